//! Pods that are tried before their controllers are asked to make them, so that
//! what refuses them is known before the first write. Pure.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::access::STAND_IN;
use super::{Check, Finding};
use crate::manifest::{ObjectId, Rendered};

/// A pod to create by dry run.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial {
    /// Whose it is: `Deployment farm/server`.
    pub what: String,
    /// Its namespace.
    pub namespace: String,
    /// The manifest.
    pub pod: Value,
}

/// Where a pod was tried, and what its namespace will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Its namespace does not exist yet: another one stood in.
    pub stand_in: bool,
    /// The installation sets the namespace's Pod Security level.
    pub relabelled: bool,
}

/// A bare pod of a template.
pub fn pod(name: &str, template: &Value) -> Value {
    let mut metadata = template["metadata"].as_object().cloned().unwrap_or_default();
    metadata.insert("generateName".into(), format!("{name}-").into());
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
}

/// A pod of every workload of the bundle.
pub fn trials(rendered: &Rendered) -> Vec<Trial> {
    let trial = |id: &ObjectId, body: &Value| {
        let template = ["/spec/template", "/spec/jobTemplate/spec/template"].iter().find_map(|at| body.pointer(at))?;
        template.get("spec")?;
        let namespace = id.namespace.clone()?;
        Some(Trial { what: id.to_string(), namespace, pod: pod(&id.name, template) })
    };
    rendered.objects.iter().filter_map(|object| trial(&object.id, &object.body)).collect()
}

/// The pod as it is sent: what comes with the installation and is not there yet
/// is left out, since a pod that names it would be refused.
pub fn prepared(trial: &Trial, absent: &BTreeSet<(String, String)>, stand_in: bool) -> Value {
    let mut pod = trial.pod.clone();
    let account = pod.pointer("/spec/serviceAccountName").and_then(Value::as_str).map(str::to_owned);
    if account.is_some_and(|account| stand_in || absent.contains(&(trial.namespace.clone(), account)))
        && let Some(spec) = pod.get_mut("spec").and_then(Value::as_object_mut)
    {
        spec.remove("serviceAccountName");
    }
    let namespace = if stand_in { STAND_IN } else { &trial.namespace };
    pod["metadata"]["namespace"] = namespace.into();
    pod
}

/// What it means that the API server does not take a pod.
pub fn refused(check: Check, trial: &Trial, code: u16, message: &str, room: Room) -> Finding {
    let Trial { what, namespace, .. } = trial;
    let security = message.contains("violates PodSecurity");
    let quota = message.contains("exceeded quota") || message.contains("failed quota");
    if (room.relabelled && security) || (room.stand_in && (security || quota)) {
        // The namespace's own business, and its own is another.
        return check.ok(format!("{what}: accepted but for what its namespace will allow"));
    }
    if room.stand_in {
        let message =
            format!("{what}: tried in namespace \"{STAND_IN}\", since \"{namespace}\" does not exist yet: {message}");
        return check.warn(message, "make sure that this does not hold for its own namespace, or exempt that");
    }
    let hint = if security {
        format!(
            "kubectl label namespace {namespace} pod-security.kubernetes.io/enforce={} --overwrite",
            if check == Check::DaemonPods { "privileged" } else { "restricted" }
        )
    } else if quota {
        format!("raise the quota, or ask for less: `kubectl -n {namespace} describe resourcequota`")
    } else if message.contains("LimitRange") || message.contains("usage per Container") {
        format!("change the LimitRange, or the values of the resources: `kubectl -n {namespace} describe limitrange`")
    } else if code == 404 || message.contains("not found") {
        "make it first, or choose another by its value".to_owned()
    } else {
        format!("exempt namespace \"{namespace}\" from what refuses this, or change the values that it complains of")
    };
    check.fail(format!("{what}: namespace \"{namespace}\" takes no such pod: {message}"), hint)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn trial() -> Trial {
        let pod = pod("server", &json!({"metadata": {"labels": {"a": "b"}}, "spec": {"serviceAccountName": "server"}}));
        Trial { what: "Deployment farm/server".into(), namespace: "farm".into(), pod }
    }

    #[test]
    fn what_is_not_there_yet_is_left_out() {
        let trial = trial();
        let sent = prepared(&trial, &[("farm".to_owned(), "server".to_owned())].into(), false);
        assert_eq!(sent["spec"].get("serviceAccountName"), None);
        assert_eq!(sent["metadata"], json!({"labels": {"a": "b"}, "generateName": "server-", "namespace": "farm"}));
        assert_eq!(prepared(&trial, &BTreeSet::new(), false)["spec"]["serviceAccountName"], "server");
        assert_eq!(prepared(&trial, &BTreeSet::new(), true)["metadata"]["namespace"], "default");
    }

    #[test]
    fn what_another_namespace_forbids_is_not_held_against_a_pod() {
        let room = |stand_in, relabelled| Room { stand_in, relabelled };
        let security = "pods \"x\" is forbidden: violates PodSecurity \"restricted:latest\": seccompProfile";
        for (message, room, expected) in [
            (security, room(false, false), Verdict::Fail),
            (security, room(false, true), Verdict::Ok),
            (security, room(true, true), Verdict::Ok),
            ("exceeded quota: small", room(true, false), Verdict::Ok),
            ("exceeded quota: small", room(false, true), Verdict::Fail),
            ("admission webhook \"x\" denied the request", room(true, false), Verdict::Warn),
            ("admission webhook \"x\" denied the request", room(false, false), Verdict::Fail),
        ] {
            let finding = refused(Check::DaemonPods, &trial(), 403, message, room);
            assert_eq!(finding.verdict, expected, "{message} {room:?}");
        }
        let finding = refused(Check::DaemonPods, &trial(), 403, security, room(false, false));
        assert!(finding.hint.unwrap().contains("pod-security.kubernetes.io/enforce=privileged"));
    }
}
