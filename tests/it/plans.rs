//! Plans: what is decided, how it reads, what must hold of it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bko_install::manifest::{Object, ObjectId, Runlevel};
use bko_install::plan::{
    Action, Desired, Fault, Means, Observation, Observations, Origin, Plan, PlanError, Progress, Pruned, Record,
    Remains, Settings, check, difference, plan, unwanted,
};
use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Value, json};

const TOKEN: &str = "c2VjcmV0LXRva2VuLTEyMw==";

fn object(runlevel: Runlevel, component: &str, body: Value) -> Object {
    let text = |pointer: &str| body.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let api_version = text("/apiVersion").unwrap();
    let (group, version) = api_version.rsplit_once('/').unwrap_or(("", &api_version));
    let id = ObjectId {
        group: group.to_owned(),
        version: version.to_owned(),
        kind: text("/kind").unwrap(),
        namespace: text("/metadata/namespace"),
        name: text("/metadata/name").unwrap(),
    };
    Object { id, component: component.into(), runlevel, body: body.into(), source: "test".into() }
}

fn yaml(text: &str) -> Value {
    serde_yaml::from_str(text).unwrap()
}

fn settings() -> Settings {
    Settings { profile: "dev".into(), overrides: BTreeMap::new(), image: "registry.example/bko:1".into() }
}

/// Every kind of change: created, changed in several ways, unchanged, secret.
fn example() -> (Desired, Observations) {
    let secret = |data: &str, version: &str| {
        yaml(&format!(
            "{{apiVersion: v1, kind: Secret, metadata: {{name: token, namespace: farm, resourceVersion: '{version}', \
             annotations: {{kubectl.kubernetes.io/last-applied-configuration: '{data}'}}}}, data: {{token: '{data}'}}}}"
        ))
    };
    let deployment = |replicas: u32, containers: &str| {
        yaml(&format!(
            "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: server, namespace: farm}}, \
             spec: {{replicas: {replicas}, template: {{spec: {{containers: {containers}}}}}}}}}"
        ))
    };
    let config = |text: &str| {
        let mut map = yaml("{apiVersion: v1, kind: ConfigMap, metadata: {name: config, namespace: farm}, data: {}}");
        map["data"]["farm.toml"] = text.into();
        map
    };
    let service = yaml("{apiVersion: v1, kind: Service, metadata: {name: server, namespace: farm}}");
    let objects = vec![
        object(Runlevel::Rc3, "server", deployment(2, "[{name: proxy, image: p}, {name: server, image: 'x:2'}]")),
        object(Runlevel::Rc3, "server", service.clone()),
        object(Runlevel::Rc0, "base", yaml("{apiVersion: v1, kind: Namespace, metadata: {name: farm}}")),
        object(Runlevel::Rc1, "auth", secret(TOKEN, "2")),
        object(Runlevel::Rc1, "auth", config("a = 1\nb = 2\nc = 3\nd = 5\n")),
    ];
    let mut authority = secret(TOKEN, "3");
    authority["metadata"]["name"] = "zz-authority".into();
    let authority = object(Runlevel::Rc1, "certificates", authority);
    let present = |live: Value, predicted: Value| Observation::Present { live, predicted, means: Means::default() };
    let observed = [
        present(
            deployment(1, "[{name: server, image: 'x:1'}]"),
            deployment(2, "[{name: proxy, image: p}, {name: server, image: 'x:2'}]"),
        ),
        present(service.clone(), service),
        Observation::Absent,
        present(secret("b2xkLXNlY3JldC10b2tlbg==", "1"), secret(TOKEN, "1")),
        present(config("a = 1\nb = 2\nc = 3\nd = 4\n"), config("a = 1\nb = 2\nc = 3\nd = 5\n")),
    ];
    let mut observed: Observations = objects.iter().map(|object| object.id.clone()).zip(observed).collect();
    observed.insert(authority.id.clone(), Observation::Absent);
    let authorities = BTreeSet::from([authority.id.clone()]);
    let objects = objects.into_iter().chain([authority]).collect();
    (Desired { objects, authorities, ..Desired::default() }, observed)
}

fn example_plan() -> (Plan, Desired) {
    let (desired, observed) = example();
    (plan(&desired, &observed, Pruned::default(), None, &settings()).unwrap(), desired)
}

