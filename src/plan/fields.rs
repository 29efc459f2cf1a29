//! Fields of an object, as the API server names them: paths of conflicts
//! (`.spec.containers[name="a"].image`) and sets of `managedFields`
//! (`{"f:spec": {"k:{\"name\":\"a\"}": {".": {}}}}`).

use serde_json::{Map, Value};

/// One step into a value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// The value at a path of a conflict.
pub(super) fn at<'a>(object: &'a Value, path: &str) -> Option<&'a Value> {
    let steps = steps(object, path)?;
    steps.iter().try_fold(object, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Index(index) => value.get(index),
    })
}

/// Takes the field at a path out of an object; whether it was there.
pub(super) fn remove(object: &mut Value, path: &str) -> bool {
    let Some(steps) = steps(object, path) else { return false };
    let Some((last, way)) = steps.split_last() else { return false };
    let parent = way.iter().try_fold(object, |value, step| match step {
        Step::Key(key) => value.get_mut(key),
        Step::Index(index) => value.get_mut(index),
    });
    match (parent, last) {
        (Some(Value::Object(map)), Step::Key(key)) => map.shift_remove(key).is_some(),
        (Some(Value::Array(list)), Step::Index(index)) if *index < list.len() => {
            list.remove(*index);
            true
        }
        _ => false,
    }
}

/// The steps of a path. Names may hold dots (`.metadata.labels.example.org/a`),
/// which only the object can tell apart: the longest name that fits counts.
fn steps(value: &Value, path: &str) -> Option<Vec<Step>> {
    if path.is_empty() {
        return Some(Vec::new());
    }
    let then = |step: Step, value: &Value, rest: &str| {
        let mut all = vec![step];
        all.extend(steps(value, rest)?);
        Some(all)
    };
    if let Some(rest) = path.strip_prefix('.') {
        let map = value.as_object()?;
        let ends = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
        let fits = |key: &&String| rest.strip_prefix(key.as_str()).is_some_and(ends);
        let mut keys: Vec<&String> = map.keys().filter(fits).collect();
        keys.sort_by_key(|key| std::cmp::Reverse(key.len()));
        return keys.into_iter().find_map(|key| then(Step::Key(key.clone()), &map[key], &rest[key.len()..]));
    }
    let (inner, rest) = bracket(path)?;
    let list = value.as_array()?;
    let index = match (inner.strip_prefix('='), inner.parse::<usize>()) {
        (Some(json), _) => {
            let wanted: Value = serde_json::from_str(json).ok()?;
            list.iter().position(|element| *element == wanted)?
        }
        (None, Ok(index)) => index,
        (None, Err(_)) => element_of(list, &keys(inner)?)?,
    };
    then(Step::Index(index), list.get(index)?, rest)
}

/// `[…]`, and what follows it; brackets within quotes do not count.
fn bracket(path: &str) -> Option<(&str, &str)> {
    let inner = path.strip_prefix('[')?;
    let (mut quoted, mut escaped) = (false, false);
    for (at, c) in inner.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            ']' if !quoted => return Some((&inner[..at], &inner[at + 1..])),
            _ => {}
        }
    }
    None
}

/// `containerPort=80,protocol="TCP"`.
fn keys(text: &str) -> Option<Map<String, Value>> {
    let mut keys = Map::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=')?;
        let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        let value = values.next()?.ok()?;
        keys.insert(name.to_owned(), value);
        rest = after[values.byte_offset()..].trim_start_matches(',');
    }
    Some(keys)
}

/// The element with these keys. Keys that an element leaves out have their
/// default, which is not known here: it is meant when no other is.
fn element_of(list: &[Value], keys: &Map<String, Value>) -> Option<usize> {
    let all = |element: &Value| keys.iter().all(|(name, value)| element.get(name) == Some(value));
    let open = |element: &Value| {
        keys.iter().all(|(name, value)| element.get(name).is_none_or(|own| own == value))
            && keys.keys().any(|name| element.get(name).is_some())
    };
    list.iter().position(all).or_else(|| list.iter().position(open))
}

/// Everything that is in either set.
pub(super) fn union(a: &Value, b: &Value) -> Value {
    let (Value::Object(a), Value::Object(b)) = (a, b) else { return a.clone() };
    let mut all = a.clone();
    for (key, value) in b {
        let merged = all.get(key).map_or_else(|| value.clone(), |own| union(own, value));
        all.insert(key.clone(), merged);
    }
    Value::Object(all)
}

/// What is in `a` and not in `b`.
pub(super) fn difference(a: &Value, b: &Value) -> Value {
    let (Value::Object(a), Value::Object(b)) = (a, b) else { return a.clone() };
    let mut left = Map::new();
    for (key, value) in a {
        match b.get(key) {
            None => drop(left.insert(key.clone(), value.clone())),
            Some(other) => {
                let rest = difference(value, other);
                if rest.as_object().is_some_and(|rest| !rest.is_empty()) {
                    left.insert(key.clone(), rest);
                }
            }
        }
    }
    Value::Object(left)
}

/// The fields of a set, as conflicts name them.
pub(super) fn paths(set: &Value) -> Vec<String> {
    let mut paths = Vec::new();
    collect(set, String::new(), &mut paths);
    paths
}

fn collect(set: &Value, path: String, paths: &mut Vec<String>) {
    let inner = set.as_object().into_iter().flatten().filter(|(key, _)| *key != ".");
    let mut leaf = true;
    for (key, set) in inner {
        leaf = false;
        let step = match key.split_once(':') {
            Some(("f", name)) => format!(".{name}"),
            Some(("k", keys)) => format!("[{}]", with_values(keys).unwrap_or_else(|| keys.to_owned())),
            Some(("v", value)) => format!("[={value}]"),
            _ => format!("[{key}]"),
        };
        collect(set, format!("{path}{step}"), paths);
    }
    if leaf && !path.is_empty() {
        paths.push(path);
    }
}

