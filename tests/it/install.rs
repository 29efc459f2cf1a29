//! Errors of the way to the API server, and repetitions, against servers on
//! loopback.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and writes kubeconfigs"
)]

use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use bko_install::cluster::lock::{self, LockError};
use bko_install::cluster::record::{self, RecordError};
use bko_install::cluster::{Cluster, Event, Limits, RequestError};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

fn bko(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bko-install"))
        .args(args)
        .env_remove("KUBECONFIG")
        .env_remove("KUBERNETES_SERVICE_HOST")
        .env("HOME", "/nonexistent")
        .output()
        .unwrap()
}

fn kubeconfig(server: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: \"{server}\"}}}}]\n\
         users: [{{name: u, user: {{token: t}}}}]\ncontexts: [{{name: first, context: {{cluster: c, user: u}}}}, \
         {{name: second, context: {{cluster: c, user: u}}}}]\ncurrent-context: first\n"
    );
    std::fs::write(file.path(), text).unwrap();
    file
}

#[track_caller]
fn fails(args: &[&str], code: i32, expected: &[&str]) {
    let output = bko(args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert_eq!(said.matches("error: ").count(), 1, "{said}");
    assert!(output.stdout.is_empty());
    for text in expected {
        assert!(said.contains(text), "\"{text}\" is not in: {said}");
    }
}

#[test]
fn without_any_configuration_it_says_where_it_looked() {
    fails(&["cluster", "plan"], 1, &["no kubeconfig", "hint: pass --kubeconfig"]);
}

#[test]
fn a_kubeconfig_that_is_missing_is_named() {
    fails(
        &["cluster", "init", "--kubeconfig", "/nonexistent/kube"],
        1,
        &["cannot read kubeconfig \"/nonexistent/kube\"", "caused by: No such file"],
    );
}

#[test]
fn an_unknown_context_lists_the_known_ones() {
    let file = kubeconfig("http://127.0.0.1:1");
    let path = file.path().to_str().unwrap();
    fails(
        &["cluster", "status", "--kubeconfig", path, "--context", "third"],
        2,
        &["has no context \"third\"", "hint: pass --context with one of: first, second"],
    );
}

#[test]
fn a_malformed_kubeconfig_is_named_and_not_shown() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for text in [
        b"users: [{name: u, user: {token: hush}}]\nclusters: }".as_slice(),
        b"hush:x:0:0:hush:/hush\n",
        b"users: \"hush\"\n",
        b"users: [{name: u, user: hush}]\n",
        &[0x80, 0x81, 0x00],
    ] {
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().to_str().unwrap();
        fails(&["cluster", "plan", "--kubeconfig", path], 1, &[path, "is malformed: ", "hint: "]);
        let said = bko(&["cluster", "plan", "--kubeconfig", path]).stderr;
        assert!(!String::from_utf8(said).unwrap().contains("hush"));
    }
}

#[test]
fn an_api_server_that_is_not_there_is_named() {
    let file = kubeconfig("http://127.0.0.1:1");
    let path = file.path().to_str().unwrap();
    fails(
        &["cluster", "plan", "--kubeconfig", path],
        1,
        &["cannot reach the API server at http://127.0.0.1:1: Connection refused", "hint: "],
    );
}

#[test]
fn flags_that_make_no_sense_are_usage_errors() {
    for args in [
        ["cluster", "init", "--stop-after", "never"],
        ["cluster", "init", "--timeout", "soon"],
        ["cluster", "plan", "--concurrency", "0"],
    ] {
        fails(&args, 2, &[args[3]]);
    }
}

/// An API server that answers what a script says, and counts.
#[derive(Clone)]
struct Fake {
    requests: Arc<AtomicUsize>,
    script: Arc<Script>,
}

/// The answer to the request of this number, to this path.
type Script = dyn Fn(usize, &str) -> (u16, Value) + Send + Sync;

async fn serve(fake: Fake) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let app = Router::new().fallback(answer).with_state(fake);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    address
}

