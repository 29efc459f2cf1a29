//! What came back of a pod that was sent: which fields somebody changed, and
//! what that does to a daemon. Pure.
//!
//! A field that was sent and comes back otherwise counts always. One that was
//! not sent counts only where it takes something from the daemon: the API
//! server fills in dozens by itself.

use serde_json::Value;

use super::Verdict;
use crate::profile::syntax::amount;

/// A field that somebody changed.
#[derive(Clone, Debug, PartialEq)]
pub struct Mutation {
    /// `.spec.containers[buildkitd].securityContext.allowPrivilegeEscalation`.
    pub path: String,
    /// What was sent.
    pub sent: Option<Value>,
    /// What came back.
    pub got: Option<Value>,
}

/// Fields that count although nobody sent them.
const TAKEN: [&str; 17] = [
    "allowPrivilegeEscalation",
    "privileged",
    "seccompProfile",
    "appArmorProfile",
    "seLinuxOptions",
    "runAsUser",
    "runAsGroup",
    "runAsNonRoot",
    "fsGroup",
    "supplementalGroups",
    "readOnlyRootFilesystem",
    "runtimeClassName",
    "hostUsers",
    "affinity",
    "command",
    "args",
    "lifecycle",
];

/// Fields of which every entry counts.
const MAPS: [&str; 4] = ["limits", "requests", "nodeSelector", "capabilities"];

/// Lists whose every further entry counts.
const LISTS: [&str; 3] = ["containers", "initContainers", "env"];

/// Every change that matters, in the order of the fields.
pub fn mutations(sent: &Value, got: &Value) -> Vec<Mutation> {
    let mut found = Vec::new();
    compare(&mut found, ".spec", &sent["spec"], &got["spec"]);
    found
}

fn compare(found: &mut Vec<Mutation>, path: &str, sent: &Value, got: &Value) {
    match (sent, got) {
        (Value::Object(before), Value::Object(after)) => {
            for (name, sent) in before {
                compare_entry(found, &format!("{path}.{name}"), sent, after.get(name));
            }
            for (name, got) in after.iter().filter(|(name, _)| !before.contains_key(*name)) {
                added(found, path, name, got);
            }
        }
        (Value::Array(before), Value::Array(after)) => compare_lists(found, path, before, after),
        _ if same(sent, got) => {}
        _ => found.push(Mutation { path: path.to_owned(), sent: Some(sent.clone()), got: Some(got.clone()) }),
    }
}

fn compare_entry(found: &mut Vec<Mutation>, path: &str, sent: &Value, got: Option<&Value>) {
    match got {
        Some(got) => compare(found, path, sent, got),
        // An empty list or map is as good as none.
        None if sent.as_array().is_some_and(Vec::is_empty) || sent.as_object().is_some_and(|map| map.is_empty()) => {}
        None => found.push(Mutation { path: path.to_owned(), sent: Some(sent.clone()), got: None }),
    }
}

/// Lists of what has a name are compared by it; others as sets.
fn compare_lists(found: &mut Vec<Mutation>, path: &str, before: &[Value], after: &[Value]) {
    let key =
        ["name", "mountPath"].into_iter().find(|key| before.iter().chain(after).all(|item| item.get(key).is_some()));
    let Some(key) = key else {
        let lost = before.iter().filter(|sent| !after.iter().any(|got| contains(got, sent)));
        for sent in lost {
            found.push(Mutation { path: path.to_owned(), sent: Some(sent.clone()), got: None });
        }
        let more = [".drop", ".add", ".args", ".command"].iter().any(|end| path.ends_with(end));
        for got in after.iter().filter(|got| more && !before.contains(got)) {
            found.push(Mutation { path: path.to_owned(), sent: None, got: Some(got.clone()) });
        }
        return;
    };
    for sent in before {
        let name = sent[key].as_str().unwrap_or_default();
        compare_entry(found, &format!("{path}[{name}]"), sent, after.iter().find(|got| got[key] == sent[key]));
    }
    let list = path.rsplit('.').next().unwrap_or_default();
    for got in after.iter().filter(|got| !before.iter().any(|sent| sent[key] == got[key])) {
        if LISTS.contains(&list) {
            found.push(entry(path, got));
        }
    }
}