/// `name="a",protocol="TCP"` of `{"name":"a","protocol":"TCP"}`.
fn with_values(keys: &str) -> Option<String> {
    let keys: Map<String, Value> = serde_json::from_str(keys).ok()?;
    Some(keys.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(","))
}

/// Takes every field of a set out of an object, as the API server does when
/// their last owner gives them up.
pub(super) fn remove_all(object: &mut Value, set: &Value) {
    let Some(set) = set.as_object() else { return };
    for (key, inner) in set {
        let leaf = inner.as_object().is_none_or(Map::is_empty);
        let whole = inner.get(".").is_some();
        if let (Some(name), Value::Object(map)) = (key.strip_prefix("f:"), &mut *object) {
            if leaf {
                map.shift_remove(name);
            } else if let Some(value) = map.get_mut(name) {
                remove_all(value, inner);
                if is_empty(value) {
                    map.shift_remove(name);
                }
            }
        } else if let Value::Array(list) = object {
            let Some(index) = position(list, key) else { continue };
            if leaf || whole {
                list.remove(index);
            } else {
                remove_all(&mut list[index], inner);
            }
        }
    }
}

fn position(list: &[Value], key: &str) -> Option<usize> {
    if let Some(keys) = key.strip_prefix("k:") {
        let keys: Map<String, Value> = serde_json::from_str(keys).ok()?;
        return element_of(list, &keys);
    }
    let wanted: Value = serde_json::from_str(key.strip_prefix("v:")?).ok()?;
    list.iter().position(|element| *element == wanted)
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object() -> Value {
        json!({
            "metadata": {"labels": {"a": "1", "a.b/c": "2"}, "finalizers": ["x/y", "z"]},
            "spec": {"containers": [
                {"name": "a", "ports": [{"containerPort": 80}, {"containerPort": 80, "protocol": "UDP"}]},
                {"name": "b]", "args": ["one", "two"]},
            ]},
        })
    }

    #[test]
    fn paths_of_conflicts_lead_to_their_values() {
        let object = object();
        for (path, expected) in [
            (".metadata.labels.a", json!("1")),
            (".metadata.labels.a.b/c", json!("2")),
            (r#".metadata.finalizers[="z"]"#, json!("z")),
            (r#".spec.containers[name="b]"].args[1]"#, json!("two")),
            (r#".spec.containers[name="a"].ports[containerPort=80,protocol="UDP"].protocol"#, json!("UDP")),
            (r#".spec.containers[name="a"].ports[containerPort=80,protocol="TCP"].containerPort"#, json!(80)),
        ] {
            assert_eq!(at(&object, path), Some(&expected), "{path}");
        }
        for path in
            [".spec.replicas", r#".spec.containers[name="c"]"#, ".spec.containers[", "spec", ".metadata.labels.a.c"]
        {
            assert_eq!(at(&object, path), None, "{path}");
        }
    }

    #[test]
    fn a_set_is_told_as_conflicts_name_fields() {
        let set = json!({
            "f:metadata": {"f:labels": {".": {}, "f:a.b/c": {}}, "f:finalizers": {"v:\"z\"": {}}},
            "f:spec": {"f:containers": {"k:{\"containerPort\":80,\"protocol\":\"TCP\"}": {".": {}, "f:name": {}}}},
            "f:data": {".": {}},
        });
        let paths = paths(&set);
        assert_eq!(
            paths,
            [
                ".metadata.labels.a.b/c",
                r#".metadata.finalizers[="z"]"#,
                r#".spec.containers[containerPort=80,protocol="TCP"].name"#,
                ".data",
            ]
        );
    }

    #[test]
    fn a_field_is_taken_out_and_its_neighbours_stay() {
        let mut object = object();
        assert!(remove(&mut object, r#".spec.containers[name="a"].ports[containerPort=80,protocol="UDP"]"#));
        assert!(remove(&mut object, ".metadata.labels.a.b/c"));
        assert!(!remove(&mut object, ".metadata.labels.a.b/c"));
        assert_eq!(object["spec"]["containers"][0]["ports"], json!([{"containerPort": 80}]));
        assert_eq!(object["metadata"]["labels"], json!({"a": "1"}));
    }

    #[test]
    fn what_only_another_owned_goes_and_shared_containers_stay() {
        let theirs = json!({
            "f:metadata": {"f:labels": {".": {}, "f:a": {}, "f:a.b/c": {}}, "f:finalizers": {"v:\"z\"": {}}},
            "f:spec": {"f:containers": {
                "k:{\"name\":\"a\"}": {".": {}, "f:name": {}, "f:ports": {"k:{\"containerPort\":80,\"protocol\":\"UDP\"}": {".": {}, "f:containerPort": {}}}},
                "k:{\"name\":\"b]\"}": {".": {}, "f:name": {}, "f:args": {}},
            }},
        });
        let ours = json!({
            "f:metadata": {"f:labels": {"f:a": {}}},
            "f:spec": {"f:containers": {"k:{\"name\":\"a\"}": {".": {}, "f:name": {}}}},
        });
        let mut object = object();
        remove_all(&mut object, &difference(&theirs, &ours));
        let expected = json!({
            "metadata": {"labels": {"a": "1"}, "finalizers": ["x/y"]},
            "spec": {"containers": [{"name": "a", "ports": [{"containerPort": 80}]}]},
        });
        assert_eq!(object, expected);
        assert_eq!(difference(&union(&theirs, &ours), &theirs), json!({}));
    }
}