async fn answer(State(fake): State<Fake>, uri: Uri) -> Response {
    if uri.path() == "/api/v1" {
        let kind =
            json!({"name": "configmaps", "singularName": "", "namespaced": true, "kind": "ConfigMap", "verbs": []});
        return axum::Json(json!({"kind": "APIResourceList", "groupVersion": "v1", "resources": [kind]}))
            .into_response();
    }
    let count = fake.requests.fetch_add(1, Ordering::SeqCst) + 1;
    let (code, body) = (fake.script)(count, uri.path());
    (StatusCode::from_u16(code).unwrap(), axum::Json(body)).into_response()
}

fn status(code: u16, message: &str) -> (u16, Value) {
    (code, json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}))
}

struct Run {
    result: Result<Option<bko_install::plan::Record>, RecordError>,
    requests: usize,
    events: Vec<Event>,
}

/// Loads the record from a fake API server within a time.
async fn load(time: Duration, script: impl Fn(usize, &str) -> (u16, Value) + Send + Sync + 'static) -> Run {
    let fake = Fake { requests: Arc::default(), script: Arc::new(script) };
    let address = serve(fake.clone()).await;
    let mut config = kube::Config::new(address.parse().unwrap());
    config.default_retry = false;
    let events: Arc<Mutex<Vec<Event>>> = Arc::default();
    let log = events.clone();
    let cluster = Cluster::new(
        kube::Client::try_from(config).unwrap(),
        Limits { concurrency: 4, deadline: Instant::now() + time },
        CancellationToken::new(),
        Arc::new(move |event| log.lock().unwrap().push(event)),
    );
    let result = record::load(&cluster, "farm").await;
    let events = events.lock().unwrap().clone();
    Run { result, requests: fake.requests.load(Ordering::SeqCst), events }
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn what_may_pass_is_tried_again_and_told() {
    let run = load(LONG, |count, _| match count {
        1 => status(429, "too many requests"),
        2 => status(500, "etcdserver: leader changed"),
        3 => status(503, "not ready"),
        _ => status(404, "configmaps \"bko-install\" not found"),
    })
    .await;
    assert!(matches!(run.result, Ok(None)));
    assert_eq!(run.requests, 4);
    let told: Vec<_> = run
        .events
        .iter()
        .map(|event| match event {
            Event::Retrying { request, why, .. } => format!("{request}: {why}"),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        told,
        [
            "get ConfigMap farm/bko-install: too many requests",
            "get ConfigMap farm/bko-install: etcdserver: leader changed",
            "get ConfigMap farm/bko-install: not ready",
        ]
    );
}

#[tokio::test]
async fn what_cannot_pass_is_asked_once() {
    for code in [400, 401, 403, 422] {
        let run = load(LONG, move |_, _| status(code, "no")).await;
        assert!(run.result.is_err());
        assert_eq!((run.requests, run.events.len()), (1, 0), "{code}");
    }
}

#[tokio::test]
async fn an_object_that_does_not_fit_the_schema_is_asked_once() {
    let message = "failed to create typed patch object (farm/bko-install; v1, Kind=ConfigMap): .x: field not declared";
    let run = load(LONG, move |_, _| status(500, message)).await;
    let Err(RecordError::Request { source, .. }) = run.result else { panic!("no error") };
    assert_eq!(
        source.to_string(),
        "ConfigMap farm/bko-install does not fit the API server's schema: .x: field not declared"
    );
    assert_eq!((run.requests, run.events.len()), (1, 0));
}

/// An API server where a dead installer's lease lies.
async fn locked(method: Method, uri: Uri) -> Response {
    let lease = json!({
        "metadata": {"name": "bko-install", "namespace": "farm", "resourceVersion": "1"},
        "spec": {"holderIdentity": "elsewhere, process 7", "leaseDurationSeconds": 30},
    });
    if method == Method::POST {
        return (StatusCode::CONFLICT, axum::Json(status(409, "already exists").1)).into_response();
    }
    if uri.query().is_some_and(|query| query.contains("watch=")) {
        return std::future::pending().await;
    }
    let list = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList", "metadata": {"resourceVersion": "1"}, "items": [lease]});
    axum::Json(list).into_response()
}

#[tokio::test]
async fn a_lock_that_outlasts_the_deadline_is_named_with_its_holder_and_end() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(locked)).await.unwrap() });
    let cluster = Cluster::new(
        kube::Client::try_from(kube::Config::new(address.parse().unwrap())).unwrap(),
        Limits { concurrency: 4, deadline: Instant::now() + Duration::from_secs(1) },
        CancellationToken::new(),
        Arc::new(|_| {}),
    );
    let error = lock::take(&cluster, "farm", "me".into()).await.unwrap_err();
    assert!(matches!(error, LockError::Deadline { until: Some(_), .. }), "{error:?}");
    let said = error.to_string();
    assert!(said.starts_with("cannot take the lock before the deadline: elsewhere, process 7 holds it until about "));
    assert!(said.contains(" UTC"), "{said}");
}

