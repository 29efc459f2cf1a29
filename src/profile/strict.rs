//! Types of Kubernetes, read so that no field of theirs is ignored. Pure.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::manifest::describe;

/// Reads a value. The types of Kubernetes let unknown fields pass; here they
/// are faults.
///
/// # Errors
/// The first fault: `nodeSelector.disk: want a string, found true`.
pub(crate) fn read<T: DeserializeOwned + Serialize>(raw: &Value) -> Result<T, String> {
    let read: T = serde_path_to_error::deserialize(raw).map_err(|error| said(raw, &error))?;
    let understood = serde_json::to_value(&read).map_err(|error| error.to_string())?;
    match ignored(raw, &understood, String::new()) {
        Some(path) => Err(format!("{path}: unknown field")),
        None => Ok(read),
    }
}

/// The first field that is not there any more.
fn ignored(raw: &Value, understood: &Value, at: String) -> Option<String> {
    match (raw, understood) {
        (Value::Object(raw), Value::Object(understood)) => raw.iter().find_map(|(key, value)| {
            let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
            match understood.get(key) {
                Some(understood) => ignored(value, understood, at),
                None => (!value.is_null()).then_some(at),
            }
        }),
        (Value::Array(raw), Value::Array(understood)) => {
            let mut items = raw.iter().zip(understood).enumerate();
            items.find_map(|(index, (value, understood))| ignored(value, understood, format!("{at}[{index}]")))
        }
        _ => None,
    }
}

/// What the parser says, in words of people.
fn said(raw: &Value, error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    let (path, message) = (error.path().to_string(), error.inner().to_string());
    let what = match (message.strip_prefix("unknown field "), message.split_once(", expected ")) {
        (Some(field), _) => {
            let known = field.split_once(", expected ").map_or("none", |(_, known)| known);
            format!("unknown field, want {}", known.replace('`', ""))
        }
        (None, Some((_, expected))) if message.starts_with("invalid ") => {
            format!("want {}, found {}", wanted(expected), at(raw, error.path()).map_or("nothing".to_owned(), describe))
        }
        _ => message,
    };
    if matches!(path.as_str(), "" | ".") { what } else { format!("{path}: {what}") }
}

fn wanted(expected: &str) -> &str {
    match expected {
        "i8" | "i16" | "i32" | "i64" | "u8" | "u16" | "u32" | "u64" => "a whole number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "IntOrString" => "a number or a name",
        "a map" => "a mapping",
        "Quantity" => "a quantity such as 500m or 2Gi",
        // The name of a type.
        name if name.starts_with("struct ") || name.starts_with(|c: char| c.is_ascii_uppercase()) => "a mapping",
        other => other,
    }
}

fn at<'a>(raw: &'a Value, path: &Path) -> Option<&'a Value> {
    path.iter().try_fold(raw, |value, segment| match segment {
        Segment::Seq { index } => value.get(index),
        Segment::Map { key } => value.get(key),
        Segment::Enum { .. } | Segment::Unknown => Some(value),
    })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{ResourceRequirements, Toleration};
    use serde_json::json;

    use super::*;

    #[test]
    fn every_field_counts_and_faults_are_plain() {
        for (raw, want) in [
            (json!({"requests": {"cpu": "1"}}), Ok(())),
            (json!({"requests": null}), Ok(())),
            (json!({"reqests": {"cpu": "1"}}), Err("reqests: unknown field")),
            (json!({"claims": [{"name": "a", "nmae": "b"}]}), Err("claims[0].nmae: unknown field")),
            (json!({"requests": {"cpu": [2]}}), Err("requests.cpu: want a quantity such as 500m or 2Gi, found a list")),
            (json!({"requests": {"cpu": 2}}), Ok(())),
            (json!({"requests": ["cpu"]}), Err("requests: want a mapping, found a list")),
            (json!("cpu"), Err("want a mapping, found \"cpu\"")),
        ] {
            assert_eq!(read::<ResourceRequirements>(&raw).map(drop), want.map_err(str::to_owned), "{raw}");
        }
        for (raw, want) in [
            (
                json!([{"key": "a", "tolerationSeconds": "9"}]),
                "[0].tolerationSeconds: want a whole number, found \"9\"",
            ),
            (json!({"key": "a"}), "want a list, found a mapping"),
        ] {
            assert_eq!(read::<Vec<Toleration>>(&raw).unwrap_err(), want, "{raw}");
        }
    }
}
