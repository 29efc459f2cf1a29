//! What differs between an object as it is and as it would become.

use serde::Serialize;
use serde_json::{Map, Value};

use super::fields;
use crate::names::INSTALLER_MANAGER;

/// Stands for Secret data in everything printed.
pub const MASK: &str = "<secret>";

/// One field that changes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FieldChange {
    /// `.spec.template.spec.containers[server].image`.
    pub path: String,
    /// The value now; absent when the field is new.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<Value>,
    /// The value to be; absent when the field goes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Value>,
}

/// The fields that change from `live` to `predicted`. What the API server
/// keeps for itself (status, versions, field management) is left out, but for
/// one thing: which fields are ours. Without that, a field that somebody else
/// set to our value would stay theirs, and could never be removed by us.
pub fn difference(live: &Value, predicted: &Value) -> Vec<FieldChange> {
    let mut changes = Vec::new();
    let (before, after) = (comparable(live), comparable(predicted));
    compare(&mut changes, String::new(), Some(&before), Some(&after));
    if is_secret(live) {
        for change in &mut changes {
            change.conceal();
        }
    }
    if changes.is_empty() && owned(live) != owned(predicted) {
        changes.push(FieldChange::of_fields(owned(live), owned(predicted)));
    }
    changes
}

/// Where field management is told, among the fields of an object.
pub(super) const OWNERSHIP: &str = ".metadata.managedFields";

impl FieldChange {
    /// That the fields of others become ours, with the same values.
    pub(super) fn of_ownership(owners: &[String]) -> Self {
        let before = Some(format!("fields of {}", owners.join(", ")).into());
        Self { path: OWNERSHIP.into(), before, after: Some("ours".into()) }
    }

    /// Fields that we give up, and fields that become ours, with the same values.
    fn of_fields(before: Option<&Value>, after: Option<&Value>) -> Self {
        let none = Value::Object(Map::new());
        let (before, after) = (before.unwrap_or(&none), after.unwrap_or(&none));
        let paths = |a, b| {
            let paths = fields::paths(&fields::difference(a, b));
            (!paths.is_empty()).then(|| Value::from(paths))
        };
        Self { path: OWNERSHIP.into(), before: paths(before, after), after: paths(after, before) }
    }

    fn conceal(&mut self) {
        let in_data = [".data", ".stringData"].iter().any(|p| self.path.starts_with(p));
        // kubectl keeps a whole copy of what was applied in an annotation.
        if in_data || self.path.starts_with(".metadata.annotations") {
            for value in [&mut self.before, &mut self.after].into_iter().flatten() {
                *value = MASK.into();
            }
        }
    }
}

/// The object with the values of a Secret masked; others pass unchanged.
pub fn mask(mut object: Value) -> Value {
    if !is_secret(&object) {
        return object;
    }
    for pointer in ["/data", "/stringData", "/metadata/annotations"] {
        if let Some(Value::Object(values)) = object.pointer_mut(pointer) {
            values.values_mut().for_each(|value| *value = MASK.into());
        }
    }
    object
}

/// Whether an object is a Secret.
pub fn is_secret(object: &Value) -> bool {
    object.get("apiVersion").is_some_and(|v| v == "v1") && object.get("kind").is_some_and(|k| k == "Secret")
}

fn comparable(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
        if let Some(Value::Object(metadata)) = fields.get_mut("metadata") {
            for kept_by_server in
                ["managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink"]
            {
                metadata.remove(kept_by_server);
            }
        }
    }
    object
}

/// The fields that our applies own.
fn owned(object: &Value) -> Option<&Value> {
    let entries = object.pointer("/metadata/managedFields")?.as_array()?;
    entries.iter().find(|e| e["manager"] == INSTALLER_MANAGER && e["operation"] == "Apply")?.get("fieldsV1")
}

fn compare(changes: &mut Vec<FieldChange>, path: String, before: Option<&Value>, after: Option<&Value>) {
    match (before, after) {
        (Some(before), Some(after)) if before == after => {}
        (Some(Value::Object(before)), Some(Value::Object(after))) => compare_maps(changes, &path, before, after),
        (Some(Value::Array(before)), Some(Value::Array(after))) => compare_lists(changes, path, before, after),
        (before, after) => changes.push(FieldChange { path, before: before.cloned(), after: after.cloned() }),
    }
}

fn compare_maps(changes: &mut Vec<FieldChange>, path: &str, before: &Map<String, Value>, after: &Map<String, Value>) {
    let mut keys: Vec<&String> = before.keys().chain(after.keys().filter(|k| !before.contains_key(*k))).collect();
    keys.sort();
    for key in keys {
        let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'));
        let path = if plain { format!("{path}.{key}") } else { format!("{path}[\"{key}\"]") };
        compare(changes, path, before.get(key), after.get(key));
    }
}

/// Lists whose elements have unique names are compared by name, so that one
/// inserted element is one change; lists of plain values as a whole, unless
/// only one of them changes; all others by position.
fn compare_lists(changes: &mut Vec<FieldChange>, path: String, before: &[Value], after: &[Value]) {
    if let (Some(old), Some(new)) = (names(before), names(after)) {
        for (name, element) in &old {
            let other = new.iter().find(|(n, _)| n == name).map(|(_, e)| *e);
            compare(changes, format!("{path}[{name}]"), Some(element), other);
        }
        for (name, element) in new.iter().filter(|(name, _)| old.iter().all(|(n, _)| n != name)) {
            compare(changes, format!("{path}[{name}]"), None, Some(element));
        }
        let common = |list: &[(&str, &Value)], others: &[(&str, &Value)]| -> Vec<String> {
            list.iter().map(|(n, _)| (*n).to_owned()).filter(|n| others.iter().any(|(o, _)| o == n)).collect()
        };
        let (was, is) = (common(&old, &new), common(&new, &old));
        if was != is {
            let path = format!("{path}[order]");
            changes.push(FieldChange { path, before: Some(was.into()), after: Some(is.into()) });
        }
        return;
    }
    let plain = |value: &Value| !value.is_object() && !value.is_array();
    let changed = before.iter().zip(after).filter(|(before, after)| before != after).count();
    if before.iter().chain(after).all(plain) && (before.len() != after.len() || changed > 1) {
        changes.push(FieldChange { path, before: Some(before.into()), after: Some(after.into()) });
        return;
    }
    for index in 0..before.len().max(after.len()) {
        compare(changes, format!("{path}[{index}]"), before.get(index), after.get(index));
    }
}

fn names(list: &[Value]) -> Option<Vec<(&str, &Value)>> {
    let named: Option<Vec<_>> = list.iter().map(|e| Some((e.get("name")?.as_str()?, e))).collect();
    let named = named?;
    let mut unique: Vec<_> = named.iter().map(|(name, _)| *name).collect();
    unique.sort_unstable();
    unique.dedup();
    (unique.len() == named.len()).then_some(named)
}
