//! What the controller makes of a BuildProject, as a person would read it.
#![allow(clippy::unwrap_used, reason = "helpers of tests, outside of #[test] functions")]

use std::sync::Arc;

use bko_install::families::build_farm::api::BuildProject;
use bko_install::families::build_farm::build::config::Base;
use bko_install::families::build_farm::build::{as_made, build};
use bko_install::families::build_farm::settings::{CacheKind, Sandbox, Settings};
use bko_install::families::build_farm::validate::{Invalid, servable, validate};
use bko_install::key::Arch;

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

/// The claims of a StatefulSet can never be changed: a daemon that exists keeps
/// its cache where it is, whatever is chosen for new ones.
#[test]
fn a_cache_on_the_nodes_disk_has_no_claim_and_one_that_exists_stays_where_it_is() {
    let project = project(CANONICAL);
    let valid = validate(&project).unwrap();
    let ephemeral = Arc::new(Settings { cache_kind: CacheKind::EmptyDir, ..Settings::default() });
    let made = build(&valid, &ephemeral, &Base::default()).stateful_set;
    let spec = made.spec.as_ref().unwrap();
    assert_eq!(spec.volume_claim_templates, None);
    let pod = spec.template.spec.as_ref().unwrap();
    let cache = pod.volumes.iter().flatten().find(|volume| volume.name == "cache").unwrap();
    assert_eq!(cache.empty_dir.as_ref().unwrap().size_limit.as_ref().unwrap().0, "60Gi");

    let claimed = build(&valid, &Settings::default(), &Base::default()).stateful_set;
    assert!(
        claimed
            .spec
            .as_ref()
            .unwrap()
            .template
            .spec
            .as_ref()
            .unwrap()
            .volumes
            .iter()
            .flatten()
            .all(|v| v.name != "cache")
    );
    let default = Arc::new(Settings::default());
    assert_eq!(as_made(&ephemeral, Some(&claimed)).cache_kind, CacheKind::Pvc);
    assert_eq!(as_made(&default, Some(&made)).cache_kind, CacheKind::EmptyDir);
    assert!(Arc::ptr_eq(&as_made(&ephemeral, None), &ephemeral));
    assert!(Arc::ptr_eq(&as_made(&default, Some(&claimed)), &default));
}

#[test]
fn what_a_daemon_is_told_of_registries_is_in_its_pod() {
    let settings = Settings {
        proxy: vec![("HTTPS_PROXY".into(), "http://proxy.test:3128".into())],
        registry_ca: "-----BEGIN CERTIFICATE-----".into(),
        ..Settings::default()
    };
    let project = project(CANONICAL);
    let template = build(&validate(&project).unwrap(), &settings, &Base::default()).stateful_set.spec.unwrap().template;
    let annotations = template.metadata.unwrap().annotations.unwrap();
    let annotation = "buildkit-operator.socialgouv.github.io/registry-ca.pem";
    assert_eq!(annotations[annotation], settings.registry_ca);
    let pod = serde_yaml::to_string(&template.spec.unwrap()).unwrap();
    assert!(
        pod.contains("path: registry-ca.pem") && pod.contains(&format!("metadata.annotations['{annotation}']")),
        "{pod}"
    );
    assert!(pod.contains("name: SSL_CERT_DIR\n    value: /etc/ssl/certs:/etc/buildkit"), "{pod}");
    assert!(pod.contains("name: HTTPS_PROXY\n    value: http://proxy.test:3128"), "{pod}");
}

#[test]
fn an_architecture_without_a_companion_is_refused_with_its_reason() {
    let settings = |companion: Option<&str>, known: &[Arch]| Settings {
        companion: companion.map(str::to_owned),
        companion_architectures: known.to_vec(),
        ..Settings::default()
    };
    for (companion, known, refused) in [
        (Some("i:1"), &[Arch::Amd64][..], true),
        (Some("i:1"), &[Arch::Amd64, Arch::Arm64], false),
        (Some("i:1"), &[], false),
        (None, &[Arch::Amd64], false),
    ] {
        assert_eq!(servable(Arch::Arm64, &settings(companion, known)).is_err(), refused, "{companion:?} {known:?}");
    }
    let why = servable(Arch::Arm64, &settings(Some("i:1"), &[Arch::Amd64])).unwrap_err().to_string();
    assert!(why.starts_with("spec.arch is \"arm64\", and the companion's image is for amd64: "), "{why}");
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
}

/// The parts of a pod that differ between profiles.
fn confined(yaml: &str, settings: &Settings) -> String {
    let project = project(yaml);
    let set = build(&validate(&project).unwrap(), settings, &Base::default()).stateful_set;
    let pod = set.spec.unwrap().template.spec.unwrap();
    let daemon = &pod.containers[0];
    let mount = daemon.volume_mounts.iter().flatten().find(|mount| mount.name == "cache").unwrap();
    serde_yaml::to_string(&serde_json::json!({
        "hostUsers": pod.host_users, "runtimeClassName": pod.runtime_class_name, "securityContext": pod.security_context,
        "image": daemon.image, "cache": mount.mount_path, "daemon": daemon.security_context,
        "noProcessSandbox": daemon.args.iter().flatten().any(|arg| arg == "--oci-worker-no-process-sandbox"),
        "config": daemon.args.iter().flatten().any(|arg| arg == "--config"),
    }))
    .unwrap()
}

#[test]
fn profiles_differ_in_image_user_privileges_and_directory() {
    let settings = Settings::default();
    let profile = |name: &str| CANONICAL.replace("arch: amd64", &format!("arch: amd64, securityProfile: {name}"));
    insta::assert_snapshot!("profile_userns", confined(&profile("userns"), &settings));
    insta::assert_snapshot!("profile_privileged", confined(&profile("privileged"), &settings));
}

#[test]
fn untrusted_builds_go_to_the_sandbox_and_others_do_not() {
    let sandbox = Sandbox { runtime_class: "kata-clh".into(), image: None };
    let mut settings = Settings { sandbox: Some(sandbox), ..Settings::default() };
    insta::assert_snapshot!("profile_sandboxed", confined(FORK, &settings));
    assert!(confined(CANONICAL, &settings).contains("runtimeClassName: null"));
    settings.sandbox.as_mut().unwrap().image = Some("example.org/buildkit:vm".into());
    assert!(confined(FORK, &settings).contains("image: example.org/buildkit:vm"));
}

#[test]
fn daemons_run_where_they_are_told_to_on_nodes_of_their_architecture() {
    let json = r#"{"nodeSelector": {"pool": "builds"}, "tolerations": [{"key": "builds", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}"#;
    let settings = Settings { scheduling: json.parse().unwrap(), ..Settings::default() };
    let project = project(FORK);
    let set = build(&validate(&project).unwrap(), &settings, &Base::default()).stateful_set;
    let pod = set.spec.unwrap().template.spec.unwrap();
    let selector = pod.node_selector.unwrap();
    assert_eq!((selector["pool"].as_str(), selector["kubernetes.io/arch"].as_str()), ("builds", "arm64"));
    assert_eq!(pod.tolerations.unwrap()[0].key.as_deref(), Some("builds"));
    assert!(pod.affinity.unwrap().node_affinity.is_some());
}
