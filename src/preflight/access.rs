//! Which permissions an installation needs. Pure.
//!
//! One list for everything that asks: `init` before its first write, `cluster
//! check`, and `--print-rbac`. What the engine does to an object and to its own
//! record belongs here the moment it does it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde_json::Value;

use super::secrets;
use super::{Check, Finding};
use crate::cluster::record;
use crate::manifest::{ObjectId, Rendered};
use crate::readiness;

/// Namespace in which objects are tried whose own does not exist yet.
pub const STAND_IN: &str = "default";

/// One thing that somebody may do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Permission {
    /// Where; everywhere, and what is in no namespace, when absent.
    pub namespace: Option<String>,
    /// API group; empty for the core group.
    pub group: String,
    /// `deployments`, `pods/log`.
    pub resource: String,
    /// The object; any when absent.
    pub name: Option<String>,
    /// `patch`.
    pub verb: String,
}

/// What an installation needs, and for what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// To install, upgrade, prune and uninstall.
    pub install: BTreeSet<Permission>,
    /// To grant: nobody may give away what they do not have.
    pub grants: BTreeSet<Permission>,
    /// To look at the cluster before; an installation is possible without.
    pub checks: BTreeSet<Permission>,
}

/// What an installation of these objects needs. `missing` are namespaces that
/// do not exist yet: their objects are tried in [`STAND_IN`].
pub fn needs(rendered: &Rendered, missing: &BTreeSet<String>) -> Needs {
    let mut needs = Needs::default();
    let custom = plurals(rendered);
    for id in identities(rendered) {
        let at = Place::of(&id, &custom);
        let namespace = id.namespace.as_deref();
        add(&mut needs.install, namespace, &at, None, &["create"]);
        // Fields of a predecessor are freed by an update.
        let mut verbs = vec!["get", "patch", "update", "delete"];
        if readiness::has_rule(&id.group, &id.kind) {
            verbs.extend(["list", "watch"]);
        }
        add(&mut needs.install, namespace, &at, Some(&id.name), &verbs);
        if namespace.is_some_and(|namespace| missing.contains(namespace)) {
            add(&mut needs.install, Some(STAND_IN), &at, None, &["create"]);
            add(&mut needs.install, Some(STAND_IN), &at, Some(&id.name), &["get", "patch"]);
        }
    }
    // What others make is looked at before the first write.
    for (namespace, name) in secrets::places(rendered) {
        add(&mut needs.install, Some(&namespace), &Place::new("", "secrets"), Some(&name), &["get"]);
    }
    record_and_lock(&mut needs.install, &rendered.operator_namespace);
    for namespace in pod_namespaces(rendered) {
        explanations(&mut needs.install, &namespace);
        let trial = if missing.contains(&namespace) { STAND_IN } else { &namespace };
        add(&mut needs.install, Some(trial), &Place::new("", "pods"), None, &["create"]);
        for resource in ["resourcequotas", "limitranges"] {
            add(&mut needs.checks, Some(&namespace), &Place::new("", resource), None, &["list"]);
        }
    }
    needs.grants = grants(rendered);
    checks(&mut needs.checks, rendered);
    needs
}

/// Every object that the engine writes.
fn identities(rendered: &Rendered) -> BTreeSet<ObjectId> {
    let secret = |namespace: &str, name: &str| ObjectId {
        group: String::new(),
        version: "v1".into(),
        kind: "Secret".into(),
        namespace: Some(namespace.to_owned()),
        name: name.to_owned(),
    };
    let objects = rendered.objects.iter().map(|object| object.id.clone());
    let made = rendered.declarations();
    let certificates = made.certificates.iter().map(|spec| secret(&spec.namespace, &spec.secret));
    let generated = made.generated.iter().map(|value| secret(&value.namespace, &value.name));
    objects.chain(certificates).chain(generated).collect()
}

/// Group and plural of a resource.
struct Place {
    group: String,
    resource: String,
}

impl Place {
    fn new(group: &str, resource: &str) -> Self {
        Self { group: group.to_owned(), resource: resource.to_owned() }
    }

    fn of(id: &ObjectId, custom: &BTreeMap<(String, String), String>) -> Self {
        let known = custom.get(&(id.group.clone(), id.kind.clone())).cloned();
        Self { group: id.group.clone(), resource: known.unwrap_or_else(|| plural(&id.kind)) }
    }
}

/// Plurals of the kinds that the bundle itself defines.
fn plurals(rendered: &Rendered) -> BTreeMap<(String, String), String> {
    let definitions = rendered.objects.iter().filter(|object| object.id.kind == "CustomResourceDefinition");
    let entry = |body: &Value| {
        let text = |pointer| body.pointer(pointer)?.as_str().map(str::to_owned);
        Some(((text("/spec/group")?, text("/spec/names/kind")?), text("/spec/names/plural")?))
    };
    definitions.filter_map(|object| entry(&object.body)).collect()
}

