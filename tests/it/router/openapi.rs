//! The document is true: every status, content type and header that it names is
//! given, and nothing is given that it does not name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bko_install::provisioner::ProvisionError;
use bko_install::router::{Config, Metrics, RateLimit, Router};
use serde_json::Value;

use super::memory::{Memory, Step};
use super::{Answered, SHOP, SHOP_KEY, call, open, tokens};

const BEARER: (&str, &str) = ("Authorization", "Bearer s3cret");
const METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"];
const DOCUMENTED: [(&str, &[&str]); 7] = [
    ("/complete", &["POST"]),
    ("/healthz", &METHODS),
    ("/openapi.json", &["GET", "HEAD"]),
    ("/prewarm", &["POST"]),
    ("/projects", &["GET", "HEAD"]),
    ("/projects/{key}", &["GET", "HEAD"]),
    ("/route", &["POST"]),
];

fn router(config: Config, memory: &Arc<Memory>) -> Router {
    Router::new(config, memory.clone(), Metrics::default())
}

async fn document(router: &Router) -> Value {
    let answer = call(router, "GET", "/openapi.json", &[], "").await;
    assert_eq!((answer.status.as_u16(), answer.header("content-type")), (200, Some("application/json")));
    answer.json()
}

fn address(path: &str) -> String {
    path.replace("{key}", SHOP_KEY)
}

fn body(path: &str) -> &'static str {
    match path {
        "/route" | "/prewarm" => SHOP,
        "/complete" => r#"{"key":"p41bd34a2227aca39","buildId":"0123456789abcdef"}"#,
        _ => "",
    }
}

#[tokio::test(start_paused = true)]
async fn every_path_has_the_methods_that_are_documented_and_no_others() {
    let memory = Arc::new(Memory::ready());
    let router = router(open(), &memory);
    assert_eq!(call(&router, "POST", "/route", &[], SHOP).await.status, 200);
    let document = document(&router).await;
    assert_eq!(document["openapi"], "3.1.0");
    let mut paths = BTreeMap::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let methods: BTreeSet<_> = item.as_object().unwrap().keys().map(|method| method.to_uppercase()).collect();
        paths.insert(path.as_str(), methods);
    }
    let wanted = DOCUMENTED.map(|(path, methods)| (path, methods.iter().map(|m| (*m).to_owned()).collect()));
    assert_eq!(paths, BTreeMap::from(wanted));
    for (path, documented) in &paths {
        for method in METHODS.into_iter().chain(["QUERY"]) {
            let answer = call(&router, method, &address(path), &[], body(path)).await;
            if documented.contains(method) {
                assert!(answer.status.is_success(), "{method} {path}: {}", answer.status);
                assert_given(&document, path, method, &answer);
            } else {
                let allowed: BTreeSet<_> = answer.header("allow").unwrap().split(", ").map(str::to_owned).collect();
                assert_eq!((answer.status.as_u16(), &allowed), (405, documented), "{method} {path}");
            }
        }
    }
}

/// What is given is in the document: status, content type, headers of ours.
fn assert_given(document: &Value, path: &str, method: &str, answer: &Answered) {
    let operation = &document["paths"][path][method.to_lowercase()];
    let status = answer.status.as_str();
    let response = &operation["responses"][status];
    assert!(response.is_object(), "{method} {path} gives {status}, which is not documented");
    let documented: Vec<_> = response["content"].as_object().into_iter().flat_map(|c| c.keys()).collect();
    let given = answer.header("content-type").map(|kind| kind.split(';').next().unwrap());
    if method != "HEAD" {
        assert_eq!(documented, given.into_iter().collect::<Vec<_>>(), "{method} {path} {status}");
    }
    let known: BTreeSet<_> =
        response["headers"].as_object().into_iter().flatten().map(|(h, _)| h.to_lowercase()).collect();
    for name in answer.headers.keys().map(|name| name.as_str()) {
        let common = ["content-type", "content-length", "x-content-type-options", "connection", "allow"];
        assert!(common.contains(&name) || known.contains(name), "{method} {path} {status}: header {name}");
    }
}

type Fault = (Step, fn() -> ProvisionError);

const FAULTS: [Fault; 12] = [
    (Step::Ensure, || ProvisionError::Refused("no".into())),
    (Step::Ensure, unavailable),
    (Step::Touch, || ProvisionError::Refused("no".into())),
    (Step::Touch, unavailable),
    (Step::Begin, || ProvisionError::Refused("no".into())),
    (Step::Begin, unavailable),
    (Step::Begin, || ProvisionError::Saturated { inflight: 2000 }),
    (Step::End, || ProvisionError::Refused("no".into())),
    (Step::End, unavailable),
    (Step::Wait, || ProvisionError::NotReady { last: Some("Pending: unbound claim".into()) }),
    (Step::Wait, || ProvisionError::Failed { reason: "ErrImagePull".into() }),
    (Step::Wait, unavailable),
];

fn unavailable() -> ProvisionError {
    ProvisionError::Unavailable { message: "away".into(), retry_after: Duration::from_secs(3) }
}

