//! Whether our apply would change nothing, told from the object alone.
//!
//! A server-side apply changes nothing when every field that it sends has that
//! value already, and the fields that we own are exactly those that it sends:
//! then there is nothing to set, nothing to give up, and nobody to conflict
//! with. `managedFields` says what we own, and how the API server sees each
//! field: as a whole, or by its parts. Whatever is not certain counts as a
//! change, and the API server is asked.

use serde_json::{Map, Value};

use crate::names::INSTALLER_MANAGER;

/// Maps that the API replaces as a whole. Owned as a whole, any other map was
/// empty when we applied it.
const WHOLE: &[&str] = &[
    "selector",
    "podSelector",
    "namespaceSelector",
    "labelSelector",
    "roleRef",
    "nodeSelector",
    "fieldRef",
    "resourceFieldRef",
    "secretKeyRef",
    "configMapKeyRef",
    "scopeSelector",
];

/// Whether applying `body` would leave `live` as it is, field management
/// included.
pub fn is_settled(live: &Value, body: &Value) -> bool {
    let (Some(owned), Some(wanted)) = (owned(live, body), body.as_object()) else { return false };
    let sent = wanted.iter().filter(|(key, _)| !matches!(key.as_str(), "apiVersion" | "kind"));
    fields_agree(owned, sent, live, |key, set, value, live| match key {
        "metadata" => metadata_agrees(set, value, live),
        _ => agrees(key, set, value, live),
    })
}

/// What we own by applies of this version, if that is all that we own.
fn owned<'a>(live: &'a Value, body: &Value) -> Option<&'a Map<String, Value>> {
    let entries = live.pointer("/metadata/managedFields")?.as_array()?;
    let mut own = entries.iter().filter(|entry| entry["manager"] == INSTALLER_MANAGER && entry["operation"] == "Apply");
    let (entry, more) = (own.next()?, own.next());
    let same = entry["apiVersion"] == body["apiVersion"] && entry.get("subresource").is_none();
    entry.get("fieldsV1")?.as_object().filter(|_| same && more.is_none())
}

/// Name and namespace are nobody's.
fn metadata_agrees(set: &Value, wanted: &Value, live: &Value) -> bool {
    let (Some(set), Some(wanted)) = (set.as_object(), wanted.as_object()) else { return false };
    let sent = wanted.iter().filter(|(key, _)| !matches!(key.as_str(), "name" | "namespace"));
    fields_agree(set, sent, live, agrees)
}

/// Whether these fields are those of the set, and are so already.
fn fields_agree<'a>(
    set: &Map<String, Value>,
    sent: impl Iterator<Item = (&'a String, &'a Value)>,
    live: &Value,
    agrees: impl Fn(&str, &Value, &Value, &Value) -> bool,
) -> bool {
    let mut count = 0;
    for (key, value) in sent {
        count += 1;
        let (Some(set), Some(live)) = (set.get(&format!("f:{key}")), live.get(key)) else { return false };
        if !agrees(key, set, value, live) {
            return false;
        }
    }
    count == set.len()
}

fn agrees(name: &str, set: &Value, wanted: &Value, live: &Value) -> bool {
    let Some(set) = set.as_object() else { return false };
    match wanted {
        Value::Object(map) if set.is_empty() => wanted == live && (map.is_empty() || WHOLE.contains(&name)),
        _ if set.is_empty() => !wanted.is_null() && wanted == live,
        Value::Object(map) => fields_agree(set, map.iter(), live, agrees),
        Value::Array(list) => live.as_array().is_some_and(|live| elements_agree(set, list, live)),
        _ => false,
    }
}

/// The same of a list whose elements have keys, or are values of a set: each
/// element has its own entry, and they stand in the order that is sent.
fn elements_agree(set: &Map<String, Value>, wanted: &[Value], live: &[Value]) -> bool {
    let Some(entries) = set.iter().map(entry).collect::<Option<Vec<_>>>() else { return false };
    let mut from = 0;
    let mut used = Vec::with_capacity(entries.len());
    for element in wanted {
        let mut fitting = entries.iter().enumerate().filter(|(_, (key, _))| key.may_be(element));
        let (Some((index, (key, fields))), None) = (fitting.next(), fitting.next()) else { return false };
        let Some(at) = live[from..].iter().position(|live| key.is(live)).map(|at| from + at) else { return false };
        if used.contains(&index) || !key.agrees(fields, element, &live[at]) {
            return false;
        }
        used.push(index);
        from = at + 1;
    }
    used.len() == entries.len()
}

enum Key {
    Fields(Map<String, Value>),
    Value(Value),
}

fn entry<'a>((key, fields): (&String, &'a Value)) -> Option<(Key, &'a Value)> {
    let key = match key.split_once(':')? {
        ("k", keys) => Key::Fields(serde_json::from_str(keys).ok()?),
        ("v", value) => Key::Value(serde_json::from_str(value).ok()?),
        _ => return None,
    };
    Some((key, fields))
}

impl Key {
    /// Whether an element that is sent may be meant: keys that have a default
    /// may be left out.
    fn may_be(&self, element: &Value) -> bool {
        match self {
            Self::Fields(keys) => {
                keys.iter().all(|(name, value)| element.get(name).is_none_or(|own| own == value))
                    && keys.keys().any(|name| element.get(name).is_some())
            }
            Self::Value(value) => value == element,
        }
    }

    fn is(&self, live: &Value) -> bool {
        match self {
            Self::Fields(keys) => keys.iter().all(|(name, value)| live.get(name) == Some(value)),
            Self::Value(value) => value == live,
        }
    }

