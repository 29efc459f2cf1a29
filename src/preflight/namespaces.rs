//! What namespaces allow: their Pod Security level and their quotas. Pure.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Check, Finding};
use crate::manifest::Rendered;
use crate::profile::syntax::amount;

/// Label of the level that a namespace enforces.
pub const ENFORCE: &str = "pod-security.kubernetes.io/enforce";

/// The level that the installation gives a namespace, if it does.
pub fn level_to_be<'a>(rendered: &'a Rendered, namespace: &str) -> Option<&'a str> {
    let found = rendered.objects.iter().find(|o| o.id.kind == "Namespace" && o.id.name == namespace)?;
    found.body["metadata"]["labels"][ENFORCE].as_str()
}

/// What is found of the level of the daemons' namespace. `live` is the
/// namespace as it is.
pub fn pod_security(rendered: &Rendered, namespace: &str, live: Option<&Value>) -> Finding {
    let level = live.and_then(|live| live["metadata"]["labels"][ENFORCE].as_str());
    match (level_to_be(rendered, namespace), level) {
        (Some(to_be), Some(level)) if to_be != level => Check::PodSecurity.warn(
            format!("namespace \"{namespace}\" enforces \"{level}\", and is to enforce \"{to_be}\": daemons need \"privileged\""),
            format!("let nobody set it back, or run daemons elsewhere with namespaces.builds: they would not start under \"{level}\""),
        ),
        (Some(to_be), _) => Check::PodSecurity.ok(format!("namespace \"{namespace}\" enforces \"{to_be}\"")),
        (None, Some("privileged")) => Check::PodSecurity.ok(format!("namespace \"{namespace}\" enforces \"privileged\"")),
        (None, Some(level)) => Check::PodSecurity.fail(
            format!("namespace \"{namespace}\" enforces \"{level}\": daemons need \"privileged\", for a seccomp profile that allows user namespaces"),
            format!("kubectl label namespace {namespace} {ENFORCE}=privileged --overwrite"),
        ),
        (None, None) => Check::PodSecurity.warn(
            format!("namespace \"{namespace}\" has no level of its own: the API server's default counts"),
            format!("kubectl label namespace {namespace} {ENFORCE}=privileged"),
        ),
    }
}

/// Whether a namespace is being deleted.
pub fn is_terminating(live: &Value) -> bool {
    live.pointer("/metadata/deletionTimestamp").is_some()
}

/// What is found of a namespace that is being deleted: nothing can be made in
/// it, and it may never go by itself.
pub fn terminating(name: &str, live: &Value) -> Option<Finding> {
    if !is_terminating(live) {
        return None;
    }
    // Its controller says what it waits for.
    let conditions = live.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    let held: Vec<&str> = conditions
        .filter(|condition| condition["status"] == "True")
        .filter_map(|condition| Some(condition["message"].as_str()?.trim_end_matches('.')))
        .collect();
    let why = if held.is_empty() { "nothing is known yet that holds it".to_owned() } else { held.join("; ") };
    let kinds = left(live);
    let look = if kinds.is_empty() {
        format!("`kubectl get namespace {name} --output yaml` says what it waits for")
    } else {
        let kinds = kinds.join(",");
        format!(
            "start the controllers whose finalizers these are, or take the finalizers off: \
             `kubectl -n {name} get {kinds} --output yaml` shows them"
        )
    };
    let hint = format!("wait until it is gone, and run again; {look}");
    Some(Check::Namespaces.fail(format!("namespace \"{name}\" is being deleted: {why}"), hint))
}

/// The resources that are left in a namespace, as its conditions name them:
/// `Some resources are remaining: configmaps. has 1 resource instances, x.example.org has 2 …`
fn left(live: &Value) -> Vec<String> {
    let conditions = live.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
    let remaining = conditions.filter(|c| c["type"] == "NamespaceContentRemaining" && c["status"] == "True");
    let lists = remaining.filter_map(|c| c["message"].as_str()?.split_once("remaining: ")).map(|(_, list)| list);
    let kinds =
        lists.flat_map(|list| list.split(", ")).filter_map(|part| part.split_once(" has ")).map(|(kind, _)| kind);
    kinds.map(|kind| kind.trim_end_matches('.').to_owned()).collect()
}

