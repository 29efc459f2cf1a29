//! What callers are told, and what the log and the metrics are.

use std::io;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use axum::http::StatusCode;
use bko_install::provisioner::ProvisionError;
use bko_install::router::{
    Auth, Config, ConfigError, GivenToken, Metrics, RateLimit, RouteArgs, Router, Secret, Timeouts,
};
use clap::Parser;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tracing::Dispatch;

use super::memory::{Memory, Step};
use super::{SHOP, SHOP_KEY, Server, call, open, post, tokens};

const BEARER: (&str, &str) = ("Authorization", "Bearer s3cret");

fn router(config: Config, memory: &Arc<Memory>) -> Router {
    Router::new(config, memory.clone(), Metrics::default())
}

fn unavailable() -> ProvisionError {
    ProvisionError::Unavailable { message: "etcd is away".to_owned(), retry_after: Duration::from_millis(2500) }
}

/// The fault of a step, and its answer: call, status, text, `Retry-After`.
type Failing = (Step, fn() -> ProvisionError, &'static str, u16, &'static str, Option<&'static str>);

const FAILING: [Failing; 13] = [
    (Step::Ensure, || ProvisionError::Refused("forbidden".into()), "/route", 500, "ensure project: forbidden\n", None),
    (Step::Ensure, unavailable, "/route", 503, "ensure project: etcd is away\n", Some("3")),
    (Step::Begin, unavailable, "/route", 503, "register build: etcd is away\n", Some("3")),
    (Step::Begin, || ProvisionError::Refused("no".into()), "/route", 500, "register build: no\n", None),
    (
        Step::Begin,
        || ProvisionError::Saturated { inflight: 2000 },
        "/route",
        429,
        "project saturated: 2000 builds in flight\n",
        Some("30"),
    ),
    (
        Step::Wait,
        || ProvisionError::NotReady { last: Some("Pending:\nunbound claim".into()) },
        "/route",
        504,
        "daemon not ready: timed out waiting for Ready replica\n",
        None,
    ),
    (
        Step::Wait,
        || ProvisionError::Failed { reason: "ErrImagePull: no such image".into() },
        "/route",
        503,
        "daemon failed: ErrImagePull: no such image\n",
        Some("60"),
    ),
    (Step::Wait, unavailable, "/route", 503, "daemon not ready: etcd is away\n", Some("3")),
    (Step::Wait, || ProvisionError::Refused("gone".into()), "/route", 500, "daemon not ready: gone\n", None),
    (Step::Ensure, unavailable, "/prewarm", 503, "ensure project: etcd is away\n", Some("3")),
    (Step::Touch, unavailable, "/prewarm", 503, "touch project: etcd is away\n", Some("3")),
    (Step::Touch, || ProvisionError::Refused("no".into()), "/prewarm", 500, "touch project: no\n", None),
    (Step::End, unavailable, "/complete", 503, "release build: etcd is away\n", Some("3")),
];

#[tokio::test(start_paused = true)]
async fn every_fault_of_the_provisioner_has_its_status_and_its_line() {
    for (step, fault, path, status, text, retry_after) in FAILING {
        let memory = Arc::new(Memory::new());
        memory.fail(step, fault);
        let router = router(open(), &memory);
        let body = if path == "/complete" { r#"{"key":"p41bd34a2227aca39"}"# } else { SHOP };
        let got = post(&router, path, body).await;
        assert_eq!((got.status.as_u16(), got.body.as_str()), (status, text), "{step:?} {path}");
        assert_eq!(got.header("retry-after"), retry_after, "{text}");
        assert_eq!(got.header("content-type"), Some("text/plain; charset=utf-8"), "{text}");
        assert_eq!(got.header("x-content-type-options"), Some("nosniff"), "{text}");
        let waiting = (status == 504).then_some("Pending:?unbound claim");
        assert_eq!(got.header("x-buildkit-operator-waiting-for"), waiting, "{text}");
        router.releases().close();
        router.releases().wait().await;
        assert_eq!(memory.inflight(SHOP_KEY).unwrap_or_default(), 0, "{text}");
    }
}

#[tokio::test]
async fn every_refusal_is_one_line_of_text() {
    let memory = Arc::new(Memory::ready());
    let router = router(Config { require_build_id: true, ..tokens() }, &memory);
    let long = format!(r#"{{"repo":"{}"}}"#, "r".repeat(9000));
    for (method, path, headers, body, status) in [
        ("GET", "/", &[][..], "", 404),
        ("POST", "/route/", &[], SHOP, 404),
        ("POST", "//route", &[], SHOP, 404),
        ("POST", "/route", &[], SHOP, 401),
        ("DELETE", "/route", &[BEARER], "", 405),
        ("PUT", "/prewarm", &[BEARER], "", 405),
        ("GET", "/complete", &[BEARER], "", 405),
        ("POST", "/route", &[BEARER], "", 400),
        ("POST", "/route", &[BEARER], &long, 400),
        ("POST", "/prewarm", &[BEARER], r#"{"repo":"a\u0000b","arch":"amd64"}"#, 400),
        ("POST", "/prewarm", &[BEARER], r#"{"repo":"\u00e9\ud800"}"#, 400),
        ("POST", "/complete", &[BEARER], r#"{"key":"k"}"#, 400),
        ("POST", "/complete", &[BEARER], r#"{"key":"k","buildId":"x"}"#, 400),
        ("POST", "/complete", &[("Authorization", "Bearer old")], r#"{"key":"k"}"#, 401),
        ("POST", "/complete", &[("Authorization", "Bearer old")], r#"{"key":"k","buildId":"x"}"#, 400),
    ] {
        let got = call(&router, method, path, headers, body).await;
        assert_eq!(got.status.as_u16(), status, "{method} {path} {body:.40} {}", got.body);
        assert!(got.body.ends_with('\n') && got.body.lines().count() == 1, "{:?}", got.body);
        assert_eq!(got.header("content-type"), Some("text/plain; charset=utf-8"), "{}", got.body);
        assert_eq!(got.header("allow"), (status == 405).then_some("POST"), "{}", got.body);
        assert_eq!(got.header("www-authenticate").is_some(), status == 401, "{}", got.body);
        assert_eq!(got.header("connection"), (body.len() > 8192).then_some("close"), "{}", got.body);
    }
}

#[tokio::test]
async fn a_control_character_is_refused_with_its_reason() {
    let router = router(open(), &Arc::new(Memory::ready()));
    let got = post(&router, "/route", r#"{"repo":"acme/shop","target":"a\u001b[2J","arch":"amd64"}"#).await;
    assert_eq!(got.body, "bad request: target contains a control character (U+001B)\n");
}

#[tokio::test]
async fn ignored_fields_are_named_whatever_the_answer() {
    let router = router(open(), &Arc::new(Memory::ready()));
    for (body, status) in [
        (r#"{"repo":"acme/shop","arch":"amd64","branch":"main","pr\r\n":7}"#, 200),
        (r#"{"repo":"","branch":"main","pr\r\n":7}"#, 400),
    ] {
        let got = post(&router, "/route", body).await;
        assert_eq!(got.status.as_u16(), status);
        assert_eq!(got.header("x-buildkit-operator-ignored-fields"), Some("branch, pr??"));
    }
    assert_eq!(post(&router, "/route", SHOP).await.header("x-buildkit-operator-ignored-fields"), None);
}

#[tokio::test(start_paused = true)]
async fn the_bucket_refills_and_says_when() {
    let memory = Arc::new(Memory::ready());
    let router = router(Config { rate: RateLimit::new(0.5, 1).unwrap(), ..tokens() }, &memory);
    let denied = call(&router, "POST", "/route", &[("Authorization", "Bearer nope")], SHOP).await;
    assert_eq!(denied.status, StatusCode::UNAUTHORIZED);
    assert_eq!(call(&router, "POST", "/prewarm", &[BEARER], SHOP).await.status, StatusCode::ACCEPTED);
    let limited = call(&router, "POST", "/prewarm", &[BEARER], SHOP).await;
    assert_eq!((limited.status, limited.header("retry-after")), (StatusCode::TOO_MANY_REQUESTS, Some("2")));
    tokio::time::advance(Duration::from_secs(2)).await;
    // A wrong token on /complete makes us look for the build: it spends.
    let wrong = &[("Authorization", "Bearer nope")];
    let unknown = r#"{"key":"p41bd34a2227aca39","buildId":"0123456789abcdef"}"#;
    assert_eq!(call(&router, "POST", "/complete", wrong, unknown).await.status, StatusCode::UNAUTHORIZED);
    assert_eq!(call(&router, "POST", "/complete", wrong, unknown).await.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(call(&router, "POST", "/complete", &[], unknown).await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_release_needs_an_identity_or_the_id_of_a_live_build() {
    let memory = Arc::new(Memory::ready());
    let router = router(tokens(), &memory);
    let routed = call(&router, "POST", "/route", &[BEARER], SHOP).await;
    let id = routed.json()["buildId"].as_str().unwrap().to_owned();
    let named = format!(r#"{{"key":"{SHOP_KEY}","buildId":"{id}"}}"#);
    let upper = format!(r#"{{"key":"{SHOP_KEY}","buildId":"{}"}}"#, id.to_uppercase());
    let admin = ("X-Buildkit-Operator-Admin-Token", "nope");
    let stale = ("Authorization", "Bearer expired");
    for (headers, body, status, left) in [
        (&[][..], &named, 401, 1),
        (&[admin, BEARER], &named, 401, 1),
        (&[BEARER], &upper, 204, if upper == named { 0 } else { 1 }),
        (&[stale], &named, 204, 0),
        (&[stale], &named, 401, 0),
        (&[BEARER], &named, 204, 0),
    ] {
        let got = call(&router, "POST", "/complete", headers, body).await;
        assert_eq!(got.status.as_u16(), status, "{headers:?} {body}");
        assert_eq!(memory.inflight(SHOP_KEY), Some(left), "{headers:?} {body}");
    }
}

#[tokio::test]
async fn metrics_tell_warm_cold_untrusted_and_error() {
    let memory = Arc::new(Memory::ready());
    let mut registry = Registry::default();
    let router = Router::new(open(), memory.clone(), Metrics::register(&mut registry));
    post(&router, "/route", SHOP).await;
    post(&router, "/route", SHOP).await;
    post(&router, "/route", r#"{"repo":"https://github.com/acme/shop","arch":"amd64","untrusted":true}"#).await;
    memory.fail(Step::Begin, unavailable);
    post(&router, "/route", SHOP).await;
    post(&router, "/route", "not even a request").await;
    post(&router, "/prewarm", SHOP).await;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    for line in [
        "buildkit_operator_routes_total{result=\"warm\"} 1",
        "buildkit_operator_routes_total{result=\"cold\"} 1",
        "buildkit_operator_routes_total{result=\"untrusted\"} 1",
        "buildkit_operator_routes_total{result=\"error\"} 1",
        "buildkit_operator_route_duration_seconds_bucket{le=\"180.0\"} 4",
        "buildkit_operator_route_duration_seconds_count 4",
        "buildkit_operator_coldstart_seconds_bucket{le=\"300.0\"} 2",
        "buildkit_operator_coldstart_seconds_count 2",
        "buildkit_operator_coldstarts_inflight 0",
    ] {
        assert!(text.lines().any(|l| l == line), "no {line} in\n{text}");
    }
}

/// What was logged, as JSON lines.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

/// With one subscriber alone in the process, tracing asks the thread that first
/// meets an event whether anybody listens, and keeps the answer for all threads.
static SECOND: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(tracing_subscriber::fmt().with_writer(io::sink).finish()));

impl Log {
    pub(crate) fn capture(&self) -> tracing::subscriber::DefaultGuard {
        LazyLock::force(&SECOND);
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || log.clone()).finish();
        tracing::subscriber::set_default(subscriber)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    pub(super) fn calls(&self) -> Vec<serde_json::Value> {
        let lines = self.text();
        let lines = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.filter(|line| line["message"] == "call").collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn each_call_leaves_one_audit_line_and_no_secret() {
    let log = Log::default();
    let _capture = log.capture();
    let memory = Arc::new(Memory::ready());
    let router = router(tokens(), &memory);
    let untrusted = r#"{"repo":"git@GitHub.com:Acme/Shop.git","arch":"amd64","untrusted":true}"#;
    let routed = call(&router, "POST", "/route", &[BEARER], untrusted).await;
    let id = routed.json()["buildId"].as_str().unwrap().to_owned();
    call(&router, "POST", "/prewarm", &[("X-Buildkit-Operator-Admin-Token", "root-tok")], SHOP).await;
    call(&router, "POST", "/prewarm", &[("X-Buildkit-Operator-Admin-Token", "guess")], SHOP).await;
    let complete = format!(r#"{{"key":"fork{SHOP_KEY}","buildId":"{id}"}}"#);
    call(&router, "POST", "/complete", &[("Authorization", "Bearer guess")], &complete).await;

    let calls = log.calls();
    let field = |name: &str| calls.iter().map(|call| call[name].to_string().replace('"', "")).collect::<Vec<_>>();
    assert_eq!(field("path"), ["/route", "/prewarm", "/prewarm", "/complete"]);
    assert_eq!(field("who"), ["bearer", "admin", "nobody", "nobody"]);
    assert_eq!(field("status"), ["200", "202", "401", "204"]);
    assert_eq!(field("verdict"), ["untrusted", "prewarmed", "Unauthorized", "released"]);
    assert_eq!(field("untrusted"), ["true", "false", "false", "false"]);
    assert_eq!(field("repo")[0], "github.com/acme/shop");
    assert_eq!(field("project.key")[..2], [format!("fork{SHOP_KEY}"), SHOP_KEY.to_owned()]);
    assert!(calls.iter().all(|call| call["duration_ms"].is_u64()));
    for secret in ["s3cret", "root-tok", "guess", &id] {
        assert!(!log.text().contains(secret), "{secret} in {}", log.text());
    }
}

#[tokio::test]
async fn a_proxy_is_believed_only_when_trusted() {
    for (proxies, want) in [("", "127.0.0.1"), ("127.0.0.0/8", "203.0.113.9")] {
        let log = Log::default();
        let _capture = log.capture();
        let config = Config { trusted_proxies: proxies.parse().unwrap(), ..open() };
        let timeouts = Timeouts::new(config.route_wait);
        let server = Server::start(config, &Arc::new(Memory::new()), timeouts).await;
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let head =
            "GET /route HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 6.6.6.6, 203.0.113.9\r\nConnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.read_to_string(&mut String::new()).await.unwrap();
        server.stop().await;
        assert_eq!(log.calls()[0]["client.addr"], want);
    }
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    route: RouteArgs,
}

fn flags(args: &[&str]) -> RouteArgs {
    let mut args = Flags::parse_from(std::iter::once(&"server").chain(args)).route;
    (args.auth_token, args.admin_token) = (None, None);
    args
}

#[test]
fn a_server_that_nobody_may_call_does_not_start() {
    let refused = Config::try_from(flags(&[])).unwrap_err();
    assert!(matches!(refused, ConfigError::Auth(_)));
    assert_eq!(
        refused.to_string(),
        "nobody may call the routing API: neither a token nor an admin token is set, no identity provider is \
         configured, and it is not open; set BUILDKIT_OPERATOR_AUTH_TOKEN, --auth-token-dir or --oidc-config, or let \
         anybody call with --auth-open"
    );
    assert!(Config::try_from(flags(&["--auth-open"])).is_ok());
    let token = Config::try_from(RouteArgs { auth_token: Some(GivenToken::new("s3cret")), ..flags(&[]) });
    assert!(!format!("{:?}", token.unwrap()).contains("s3cret"));
    assert!(Auth { token: Some(Secret::new(" \n")), ..Auth::default() }.checked().is_err());
}

#[test]
fn a_rate_that_is_none_does_not_start() {
    let refused = Config::try_from(flags(&["--auth-open", "--api-rate-limit=inf"])).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "--api-rate-limit and --api-rate-burst: a rate of inf per second is not a rate: want 0 for no limit, or more"
    );
}
