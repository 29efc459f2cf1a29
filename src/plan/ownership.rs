//! Who owns an object and its fields, and what may be taken from whom.
//!
//! | Owner of a field | What happens |
//! |---|---|
//! | we ourselves, by an update under our name | taken |
//! | a predecessor (kubectl's client-side apply, Helm, the reference's controller) | taken with all its fields, if the object carries our label or adoption was asked for |
//! | what applied our export by server-side apply (kubectl, Flux, Argo CD), until we have applied the object ourselves | the same |
//! | an autoscaler, of `spec.replicas`; an injector, of `caBundle` | left to it |
//! | anybody else | as the component's policy says: `fail` unless told otherwise |
//! | Argo CD or Flux, of the object | refused |

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::contrast::{alone, contrast};
use super::difference::{MASK, is_secret};
use super::fields;
use crate::manifest::ObjectId;
use crate::names::INSTALLER_MANAGER;

/// What becomes of a field that another manager owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// It is set to our value, and ours from then on.
    Take,
    /// It stays as it is, and theirs.
    Yield,
    /// The run ends and names it.
    Fail,
}

/// A component's policy for one field of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FieldPolicy {
    /// `Deployment`.
    pub kind: String,
    /// `.spec.replicas`; fields below it are meant, too.
    pub field: String,
    /// What becomes of it.
    pub policy: Policy,
}

/// A field that another manager owns, and whose value we would change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldConflict {
    /// `kubectl-edit`.
    pub manager: String,
    /// `.spec.replicas`.
    pub field: String,
}

/// A conflict that nobody may resolve but a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contested {
    /// Who owns the field.
    pub manager: String,
    /// Which field.
    pub field: String,
    /// Its value now, as JSON, as far as it differs; Secret data masked.
    pub live: String,
    /// Our value, likewise.
    pub wanted: String,
    /// Whether adoption would take it.
    pub adoptable: bool,
}

impl std::fmt::Display for Contested {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of \"{}\" is {} and would become {}", self.field, self.manager, self.live, self.wanted)
    }
}

/// How an object's conflicts are resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resolution {
    /// Whether fields of other managers are taken.
    pub force: bool,
    /// Fields that are left to their owners.
    pub yields: Vec<String>,
}

/// What a person allows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Consent {
    /// Objects of predecessors may be taken over.
    pub adopt: bool,
    /// Any field of any manager may be taken.
    pub force: bool,
    /// Nothing will be written: whose an object is does not matter.
    pub look: bool,
}

/// A Helm release that an object belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct HelmRelease {
    /// Its name.
    pub name: String,
    /// Where Helm keeps it.
    pub namespace: String,
}

impl std::fmt::Display for HelmRelease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Helm release {}/{}", self.namespace, self.name)
    }
}

/// The release that an object says it belongs to.
pub fn helm_release(live: &Value) -> Option<HelmRelease> {
    let annotation = |name: &str| Some(live.pointer("/metadata/annotations")?.get(name)?.as_str()?.to_owned());
    Some(HelmRelease {
        name: annotation("meta.helm.sh/release-name")?,
        namespace: annotation("meta.helm.sh/release-namespace")?,
    })
}

/// Whether an object carries our label.
pub fn is_ours(live: &Value) -> bool {
    label(live, "app.kubernetes.io/managed-by").is_some_and(|by| by == INSTALLER_MANAGER)
}

/// The GitOps tool that keeps an object as its repository says.
pub fn tracker(id: &ObjectId, live: &Value) -> Option<String> {
    let both = |name: &str, namespace: &str| Some((label(live, name)?, label(live, namespace)?));
    if let Some((name, namespace)) = both("kustomize.toolkit.fluxcd.io/name", "kustomize.toolkit.fluxcd.io/namespace") {
        return Some(format!("Flux Kustomization {namespace}/{name}"));
    }
    if let Some((name, namespace)) = both("helm.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/namespace") {
        return Some(format!("Flux HelmRelease {namespace}/{name}"));
    }
    if let Some(name) = label(live, "argocd.argoproj.io/instance") {
        return Some(format!("Argo CD application {name}"));
    }
    // `app:group/kind:namespace/name`; controllers copy annotations to other objects, of which it does not speak.
    let tracking = live.pointer("/metadata/annotations")?.get("argocd.argoproj.io/tracking-id")?.as_str()?;
    let (application, rest) = tracking.split_once(':')?;
    let namespace = id.namespace.as_deref().unwrap_or_default();
    let own = format!("{}/{}:{namespace}/{}", id.group, id.kind, id.name);
    let unscoped = format!("{}/{}:/{}", id.group, id.kind, id.name);
    (rest == own || rest == unscoped).then(|| format!("Argo CD application {application}"))
}

