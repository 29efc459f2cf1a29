//! What each command needs to be allowed. Pure.
//!
//! What the engine does to an object and to its own record belongs here the
//! moment it does it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{EVERYTHING, Needs, Permission, STAND_IN};
use crate::cluster::record;
use crate::manifest::{Declarations, ObjectId, Rendered};
use crate::plan::Plan;
use crate::preflight::{ask, daemon, secrets};

/// What a run does beside applying objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Besides {
    /// Recorded objects that are no longer wanted.
    pub going: BTreeSet<ObjectId>,
    /// Definitions whose objects are moved to another stored version.
    pub migrated: BTreeSet<ObjectId>,
    /// Namespaces whose releases of Helm are taken over.
    pub releases: BTreeSet<String>,
}

impl From<&Plan> for Besides {
    fn from(plan: &Plan) -> Self {
        let migrated = plan.changes().filter(|change| !change.means.migrates.is_empty());
        Self {
            going: plan.deletions.iter().map(|deletion| deletion.id.clone()).collect(),
            migrated: migrated.map(|change| change.id.clone()).collect(),
            releases: plan.releases.iter().map(|release| release.namespace.clone()).collect(),
        }
    }
}

/// What counts of the cluster as it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Known {
    /// Namespaces that do not exist yet: their objects are tried in [`STAND_IN`].
    pub missing: BTreeSet<String>,
    /// How resources are called.
    pub plurals: Plurals,
    /// Roles as they are, of those that are installed. Bindings are tried by
    /// dry run while these still give what they give.
    pub roles: Vec<Value>,
}

/// What an installation of these objects needs.
pub fn install(rendered: &Rendered, known: &Known, besides: &Besides) -> Needs {
    let Known { missing, plurals, roles } = known;
    let mut needs = Needs::default();
    let to = &mut needs.install;
    for id in identities(rendered) {
        let at = Place::of(&id, plurals);
        let namespace = id.namespace.as_deref();
        add(to, namespace, &at, None, &["create"]);
        // Fields of a predecessor are freed by an update; what is made anew is
        // deleted, and watched until it is gone.
        add(to, namespace, &at, Some(&id.name), &["get", "patch", "update", "delete", "list", "watch"]);
        if namespace.is_some_and(|namespace| missing.contains(namespace)) {
            add(to, Some(STAND_IN), &at, None, &["create"]);
            add(to, Some(STAND_IN), &at, Some(&id.name), &["get", "patch"]);
        }
        // A schema that becomes tighter is tried on every live object.
        if let Some(instances) = instances(&id) {
            add(to, None, &instances, None, &["list"]);
        }
    }
    // What others make is looked at before the first write.
    for (namespace, name) in secrets::places(rendered) {
        add(to, Some(&namespace), &Place::new("", "secrets"), Some(&name), &["get"]);
    }
    record_and_lock(to, &rendered.operator_namespace);
    for namespace in pod_namespaces(rendered) {
        explanations(to, &namespace);
        let trial = if missing.contains(&namespace) { STAND_IN } else { &namespace };
        add(to, Some(trial), &Place::new("", "pods"), None, &["create"]);
        for resource in ["resourcequotas", "limitranges"] {
            add(&mut needs.checks, Some(&namespace), &Place::new("", resource), None, &["list"]);
        }
    }
    beside(to, besides, plurals);
    let ours = rendered.objects.iter().filter(|object| is_role(&object.id)).map(|object| &*object.body);
    needs.grants = grants(ours.chain(roles));
    checks(&mut needs.checks, rendered);
    needs
}

fn beside(to: &mut BTreeSet<Permission>, besides: &Besides, plurals: &Plurals) {
    for id in &besides.going {
        removal(to, id, plurals);
        if let Some(instances) = instances(id) {
            add(to, None, &instances, None, &["list"]);
        }
    }
    for id in &besides.migrated {
        let status = Place::new(&id.group, "customresourcedefinitions/status");
        add(to, None, &status, Some(&id.name), &["patch"]);
        if let Some(instances) = instances(id) {
            add(to, None, &instances, None, &["list", "get", "update"]);
        }
    }
    besides.releases.iter().for_each(|namespace| to.extend(adoption(namespace, &BTreeSet::new(), plurals)));
}