#[test]
fn a_plan_reads_as_it_is_carried_out() {
    let (plan, desired) = example_plan();
    assert_eq!(check(&plan, &desired.objects), []);
    insta::assert_snapshot!(plan, @r#"
    rc0
      create     Namespace farm (base)
    rc1
      create     Secret farm/zz-authority (certificates)
      configure  ConfigMap farm/config (auth)
                 .data["farm.toml"]:
                     b = 2
                     c = 3
                   - d = 4
                   + d = 5
      configure  Secret farm/token (auth)
                 .data.token: "<secret>" → "<secret>"
                 .metadata.annotations["kubectl.kubernetes.io/last-applied-configuration"]: "<secret>" → "<secret>"
    rc3
      configure  Deployment farm/server (server)
                 .spec.replicas: 1 → 2
                 .spec.template.spec.containers[server].image: "x:1" → "x:2"
                 .spec.template.spec.containers[proxy]: + {"name":"proxy","image":"p"}
    record: first installation
    2 to create, 3 to configure, 1 unchanged
    "#);
}

/// What a change of these values reads like.
fn told(before: &Value, after: &Value) -> String {
    let live = json!({"spec": {"value": before}});
    let changes = difference(&live, &json!({"spec": {"value": after}}));
    changes.iter().map(ToString::to_string).collect()
}

#[test]
fn a_change_shows_what_differs_and_little_else() {
    let arguments = ["--listen=0.0.0.0:1", "--roles=gateway", "--domain=a.example", "--level=info"];
    let more = ["--listen=0.0.0.0:1", "--new", "--roles=gateway", "--domain=a.example", "--level=info"];
    insta::assert_snapshot!(told(&json!(arguments), &json!(more)), @r#"
             .spec.value:
                 "--listen=0.0.0.0:1"
               + "--new"
                 "--roles=gateway"
                 "--domain=a.example"
    "#);
    insta::assert_snapshot!(told(&json!(["a", "b"]), &json!(["a", "c"])), @r#"             .spec.value[1]: "b" → "c""#);

    let entry =
        |name: &str, domain: &str| json!({"name": name, "domains": [domain, "localhost"], "key": "k".repeat(40)});
    let old = json!([entry("one", "a.example"), entry("two", "b.example")]).to_string();
    let new = json!([entry("one", "a.example"), entry("two", "c.example")]).to_string();
    insta::assert_snapshot!(told(&json!(old), &json!(new)), @r#"
    .spec.value:
            "name": "two",
            "domains": [
      -       "b.example",
      +       "c.example",
              "localhost"
            ],
    "#);

    let long = |middle: &str| format!("{}{middle}{}", "x".repeat(300), "y".repeat(300));
    let told = told(&json!(long("one")), &json!(long("two")));
    insta::assert_snapshot!(told, @".spec.value: …xxxxxxxxxxxxxxxxxxxxoneyyyyyyyyyyyyyyyyyyyy… → …xxxxxxxxxxxxxxxxxxxxtwoyyyyyyyyyyyyyyyyyyyy…");

    let new = difference(&json!({"spec": {}}), &json!({"spec": {"value": entry(&"n".repeat(80), "a")}}));
    insta::assert_snapshot!(new[0], @r#"
    .spec.value:
      + {
      +   "name": "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn",
      +   "domains": [
      +     "a",
      +     "localhost"
      +   ],
      +   "key": "kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk"
      + }
    "#);
}

#[test]
fn fields_that_only_change_hands_are_named() {
    let owned = |fields: Value| {
        json!({"metadata": {"managedFields": [
            {"manager": "bko-install", "operation": "Apply", "fieldsV1": fields}]}})
    };
    let (few, many) = (json!({"f:spec": {"f:a": {}}}), json!({"f:spec": {"f:b": {}, "f:c": {}}}));
    let changes = difference(&owned(few), &owned(many));
    insta::assert_snapshot!(changes[0], @"
    no longer ours, with the same value: .spec.a
    ours from now on, with the same value: .spec.b, .spec.c
    ");
}

#[test]
fn a_plan_for_programs_has_the_same_vocabulary_and_no_secret() {
    let (plan, _) = example_plan();
    let value = serde_json::to_value(&plan).unwrap();
    let changes = value.pointer("/levels/1/changes").unwrap();
    assert_eq!(changes[0]["action"], "create");
    assert_eq!(changes[0]["object"]["data"]["token"], "<secret>");
    assert_eq!(changes[2]["changes"][0], json!({"path": ".data.token", "before": "<secret>", "after": "<secret>"}));
    assert_eq!(value.pointer("/levels/2/changes/0/action").unwrap(), "unchanged");
    for text in [value.to_string(), format!("{plan:?}"), plan.to_string()] {
        assert!(!text.contains(TOKEN) && !text.contains("b2xkLXNlY3JldC10b2tlbg"), "{text}");
    }
}

#[test]
fn what_is_applied_is_the_manifest_itself() {
    let (plan, _) = example_plan();
    let secret = plan.changes().find(|change| change.id.name == "token").unwrap();
    assert_eq!(secret.body.expose()["data"]["token"], TOKEN);
}

#[test]
fn what_the_api_server_keeps_for_itself_is_no_difference() {
    let live = yaml(
        "{kind: Deployment, metadata: {name: a, uid: u, resourceVersion: '1', generation: 1, creationTimestamp: x, \
         managedFields: []}, status: {replicas: 1}}",
    );
    let predicted = yaml("{kind: Deployment, metadata: {name: a, uid: v, resourceVersion: '2', generation: 2}}");
    assert_eq!(difference(&live, &predicted), []);
}

#[test]
fn a_field_that_is_not_ours_yet_is_taken_although_its_value_is_right() {
    let entry = |manager: &str, operation: &str, fields: Value| json!({"manager": manager, "operation": operation, "fieldsV1": fields});
    let theirs = entry("kubectl", "Update", json!({"f:data": {}}));
    let ours = entry("bko-install", "Apply", json!({"f:data": {}}));
    let object = |fields: &[&Value]| json!({"kind": "ConfigMap", "metadata": {"managedFields": fields}});
    assert_eq!(difference(&object(&[&ours]), &object(&[&theirs, &ours])), []);
    let taken = difference(&object(&[&theirs]), &object(&[&theirs, &ours]));
    assert_eq!(taken.len(), 1);
    assert_eq!(taken[0].path, ".metadata.managedFields");
}

#[test]
fn the_order_of_named_elements_is_a_difference() {
    let list = |names: [&str; 2]| json!({"spec": {"initContainers": [{"name": names[0]}, {"name": names[1]}]}});
    let changes = difference(&list(["a", "b"]), &list(["b", "a"]));
    assert_eq!(changes.iter().map(|c| c.path.as_str()).collect::<Vec<_>>(), [".spec.initContainers[order]"]);
}

#[test]
fn an_object_that_was_not_observed_is_no_plan() {
    let (desired, mut observed) = example();
    let id = desired.objects[0].id.clone();
    observed.remove(&id);
    assert_eq!(plan(&desired, &observed, Pruned::default(), None, &settings()), Err(PlanError::NotObserved(id)));
}

/// The checker itself must see what it is there for.
#[test]
fn the_checker_sees_every_kind_of_fault() {
    let tampered = |tamper: &dyn Fn(&mut Plan)| {
        let (mut plan, desired) = example_plan();
        tamper(&mut plan);
        check(&plan, &desired.objects)
    };
    let faults = tampered(&|plan| drop(plan.levels[0].changes.pop()));
    assert!(matches!(faults.as_slice(), [Fault::Missing(id)] if id.kind == "Namespace"), "{faults:?}");
    let faults = tampered(&|plan| {
        let twice = plan.levels[0].changes[0].clone();
        plan.levels[0].changes.push(twice);
    });
    assert!(matches!(faults.as_slice(), [Fault::Twice(_)]), "{faults:?}");
    let faults = tampered(&|plan| plan.levels[0].changes[0].id.name = "other".into());
    assert!(faults.iter().any(|fault| matches!(fault, Fault::NotDesired(_))), "{faults:?}");
    let faults = tampered(&|plan| plan.levels[2].changes.reverse());
    assert!(faults.iter().any(|fault| matches!(fault, Fault::Order(_))), "{faults:?}");
    let faults = tampered(&|plan| plan.levels.swap(0, 1));
    assert!(faults.iter().any(|fault| matches!(fault, Fault::Order(_))), "{faults:?}");
    let faults = tampered(&|plan| plan.levels[0].changes[0].action = Action::Configure { changes: Vec::new() });
    assert!(matches!(faults.as_slice(), [Fault::NoField(_)]), "{faults:?}");
    for shown in [TOKEN, "secret-token-123"] {
        let faults = tampered(&|plan| plan.levels[0].changes[0].component = shown.into());
        assert!(faults.iter().any(|fault| matches!(fault, Fault::Secret(id) if id.name == "token")), "{faults:?}");
    }
}

/// A record as a successful run leaves it, and observations to match.
fn installed() -> (Desired, Observations, Record) {
    let (desired, observed) = example();
    let live = |object: &Object| {
        let mut live = Value::clone(&object.body);
        live["metadata"]["uid"] = format!("uid-{}", object.id.name).into();
        Observation::Present { predicted: live.clone(), live, means: Means::default() }
    };
    let first = plan(&desired, &observed, Pruned::default(), None, &settings()).unwrap();
    let mut record = Record::intent(&first, None, &settings(), Origin::Init, Timestamp::UNIX_EPOCH);
    for object in &desired.objects {
        record.applied(&object.id, &format!("uid-{}", object.id.name));
    }
    record.outcome(None, Timestamp::UNIX_EPOCH);
    let observed = desired.objects.iter().map(|object| (object.id.clone(), live(object))).collect();
    (desired, observed, record)
}

#[test]
fn after_a_successful_run_the_plan_is_empty() {
    let (desired, observed, record) = installed();
    let plan = plan(&desired, &observed, Pruned::default(), Some(&record), &settings()).unwrap();
    assert!(plan.is_empty(), "{plan}");
    assert_eq!(plan.to_string(), "0 to create, 0 to configure, 6 unchanged\n");
}

#[test]
fn a_record_that_is_not_as_it_should_be_is_a_change_by_itself() {
    let (desired, observed, record) = installed();
    let why = |tamper: &dyn Fn(&mut Record), settings: &Settings| {
        let mut record = record.clone();
        tamper(&mut record);
        let plan = plan(&desired, &observed, Pruned::default(), Some(&record), settings).unwrap();
        assert_eq!(plan.is_empty(), plan.record.is_none());
        plan.record
    };
    let same = settings();
    assert_eq!(why(&|_| {}, &same), None);
    assert_eq!(why(&|r| r.run.state = Progress::Applying, &same).unwrap(), "the last run was cut off");
    assert_eq!(why(&|r| r.run.state = Progress::Failed, &same).unwrap(), "the last run failed");
    assert_eq!(
        why(&|r| r.run.version = "0.0.1".into(), &same).unwrap(),
        format!("version 0.0.1 → {}", bko_install::VERSION)
    );
    assert_eq!(why(&|r| r.inventory[0].uid = None, &same).unwrap(), "the inventory changes");
    let other = Settings { profile: "default".into(), ..settings() };
    assert_eq!(why(&|_| {}, &other).unwrap(), "profile dev → default");
    let other = Settings { overrides: BTreeMap::from([("server.replicas".into(), json!(3))]), ..settings() };
    assert_eq!(why(&|_| {}, &other).unwrap(), "other values or image");
}

#[test]
fn what_is_no_longer_desired_is_recorded_until_it_is_gone() {
    let (mut desired, observed, record) = installed();
    let gone = desired.objects.remove(1).id;
    let unwanted = unwanted(&desired, Some(&record));
    assert_eq!(unwanted.iter().map(|entry| &entry.id).collect::<Vec<_>>(), [&gone]);
    let ours = Remains::Ours { uid: "uid-server".into(), brakes: Vec::new() };
    let remains = Pruned::new(unwanted.clone().into_iter().map(|entry| (entry, ours.clone())));
    let doomed = plan(&desired, &observed, remains, Some(&record), &settings()).unwrap();
    assert_eq!(doomed.brakes, []);
    assert!(doomed.to_string().contains("when all is ready\n  delete     Service farm/server (server)\n"), "{doomed}");
    let mut next = Record::intent(&doomed, Some(&record), &settings(), Origin::Init, Timestamp::UNIX_EPOCH);
    assert_eq!(next.inventory.len(), record.inventory.len());
    next.removed(&gone);
    assert_eq!(next.inventory.len(), record.inventory.len() - 1);

    // What somebody else has removed is only forgotten; what is kept stays.
    let forgotten = Pruned::new(unwanted.iter().cloned().map(|entry| (entry, Remains::Gone)));
    let plan_of = |remains| plan(&desired, &observed, remains, Some(&record), &settings()).unwrap();
    assert_eq!(plan_of(forgotten).record.as_deref(), Some("the inventory changes"));
    let kept = Pruned::new(unwanted.into_iter().map(|entry| (entry, Remains::Kept)));
    assert!(plan_of(kept).is_empty());
}

#[test]
fn components_that_are_left_out_stay_as_they_are() {
    let (mut desired, observed, record) = installed();
    desired.untouched.insert("server".into());
    desired.objects.retain(|object| object.component != "server");
    assert_eq!(unwanted(&desired, Some(&record)), []);
    let plan = plan(&desired, &observed, Pruned::default(), Some(&record), &settings()).unwrap();
    assert!(plan.is_empty(), "{plan}");
}

#[test]
fn ten_revisions_are_remembered_and_the_last_good_one_is_found() {
    let (desired, observed, mut record) = installed();
    let plan = plan(&desired, &observed, Pruned::default(), Some(&record), &settings()).unwrap();
    for run in 2..=14_u32 {
        record = Record::intent(&plan, Some(&record), &settings(), Origin::Init, Timestamp::UNIX_EPOCH);
        record.history.last_mut().unwrap().objects = vec![format!("part-{run}")];
        record.outcome((run == 13).then(|| "broke".into()), Timestamp::UNIX_EPOCH);
    }
    let numbers: Vec<u32> = record.history.iter().map(|revision| revision.revision).collect();
    assert_eq!(numbers, (5..=14).collect::<Vec<_>>());
    assert_eq!(record.revision(None).unwrap().revision, 12);
    assert_eq!(record.revision(Some(5)).unwrap().objects, ["part-5"]);
    assert_eq!(record.revision(Some(4)), None);
}

#[test]
fn a_record_holds_no_secret_and_no_digest_of_one() {
    let (desired, observed, record) = installed();
    let text = serde_json::to_string(&record).unwrap();
    assert!(!text.contains(TOKEN) && !text.contains("secret-token"));
    let mut other = desired.clone();
    let secret = other.objects.iter_mut().find(|object| object.id.name == "token").unwrap();
    Arc::make_mut(&mut secret.body)["data"]["token"] = "b3RoZXItc2VjcmV0".into();
    let digests = |desired: &Desired| -> Vec<String> {
        let plan = plan(desired, &observed, Pruned::default(), None, &settings()).unwrap();
        plan.changes().map(|change| change.digest.clone()).collect()
    };
    assert_eq!(digests(&desired), digests(&other));
    Arc::make_mut(&mut other.objects[0].body)["spec"]["replicas"] = 7.into();
    assert_ne!(digests(&desired), digests(&other));
}

#[test]
fn a_record_survives_its_own_format() {
    let (_, _, record) = installed();
    let text = serde_json::to_string(&record).unwrap();
    assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    assert!(text.starts_with(r#"{"format":2,"state":"installed","#), "{text}");
}

const KINDS: [(&str, &str); 12] = [
    ("v1", "Namespace"),
    ("apiextensions.k8s.io/v1", "CustomResourceDefinition"),
    ("scheduling.k8s.io/v1", "PriorityClass"),
    ("v1", "ServiceAccount"),
    ("v1", "Secret"),
    ("v1", "ConfigMap"),
    ("rbac.authorization.k8s.io/v1", "ClusterRole"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
    ("v1", "Service"),
    ("example.com/v1", "Whatever"),
    ("apps/v1", "Deployment"),
    ("admissionregistration.k8s.io/v1", "ValidatingWebhookConfiguration"),
];

proptest! {
    /// Whatever is desired in whatever order and state, the invariants hold,
    /// and kinds come in the order in which they need one another.
    #[test]
    fn every_plan_holds_its_invariants(wanted in prop::collection::vec((0..5_usize, 0..KINDS.len(), 0..3_usize), 0..40)) {
        let mut desired = Desired::default();
        let mut observed = Observations::new();
        for (index, (level, kind, state)) in wanted.into_iter().enumerate() {
            let (api_version, kind) = KINDS[kind];
            let body = json!({
                "apiVersion": api_version, "kind": kind,
                "metadata": {"name": format!("n{index}")},
                "data": {"key": format!("value-of-number-{index:04}-end")},
            });
            let object = object(Runlevel::ALL[level], "any", body.clone());
            let mut live = body.clone();
            live["data"]["key"] = format!("former-value-{index}").into();
            observed.insert(object.id.clone(), match state {
                0 => Observation::Absent,
                1 => Observation::Present { live: body.clone(), predicted: body, means: Means::default() },
                _ => Observation::Present { live, predicted: body, means: Means::default() },
            });
            desired.objects.push(object);
        }
        let plan = plan(&desired, &observed, Pruned::default(), None, &settings()).unwrap();
        prop_assert_eq!(check(&plan, &desired.objects), []);
        for level in &plan.levels {
            let position = |c: &str| KINDS.iter().position(|(_, kind)| *kind == c).unwrap();
            let order: Vec<_> = level.changes.iter().map(|change| position(&change.id.kind)).collect();
            // PriorityClass and ServiceAccount, Secret and ConfigMap, Service and
            // custom resources share a wave.
            let wave = |p: usize| match p { 3 => 2, 5 => 4, 9 => 8, p => p };
            prop_assert!(order.iter().map(|p| wave(*p)).is_sorted(), "{order:?}");
        }
    }
}