/// A named entry of a list that nobody sent.
fn entry(path: &str, got: &Value) -> Mutation {
    let path = format!("{path}[{}]", got["name"].as_str().unwrap_or_default());
    let told = [&got["image"], &got["value"]].into_iter().find(|value| !value.is_null());
    Mutation { path, sent: None, got: told.cloned() }
}

fn added(found: &mut Vec<Mutation>, parent: &str, name: &str, got: &Value) {
    let path = format!("{parent}.{name}");
    let open = MAPS.contains(&name) || matches!(name, "securityContext" | "resources");
    let within = MAPS.iter().any(|map| parent.strip_suffix(map).is_some_and(|rest| rest.ends_with('.')));
    match got {
        Value::Null => {}
        Value::Object(map) if open || map.is_empty() => {
            map.iter().for_each(|(name, got)| added(found, &path, name, got));
        }
        Value::Array(list) if LISTS.contains(&name) || list.is_empty() => {
            found.extend(list.iter().map(|got| entry(&path, got)));
        }
        got if within || TAKEN.contains(&name) => {
            found.push(Mutation { path, sent: None, got: Some(got.clone()) });
        }
        _ => {}
    }
}

/// Whether all that was sent is in what came back.
fn contains(got: &Value, sent: &Value) -> bool {
    match (got, sent) {
        (Value::Object(got), Value::Object(sent)) => {
            sent.iter().all(|(name, sent)| got.get(name).is_some_and(|got| contains(got, sent)))
        }
        (got, sent) => same(got, sent),
    }
}

/// `1000m` is `1`.
fn same(a: &Value, b: &Value) -> bool {
    let quantities = || Some((amount(a.as_str()?)?, amount(b.as_str()?)?));
    a == b || quantities().is_some_and(|(a, b)| (a - b).abs() < f64::EPSILON)
}

/// What a change does to a daemon, and how bad that is.
pub fn effect(mutation: &Mutation) -> (Verdict, &'static str) {
    let path = mutation.path.as_str();
    let ends = |end: &str| path.ends_with(end);
    let companion = path.contains("[companion]");
    let got = mutation.got.as_ref();
    if companion && path.contains(".securityContext") {
        return (Verdict::Warn, "the companion may not read the daemon's files any more");
    }
    if ends(".allowPrivilegeEscalation") {
        return (Verdict::Fail, "a rootless daemon calls newuidmap, which raises its privileges: it will not start");
    }
    if path.contains(".capabilities") {
        return (Verdict::Fail, "newuidmap needs the capabilities SETUID and SETGID: a rootless daemon will not start");
    }
    if path.contains(".seccompProfile") || path.contains(".appArmorProfile") || path.contains(".seLinuxOptions") {
        return (Verdict::Fail, "a rootless daemon makes user namespaces and mounts, which such profiles forbid");
    }
    if ends(".runAsUser") || ends(".runAsGroup") || path.contains(".fsGroup") {
        return (Verdict::Fail, "the image has subordinate ids for its own user only, and that user owns the caches");
    }
    if ends(".privileged") || ends(".hostUsers") || ends(".runtimeClassName") {
        return (Verdict::Fail, "the daemon is not confined as its security profile says");
    }
    if ends(".readOnlyRootFilesystem") && got == Some(&Value::Bool(true)) {
        return (Verdict::Fail, "the daemon cannot write its temporary files");
    }
    if ends(".runAsNonRoot") {
        return (Verdict::Warn, "daemons of the profiles userns and privileged will not start");
    }
    if path.contains(".limits") {
        return (Verdict::Warn, "a limit ends or slows the whole daemon with all its builds");
    }
    if path.contains(".requests") {
        return (Verdict::Warn, "the scheduler sees another size than was asked for");
    }
    let list = path.rsplit('.').next().unwrap_or_default();
    if list.starts_with("containers[") || list.starts_with("initContainers[") {
        return (Verdict::Warn, "a container beside the daemon may intercept its connections, whose TLS is end to end");
    }
    if ends("image") {
        return (Verdict::Warn, "another image is run than was asked for");
    }
    if path.contains(".env[") && mutation.sent.is_none() {
        return (Verdict::Ok, "the daemon gets a variable more");
    }
    if path.starts_with(".spec.nodeSelector") || path.starts_with(".spec.affinity") || path.contains(".tolerations") {
        return (Verdict::Warn, "daemons run on other nodes than was asked for");
    }
    (Verdict::Warn, "the daemon is not as it was asked for")
}

