//! Permissions as the least roles that hold them. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::access::{EVERYTHING, Needs, Permission};
use crate::manifest::emit::to_yaml;
use crate::names::INSTALLER_MANAGER;

/// Who is to install.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceAccount {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// The roles and bindings, as manifests for `kubectl apply`. The namespaces
/// come first, since a Role needs its own.
pub fn manifests(needs: &Needs, subject: &ServiceAccount) -> Vec<Value> {
    let all: BTreeSet<&Permission> = needs.install.iter().chain(&needs.grants).chain(&needs.checks).collect();
    let mut places: BTreeMap<Option<&str>, BTreeSet<&Permission>> = BTreeMap::new();
    for permission in all {
        places.entry(permission.namespace.as_deref()).or_default().insert(permission);
    }
    let namespaces = places.keys().flatten().copied().chain([subject.namespace.as_str()]).collect::<BTreeSet<_>>();
    let mut manifests: Vec<Value> = namespaces.into_iter().map(namespace).collect();
    manifests.push(json!({
        "apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": subject.name, "namespace": subject.namespace},
    }));
    for (namespace, permissions) in places {
        manifests.push(role(namespace, &permissions));
        manifests.push(binding(namespace, subject));
    }
    manifests
}

/// The same as one YAML stream.
pub fn yaml(needs: &Needs, subject: &ServiceAccount) -> String {
    let documents: Vec<String> = manifests(needs, subject).iter().map(to_yaml).collect();
    documents.join("---\n")
}

fn namespace(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
}

fn metadata(namespace: Option<&str>) -> Value {
    match namespace {
        Some(namespace) => json!({"name": INSTALLER_MANAGER, "namespace": namespace}),
        None => json!({"name": INSTALLER_MANAGER}),
    }
}

fn role(namespace: Option<&str>, permissions: &BTreeSet<&Permission>) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": if namespace.is_some() { "Role" } else { "ClusterRole" },
        "metadata": metadata(namespace),
        "rules": rules(permissions),
    })
}

fn binding(namespace: Option<&str>, subject: &ServiceAccount) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": if namespace.is_some() { "RoleBinding" } else { "ClusterRoleBinding" },
        "metadata": metadata(namespace),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": if namespace.is_some() { "Role" } else { "ClusterRole" },
            "name": INSTALLER_MANAGER,
        },
        "subjects": [{"kind": "ServiceAccount", "name": subject.name, "namespace": subject.namespace}],
    })
}

type Verbs<'a> = BTreeSet<&'a str>;

/// Objects that have the same verbs share a rule, and then resources of one
/// group that have the same verbs on the same names. What any object may is
/// not said again of some.
fn rules(permissions: &BTreeSet<&Permission>) -> Vec<Value> {
    let any: BTreeSet<(&str, &str, &str)> = permissions
        .iter()
        .filter(|p| p.name.is_none())
        .map(|p| (p.group.as_str(), p.resource.as_str(), p.verb.as_str()))
        .collect();
    let mut by_object: BTreeMap<(&str, &str, Option<&str>), Verbs<'_>> = BTreeMap::new();
    for p in permissions {
        let said = p.name.is_some() && any.contains(&(p.group.as_str(), p.resource.as_str(), p.verb.as_str()))
            || p.resource != EVERYTHING && any.contains(&(EVERYTHING, EVERYTHING, p.verb.as_str()));
        if !said {
            by_object.entry((&p.group, &p.resource, p.name.as_deref())).or_default().insert(&p.verb);
        }
    }
    let mut by_verbs: BTreeMap<(&str, &str, bool, Verbs<'_>), BTreeSet<&str>> = BTreeMap::new();
    for ((group, resource, name), verbs) in by_object {
        by_verbs.entry((group, resource, name.is_some(), verbs)).or_default().extend(name);
    }
    let mut rules: BTreeMap<(&str, Verbs<'_>, BTreeSet<&str>), Vec<&str>> = BTreeMap::new();
    for ((group, resource, _, verbs), names) in by_verbs {
        rules.entry((group, verbs, names)).or_default().push(resource);
    }
    rules.into_iter().map(|((group, verbs, names), resources)| rule(group, &resources, &names, &verbs)).collect()
}

fn rule(group: &str, resources: &[&str], names: &BTreeSet<&str>, verbs: &Verbs<'_>) -> Value {
    let mut rule = json!({"apiGroups": [group], "resources": resources, "verbs": verbs});
    if !names.is_empty() {
        rule["resourceNames"] = json!(names);
    }
    rule
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permission(resource: &str, name: Option<&str>, verb: &str) -> Permission {
        Permission {
            namespace: Some("farm".into()),
            group: String::new(),
            resource: resource.into(),
            name: name.map(str::to_owned),
            verb: verb.into(),
        }
    }

    #[test]
    fn permissions_become_the_fewest_rules_that_say_no_more() {
        let install = [
            permission("secrets", None, "create"),
            permission("secrets", Some("a"), "get"),
            permission("secrets", Some("b"), "get"),
            permission("services", None, "create"),
            permission("services", None, "get"),
            permission("services", Some("a"), "get"),
            permission("pods", None, "list"),
            permission("pods", Some("a"), "list"),
            Permission { group: "*".into(), ..permission("*", None, "list") },
        ];
        let needs = Needs { install: install.into(), ..Needs::default() };
        let subject = ServiceAccount { namespace: "ci".into(), name: "installer".into() };
        let manifests = manifests(&needs, &subject);
        let kinds: Vec<_> = manifests.iter().map(|m| m["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["Namespace", "Namespace", "ServiceAccount", "Role", "RoleBinding"]);
        assert_eq!(
            manifests[3]["rules"],
            json!([
                {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
                {"apiGroups": [""], "resources": ["services"], "verbs": ["create", "get"]},
                {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["a", "b"]},
                {"apiGroups": ["*"], "resources": ["*"], "verbs": ["list"]},
            ])
        );
    }
}
