//! What the cluster has: a version, runtime classes, nodes, load balancers. Pure.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Check, Finding};
use crate::manifest::Rendered;

/// Native sidecars are on by default from here on.
const OLDEST: u32 = 29;

/// The newest that the tests run against.
const NEWEST: u32 = 36;

/// What is found of the answer of `/version`.
pub fn version(answer: &Value) -> Finding {
    let number = |field: &str| {
        let text = answer[field].as_str().unwrap_or_default();
        // Some clouds write "29+".
        text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse::<u32>().ok()
    };
    let git = answer["gitVersion"].as_str().unwrap_or("an unknown version");
    match (number("major"), number("minor")) {
        (Some(1), Some(minor)) if minor < OLDEST => Check::ServerVersion.fail(
            format!("the API server is {git}; this needs 1.{OLDEST} or later, for native sidecars"),
            "upgrade the cluster",
        ),
        (Some(1), Some(minor)) if minor <= NEWEST => Check::ServerVersion.ok(git),
        _ => Check::ServerVersion.warn(
            format!("the API server is {git}; this is tested with 1.{OLDEST} to 1.{NEWEST}"),
            "look for a newer bko-install, and try on a cluster that may break",
        ),
    }
}

/// What is found of the sandbox's runtime class.
pub fn runtime_class(wanted: &str, rendered: &Rendered, classes: &[Value]) -> Finding {
    let names: Vec<&str> = classes.iter().filter_map(|class| class.pointer("/metadata/name")?.as_str()).collect();
    let ours = rendered.objects.iter().any(|o| o.id.kind == "RuntimeClass" && o.id.name == wanted);
    if ours || names.contains(&wanted) {
        return Check::RuntimeClass.ok(format!("\"{wanted}\""));
    }
    let there =
        if names.is_empty() { "there is none at all".to_owned() } else { format!("there are {}", names.join(", ")) };
    Check::RuntimeClass.fail(
        format!("forks.sandbox.runtimeClass is \"{wanted}\", which does not exist: {there}"),
        "install the runtime with its RuntimeClass, or set forks.sandbox.runtimeClass to one that exists or to nothing",
    )
}

/// What is found of load balancers, if the bundle has a Service that wants one.
pub fn load_balancer(rendered: &Rendered, nodes: &[Value], services: &[Value]) -> Option<Finding> {
    let wanted =
        rendered.objects.iter().find(|o| o.id.kind == "Service" && o.body["spec"]["type"] == "LoadBalancer")?;
    let has_address = |service: &&Value| {
        service["spec"]["type"] == "LoadBalancer"
            && service
                .pointer("/status/loadBalancer/ingress")
                .and_then(Value::as_array)
                .is_some_and(|list| !list.is_empty())
    };
    if let Some(service) = services.iter().find(has_address) {
        let text = |field: &str| service["metadata"][field].as_str().unwrap_or_default();
        return Some(Check::LoadBalancer.ok(format!("Service {}/{} has an address", text("namespace"), text("name"))));
    }
    let provider = nodes.iter().find_map(|node| {
        let id = node.pointer("/spec/providerID")?.as_str()?;
        id.split_once("://").map(|(provider, _)| provider)
    });
    Some(match provider {
        // Names that say that nobody gives out addresses.
        Some(provider) if !matches!(provider, "kind" | "k3s" | "minikube" | "docker") => {
            Check::LoadBalancer.ok(format!("nodes are of cloud \"{provider}\", which gives out addresses"))
        }
        _ => Check::LoadBalancer.warn(
            format!(
                "nothing shows that a Service of type LoadBalancer gets an address: {} may wait for ever",
                wanted.id
            ),
            "install a load balancer such as MetalLB, or set gateway.service.type=NodePort",
        ),
    })
}