/// `.spec.containers[buildkitd].securityContext.allowPrivilegeEscalation: false`.
impl std::fmt::Display for Mutation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (&self.sent, &self.got) {
            (None, Some(got)) => write!(f, "{} is set to {got}", self.path),
            (None, None) => write!(f, "{} is added", self.path),
            (Some(sent), Some(got)) => write!(f, "{} is {got} instead of {sent}", self.path),
            (Some(sent), None) => write!(f, "{} loses {sent}", self.path),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(container: Value) -> Value {
        json!({"spec": {"containers": [container], "tolerations": [{"key": "a", "operator": "Exists"}]}})
    }

    fn sent() -> Value {
        pod(json!({
            "name": "buildkitd",
            "image": "a:1",
            "resources": {"requests": {"cpu": "1000m"}},
            "securityContext": {"seccompProfile": {"type": "Unconfined"}},
        }))
    }

    /// As an API server returns a pod that nobody changed.
    fn untouched() -> Value {
        let mut got = sent();
        let container = &mut got["spec"]["containers"][0];
        container["resources"] = json!({"requests": {"cpu": "1"}});
        container["terminationMessagePath"] = "/dev/termination-log".into();
        container["imagePullPolicy"] = "IfNotPresent".into();
        got["spec"]["tolerations"] = json!([
            {"key": "a", "operator": "Exists"},
            {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 300},
        ]);
        got["spec"]["restartPolicy"] = "Always".into();
        got["spec"]["priority"] = 0.into();
        got["spec"]["volumes"] = json!([{"name": "more"}]);
        got
    }

    #[test]
    fn what_the_api_server_fills_in_is_no_change() {
        assert_eq!(mutations(&sent(), &untouched()), []);
    }

    #[test]
    fn what_breaks_a_daemon_is_named_with_its_field() {
        for (pointer, value, path, verdict) in [
            (
                "/spec/containers/0/securityContext/allowPrivilegeEscalation",
                json!(false),
                "allowPrivilegeEscalation",
                Verdict::Fail,
            ),
            (
                "/spec/containers/0/securityContext/seccompProfile/type",
                json!("RuntimeDefault"),
                "seccompProfile.type",
                Verdict::Fail,
            ),
            (
                "/spec/containers/0/securityContext/capabilities",
                json!({"drop": ["ALL"]}),
                "capabilities.drop",
                Verdict::Fail,
            ),
            ("/spec/containers/0/securityContext/runAsUser", json!(65534), "runAsUser", Verdict::Fail),
            ("/spec/securityContext", json!({"runAsUser": 1}), ".spec.securityContext.runAsUser", Verdict::Fail),
            ("/spec/containers/0/resources/limits", json!({"memory": "1Gi"}), "resources.limits.memory", Verdict::Warn),
            ("/spec/containers/0/image", json!("mirror/a:1"), "image", Verdict::Warn),
            ("/spec/containers/0/env", json!([{"name": "HTTP_PROXY", "value": "x"}]), "", Verdict::Ok),
            ("/spec/nodeSelector", json!({"pool": "x"}), "nodeSelector.pool", Verdict::Warn),
            ("/spec/initContainers", json!([{"name": "mesh", "image": "m:1"}]), "", Verdict::Ok),
        ] {
            let mut got = untouched();
            let (parent, name) = pointer.rsplit_once('/').unwrap();
            got.pointer_mut(parent).unwrap()[name] = value;
            let found = mutations(&sent(), &got);
            if path.is_empty() {
                assert!(found.iter().all(|m| effect(m).0 <= Verdict::Warn), "{found:?}");
                continue;
            }
            assert_eq!(found.len(), 1, "{pointer}: {found:?}");
            assert!(found[0].path.ends_with(path), "{found:?}");
            assert_eq!(effect(&found[0]).0, verdict, "{found:?}");
        }
    }

    #[test]
    fn a_container_more_is_seen_and_a_lost_one_too() {
        let mut got = untouched();
        got["spec"]["containers"].as_array_mut().unwrap().push(json!({"name": "mesh", "image": "m:1", "ports": []}));
        let found = mutations(&sent(), &got);
        assert_eq!(
            found.iter().map(ToString::to_string).collect::<Vec<_>>(),
            [".spec.containers[mesh] is set to \"m:1\""]
        );
        got["spec"]["containers"] = json!([{"name": "mesh", "image": "m:1"}]);
        assert_eq!(mutations(&sent(), &got).len(), 2);
    }
}