    fn agrees(&self, fields: &Value, wanted: &Value, live: &Value) -> bool {
        match (self, fields.as_object(), wanted.as_object()) {
            (Self::Value(_), Some(fields), _) => fields.is_empty(),
            (Self::Fields(_), Some(fields), Some(wanted)) if fields.contains_key(".") => {
                let mut fields = fields.clone();
                fields.shift_remove(".");
                fields_agree(&fields, wanted.iter(), live, agrees)
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body() -> Value {
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": "a", "namespace": "n", "labels": {"app": "a"}, "finalizers": ["x/y"]},
            "spec": {
                "selector": {"matchLabels": {"app": "a"}},
                "template": {"spec": {
                    "containers": [
                        {"name": "one", "args": ["1", "2"], "ports": [{"containerPort": 80}]},
                        {"name": "two", "securityContext": {}},
                    ],
                }},
            },
        })
    }

    fn live() -> Value {
        let mut live = body();
        live["status"] = json!({"replicas": 1});
        live["metadata"]["uid"] = "u".into();
        live["metadata"]["finalizers"] = json!(["other", "x/y"]);
        live["spec"]["replicas"] = 1.into();
        let containers = &mut live["spec"]["template"]["spec"]["containers"];
        containers[0]["ports"][0]["protocol"] = "TCP".into();
        containers.as_array_mut().unwrap().insert(1, json!({"name": "injected"}));
        live["metadata"]["managedFields"] = json!([
            {"manager": "other", "operation": "Update", "apiVersion": "apps/v1", "fieldsV1": {"f:spec": {"f:replicas": {}}}},
            {"manager": INSTALLER_MANAGER, "operation": "Apply", "apiVersion": "apps/v1", "fieldsV1": {
                "f:metadata": {"f:labels": {"f:app": {}}, "f:finalizers": {"v:\"x/y\"": {}}},
                "f:spec": {
                    "f:selector": {},
                    "f:template": {"f:spec": {"f:containers": {
                        "k:{\"name\":\"one\"}": {".": {}, "f:name": {}, "f:args": {}, "f:ports": {
                            "k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {".": {}, "f:containerPort": {}}}},
                        "k:{\"name\":\"two\"}": {".": {}, "f:name": {}, "f:securityContext": {}},
                    }}},
                },
            }},
        ]);
        live
    }

    #[test]
    fn what_others_have_added_does_not_matter() {
        assert!(is_settled(&live(), &body()));
    }

    /// Every field, changed, gone and added, on either side.
    #[test]
    fn any_difference_is_seen() {
        let pointers = [
            "/metadata/labels/app",
            "/metadata/finalizers/0",
            "/spec/selector/matchLabels/app",
            "/spec/template/spec/containers/0/args",
            "/spec/template/spec/containers/0/args/1",
            "/spec/template/spec/containers/0/ports/0/containerPort",
            "/spec/template/spec/containers/1/name",
            "/spec/template/spec/containers/1/securityContext",
        ];
        for pointer in pointers {
            let mut changed = body();
            *changed.pointer_mut(pointer).unwrap() = json!("other");
            assert!(!is_settled(&live(), &changed), "{pointer} changed");
            let mut gone = body();
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            match gone.pointer_mut(parent).unwrap() {
                Value::Object(map) => drop(map.shift_remove(key)),
                Value::Array(list) => drop(list.remove(key.parse().unwrap())),
                _ => unreachable!(),
            }
            assert!(!is_settled(&live(), &gone), "{pointer} gone");
        }
        for pointer in ["/metadata/labels", "/spec", "/spec/template/spec/containers/0/ports/0", "/spec/selector"] {
            let mut added = body();
            added.pointer_mut(pointer).unwrap()["more"] = json!("x");
            assert!(!is_settled(&live(), &added), "{pointer} added");
            if pointer == "/spec/selector" {
                continue; // ours as a whole, whatever is in it
            }
            // The value alone does not make it ours.
            let mut taken = live();
            taken.pointer_mut(pointer).unwrap()["more"] = json!("x");
            assert!(!is_settled(&taken, &added), "{pointer} of somebody else");
        }
        let mut swapped = body();
        swapped["spec"]["template"]["spec"]["containers"].as_array_mut().unwrap().swap(0, 1);
        assert!(!is_settled(&live(), &swapped));
    }

    #[test]
    fn without_certainty_the_api_server_is_asked() {
        let edit = |edit: &dyn Fn(&mut Value)| {
            let mut live = live();
            edit(&mut live["metadata"]["managedFields"]);
            is_settled(&live, &body())
        };
        assert!(!edit(&|fields| *fields = Value::Null));
        assert!(!edit(&|fields| fields[1]["manager"] = "kubectl".into()));
        assert!(!edit(&|fields| fields[1]["operation"] = "Update".into()));
        assert!(!edit(&|fields| fields[1]["apiVersion"] = "apps/v2".into()));
        assert!(!edit(&|fields| fields[1]["subresource"] = "scale".into()));
        assert!(!edit(&|fields| fields[0] = fields[1].clone()));
        assert!(!edit(&|fields| fields[1]["fieldsV1"]["f:spec"]["f:replicas"] = json!({})));
        assert!(!edit(&|fields| fields[1]["fieldsV1"]["f:metadata"]["f:labels"]["."] = json!({})));
        // A map that was empty when it was applied, and has got our value from somebody else.
        let (mut live, mut body) = (live(), body());
        live["spec"]["template"]["spec"]["containers"][2]["securityContext"]["runAsUser"] = 1.into();
        assert!(!is_settled(&live, &body));
        body["spec"]["template"]["spec"]["containers"][1]["securityContext"]["runAsUser"] = 1.into();
        assert!(!is_settled(&live, &body));
    }
}
