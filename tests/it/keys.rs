//! Recorded truths of the routing key.

use bko_install::key::Project;
use serde::Deserialize;

#[derive(Deserialize)]
struct Vector {
    repo: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    target: String,
    arch: String,
    normalized: String,
    key: String,
}

#[test]
fn every_recorded_key_comes_out_the_same() {
    let vectors: Vec<Vector> = serde_json::from_str(include_str!("../vectors/key-vectors.json")).unwrap();
    assert!(vectors.len() >= 30);
    for v in vectors {
        let project = Project::new(&v.repo, &v.name, &v.target, &v.arch, false).unwrap();
        assert_eq!(project.repo.as_str(), v.normalized, "{}", v.repo);
        assert_eq!(project.canonical_key().as_str(), v.key, "{} {} {} {}", v.repo, v.name, v.target, v.arch);
    }
}
