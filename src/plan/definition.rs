//! What an upgrade of a custom resource definition would do to objects that live.

use serde_json::Value;

/// A place where the new schema accepts less than the old one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tightening {
    /// Names from the root; `[]` stands for every element.
    pub path: Vec<String>,
    /// What is no longer accepted.
    pub what: Tightened,
}

/// How a schema became tighter.
#[derive(Clone, Debug, PartialEq)]
pub enum Tightened {
    /// The field is gone: what it holds would be dropped.
    Removed,
    /// The field must be there.
    Required,
    /// It has another type.
    Type(String),
    /// Only these values are left.
    Values(Vec<Value>),
    /// A number may not be so small, or so large.
    Bounds {
        /// The least.
        least: Option<f64>,
        /// The greatest.
        greatest: Option<f64>,
    },
}

impl Eq for Tightened {}

impl std::fmt::Display for Tightening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, ".{}", self.path.join(".").replace(".[]", "[]"))?;
        match &self.what {
            Tightened::Removed => write!(f, " is no longer a field"),
            Tightened::Required => write!(f, " becomes required"),
            Tightened::Type(kind) => write!(f, " becomes {kind}"),
            Tightened::Values(values) => {
                let values: Vec<String> = values.iter().map(Value::to_string).collect();
                write!(f, " accepts only {}", values.join(", "))
            }
            Tightened::Bounds { least, greatest } => {
                let bound = |name: &str, bound: &Option<f64>| bound.map(|b| format!(" {name} {b}")).unwrap_or_default();
                write!(f, " must be{}{}", bound("at least", least), bound("at most", greatest))
            }
        }
    }
}

/// Stored versions of a definition that the new one no longer has.
pub fn dropped_stored(live: &Value, wanted: &Value) -> Vec<String> {
    let stored = live.pointer("/status/storedVersions").and_then(Value::as_array).into_iter().flatten();
    let kept = names(wanted);
    stored.filter_map(Value::as_str).filter(|name| !kept.contains(name)).map(str::to_owned).collect()
}

/// Served versions that the new definition no longer serves.
pub fn dropped_served<'a>(live: &'a Value, wanted: &'a Value) -> Vec<&'a str> {
    let served =
        |definition: &'a Value| versions(definition).filter(|v| v["served"] == true).filter_map(|v| v["name"].as_str());
    let kept: Vec<&str> = served(wanted).collect();
    served(live).filter(|name| !kept.contains(name)).collect()
}

/// The version that a definition stores.
pub fn storage(definition: &Value) -> Option<&str> {
    versions(definition).find(|version| version["storage"] == true)?["name"].as_str()
}

fn versions(definition: &Value) -> impl Iterator<Item = &Value> {
    definition.pointer("/spec/versions").and_then(Value::as_array).into_iter().flatten()
}

fn names(definition: &Value) -> Vec<&str> {
    versions(definition).filter_map(|version| version["name"].as_str()).collect()
}

/// Where a version that both definitions have accepts less than before.
pub fn tightened(live: &Value, wanted: &Value) -> Vec<Tightening> {
    let Some(version) = storage(live) else { return Vec::new() };
    let schema = |definition: &Value| {
        let found = versions(definition).find(|v| v["name"] == version)?;
        found.pointer("/schema/openAPIV3Schema").cloned()
    };
    let (Some(old), Some(new)) = (schema(live), schema(wanted)) else { return Vec::new() };
    let mut found = Vec::new();
    compare(&mut Vec::new(), &old, &new, &mut found);
    found
}

fn compare(path: &mut Vec<String>, old: &Value, new: &Value, found: &mut Vec<Tightening>) {
    let mut note = |path: &[String], what| found.push(Tightening { path: path.to_vec(), what });
    let text = |schema: &Value, key: &str| schema.get(key).and_then(Value::as_str).map(str::to_owned);
    if let (Some(before), Some(after)) = (text(old, "type"), text(new, "type"))
        && before != after
    {
        note(path, Tightened::Type(after));
        return;
    }
    if let Some(Value::Array(values)) = new.get("enum") {
        let before = old.get("enum").and_then(Value::as_array);
        if before.is_none_or(|before| before.iter().any(|value| !values.contains(value))) {
            note(path, Tightened::Values(values.clone()));
        }
    }
    let number = |schema: &Value, key: &str| schema.get(key).and_then(Value::as_f64);
    let least = number(new, "minimum").filter(|new| number(old, "minimum").is_none_or(|old| *new > old));
    let greatest = number(new, "maximum").filter(|new| number(old, "maximum").is_none_or(|old| *new < old));
    if least.is_some() || greatest.is_some() {
        note(path, Tightened::Bounds { least, greatest });
    }
    let list = |schema: &Value| -> Vec<String> {
        let names = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        names.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let before = list(old);
    for name in list(new).into_iter().filter(|name| !before.contains(name)) {
        let mut at = path.clone();
        at.push(name);
        note(&at, Tightened::Required);
    }
    let open = new.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true))
        || new.get("additionalProperties").is_some_and(|more| *more != Value::Bool(false));
    for (name, schema) in old.get("properties").and_then(Value::as_object).into_iter().flatten() {
        path.push(name.clone());
        match new.get("properties").and_then(|properties| properties.get(name)) {
            Some(new) => compare(path, schema, new, found),
            None if open => {}
            None => found.push(Tightening { path: path.clone(), what: Tightened::Removed }),
        }
        path.pop();
    }
    for key in ["items", "additionalProperties"] {
        if let (Some(old), Some(new)) = (old.get(key), new.get(key)) {
            path.push("[]".into());
            compare(path, old, new, found);
            path.pop();
        }
    }
}