/// The plural of a built-in kind, which follows English.
fn plural(kind: &str) -> String {
    let kind = kind.to_lowercase();
    match kind.as_str() {
        kind if kind.ends_with('y') => format!("{}ies", kind.trim_end_matches('y')),
        kind if kind.ends_with('s') => format!("{kind}es"),
        kind => format!("{kind}s"),
    }
}

fn add(to: &mut BTreeSet<Permission>, namespace: Option<&str>, place: &Place, name: Option<&str>, verbs: &[&str]) {
    to.extend(verbs.iter().map(|verb| Permission {
        namespace: namespace.map(str::to_owned),
        group: place.group.clone(),
        resource: place.resource.clone(),
        name: name.map(str::to_owned),
        verb: (*verb).to_owned(),
    }));
}

/// The installer's own state beside the control plane.
fn record_and_lock(to: &mut BTreeSet<Permission>, namespace: &str) {
    let (maps, leases) = (Place::new("", "configmaps"), Place::new("coordination.k8s.io", "leases"));
    // Parts of the record are named by what they hold.
    add(to, Some(namespace), &maps, None, &["create", "get", "list", "patch", "delete"]);
    add(to, Some(namespace), &leases, None, &["create"]);
    add(to, Some(namespace), &leases, Some(record::NAME), &["get", "list", "watch", "update", "delete"]);
}

/// Why something is not ready: pods, their last lines, Events.
fn explanations(to: &mut BTreeSet<Permission>, namespace: &str) {
    add(to, Some(namespace), &Place::new("", "pods"), None, &["list", "watch"]);
    add(to, Some(namespace), &Place::new("apps", "replicasets"), None, &["list", "watch"]);
    add(to, Some(namespace), &Place::new("", "pods/log"), None, &["get"]);
    add(to, Some(namespace), &Place::new("", "events"), None, &["list"]);
}

/// Namespaces that pods run in: ours, and the daemons'.
pub fn pod_namespaces(rendered: &Rendered) -> BTreeSet<String> {
    let workloads = rendered.objects.iter().filter(|object| object.body.pointer("/spec/template/spec").is_some());
    let ours = workloads.filter_map(|object| object.id.namespace.clone());
    ours.chain(super::daemon::settings(rendered).map(|settings| settings.namespace)).collect()
}

/// Every permission that our Roles give.
fn grants(rendered: &Rendered) -> BTreeSet<Permission> {
    let mut grants = BTreeSet::new();
    for object in rendered.objects.iter().filter(|o| matches!(o.id.kind.as_str(), "Role" | "ClusterRole")) {
        for rule in object.body["rules"].as_array().into_iter().flatten() {
            let list = |key: &str| {
                let items = rule.get(key).and_then(Value::as_array).into_iter().flatten();
                items.filter_map(Value::as_str).collect::<Vec<_>>()
            };
            let (verbs, names) = (list("verbs"), list("resourceNames"));
            let names: Vec<Option<&str>> =
                if names.is_empty() { vec![None] } else { names.into_iter().map(Some).collect() };
            for group in list("apiGroups") {
                for resource in list("resources") {
                    let place = Place::new(group, resource);
                    for name in &names {
                        add(&mut grants, object.id.namespace.as_deref(), &place, *name, &verbs);
                    }
                }
            }
        }
    }
    grants
}

fn checks(to: &mut BTreeSet<Permission>, rendered: &Rendered) {
    for (group, resource) in [
        ("", "nodes"),
        ("", "services"),
        ("storage.k8s.io", "storageclasses"),
        ("snapshot.storage.k8s.io", "volumesnapshotclasses"),
        ("node.k8s.io", "runtimeclasses"),
        ("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
        ("admissionregistration.k8s.io", "mutatingadmissionpolicies"),
        ("admissionregistration.k8s.io", "mutatingadmissionpolicybindings"),
    ] {
        add(to, None, &Place::new(group, resource), None, &["list"]);
    }
    let proxy = Place::new("", "services/proxy");
    add(to, Some(&rendered.operator_namespace), &proxy, Some(&super::ask::route_service()), &["get"]);
}

/// What may lack a permission: `deployments.apps`, with names when it is about
/// some objects only.
impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, resource(&self.group, &self.resource))?;
        if let Some(name) = &self.name {
            write!(f, " \"{name}\"")?;
        }
        f.write_str(&place(self.namespace.as_deref()))
    }
}

fn resource(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

fn place(namespace: Option<&str>) -> String {
    namespace.map_or_else(|| " in the whole cluster".to_owned(), |namespace| format!(" in namespace \"{namespace}\""))
}

/// What is lacking of one resource.
#[derive(Default)]
struct Lacking<'a> {
    verbs: BTreeSet<&'a str>,
    /// Of the objects that it is about; nothing when it is about any.
    names: BTreeSet<&'a str>,
}

