//! Replays the recorded exchanges of `wire-vectors.json` against a server.
//!
//! Whoever has a server and can look into its projects implements [`Subject`];
//! every wanted difference from the record is a [`Difference`] with its row of
//! `docs/compatibility.md`. Whatever else differs is reported.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use bko_install::key::Project;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use serde_json::Value;

/// The groups that need no bucket.
pub(crate) const GROUPS: [&str; 11] = [
    "open",
    "cold",
    "no-namespace",
    "token",
    "admin",
    "require-build-id",
    "rate",
    "oidc",
    "gateway",
    "gateway-443",
    "port",
];

/// A server, and what lies behind it.
pub(crate) trait Subject {
    /// Where it serves.
    fn address(&self) -> SocketAddr;
    /// Entries in flight of a project; `None` when there is no such project.
    fn inflight(&self, key: &str) -> impl Future<Output = Option<usize>>;
    /// From here on daemons become ready; returns when those of all existing
    /// projects are.
    fn let_pods_become_ready(&self) -> impl Future<Output = ()>;
    /// A token with these claims, of the identity provider that it trusts.
    fn token(&self, claims: &str) -> String;
}

/// One exchange, as recorded.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Exchange {
    pub(crate) name: String,
    pub(crate) group: String,
    pub(crate) seq: u32,
    #[serde(default)]
    pub(crate) setup: Vec<String>,
    pub(crate) server: Server,
    request: Request,
    response: Response,
    after: Option<After>,
}

/// How the recorded server was started.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Server {
    pub(crate) flags: Vec<String>,
    pub(crate) env: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Deserialize)]
struct Request {
    method: String,
    path: String,
    headers: BTreeMap<String, String>,
    body: Option<String>,
}

/// The answer that is expected: the record, or what a difference makes of it.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Value,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct After {
    project: bool,
    inflight: usize,
    inflight_builds: usize,
}

/// One wanted difference.
pub(crate) struct Difference {
    /// Names of the exchanges.
    pub(crate) exchanges: &'static [&'static str],
    /// Row of `docs/compatibility.md`.
    pub(crate) row: &'static str,
    /// What we answer instead.
    pub(crate) ours: fn(&mut Response),
    /// Ours changes what the exchanges after it rest on: it comes last in its group.
    pub(crate) last: bool,
}

/// Headers that we add: name, the statuses that must carry it, row.
const ADDED: [(&str, &[u16], &str); 3] =
    [("retry-after", &[429, 503], "BF-41"), ("allow", &[405], "BF-41"), ("www-authenticate", &[401], "BF-41")];

/// Headers that mean nothing to a comparison, or may be there.
const FREE: [&str; 3] = ["date", "content-length", "x-buildkit-operator-waiting-for"];

/// Exchanges that the record leaves out, but whose entries it counts: each
/// routed one more build of this project.
const LEFT_OUT: [(&str, u32); 2] = [("open", 50), ("open", 57)];
const LEFT_OUT_BODY: &str = r#"{"repo":"https://github.com/acme/shop","arch":"amd64"}"#;

/// The one setup that these groups know.
const PODS_READY: &str = "pods become Ready from here on";

/// The exchanges of one group, in order.
pub(crate) fn group(name: &str) -> Vec<Exchange> {
    let all: Vec<Value> = serde_json::from_str(include_str!("wire-vectors.json")).unwrap();
    let group = all.into_iter().filter(|exchange| exchange["group"] == name);
    let mut group: Vec<Exchange> = group.map(|exchange| serde_json::from_value(exchange).unwrap()).collect();
    group.sort_by_key(|e| e.seq);
    assert!(!group.is_empty(), "no exchanges in group {name:?}");
    group
}

