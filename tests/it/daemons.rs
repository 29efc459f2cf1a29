//! What the controller makes of a BuildProject, as a person would read it.
#![allow(clippy::unwrap_used, reason = "helpers of tests, outside of #[test] functions")]

use bko_install::families::build_farm::api::BuildProject;
use bko_install::families::build_farm::build::build;
use bko_install::families::build_farm::build::config::Base;
use bko_install::families::build_farm::settings::Settings;
use bko_install::families::build_farm::validate::{Invalid, validate};

fn project(yaml: &str) -> BuildProject {
    let mut project: BuildProject = serde_yaml::from_str(yaml).unwrap();
    project.metadata.uid = Some("00000000-0000-0000-0000-000000000001".into());
    project
}

const CANONICAL: &str = "
apiVersion: buildkit-operator.socialgouv.github.io/v1alpha1
kind: BuildProject
metadata: {name: p41bd34a2227aca39, namespace: buildkit-builds}
spec: {key: p41bd34a2227aca39, repo: github.com/acme/shop, target: default, arch: amd64}
";

const FORK: &str = "
apiVersion: buildkit-operator.socialgouv.github.io/v1alpha1
kind: BuildProject
metadata: {name: forkp41bd34a2227aca39, namespace: buildkit-builds}
spec:
  key: forkp41bd34a2227aca39
  repo: github.com/acme/shop
  arch: arm64
  storageClass: fast
  cacheVolumeGi: 5
  restoreFromSnapshot: snap-1
  resources: {limits: {memory: 256Mi}}
";

fn render(yaml: &str) -> String {
    let project = project(yaml);
    let settings = Settings { companion: Some("example.test/bko-install:1".into()), ..Settings::default() };
    let resources = build(&validate(&project).unwrap(), &settings, &Base::default());
    let set = serde_yaml::to_string(&resources.stateful_set).unwrap();
    format!("{set}---\n{}", serde_yaml::to_string(&resources.service).unwrap())
}

#[test]
fn a_project_becomes_a_stateful_set_and_a_service() {
    insta::assert_snapshot!("daemon_canonical", render(CANONICAL));
}

#[test]
fn a_fork_is_labelled_untrusted_and_loses_its_cache_with_its_project() {
    let yaml = render(FORK);
    insta::assert_snapshot!("daemon_fork", yaml);
    let project = project(FORK);
    let resources = build(&validate(&project).unwrap(), &Settings::default(), &Base::default());
    let spec = resources.stateful_set.spec.unwrap();
    let untrusted = "buildkit-operator.socialgouv.github.io/untrusted";
    assert!(!spec.selector.match_labels.unwrap().contains_key(untrusted), "a selector never carries the label");
    assert_eq!(spec.template.metadata.unwrap().labels.unwrap()[untrusted], "true");
}

#[test]
fn without_a_companion_the_daemon_is_asked_itself() {
    let project = project(CANONICAL);
    let resources = build(&validate(&project).unwrap(), &Settings::default(), &Base::default());
    let pod = resources.stateful_set.spec.unwrap().template.spec.unwrap();
    assert_eq!(pod.init_containers, None);
    let daemon = &pod.containers[0];
    assert!(daemon.lifecycle.is_none() && daemon.liveness_probe.as_ref().unwrap().exec.is_some());
    assert!(!serde_yaml::to_string(&pod).unwrap().contains("companion"));
}

#[test]
fn a_project_that_no_daemon_can_serve_says_why() {
    let mut renamed = project(CANONICAL);
    renamed.metadata.name = Some("other".into());
    assert_eq!(
        validate(&renamed).unwrap_err(),
        Invalid::NameIsNotKey { key: "p41bd34a2227aca39".into(), name: "other".into() }
    );
    let mut privileged = project(CANONICAL);
    privileged.spec.security_profile = bko_install::families::build_farm::api::SecurityProfile::Privileged;
    assert!(validate(&privileged).unwrap_err().to_string().contains("privileged"));
}