/// Whether a live object would not be accepted any more, or would lose a field.
pub fn violates(object: &Value, tightening: &Tightening) -> bool {
    let Some((last, way)) = tightening.path.split_last() else { return breaks(object, &tightening.what) };
    if tightening.what == Tightened::Required && last != "[]" {
        return reach(object, way).into_iter().any(|parent| parent.is_object() && parent.get(last).is_none());
    }
    reach(object, &tightening.path).into_iter().any(|value| breaks(value, &tightening.what))
}

fn breaks(value: &Value, what: &Tightened) -> bool {
    match what {
        Tightened::Removed => true,
        Tightened::Required => false,
        Tightened::Type(kind) => !match kind.as_str() {
            "string" => value.is_string(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => true,
        },
        Tightened::Values(values) => !values.contains(value),
        Tightened::Bounds { least, greatest } => value.as_f64().is_some_and(|number| {
            least.is_some_and(|least| number < least) || greatest.is_some_and(|greatest| number > greatest)
        }),
    }
}

/// Every value at a path.
fn reach<'a>(value: &'a Value, path: &[String]) -> Vec<&'a Value> {
    let Some((first, rest)) = path.split_first() else { return vec![value] };
    match (first.as_str(), value) {
        ("[]", Value::Array(list)) => list.iter().flat_map(|element| reach(element, rest)).collect(),
        ("[]", Value::Object(map)) => map.values().flat_map(|element| reach(element, rest)).collect(),
        (name, value) => value.get(name).map(|value| reach(value, rest)).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn definition(stored: &[&str], versions: &[(&str, bool)], schema: Value) -> Value {
        let versions: Vec<Value> = versions
            .iter()
            .map(|(name, storage)| json!({"name": name, "served": true, "storage": storage, "schema": {"openAPIV3Schema": schema}}))
            .collect();
        json!({"spec": {"versions": versions}, "status": {"storedVersions": stored}})
    }

    #[test]
    fn versions_that_are_still_stored_or_served_are_missed() {
        let live = definition(&["v1alpha1", "v1"], &[("v1alpha1", false), ("v1", true)], json!({}));
        let wanted = definition(&[], &[("v1", true)], json!({}));
        assert_eq!(dropped_stored(&live, &wanted), ["v1alpha1"]);
        assert_eq!(dropped_served(&live, &wanted), ["v1alpha1"]);
        assert_eq!(storage(&live), Some("v1"));
        assert_eq!(dropped_stored(&live, &live), [""; 0]);
    }

    #[test]
    fn only_what_accepts_less_is_tighter_and_only_live_values_break() {
        let old = json!({"type": "object", "properties": {"spec": {"type": "object", "required": ["a"], "properties": {
            "a": {"type": "string"}, "b": {"type": "integer", "maximum": 10}, "gone": {"type": "string"},
            "tier": {"type": "string", "enum": ["warm", "hot"]},
            "list": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "string"}}}},
        }}}});
        let mut new = old.clone();
        let spec = &mut new["properties"]["spec"];
        spec["required"] = json!(["a", "b"]);
        spec["properties"]["b"]["maximum"] = 5.into();
        spec["properties"]["tier"]["enum"] = json!(["hot", "cold"]);
        spec["properties"]["list"]["items"]["properties"]["n"]["type"] = "integer".into();
        spec["properties"].as_object_mut().unwrap().shift_remove("gone");
        let (live, wanted) = (definition(&["v1"], &[("v1", true)], old.clone()), definition(&[], &[("v1", true)], new));
        let found = tightened(&live, &wanted);
        let texts: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(
            texts,
            [
                ".spec.b becomes required",
                ".spec.b must be at most 5",
                ".spec.gone is no longer a field",
                ".spec.tier accepts only \"hot\", \"cold\"",
                ".spec.list[].n becomes integer",
            ]
        );
        assert_eq!(tightened(&live, &live), []);
        let fine = json!({"spec": {"a": "x", "b": 5, "tier": "hot", "list": [{"n": 1}]}});
        assert!(!found.iter().any(|tightening| violates(&fine, tightening)));
        for broken in [
            json!({"spec": {"a": "x"}}),
            json!({"spec": {"b": 7}}),
            json!({"spec": {"b": 1, "gone": "x"}}),
            json!({"spec": {"b": 1, "tier": "warm"}}),
            json!({"spec": {"b": 1, "list": [{"n": 1}, {"n": "x"}]}}),
        ] {
            assert_eq!(found.iter().filter(|tightening| violates(&broken, tightening)).count(), 1, "{broken}");
        }
    }
}