/// Replays one group. Returns the names of the exchanges that differed as wanted.
///
/// # Panics
/// When anything differs that no [`Difference`] names, with all of it.
pub(crate) async fn replay(group: Vec<Exchange>, subject: &impl Subject, differences: &[Difference]) -> Vec<String> {
    let mut run =
        Run { subject, client: client(), build_ids: BTreeMap::new(), differed: Vec::new(), wrong: String::new() };
    run.until_identities_are_known(&group).await;
    let difference = |e: &Exchange| differences.iter().find(|d| d.exchanges.contains(&e.name.as_str()));
    let (last, first): (Vec<_>, Vec<_>) = group.into_iter().partition(|e| difference(e).is_some_and(|d| d.last));
    let mut left_out: Vec<_> = LEFT_OUT.into_iter().rev().collect();
    for exchange in first.into_iter().chain(last) {
        left_out.retain(|(group, _)| *group == exchange.group);
        while left_out.pop_if(|(_, seq)| *seq < exchange.seq).is_some() {
            run.route_left_out().await;
        }
        run.exchange(&exchange, difference(&exchange)).await;
    }
    assert!(run.wrong.is_empty(), "\n{}", run.wrong);
    run.differed
}

struct Run<'a, S> {
    subject: &'a S,
    client: Client<HttpConnector, Full<Bytes>>,
    build_ids: BTreeMap<String, String>,
    differed: Vec<String>,
    wrong: String,
}

struct Got {
    status: u16,
    headers: BTreeMap<String, String>,
    body: String,
}