/// To look at a recorded object, to delete it, and to see that it is gone.
fn removal(to: &mut BTreeSet<Permission>, id: &ObjectId, plurals: &Plurals) {
    let at = Place::of(id, plurals);
    add(to, id.namespace.as_deref(), &at, Some(&id.name), &["get", "delete", "list", "watch"]);
    // A namespace goes only when it holds nothing else.
    if id.group.is_empty() && id.kind == "Namespace" {
        add(to, Some(&id.name), &Place::new(EVERYTHING, EVERYTHING), None, &["list"]);
    }
}

/// What it takes to remove these objects, their custom resources, and the
/// record; with the caches, if they go, too.
pub fn uninstall(
    objects: &BTreeSet<ObjectId>,
    namespace: &str,
    delete_caches: bool,
    plurals: &Plurals,
) -> BTreeSet<Permission> {
    let mut needs = BTreeSet::new();
    record_and_lock(&mut needs, namespace);
    for id in objects {
        removal(&mut needs, id, plurals);
        if let Some(instances) = instances(id) {
            add(&mut needs, None, &instances, None, &["list", "watch", "delete"]);
        }
    }
    let claims = Place::new("", "persistentvolumeclaims");
    let verbs: &[&str] = if delete_caches { &["list", "watch", "delete"] } else { &["list"] };
    for namespace in objects.iter().filter_map(|id| id.namespace.as_deref()).collect::<BTreeSet<_>>() {
        add(&mut needs, Some(namespace), &claims, None, verbs);
    }
    needs
}

/// What it takes to make Helm forget its releases in a namespace, and to give
/// them back; `retired` are objects of theirs that must not go on. How many
/// Secrets a release has, and their names, nobody knows before.
pub fn adoption(namespace: &str, retired: &BTreeSet<ObjectId>, plurals: &Plurals) -> BTreeSet<Permission> {
    let mut needs = BTreeSet::new();
    retired.iter().for_each(|id| removal(&mut needs, id, plurals));
    add(&mut needs, Some(namespace), &Place::new("", "secrets"), None, &["list", "create", "patch", "delete"]);
    needs
}

/// What it takes to replace an authority.
pub fn rotation(declared: &Declarations, namespace: &str) -> BTreeSet<Permission> {
    let (mut needs, secrets) = (BTreeSet::new(), Place::new("", "secrets"));
    add(&mut needs, Some(namespace), &Place::new("", "configmaps"), Some(Declarations::CONFIG_MAP), &["get"]);
    for (namespace, name) in declared.places() {
        add(&mut needs, Some(&namespace), &secrets, None, &["create"]);
        add(&mut needs, Some(&namespace), &secrets, Some(&name), &["get", "patch"]);
    }
    // Daemons that do not know of a new authority yet.
    for spec in declared.certificates.iter().filter(|spec| !spec.is_authority()) {
        add(&mut needs, Some(&spec.namespace), &Place::new("", "pods"), None, &["list"]);
    }
    needs
}

/// Every object that the engine writes.
pub fn identities(rendered: &Rendered) -> BTreeSet<ObjectId> {
    let secret = |(namespace, name): (String, String)| ObjectId {
        group: String::new(),
        version: "v1".into(),
        kind: "Secret".into(),
        namespace: Some(namespace),
        name,
    };
    let objects = rendered.objects.iter().map(|object| object.id.clone());
    objects.chain(rendered.declarations().places().map(secret)).collect()
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

    fn of(id: &ObjectId, plurals: &Plurals) -> Self {
        let known = plurals.get(&(id.group.clone(), id.kind.clone())).cloned();
        Self { group: id.group.clone(), resource: known.unwrap_or_else(|| plural(&id.kind)) }
    }
}

/// Plurals by group and kind, where they are known.
pub type Plurals = BTreeMap<(String, String), String>;