/// Every documented status of a path, and which request or fault brings it.
#[tokio::test(start_paused = true)]
async fn every_documented_status_is_given_and_no_other() {
    let reference = document(&router(tokens(), &Arc::new(Memory::ready()))).await;
    let mut given: BTreeMap<(&str, &str), BTreeSet<String>> = BTreeMap::new();
    for (path, methods) in DOCUMENTED.into_iter().filter(|(path, _)| *path != "/healthz") {
        for method in methods {
            let mut note = |answer: &Answered| {
                assert_given(&reference, path, method, answer);
                given.entry((path, method)).or_default().insert(answer.status.as_str().to_owned());
            };
            let memory = Arc::new(Memory::ready());
            let api = router(tokens(), &memory);
            note(&call(&api, method, &address(path), &[], body(path)).await);
            note(&call(&api, method, &address(path), &[BEARER], body(path)).await);
            call(&api, "POST", "/route", &[BEARER], SHOP).await;
            note(&call(&api, method, &address(path), &[BEARER], body(path)).await);
            note(&call(&api, method, &format!("{}?limit=x", address(path)), &[BEARER], "{").await);
            let rate = RateLimit::new(0.001, 1).unwrap();
            let limited = router(Config { rate, ..tokens() }, &memory);
            for _ in 0..2 {
                note(&call(&limited, method, &address(path), &[BEARER], body(path)).await);
            }
            for (step, fault) in FAULTS {
                let memory = Arc::new(Memory::new());
                memory.fail(step, fault);
                note(&call(&router(tokens(), &memory), method, &address(path), &[BEARER], body(path)).await);
            }
        }
    }
    for ((path, method), given) in given {
        let responses = &reference["paths"][path][method.to_lowercase()]["responses"];
        let documented: BTreeSet<_> = responses.as_object().unwrap().keys().cloned().collect();
        assert_eq!(given, documented, "{method} {path}");
    }
}

#[tokio::test(start_paused = true)]
async fn credentials_are_documented_where_they_are_needed() {
    let memory = Arc::new(Memory::ready());
    let (closed, open) = (document(&router(tokens(), &memory)).await, document(&router(open(), &memory)).await);
    for (path, methods) in DOCUMENTED {
        for method in methods.iter().map(|method| method.to_lowercase()) {
            let needed = !["/openapi.json", "/healthz"].contains(&path);
            assert_eq!(closed["paths"][path][&method]["security"].is_array(), needed, "{method} {path}");
            assert!(open["paths"][path][&method]["security"].is_null(), "{method} {path}");
        }
    }
    let schemes = &closed["components"]["securitySchemes"];
    assert_eq!((&schemes["bearer"]["scheme"], &schemes["admin"]["in"]), (&"bearer".into(), &"header".into()));
    assert_eq!(schemes["admin"]["name"], "x-buildkit-operator-admin-token");
}

/// What the document says of a body is what is read of it.
#[tokio::test(start_paused = true)]
async fn every_documented_field_is_read_and_every_answer_has_its_form() {
    let memory = Arc::new(Memory::ready());
    let router = router(open(), &memory);
    let document = document(&router).await;
    let schemas = &document["components"]["schemas"];
    for (schema, path) in [("ProjectRequest", "/route"), ("ProjectRequest", "/prewarm"), ("BuildEnded", "/complete")] {
        for field in schemas[schema]["properties"].as_object().unwrap().keys() {
            // Of the wrong type, so that reading it shows.
            let wrong = format!(r#"{{"{field}":[]}}"#);
            let answer = call(&router, "POST", path, &[], &wrong).await;
            assert!(
                answer.body.starts_with(&format!("bad request: {field} must be a ")),
                "{path} {field}: {}",
                answer.body
            );
        }
    }
    let routed = call(&router, "POST", "/route", &[], SHOP).await.json();
    let shown = call(&router, "GET", &format!("/projects/{SHOP_KEY}"), &[], "").await.json();
    for (name, value) in [("Endpoint", routed), ("Detail", shown)] {
        let properties = properties(schemas, &schemas[name]);
        for field in value.as_object().unwrap().keys() {
            assert!(properties.contains(field.as_str()), "{name} has no {field}: {properties:?}");
        }
    }
    unresolved(&document, &document);
}

/// Names of an object's fields, those of what it is made of included.
fn properties<'a>(schemas: &'a Value, schema: &'a Value) -> BTreeSet<&'a str> {
    let own = schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.as_str());
    let parts = schema["allOf"].as_array().into_iter().flatten();
    let named = schema["$ref"].as_str().map(|name| &schemas[name.rsplit('/').next().unwrap()]);
    own.chain(parts.chain(named).flat_map(|part| properties(schemas, part))).collect()
}

/// Every reference leads somewhere.
fn unresolved(document: &Value, part: &Value) {
    match part {
        Value::Object(fields) => {
            if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
                assert!(document.pointer(&reference[1..]).is_some(), "{reference}");
            }
            fields.values().for_each(|value| unresolved(document, value));
        }
        Value::Array(values) => values.iter().for_each(|value| unresolved(document, value)),
        _ => {}
    }
}