#[test]
fn a_server_that_never_answers_is_given_up_with_the_deadline() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for scheme in ["http", "https"] {
        let file = kubeconfig(&format!("{scheme}://{}", silent.local_addr().unwrap()));
        let began = Instant::now();
        let path = file.path().to_str().unwrap();
        fails(&["cluster", "init", "--timeout", "1s", "--kubeconfig", path], 4, &["before the deadline"]);
        assert!(began.elapsed() < Duration::from_secs(6), "{scheme}: {:?}", began.elapsed());
    }
}

#[test]
fn a_context_of_nobody_is_refused() {
    let file = kubeconfig("http://127.0.0.1:1");
    let path = file.path().to_str().unwrap();
    let good = std::fs::read_to_string(path).unwrap();
    for (what, from, to) in [("user", "user: u}", "user: ghost}"), ("cluster", "cluster: c,", "cluster: ghost,")] {
        std::fs::write(path, good.replace(from, to)).unwrap();
        let expected = format!("has no {what} \"ghost\"");
        fails(&["cluster", "plan", "--kubeconfig", path], 1, &[&expected, "context \"first\"", "that there are: "]);
    }
}

#[test]
fn a_run_for_programs_ends_with_an_event_that_says_why_it_failed() {
    let file = kubeconfig("http://127.0.0.1:1");
    let path = file.path().to_str().unwrap();
    let output = bko(&["cluster", "init", "-o", "json", "--kubeconfig", path]);
    let out = String::from_utf8(output.stdout).unwrap();
    let event: Value = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert_eq!((&event["event"], &event["exitCode"]), (&json!("failed"), &json!(1)));
    assert!(event["message"].as_str().unwrap().contains("Connection refused"), "{event}");
    assert!(event["hint"].is_string(), "{event}");
}

#[tokio::test]
async fn repetitions_end_with_the_deadline_and_the_last_reason() {
    let run = load(Duration::from_millis(700), |_, _| status(503, "still starting")).await;
    let Err(RecordError::Request { source, .. }) = run.result else { panic!("no error") };
    assert!(matches!(source, RequestError::Deadline { .. }));
    assert_eq!(source.to_string(), "cannot get ConfigMap farm/bko-install before the deadline: still starting");
    assert!((2..10).contains(&run.requests), "{}", run.requests);
}

#[tokio::test]
async fn a_record_of_a_later_format_is_refused() {
    let run = load(LONG, |_, path| {
        assert_eq!(path, "/api/v1/namespaces/farm/configmaps/bko-install");
        (200, json!({"kind": "ConfigMap", "apiVersion": "v1", "data": {"record.json": "{\"format\": 9}"}}))
    })
    .await;
    assert!(matches!(run.result, Err(RecordError::Newer { found: 9, .. })));
}
