//! A dotted path below a value. Pure.

use serde_json::{Map, Value};

use crate::manifest::describe;

/// Puts a value where a path leads, and makes the mappings on its way. A dot
/// within a key is written `\.`.
///
/// # Errors
/// When a key is empty, or the path leads through something else.
pub(super) fn nest(map: &mut Map<String, Value>, path: &str, value: Value) -> Result<(), String> {
    let mut keys = keys(path);
    if keys.iter().any(String::is_empty) {
        return Err(format!("\"{path}\" has an empty key"));
    }
    let Some(last) = keys.pop() else { return Ok(()) };
    let mut inner = map;
    for key in keys {
        inner = match inner.entry(key.clone()).or_insert_with(|| Value::Object(Map::new())) {
            Value::Object(next) => next,
            other => return Err(format!("\"{key}\" of \"{path}\" is {}, no mapping", describe(other))),
        };
    }
    inner.insert(last, value);
    Ok(())
}

fn keys(path: &str) -> Vec<String> {
    let (mut keys, mut key) = (Vec::new(), String::new());
    for part in path.split('.') {
        match part.strip_suffix('\\') {
            Some(part) => key.extend([part, "."]),
            None => {
                key.push_str(part);
                keys.push(std::mem::take(&mut key));
            }
        }
    }
    if !key.is_empty() {
        keys.push(key);
    }
    keys
}
