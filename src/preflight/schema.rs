//! Custom resources against the schema of a definition that comes with the
//! bundle: until the API server serves the kind, nobody else can check them.
//! Pure. Types, required and unknown fields, enumerations, bounds and lengths;
//! patterns and CEL rules are left to the API server.

use serde_json::{Map, Value};

use super::{Check, Finding};
use crate::manifest::{Object, Rendered, kind_of};

/// What is found of every custom resource whose definition is in the bundle.
/// Nothing when there is none.
pub fn custom_resources(rendered: &Rendered) -> Vec<Finding> {
    let definitions: Vec<&Value> =
        rendered.objects.iter().filter(|o| o.id.kind == "CustomResourceDefinition").map(|o| &*o.body).collect();
    rendered.objects.iter().filter_map(|object| one(object, &definitions)).collect()
}

fn one(object: &Object, definitions: &[&Value]) -> Option<Finding> {
    let id = &object.id;
    let definition = definitions
        .iter()
        .find(|body| body["spec"]["group"] == id.group.as_str() && body["spec"]["names"]["kind"] == id.kind.as_str())?;
    let versions = definition["spec"]["versions"].as_array()?;
    let Some(version) = versions.iter().find(|v| v["name"] == id.version.as_str() && v["served"] == true) else {
        let message = format!("{id}: its definition serves no version \"{}\"", id.version);
        return Some(Check::CustomResources.fail(message, format!("correct apiVersion in {}", object.source)));
    };
    let mut faults = Vec::new();
    validate(&mut faults, "", &object.body, &version["schema"]["openAPIV3Schema"], true);
    Some(match faults.is_empty() {
        true => Check::CustomResources.ok(format!("{id} fits its schema")),
        false => Check::CustomResources.fail(
            format!("{id} does not fit the schema of its definition: {}", faults.join("; ")),
            format!("correct {}, or the value that it comes from", object.source),
        ),
    })
}

/// Every fault of a value, each with its path.
fn validate(faults: &mut Vec<String>, path: &str, value: &Value, schema: &Value, root: bool) {
    let Some(schema) = schema.as_object() else { return };
    let is = |name: &str| schema.get(name) == Some(&Value::Bool(true));
    if value.is_null() && is("nullable") {
        return;
    }
    let shown = if path.is_empty() { "." } else { path };
    if is("x-kubernetes-int-or-string") {
        if !value.is_i64() && !value.is_string() {
            faults.push(format!("{shown}: want a number or a string, found {}", kind_of(value)));
        }
        return;
    }
    if let Some(wanted) = schema.get("type").and_then(Value::as_str)
        && !fits(value, wanted)
    {
        faults.push(format!("{shown}: want {wanted}, found {}", kind_of(value)));
        return;
    }
    if let Some(choices) = schema.get("enum").and_then(Value::as_array)
        && !choices.contains(value)
    {
        faults.push(format!("{shown}: want one of {}, found {value}", Value::from(choices.clone())));
    }
    bounds(faults, shown, value, schema);
    match value {
        Value::Object(map) => object(faults, path, map, schema, root),
        Value::Array(list) => {
            let items = schema.get("items").unwrap_or(&Value::Null);
            list.iter()
                .enumerate()
                .for_each(|(at, item)| validate(faults, &format!("{path}[{at}]"), item, items, false));
        }
        _ => {}
    }
}

fn object(faults: &mut Vec<String>, path: &str, map: &Map<String, Value>, schema: &Map<String, Value>, root: bool) {
    for required in schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        if !map.contains_key(required) {
            faults.push(format!("{path}.{required}: is missing"));
        }
    }
    let open = schema.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true));
    for (name, value) in map {
        // Of these the API server itself has the schema.
        if root && matches!(name.as_str(), "apiVersion" | "kind" | "metadata") {
            continue;
        }
        let path = format!("{path}.{name}");
        let known = schema.get("properties").and_then(|properties| properties.get(name));
        match (known, schema.get("additionalProperties")) {
            (Some(known), _) => validate(faults, &path, value, known, false),
            (None, Some(Value::Bool(true))) => {}
            (None, Some(additional @ Value::Object(_))) => validate(faults, &path, value, additional, false),
            (None, _) if open => {}
            (None, _) => faults.push(format!("{path}: field not declared in schema")),
        }
    }
}

fn bounds(faults: &mut Vec<String>, path: &str, value: &Value, schema: &Map<String, Value>) {
    let size = match value {
        Value::Number(number) => number.as_f64().map(|size| (size, "minimum", "maximum")),
        Value::String(text) => Some((length(text.chars().count()), "minLength", "maxLength")),
        Value::Array(list) => Some((length(list.len()), "minItems", "maxItems")),
        _ => None,
    };
    let Some((size, least, most)) = size else { return };
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    if bound(least).is_some_and(|least| size < least) || bound(most).is_some_and(|most| size > most) {
        let wanted = |name: &str| bound(name).map(|bound| format!("{name} {bound}"));
        let wanted: Vec<String> = [least, most].into_iter().filter_map(wanted).collect();
        faults.push(format!("{path}: want {}, found {value}", wanted.join(" and ")));
    }
}

fn length(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::MAX, f64::from)
}

fn fits(value: &Value, wanted: &str) -> bool {
    match wanted {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Verdict;
    use super::*;
    use crate::manifest::{Bundle, ObjectId, Runlevel, render};
    use crate::profile::{Request, resolve};

    /// The bundle's own definition, and a project of it.
    fn with_project(spec: Value) -> Finding {
        let bundle = Bundle::embedded().unwrap();
        let (profile, values) = resolve(bundle, &Request::named("dev", "i:1")).unwrap();
        let mut rendered = render(bundle, &profile, &values).unwrap();
        let id = ObjectId {
            group: crate::names::GROUP.into(),
            version: "v1alpha1".into(),
            kind: "BuildProject".into(),
            namespace: Some("b".into()),
            name: "p".into(),
        };
        let body =
            json!({"apiVersion": id.api_version(), "kind": "BuildProject", "metadata": {"name": "p"}, "spec": spec});
        rendered.objects.push(Object {
            id,
            component: "c".into(),
            runlevel: Runlevel::Rc3,
            body: body.into(),
            source: "manifests/c/x.yaml:1".into(),
        });
        custom_resources(&rendered).pop().unwrap()
    }

    #[test]
    fn a_project_is_held_against_the_definition_in_the_bundle() {
        let good =
            with_project(json!({"key": "p", "arch": "arm64", "resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}));
        assert_eq!(good.verdict, Verdict::Ok, "{good}");
        for (spec, said) in [
            (json!({"arch": "arm64"}), ".spec.key: is missing"),
            (json!({"key": "p", "arch": "x86"}), ".spec.arch: want one of"),
            (json!({"key": "p", "arch": "arm64", "cacheGi": 1}), ".spec.cacheGi: field not declared"),
            (json!({"key": "p", "arch": "arm64", "cacheVolumeGi": 0}), ".spec.cacheVolumeGi: want minimum 1"),
            (json!({"key": 5, "arch": "arm64"}), ".spec.key: want string, found a number"),
            (
                json!({"key": "p", "arch": "arm64", "resources": {"limits": {"cpu": true}}}),
                "limits.cpu: want a number or a string",
            ),
        ] {
            let found = with_project(spec.clone());
            assert!(found.verdict == Verdict::Fail && found.message.contains(said), "{spec}: {found}");
        }
    }
}