/// One line for each resource: `create, patch deployments.apps in namespace "x"`.
fn lines(lacking: &BTreeSet<&Permission>) -> Vec<String> {
    let mut by_resource: BTreeMap<(Option<&str>, &str, &str), Lacking<'_>> = BTreeMap::new();
    for permission in lacking {
        let key = (permission.namespace.as_deref(), permission.group.as_str(), permission.resource.as_str());
        let Lacking { verbs, names } = by_resource.entry(key).or_default();
        verbs.insert(&permission.verb);
        names.extend(permission.name.as_deref());
    }
    let line = |((namespace, group, name), Lacking { verbs, names })| {
        let verbs = verbs.into_iter().collect::<Vec<_>>().join(", ");
        let names: Vec<String> = names.into_iter().map(|name| format!(" \"{name}\"")).collect();
        let names = if names.len() > 3 { String::new() } else { names.join(",") };
        format!("{verbs} {}{names}{}", resource(group, name), place(namespace))
    };
    by_resource.into_iter().map(line).collect()
}

/// What is found of the permissions. `user` is who asks, `lacking` what they
/// may not.
pub fn judge(needs: &Needs, lacking: &BTreeSet<Permission>, user: &str) -> Vec<Finding> {
    let missing = |wanted: &BTreeSet<Permission>| {
        let missing: BTreeSet<Permission> = wanted.intersection(lacking).cloned().collect();
        missing
    };
    let mut findings = Vec::new();
    let list = |missing: &BTreeSet<Permission>| {
        let lines = lines(&missing.iter().collect());
        let separator = if lines.len() == 1 { " may not " } else { " may not\n- " };
        format!("{user}{separator}{}", lines.join("\n- "))
    };
    let install = missing(&needs.install);
    let hint = format!(
        "let {user} do so: somebody who may runs `bko-install cluster check --print-rbac --service-account NS/NAME \
         | kubectl apply --server-side -f -`"
    );
    if !install.is_empty() {
        findings.push(Check::Permissions.fail(list(&install), hint.clone()));
    }
    let grants = missing(&needs.grants);
    let unbound: BTreeSet<Permission> = grants.iter().filter(|grant| !may_escalate(grant, lacking)).cloned().collect();
    if !unbound.is_empty() {
        let message = format!("nobody may give away what they do not have, and our Roles give it: {}", list(&unbound));
        findings.push(Check::Permissions.fail(message, hint));
    }
    let checks = missing(&needs.checks);
    if !checks.is_empty() {
        let hint = "the rules of `bko-install cluster check --print-rbac` allow it; the installation does without";
        findings.push(Check::Permissions.warn(format!("for the checks, {}", list(&checks)), hint));
    }
    if findings.is_empty() {
        let all = needs.install.len() + needs.grants.len() + needs.checks.len();
        findings.push(Check::Permissions.ok(format!("{user} may do all {all} things that it takes")));
    }
    findings
}

/// The two verbs that stand for having all rules, in a namespace.
pub fn escalation(namespace: Option<&str>) -> [Permission; 2] {
    let resource = if namespace.is_some() { "roles" } else { "clusterroles" };
    ["escalate", "bind"].map(|verb| Permission {
        namespace: namespace.map(str::to_owned),
        group: "rbac.authorization.k8s.io".into(),
        resource: resource.into(),
        name: None,
        verb: verb.into(),
    })
}

fn may_escalate(grant: &Permission, lacking: &BTreeSet<Permission>) -> bool {
    escalation(grant.namespace.as_deref()).iter().all(|permission| !lacking.contains(permission))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permission(verb: &str, name: Option<&str>) -> Permission {
        Permission {
            namespace: Some("farm".into()),
            group: "apps".into(),
            resource: "deployments".into(),
            name: name.map(str::to_owned),
            verb: verb.into(),
        }
    }

    #[test]
    fn what_is_lacking_is_told_once_for_each_resource() {
        let needs = Needs {
            install: [permission("create", None), permission("patch", Some("a")), permission("patch", Some("b"))]
                .into(),
            ..Needs::default()
        };
        let findings = judge(&needs, &needs.install.clone(), "user \"x\"");
        assert_eq!(
            findings[0].message,
            "user \"x\" may not create, patch deployments.apps \"a\", \"b\" in namespace \"farm\""
        );
        assert_eq!(judge(&needs, &BTreeSet::new(), "user \"x\"")[0].verdict, super::super::Verdict::Ok);
    }

    #[test]
    fn who_may_escalate_need_not_have_what_is_granted() {
        let needs = Needs { grants: [permission("get", None)].into(), ..Needs::default() };
        let without = needs.grants.clone();
        assert!(judge(&needs, &without, "x").iter().all(|finding| finding.verdict != super::super::Verdict::Fail));
        let mut with = without;
        with.extend(escalation(Some("farm")));
        assert_eq!(judge(&needs, &with, "x")[0].verdict, super::super::Verdict::Fail);
    }

    #[test]
    fn plurals_follow_english() {
        for (kind, expected) in [
            ("NetworkPolicy", "networkpolicies"),
            ("Ingress", "ingresses"),
            ("IngressClass", "ingressclasses"),
            ("PodDisruptionBudget", "poddisruptionbudgets"),
            ("Namespace", "namespaces"),
        ] {
            assert_eq!(plural(kind), expected);
        }
    }
}