fn label<'a>(live: &'a Value, name: &str) -> Option<&'a str> {
    live.pointer("/metadata/labels")?.get(name)?.as_str()
}

fn entries(live: &Value) -> impl Iterator<Item = &Value> {
    live.pointer("/metadata/managedFields").and_then(Value::as_array).into_iter().flatten()
}

fn text<'a>(entry: &'a Value, key: &str) -> &'a str {
    entry.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// Whether the fields of an entry are those of what was here before us: never
/// of a subresource, and never what somebody applies with kubectl by hand. What
/// was `exported`, those have applied who apply exports.
fn is_predecessor(entry: &Value, exported: bool) -> bool {
    text(entry, "subresource").is_empty()
        && match (text(entry, "manager"), text(entry, "operation")) {
            ("kubectl-client-side-apply" | "before-first-apply" | "buildd", "Update")
            | ("helm", "Apply" | "Update") => true,
            ("kubectl" | "kustomize-controller" | "argocd-controller", "Apply") => exported,
            _ => false,
        }
}

/// Whether an object comes from an export of ours: it has our label, and not
/// from us. From our first apply on, what others apply is their own.
fn is_exported(live: &Value) -> bool {
    is_ours(live) && !is_applied(live)
}

/// Whether we have applied an object before.
pub fn is_applied(live: &Value) -> bool {
    entries(live).any(is_own)
}

fn is_own(entry: &Value) -> bool {
    text(entry, "manager") == INSTALLER_MANAGER && text(entry, "operation") == "Apply"
}

/// The predecessors that own fields of an object. Of an object without any
/// field management, the API server says with the next apply that what was
/// there before owns everything.
pub fn predecessors(live: &Value) -> Vec<String> {
    if entries(live).next().is_none() {
        return vec!["before-first-apply".to_owned()];
    }
    let exported = is_exported(live);
    let theirs = entries(live).filter(|entry| is_predecessor(entry, exported));
    let mut names: Vec<String> = theirs.map(|entry| text(entry, "manager").to_owned()).collect();
    names.dedup();
    names
}

/// The field management of an object when its predecessors' fields are ours.
/// What we do not want then goes with our next apply.
pub fn taken_over(live: &Value) -> Value {
    let version = live.get("apiVersion").cloned().unwrap_or_default();
    let exported = is_exported(live);
    let mut own = json!({});
    let mut others = Vec::new();
    for entry in entries(live) {
        // Fields of another version of the API cannot be merged by name: nobody owns them then.
        if is_own(entry) || (is_predecessor(entry, exported) && entry.get("apiVersion") == Some(&version)) {
            own = fields::union(&own, entry.get("fieldsV1").unwrap_or(&Value::Null));
        } else if !is_predecessor(entry, exported) {
            others.push(entry.clone());
        }
    }
    let mut all = vec![json!({
        "manager": INSTALLER_MANAGER,
        "operation": "Apply",
        "apiVersion": version,
        "fieldsType": "FieldsV1",
        "fieldsV1": own,
    })];
    all.extend(others);
    all.into()
}

/// What is left of an object when its predecessors' fields that nobody else
/// wants are gone. `predicted` is what our apply alone would make of it.
pub fn without_predecessors(live: &Value, predicted: &Value) -> Value {
    let none = Value::Object(Map::new());
    let exported = is_exported(live);
    let fields_of = |entry: &Value| entry.get("fieldsV1").cloned().unwrap_or_default();
    let all = entries(live).chain(entries(predicted)).filter(|entry| is_predecessor(entry, exported));
    let theirs = all.fold(none.clone(), |all, entry| fields::union(&all, &fields_of(entry)));
    let kept = entries(predicted)
        .filter(|e| !is_predecessor(e, exported))
        .fold(none, |all, e| fields::union(&all, &fields_of(e)));
    let mut left = predicted.clone();
    fields::remove_all(&mut left, &fields::difference(&theirs, &kept));
    left
}