impl<S: Subject> Run<'_, S> {
    async fn exchange(&mut self, exchange: &Exchange, difference: Option<&Difference>) {
        for setup in &exchange.setup {
            assert_eq!(setup, PODS_READY, "{}", exchange.name);
            self.subject.let_pods_become_ready().await;
        }
        let mut want = exchange.response.clone();
        if let Some(difference) = difference {
            (difference.ours)(&mut want);
            assert_ne!(want, exchange.response, "{}: {} differs no more", exchange.name, difference.row);
            self.differed.push(exchange.name.clone());
        }
        let body = self.fill(exchange.request.body.as_deref().unwrap_or_default());
        let got = self.send(&exchange.request, &body).await;
        let complaints = compare(&want, &got);
        let answer: Value = serde_json::from_str(&got.body).unwrap_or_default();
        if let Some(id) = answer["buildId"].as_str() {
            self.build_ids.insert(exchange.name.clone(), id.to_owned());
        }
        for complaint in complaints {
            let _ = writeln!(self.wrong, "{} #{} {}: {complaint}", exchange.group, exchange.seq, exchange.name);
        }
        if let Some(after) = exchange.after {
            assert_eq!(after.inflight, after.inflight_builds, "{}: an odd record", exchange.name);
            self.after(exchange, after, &key(&answer, &body)).await;
        }
    }

    /// The recorded server looked keys up when it needed them; ours does so in
    /// the background.
    async fn until_identities_are_known(&self, group: &[Exchange]) {
        if !group.iter().any(|exchange| exchange.server.env.contains_key("BUILDKIT_OPERATOR_OIDC_PROVIDERS")) {
            return;
        }
        let claims = r#"{"repository":"acme/shop","ref":"refs/heads/main"}"#;
        let headers = [("authorization".to_owned(), format!("Bearer <jwt:{claims}>"))].into();
        let (method, path) = ("POST".to_owned(), "/complete".to_owned());
        let request = Request { method, path, headers, body: None };
        let body = r#"{"key":"p0000000000000000","buildId":"0123456789abcdef"}"#;
        let known = async {
            while self.send(&request, body).await.status == 503 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), known).await.expect("the issuer's keys stay unknown");
    }

    async fn route_left_out(&self) {
        let (method, path) = ("POST".to_owned(), "/route".to_owned());
        let request = Request { method, path, headers: BTreeMap::new(), body: None };
        assert_eq!(self.send(&request, LEFT_OUT_BODY).await.status, 200);
    }

    async fn send(&self, request: &Request, body: &str) -> Got {
        let uri = format!("http://{}{}", self.subject.address(), request.path);
        let mut http = hyper::Request::builder().method(request.method.as_str()).uri(uri);
        for (name, value) in &request.headers {
            http = http.header(name, self.fill(value));
        }
        let http = http.body(Full::from(body.to_owned())).unwrap();
        let (head, body) = self.client.request(http).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Got {
            status: head.status.as_u16(),
            headers: head.headers.iter().map(|(n, v)| (n.to_string(), v.to_str().unwrap().to_owned())).collect(),
            body: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    /// Releases of failed routes run on their own: the state may lag behind.
    async fn after(&mut self, exchange: &Exchange, want: After, key: &str) {
        let want = want.project.then_some(want.inflight);
        let settled = async {
            while self.subject.inflight(key).await != want {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(3), settled).await.is_err() {
            let got = self.subject.inflight(key).await;
            let _ = writeln!(self.wrong, "{}: {key} has {got:?} entries, want {want:?}", exchange.name);
        }
    }

    /// `<REPEAT:x:n>`, `<buildId:NAME>` and `<jwt:CLAIMS>`.
    fn fill(&self, text: &str) -> String {
        let Some((before, rest)) = text.split_once('<') else { return text.to_owned() };
        let (placeholder, after) = rest.split_once('>').unwrap();
        let value = match placeholder.split(':').collect::<Vec<_>>()[..] {
            ["jwt", ..] => self.subject.token(placeholder.trim_start_matches("jwt:")),
            ["REPEAT", unit, n] => unit.repeat(n.parse().unwrap()),
            ["buildId", name] => self.build_ids.get(name).unwrap_or_else(|| panic!("no id of {name}")).clone(),
            _ => panic!("unknown placeholder <{placeholder}>"),
        };
        format!("{before}{value}{}", self.fill(after))
    }
}

fn client() -> Client<HttpConnector, Full<Bytes>> {
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http()
}

/// The project that an exchange is about: as answered, as named, or as described.
fn key(answer: &Value, request: &str) -> String {
    let request: Value = serde_json::from_str(request).unwrap_or_default();
    if let Some(key) = answer["key"].as_str().or(request["key"].as_str()) {
        return key.to_owned();
    }
    let field = |name: &str| request[name].as_str().unwrap_or_default().to_owned();
    let untrusted = request["untrusted"].as_bool().unwrap_or_default();
    let project = Project::new(&field("repo"), &field("name"), &field("target"), &field("arch"), untrusted).unwrap();
    project.key().to_string()
}

fn compare(want: &Response, got: &Got) -> Vec<String> {
    let mut wrong = Vec::new();
    if got.status != want.status {
        wrong.push(format!("status {}, want {} ({:?})", got.status, want.status, got.body));
    }
    for (name, value) in &want.headers {
        if got.headers.get(name) != Some(value) {
            wrong.push(format!("header {name} is {:?}, want {value:?}", got.headers.get(name)));
        }
    }
    for (name, statuses, _) in ADDED {
        if got.headers.contains_key(name) != statuses.contains(&got.status) {
            wrong.push(format!("header {name} is {:?} with status {}", got.headers.get(name), got.status));
        }
    }
    let known =
        |name: &str| want.headers.contains_key(name) || FREE.contains(&name) || ADDED.iter().any(|a| a.0 == name);
    wrong.extend(got.headers.iter().filter(|(n, _)| !known(n)).map(|(n, v)| format!("additional header {n}: {v}")));
    wrong.extend(compare_body(&want.body, &got.body));
    wrong
}

fn compare_body(want: &Value, got: &str) -> Option<String> {
    let complaint = || Some(format!("body {got:?}, want {want}"));
    match want {
        Value::String(text) if is_parser_error(text) => {
            (!got.starts_with("bad request: ") || !got.ends_with('\n')).then(complaint)?
        }
        Value::String(text) => (got != text).then(complaint)?,
        Value::Object(want) => {
            let Ok(Value::Object(object)) = serde_json::from_str(got) else { return complaint() };
            let same = want.keys().eq(object.keys()) && want.iter().all(|(k, v)| same(v, &object[k]));
            (!same || !got.ends_with("}\n") || got.lines().count() != 1).then(complaint)?
        }
        _ => complaint(),
    }
}

fn same(want: &Value, got: &Value) -> bool {
    match want.as_str() {
        Some("<bool>") => got.is_boolean(),
        Some("<buildId>") => {
            got.as_str().is_some_and(|id| id.len() == 16 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
        }
        _ => want == got,
    }
}

/// Texts of the recorded server's JSON parser, which are not ours.
fn is_parser_error(text: &str) -> bool {
    ["EOF\n", "unexpected EOF\n", "invalid character ", "json: "]
        .iter()
        .any(|parser| text.strip_prefix("bad request: ").is_some_and(|text| text.starts_with(parser)))
}
