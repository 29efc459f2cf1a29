//! What a profile needs of a cluster, as a person would read it.
#![allow(clippy::unwrap_used, reason = "helpers of tests, outside of #[test] functions")]

use std::collections::BTreeSet;

use bko_install::manifest::{self, Bundle, Rendered};
use bko_install::preflight::access::{self, Besides, Known, Needs};
use bko_install::preflight::role::{self, ServiceAccount};
use bko_install::preflight::{daemon, pods};
use bko_install::profile::{self, Request};

fn rendered(profile: &str, set: &[&str]) -> Rendered {
    let request = Request { set: set.iter().map(|s| (*s).to_owned()).collect(), ..Request::named(profile, "i:1") };
    let bundle = Bundle::embedded().unwrap();
    let (profile, values) = profile::resolve(bundle, &request).unwrap();
    manifest::render(bundle, &profile, &values).unwrap()
}

#[test]
fn the_least_roles_are_as_reviewed() {
    let subject = ServiceAccount { namespace: "ci".into(), name: "installer".into() };
    let rendered = rendered("dev", &[]);
    let needs = access::install(&rendered, &Known::default(), &Besides::default());
    insta::assert_snapshot!("rbac", role::yaml(&needs, &subject));
    let objects = access::identities(&rendered);
    let plurals = access::plurals(&rendered);
    let needs = Needs::of(access::uninstall(&objects, &rendered.operator_namespace, false, &plurals));
    insta::assert_snapshot!("rbac_uninstall", role::yaml(&needs, &subject));
}

#[test]
fn objects_of_a_namespace_that_is_not_there_are_tried_in_another() {
    let rendered = rendered("dev", &[]);
    let missing = BTreeSet::from(["buildkit-operator".to_owned()]);
    let needs = |missing| access::install(&rendered, &Known { missing, ..Known::default() }, &Besides::default());
    let (with, without) = (needs(missing), needs(BTreeSet::new()));
    let more: BTreeSet<String> = with.install.difference(&without.install).map(ToString::to_string).collect();
    assert!(more.contains("create deployments.apps in namespace \"default\""), "{more:?}");
    assert!(more.contains("create pods in namespace \"default\""), "{more:?}");
    assert!(more.iter().all(|permission| permission.ends_with("in namespace \"default\"")), "{more:?}");
}

#[test]
fn every_workload_and_each_kind_of_daemon_is_tried() {
    let tried = |set: &[&str]| {
        let rendered = rendered("dev", set);
        let settings = daemon::settings(&rendered).unwrap();
        let all = pods::trials(&rendered).into_iter().chain(daemon::trials(&settings));
        all.map(|trial| (trial.what, trial.namespace, trial.pod)).collect::<Vec<_>>()
    };
    let plain = tried(&["projects.defaults=[{tier: hot}]"]);
    let names: Vec<_> = plain.iter().map(|(what, namespace, _)| (what.as_str(), namespace.as_str())).collect();
    assert_eq!(
        names,
        [
            ("Deployment buildkit-operator/buildkit-operator-buildd", "buildkit-operator"),
            ("Deployment buildkit-operator/buildkit-operator-gateway", "buildkit-operator"),
            ("daemon", "buildkit-builds"),
        ]
    );
    let claim = plain[2].2["spec"]["volumes"].as_array().unwrap().iter().find(|v| v["name"] == "cache").unwrap();
    assert_eq!(claim["persistentVolumeClaim"]["claimName"], "cache-buildkitd-preflight-0");
    let sandboxed = tried(&["forks.sandbox.runtimeClass=kata", "cache.kind=emptyDir"]);
    assert_eq!(sandboxed[3].2["spec"]["runtimeClassName"], "kata");
    let cache = sandboxed[2].2["spec"]["volumes"].as_array().unwrap().iter().find(|v| v["name"] == "cache").unwrap();
    assert_eq!(cache["emptyDir"]["sizeLimit"], "5Gi");
}