/// Decides what becomes of conflicts.
///
/// # Errors
/// Those that a person has to decide.
pub fn resolve(
    live: &Value,
    wanted: &Value,
    conflicts: &[FieldConflict],
    policies: &[FieldPolicy],
    consent: Consent,
) -> Result<Resolution, Vec<Contested>> {
    let mut resolution = Resolution::default();
    let mut contested = Vec::new();
    let kind = text(wanted, "kind");
    let old: Vec<String> = predecessors(live);
    let adoption = consent.adopt || is_ours(live);
    for conflict in conflicts {
        let inherited = old.contains(&conflict.manager);
        let policy = match policy(live, kind, conflict, policies) {
            _ if consent.force || conflict.manager == INSTALLER_MANAGER || (inherited && adoption) => Policy::Take,
            policy => policy,
        };
        match policy {
            Policy::Take => resolution.force = true,
            Policy::Yield => resolution.yields.push(conflict.field.clone()),
            Policy::Fail => contested.push(contest(live, wanted, conflict, inherited)),
        }
    }
    if contested.is_empty() { Ok(resolution) } else { Err(contested) }
}

fn policy(live: &Value, kind: &str, conflict: &FieldConflict, policies: &[FieldPolicy]) -> Policy {
    let below = |field: &str| {
        conflict.field.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    let declared = policies.iter().find(|policy| policy.kind == kind && below(&policy.field));
    match declared {
        Some(declared) => declared.policy,
        None if conflict.field == ".spec.replicas" && scales(live, &conflict.manager) => Policy::Yield,
        None if conflict.field.ends_with(".caBundle") => Policy::Yield,
        None => Policy::Fail,
    }
}

/// Whether a manager has set the number of replicas as autoscalers and
/// `kubectl scale` do, by the subresource.
fn scales(live: &Value, manager: &str) -> bool {
    entries(live).any(|entry| text(entry, "manager") == manager && text(entry, "subresource") == "scale")
}

fn contest(live: &Value, wanted: &Value, conflict: &FieldConflict, adoptable: bool) -> Contested {
    let (old, new) = (fields::at(live, &conflict.field), fields::at(wanted, &conflict.field));
    let unset = || "unset".to_owned();
    let (before, after) = match (old, new) {
        _ if is_secret(wanted) => {
            let masked = |value: Option<&Value>| value.map_or_else(unset, |_| MASK.to_owned());
            (masked(old), masked(new))
        }
        (Some(old), Some(new)) => contrast(old, new),
        (old, new) => (old.map_or_else(unset, alone), new.map_or_else(unset, alone)),
    };
    Contested {
        manager: conflict.manager.clone(),
        field: conflict.field.clone(),
        live: before,
        wanted: after,
        adoptable,
    }
}

/// A manifest without the fields that are left to others.
pub fn without(body: &Arc<Value>, yields: &[String]) -> Arc<Value> {
    let mut body = Arc::clone(body);
    for field in yields {
        fields::remove(Arc::make_mut(&mut body), field);
    }
    body
}

/// Takes out a `caBundle` that is a placeholder: sent, it would end what an
/// injector has put there, and every call of the webhook with it.
pub fn drop_placeholders(body: &mut Arc<Value>) {
    if has_placeholder(body) {
        without_placeholders(Arc::make_mut(body));
    }
}

fn is_placeholder((key, value): (&String, &Value)) -> bool {
    key == "caBundle" && matches!(value.as_str(), Some("" | "Cg==" | "\n"))
}

fn has_placeholder(body: &Value) -> bool {
    match body {
        Value::Object(map) => map.iter().any(is_placeholder) || map.values().any(has_placeholder),
        Value::Array(list) => list.iter().any(has_placeholder),
        _ => false,
    }
}

fn without_placeholders(body: &mut Value) {
    match body {
        Value::Object(map) => {
            map.retain(|key, value| !is_placeholder((key, value)));
            map.values_mut().for_each(without_placeholders);
        }
        Value::Array(list) => list.iter_mut().for_each(without_placeholders),
        _ => {}
    }
}