/// What is found of nodes for our own pods. Nodes may come when they are
/// wanted, so that a lack is no failure.
pub fn nodes(rendered: &Rendered, nodes: &[Value]) -> Vec<Finding> {
    let mut unplaced = Vec::new();
    for object in &rendered.objects {
        let Some(selector) = object.body.pointer("/spec/template/spec/nodeSelector").and_then(Value::as_object) else {
            continue;
        };
        let fits = |node: &&Value| {
            let labels = &node["metadata"]["labels"];
            selector.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        if !nodes.iter().any(|node| fits(&node)) {
            let labels: Vec<String> =
                selector.iter().map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default())).collect();
            unplaced.push(Check::Nodes.warn(
                format!("{}: no node has the labels {}", object.id, labels.join(",")),
                "label a node, change the value nodeSelector or images.architectures, or let an autoscaler make one",
            ));
        }
    }
    if unplaced.is_empty() {
        let arches: BTreeSet<&str> =
            nodes.iter().filter_map(|node| node["metadata"]["labels"]["kubernetes.io/arch"].as_str()).collect();
        let arches = if arches.is_empty() {
            String::new()
        } else {
            format!(", {}", arches.into_iter().collect::<Vec<_>>().join(" and "))
        };
        unplaced.push(match nodes.len() {
            0 => Check::Nodes.warn("there is no node at all", "add one, or let an autoscaler make one"),
            count => Check::Nodes.ok(format!("{count}{arches}")),
        });
    }
    unplaced
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Verdict;
    use super::*;
    use crate::manifest::{Object, ObjectId, Runlevel};

    fn object(kind: &str, body: Value) -> Rendered {
        let id = ObjectId {
            group: String::new(),
            version: "v1".into(),
            kind: kind.into(),
            namespace: Some("farm".into()),
            name: "gateway".into(),
        };
        let object =
            Object { id, component: "c".into(), runlevel: Runlevel::Rc4, body: body.into(), source: String::new() };
        Rendered {
            profile: "p".into(),
            operator_namespace: "farm".into(),
            objects: vec![object],
            certificates: Vec::new(),
            mode: crate::certificate::Mode::default(),
            generated: Vec::new(),
            expected: Vec::new(),
            policies: std::collections::BTreeMap::new(),
        }
    }

    #[test]
    fn an_old_api_server_fails_and_an_unknown_one_warns() {
        for (major, minor, verdict) in [
            ("1", "28", Verdict::Fail),
            ("1", "28+", Verdict::Fail),
            ("1", "29", Verdict::Ok),
            ("1", "36", Verdict::Ok),
            ("1", "37", Verdict::Warn),
            ("2", "0", Verdict::Warn),
            ("", "", Verdict::Warn),
        ] {
            assert_eq!(version(&json!({"major": major, "minor": minor})).verdict, verdict, "{major}.{minor}");
        }
    }

    #[test]
    fn a_runtime_class_exists_or_comes_with_the_bundle() {
        let kata = [json!({"metadata": {"name": "kata"}})];
        assert_eq!(runtime_class("kata", &object("Service", json!({})), &kata).verdict, Verdict::Ok);
        let missing = runtime_class("gvisor", &object("Service", json!({})), &kata);
        assert!(missing.verdict == Verdict::Fail && missing.message.contains("there are kata"), "{missing}");
        assert_eq!(runtime_class("gateway", &object("RuntimeClass", json!({})), &[]).verdict, Verdict::Ok);
    }

    #[test]
    fn a_load_balancer_is_believed_in_by_its_signs() {
        let balancer = json!({"spec": {"type": "LoadBalancer"}});
        let wanted = object("Service", balancer.clone());
        let verdict = |nodes: &[Value], services: &[Value]| load_balancer(&wanted, nodes, services).unwrap().verdict;
        let node = |id: &str| [json!({"spec": {"providerID": id}})];
        assert_eq!(verdict(&node("aws:///eu/i-1"), &[]), Verdict::Ok);
        assert_eq!(verdict(&node("kind://docker/kind/node"), &[]), Verdict::Warn);
        assert_eq!(verdict(&[json!({})], std::slice::from_ref(&balancer)), Verdict::Warn);
        let mut served = balancer;
        served["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}});
        assert_eq!(verdict(&[], &[served]), Verdict::Ok);
        assert_eq!(load_balancer(&object("Service", json!({"spec": {"type": "NodePort"}})), &[], &[]), None);
    }

    #[test]
    fn pods_want_a_node_with_their_labels() {
        let deployment = object(
            "Deployment",
            json!({"spec": {"template": {"spec": {"nodeSelector": {"kubernetes.io/arch": "amd64"}}}}}),
        );
        let node = |arch: &str| json!({"metadata": {"labels": {"kubernetes.io/arch": arch}}});
        assert_eq!(nodes(&deployment, &[node("arm64"), node("amd64")])[0].message, "2, amd64 and arm64");
        let found = nodes(&deployment, &[node("arm64")]);
        assert!(
            found[0].verdict == Verdict::Warn && found[0].message.contains("kubernetes.io/arch=amd64"),
            "{}",
            found[0]
        );
        assert_eq!(nodes(&object("Service", json!({})), &[])[0].verdict, Verdict::Warn);
    }
}
