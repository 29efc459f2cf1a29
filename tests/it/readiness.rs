//! Every state of every kind, as the API server would show it.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test reads its fixtures, and fails by panicking"
)]

use bko_install::readiness::{Around, Pin, State, assess_among, culprit};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    /// What our apply returned.
    #[serde(default)]
    uid: Option<String>,
    #[serde(default)]
    generation: Option<i64>,
    /// Since when it had failed to make pods before we changed anything.
    #[serde(default)]
    failing_since: Option<String>,
    /// Whether its controller has failed again since.
    #[serde(default)]
    failed_again: bool,
    /// Its ReplicaSets.
    #[serde(default)]
    sets: Vec<Value>,
    #[serde(flatten)]
    expect: Expect,
    /// Absent: there is no such object.
    object: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Expect {
    Ready(bool),
    Pending(String),
    Failed(String),
}

fn run(file: &str, text: &str) {
    let cases: Vec<Case> = serde_yaml::from_str(text).unwrap();
    assert!(cases.len() > 2, "{file} is nearly empty");
    for case in cases {
        let pin = Pin { uid: case.uid, generation: case.generation, failing_since: case.failing_since };
        let sets: Vec<&Value> = case.sets.iter().collect();
        let around = Around { sets: &sets, failed_again: case.failed_again };
        let state = assess_among(case.object.as_ref(), &pin, None, around);
        let expected = match case.expect {
            Expect::Ready(true) => State::Ready,
            Expect::Ready(false) => panic!("{file}: {}: say why it is not ready", case.name),
            Expect::Pending(why) => State::Pending(why),
            Expect::Failed(why) => State::Failed(why),
        };
        assert_eq!(state, expected, "{file}: {}", case.name);
    }
}

macro_rules! kinds {
    ($($kind:ident),*) => {
        $(#[test]
        fn $kind() {
            let file = concat!(stringify!($kind), ".yaml");
            run(file, include_str!(concat!("readiness/", stringify!($kind), ".yaml")));
        })*

        #[test]
        fn every_fixture_is_used() {
            let folder = "tests/it/readiness";
            let mut found: Vec<String> = std::fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .filter(|name| name != "culprits.yaml")
                .collect();
            let mut known = vec![$(concat!(stringify!($kind), ".yaml").to_owned()),*];
            found.sort();
            known.sort();
            assert_eq!(found, known);
        }
    };
}

kinds!(daemon_set, definition, deployment, job, others, pod, service, stateful_set);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Story {
    name: String,
    /// `pod: container: words`, and whether waiting is of use; absent: nobody is to blame.
    culprit: Option<String>,
    #[serde(default)]
    fatal: bool,
    /// Further pods that are not ready, where the story is about them.
    others: Option<Vec<String>>,
    workload: Value,
    #[serde(default)]
    sets: Vec<Value>,
    pods: Vec<Value>,
}

#[test]
fn the_pod_to_blame_is_of_the_current_revision() {
    let stories: Vec<Story> = serde_yaml::from_str(include_str!("readiness/culprits.yaml")).unwrap();
    assert!(stories.len() > 5);
    for story in stories {
        let sets: Vec<&Value> = story.sets.iter().collect();
        let found = culprit(&story.workload, &sets, &story.pods);
        let said = found.as_ref().map(|c| format!("{}: {}", c.pod, c.trouble.describe()));
        assert_eq!(said, story.culprit, "{}", story.name);
        if let Some(others) = story.others {
            assert_eq!(found.as_ref().map(|c| &c.others), Some(&others), "{}", story.name);
        }
        assert_eq!(found.is_some_and(|c| c.trouble.is_fatal()), story.fatal, "{}", story.name);
    }
}
