//! When a daemon takes builds.

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::lifecycle::tests::project;
use super::*;

const KEY: &str = "forkp41bd34a2227aca39";
const NAMESPACE: &str = "builds";

/// A view whose caches are filled by hand.
struct Filled {
    view: View,
    sets: Writer<StatefulSet>,
    services: Writer<Service>,
    pods: Writer<Pod>,
}

fn object<K: DeserializeOwned>(name: &str, owner: &str, mut value: Value) -> K {
    let owner = json!([{"apiVersion": "v1", "kind": "Owner", "name": KEY, "uid": owner, "controller": true}]);
    value["metadata"] = json!({"name": name, "namespace": NAMESPACE, "uid": format!("{name} of {owner}"),
        "labels": {"controller-revision-hash": "r"}, "generation": 1, "ownerReferences": owner});
    serde_json::from_value(value).unwrap()
}

impl Filled {
    fn new(uid: &str) -> Self {
        let (sets, services, pods) = (Writer::default(), Writer::default(), Writer::default());
        let (mut writer, budgets) = (Writer::<BuildProject>::default(), Writer::<PodDisruptionBudget>::default());
        let mut owner = project(KEY, &[], None);
        owner.metadata.namespace = Some(NAMESPACE.to_owned());
        owner.metadata.uid = Some(uid.to_owned());
        writer.apply_watcher_event(&Event::Apply(owner));
        let view = View {
            clock: Clock::default(),
            namespace: NAMESPACE.to_owned(),
            projects: writer.as_reader(),
            writer: Mutex::new(writer),
            sets: sets.as_reader(),
            services: services.as_reader(),
            pods: pods.as_reader(),
            budgets: budgets.as_reader(),
            unschedulable: Duration::from_secs(8),
            signs: Mutex::default(),
            faults: Mutex::default(),
            waiters: Mutex::default(),
            triggers: Mutex::default(),
            filled: watch::Sender::new(true),
            base: Mutex::default(),
        };
        Self { view, sets, services, pods }
    }

    fn set(&mut self, owner: &str) -> String {
        let value = json!({"spec": {"replicas": 1, "selector": {}, "serviceName": "s", "template": {}},
            "status": {"replicas": 1, "observedGeneration": 1, "updateRevision": "r"}});
        let set: StatefulSet = object(&daemon().daemon(), owner, value);
        let uid = set.metadata.uid.clone().unwrap();
        self.sets.apply_watcher_event(&Event::Apply(set));
        uid
    }

    fn service(&mut self, owner: &str, selector: Value) {
        let service = object(&daemon().daemon(), owner, json!({"spec": {"selector": selector}}));
        self.services.apply_watcher_event(&Event::Apply(service));
    }

    fn pod(&mut self, owner: &str) {
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let pod = object(&format!("{}-0", daemon().daemon()), owner, json!({"status": ready}));
        self.pods.apply_watcher_event(&Event::Apply(pod));
    }

    fn waits_for(&self, what: &str) -> bool {
        self.view.daemon(&daemon()) == DaemonState::Starting(format!("waiting for the {what}"))
    }
}

fn daemon() -> ProjectKey {
    KEY.parse().unwrap()
}

#[test]
fn nothing_that_a_reaped_fork_has_left_is_taken_for_that_of_its_successor() {
    let mut filled = Filled::new("second");
    let first = filled.set("first");
    filled.service("first", json!({}));
    filled.pod(&first);
    assert!(filled.waits_for("StatefulSet"));
    let second = filled.set("second");
    assert!(filled.waits_for("pod"));
    filled.pod(&second);
    assert!(filled.waits_for("Service"), "nobody has made the second one's yet");
    let (key, owner) = (daemon(), filled.view.project(KEY).unwrap());
    assert!(filled.view.service(&key, &owner.metadata).is_none(), "so that the controller makes it");
    filled.service("second", json!({}));
    assert_eq!(filled.view.daemon(&key), DaemonState::Ready);
}

#[test]
fn a_daemon_whose_service_leads_nowhere_takes_no_builds() {
    let mut filled = Filled::new("p");
    let set = filled.set("p");
    filled.pod(&set);
    assert!(filled.waits_for("Service"));
    filled.service("p", json!({build::GATE: "closed"}));
    assert!(filled.waits_for("Service"));
    filled.service("p", json!({"app.kubernetes.io/component": "buildkitd"}));
    assert_eq!(filled.view.daemon(&daemon()), DaemonState::Ready);
}