/// What pods that do not exist yet ask for, all together.
pub fn demand<'a>(workloads: impl Iterator<Item = &'a Value>) -> BTreeMap<String, f64> {
    let mut demand = BTreeMap::new();
    let mut add = |name: String, amount: f64| *demand.entry(name).or_insert(0.0) += amount;
    for workload in workloads {
        let replicas = workload.pointer("/spec/replicas").and_then(Value::as_f64).unwrap_or(1.0);
        add("pods".into(), replicas);
        let containers = workload.pointer("/spec/template/spec/containers").and_then(Value::as_array);
        for container in containers.into_iter().flatten() {
            for kind in ["requests", "limits"] {
                let quantities = container["resources"][kind].as_object().into_iter().flatten();
                for (name, quantity) in quantities {
                    let amount = quantity.as_str().and_then(amount).unwrap_or(0.0) * replicas;
                    add(format!("{kind}.{name}"), amount);
                }
            }
        }
    }
    demand
}

/// What is found of the quotas of a namespace, for what is to come.
pub fn quotas(namespace: &str, quotas: &[Value], demand: &BTreeMap<String, f64>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for quota in quotas {
        let name = quota.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        let hard = quota.pointer("/status/hard").or_else(|| quota.pointer("/spec/hard")).and_then(Value::as_object);
        for (resource, limit) in hard.into_iter().flatten() {
            // `cpu` is short for `requests.cpu`.
            let key = match resource.as_str() {
                "cpu" | "memory" => format!("requests.{resource}"),
                "count/pods" => "pods".to_owned(),
                other => other.to_owned(),
            };
            let used = quota.pointer("/status/used").and_then(|used| used.get(resource)).and_then(Value::as_str);
            let (Some(wanted), Some(limit), used) =
                (demand.get(&key), limit.as_str().and_then(amount), used.and_then(amount).unwrap_or(0.0))
            else {
                continue;
            };
            if *wanted > limit - used {
                let left = (limit - used).max(0.0);
                findings.push(Check::Quota.fail(
                    format!("quota \"{name}\" of namespace \"{namespace}\" leaves {left} of {resource}; our pods there need {wanted}"),
                    format!("raise the quota, or ask for less: `kubectl -n {namespace} describe resourcequota {name}`"),
                ));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quotas_are_held_against_all_replicas_together() {
        let workload = json!({"spec": {"replicas": 2, "template": {"spec": {"containers": [
            {"resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "1"}}},
        ]}}}});
        let demand = demand([&workload].into_iter());
        assert_eq!((demand["pods"], demand["requests.cpu"], demand["limits.cpu"]), (2.0, 0.2, 2.0));
        let quota =
            |hard: Value, used: Value| json!({"metadata": {"name": "q"}, "status": {"hard": hard, "used": used}});
        for (hard, used, fails) in [
            (json!({"pods": "2"}), json!({"pods": "0"}), false),
            (json!({"pods": "2"}), json!({"pods": "1"}), true),
            (json!({"cpu": "200m"}), json!({}), false),
            (json!({"requests.cpu": "199m"}), json!({}), true),
            (json!({"limits.memory": "1"}), json!({}), false),
            (json!({"services": "0"}), json!({}), false),
        ] {
            let found = quotas("farm", &[quota(hard.clone(), used)], &demand);
            assert_eq!(!found.is_empty(), fails, "{hard}");
        }
        let spec_only = json!({"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}});
        let found = quotas("farm", &[spec_only], &demand);
        assert_eq!(found[0].message, "quota \"q\" of namespace \"farm\" leaves 1 of pods; our pods there need 2");
    }
}