/// Plurals of the kinds that the bundle itself defines.
pub fn plurals(rendered: &Rendered) -> Plurals {
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

/// The resources of a custom resource definition, which its name tells.
fn instances(id: &ObjectId) -> Option<Place> {
    let definition = id.group == "apiextensions.k8s.io" && id.kind == "CustomResourceDefinition";
    let (plural, group) = id.name.split_once('.').filter(|_| definition)?;
    Some(Place::new(group, plural))
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
    ours.chain(daemon::settings(rendered).map(|settings| settings.namespace)).collect()
}

/// Whether it gives permissions.
pub fn is_role(id: &ObjectId) -> bool {
    id.group == "rbac.authorization.k8s.io" && matches!(id.kind.as_str(), "Role" | "ClusterRole")
}

/// Every permission that these roles give.
fn grants<'a>(roles: impl Iterator<Item = &'a Value>) -> BTreeSet<Permission> {
    let mut grants = BTreeSet::new();
    for role in roles {
        let namespace = role.pointer("/metadata/namespace").and_then(Value::as_str);
        for rule in role["rules"].as_array().into_iter().flatten() {
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
                        add(&mut grants, namespace, &place, *name, &verbs);
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
    add(to, Some(&rendered.operator_namespace), &proxy, Some(&ask::route_service()), &["get"]);
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn id(group: &str, kind: &str, namespace: Option<&str>, name: &str) -> ObjectId {
        let (group, kind, name) = (group.to_owned(), kind.to_owned(), name.to_owned());
        ObjectId { group, version: "v1".into(), kind, namespace: namespace.map(str::to_owned), name }
    }

    fn told(needs: &BTreeSet<Permission>) -> Vec<String> {
        needs.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_goes_takes_its_custom_resources_and_a_look_at_all_in_its_namespace() {
        let definition = id("apiextensions.k8s.io", "CustomResourceDefinition", None, "things.example.org");
        let objects = [definition, id("", "Namespace", None, "farm"), id("", "Secret", Some("farm"), "s")].into();
        let needs = told(&uninstall(&objects, "farm", false, &Plurals::new()));
        for expected in [
            "delete things.example.org in the whole cluster",
            "watch things.example.org in the whole cluster",
            "delete customresourcedefinitions.apiextensions.k8s.io \"things.example.org\" in the whole cluster",
            "list *.* in namespace \"farm\"",
            "delete namespaces \"farm\" in the whole cluster",
            "watch secrets \"s\" in namespace \"farm\"",
            "list persistentvolumeclaims in namespace \"farm\"",
        ] {
            assert!(needs.iter().any(|line| line == expected), "{expected}: {needs:#?}");
        }
        let caches = "delete persistentvolumeclaims in namespace \"farm\"";
        assert!(!needs.iter().any(|line| line == caches));
        let needs = told(&uninstall(&objects, "farm", true, &Plurals::new()));
        assert!(needs.iter().any(|line| line == caches), "{needs:#?}");
    }

    #[test]
    fn a_run_takes_what_its_plan_does_besides() {
        let definition = id("apiextensions.k8s.io", "CustomResourceDefinition", None, "things.example.org");
        let going = [id("example.org", "Mouse", Some("farm"), "m")].into();
        let besides = Besides { going, migrated: [definition].into(), releases: ["helm".to_owned()].into() };
        let mut needs = BTreeSet::new();
        let plurals = [(("example.org".to_owned(), "Mouse".to_owned()), "mice".to_owned())].into();
        beside(&mut needs, &besides, &plurals);
        let needs = told(&needs);
        for expected in [
            "delete mice.example.org \"m\" in namespace \"farm\"",
            "patch customresourcedefinitions/status.apiextensions.k8s.io \"things.example.org\" in the whole cluster",
            "update things.example.org in the whole cluster",
            "delete secrets in namespace \"helm\"",
        ] {
            assert!(needs.iter().any(|line| line == expected), "{expected}: {needs:#?}");
        }
    }
}
