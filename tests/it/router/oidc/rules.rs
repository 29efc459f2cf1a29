//! What an identity may do: one repository, its forks, and no more.

use std::net::{IpAddr, SocketAddr};

use axum::body::Body;
use axum::http::Request;
use bko_install::identity::config::Sources;
use bko_install::provisioner::ProvisionError;
use bko_install::router::{Arrival, Auth, Config, RateLimit, Secret};
use serde_json::{Value, json};
use tokio::time::Instant;
use tower::ServiceExt;

use super::super::issuer::{Issuer, Key, now};
use super::super::memory::Step;
use super::super::{SHOP, SHOP_KEY, call, open, tokens};
use super::{Api, patient, providers, why};

struct Jobs {
    issuer: Issuer,
    key: Key,
}

impl Jobs {
    async fn new() -> Self {
        let key = Key::curve("k1", "ES256");
        Self { issuer: Issuer::start(&[&key]).await, key }
    }

    fn token(&self, others: &Value) -> String {
        self.key.token(&self.issuer.claims(others))
    }

    fn sources(&self) -> Sources {
        providers(&json!([self.issuer.provider("github")]))
    }

    async fn api(&self, config: Config, sources: Sources) -> Api {
        let api = Api::with(config, sources, patient()).await;
        api.until_known(&self.issuer.url).await;
        api
    }
}

fn complete(key: &str, id: &Value) -> String {
    json!({"key": key, "buildId": id}).to_string()
}

#[tokio::test]
async fn the_tokens_repository_counts_and_the_bodys_does_not() {
    let jobs = Jobs::new().await;
    let api = jobs.api(open(), jobs.sources()).await;
    let push = jobs.token(&json!({}));
    for body in [
        r#"{"repo":"github.com/victim/secret","arch":"amd64"}"#,
        r#"{"arch":"amd64"}"#,
        r#"{"repo":"not a \u0001 repo","arch":"amd64"}"#,
        r#"{"repo":"github.com/acme/shop","arch":"amd64","untrusted":false}"#,
    ] {
        for path in ["/route", "/prewarm"] {
            assert_eq!(api.post(path, &push, body).await.json()["key"], SHOP_KEY, "{path} {body}");
        }
    }
    assert_eq!(api.memory.seen().projects.keys().collect::<Vec<_>>(), [SHOP_KEY], "no victim is even created");
    let answer = api.post("/route", &push, r#"{"repo":7,"arch":"amd64"}"#).await;
    assert_eq!(
        (answer.status.as_u16(), answer.body.as_str()),
        (400, "bad request: repo must be a string, not a number\n")
    );
}

#[tokio::test]
async fn code_of_a_pull_request_gets_a_fork_of_its_own() {
    let jobs = Jobs::new().await;
    let api = jobs.api(open(), jobs.sources()).await;
    let trusting = Sources { trust_events: vec!["issue_comment".to_owned()], ..jobs.sources() };
    let trusting = jobs.api(open(), trusting).await;
    let trusted_body = r#"{"arch":"amd64","untrusted":false}"#;
    let fork = |number: &str| format!("fork{number}{SHOP_KEY}");
    for (claims, body, want) in [
        (json!({"ref": "refs/pull/7/merge", "event_name": "pull_request"}), trusted_body, fork("7-")),
        (json!({"ref": "refs/pull/8/merge", "event_name": "pull_request"}), trusted_body, fork("8-")),
        (json!({"ref": "refs/pull/x/merge"}), trusted_body, fork("")),
        (json!({"event_name": "pull_request_target"}), trusted_body, fork("")),
        (json!({"event_name": "issue_comment"}), trusted_body, fork("")),
        (json!({"event_name": "workflow_run"}), trusted_body, fork("")),
        (json!({"ref": null}), trusted_body, fork("")),
        (json!({}), r#"{"arch":"amd64","untrusted":true}"#, fork("")),
        (json!({}), trusted_body, SHOP_KEY.to_owned()),
    ] {
        assert_eq!(api.post("/route", &jobs.token(&claims), body).await.json()["key"], want, "{claims} {body}");
    }
    let comment = jobs.token(&json!({"event_name": "issue_comment"}));
    assert_eq!(trusting.post("/route", &comment, trusted_body).await.json()["key"], SHOP_KEY);
    let prewarmed = api.post("/prewarm", &jobs.token(&json!({"ref": "refs/pull/9/merge"})), trusted_body).await;
    assert_eq!(prewarmed.json()["key"], SHOP_KEY, "forks are not prewarmed");
}

#[tokio::test]
async fn a_repository_that_is_not_listed_is_forbidden() {
    let jobs = Jobs::new().await;
    let sources = Sources { repo_allowlist: Some("github.com/acme/*".to_owned()), ..jobs.sources() };
    let api = jobs.api(open(), sources).await;
    let stranger = jobs.token(&json!({"repository": "acme-evil/shop"}));
    for path in ["/route", "/prewarm", "/complete"] {
        let answer = api.post(path, &stranger, SHOP).await;
        assert_eq!((answer.status.as_u16(), answer.body.as_str()), (403, "Forbidden\n"), "{path}");
    }
    assert!(api.memory.seen().projects.is_empty());
    assert_eq!(api.route(&jobs.token(&json!({}))).await.status, 200);
}

#[tokio::test]
async fn the_admin_header_comes_first_and_shared_tokens_last() {
    let jobs = Jobs::new().await;
    let Auth { token, admin_token, .. } = tokens().auth;
    let api = jobs.api(Config { auth: Auth { token, admin_token, ..Auth::default() }, ..open() }, jobs.sources()).await;
    let body = r#"{"repo":"github.com/other/repo","arch":"amd64"}"#;
    let bearer = format!("Bearer {}", jobs.token(&json!({})));
    let admin = "x-buildkit-operator-admin-token";
    let routed = call(&api.router, "POST", "/route", &[(admin, "root-tok"), ("authorization", &bearer)], body).await;
    assert_eq!(routed.json()["key"], "p3c6461e35759c161", "the admin's body is believed");
    let wrong = call(&api.router, "POST", "/route", &[(admin, "nope"), ("authorization", &bearer)], body).await;
    assert_eq!(wrong.status, 401, "even if the token would pass");
    assert_eq!(api.post("/route", "s3cret", body).await.json()["key"], "p3c6461e35759c161");
    assert_eq!(api.post("/route", "nope", body).await.status, 401);
    assert_eq!(call(&api.router, "POST", "/route", &[], body).await.status, 401);

    // A shared token may have the shape of a JWT.
    let auth = Auth { token: Some(Secret::new("a.b.c")), ..Auth::default() };
    let api = jobs.api(Config { auth, ..open() }, jobs.sources()).await;
    assert_eq!(api.post("/route", "a.b.c", body).await.status, 200);
}

#[tokio::test]
async fn a_job_ends_builds_of_its_own_repository_alone() {
    let jobs = Jobs::new().await;
    let api = jobs.api(open(), jobs.sources()).await;
    let own = jobs.token(&json!({}));
    let other = jobs.token(&json!({"repository": "acme/other"}));
    let pull = |n: u32| jobs.token(&json!({"ref": format!("refs/pull/{n}/merge")}));
    let expired = jobs.token(&json!({"exp": now() - 100}));
    let routed = api.route(&own).await.json();
    let id = &routed["buildId"];
    let fork = api.route(&pull(7)).await.json();
    let (fork_key, fork_id) = (fork["key"].as_str().unwrap(), &fork["buildId"]);
    let unknown = json!("0123456789abcdef");
    let empty = format!(r#"{{"key":"{SHOP_KEY}"}}"#);
    for (what, token, body, want) in [
        ("another repository", &other, complete(SHOP_KEY, id), 403),
        ("another repository, without id", &other, empty.clone(), 403),
        ("a pull request, of a trusted build", &pull(7), complete(SHOP_KEY, id), 403),
        ("a pull request, without id", &pull(7), empty.clone(), 403),
        ("a pull request, of another's build", &pull(8), complete(fork_key, fork_id), 403),
        ("expired, unknown id", &expired, complete(SHOP_KEY, &unknown), 401),
        ("expired, without id", &expired, empty.clone(), 401),
        ("expired, malformed id", &expired, complete(SHOP_KEY, &json!("xyz")), 400),
        ("own, unknown key", &own, complete("p0000000000000000", &unknown), 204),
        ("own, no key at all", &own, complete("what is this?", &unknown), 204),
        ("own, unknown id", &own, complete(SHOP_KEY, &unknown), 204),
    ] {
        let answer = api.post("/complete", token, &body).await;
        assert_eq!(answer.status, want, "{what}: {answer:?}");
        assert_eq!((api.memory.inflight(SHOP_KEY), api.memory.inflight(fork_key)), (Some(1), Some(1)), "{what}");
    }
    let answer = api.post("/complete", &expired, &empty).await;
    assert_eq!(why(&answer), "the token has expired");
    assert_eq!(api.post("/complete", &expired, &complete(SHOP_KEY, id)).await.status, 204, "a live id is enough");
    assert_eq!(api.memory.inflight(SHOP_KEY), Some(0));
    assert_eq!(api.post("/complete", &pull(7), &complete(fork_key, fork_id)).await.status, 204);
    assert_eq!(api.memory.inflight(fork_key), Some(0));

    api.route(&own).await;
    assert_eq!(api.post("/complete", &own, &empty).await.status, 204);
    assert_eq!(api.memory.inflight(SHOP_KEY), Some(0), "without an id the oldest is released");
}

#[tokio::test]
async fn whose_a_build_is_must_be_known_before_it_is_ended() {
    let jobs = Jobs::new().await;
    let api = jobs.api(open(), jobs.sources()).await;
    let own = jobs.token(&json!({}));
    let id = api.route(&own).await.json()["buildId"].clone();
    api.memory.fail(Step::Repo, || ProvisionError::Unavailable {
        message: "the store is away".to_owned(),
        retry_after: std::time::Duration::from_secs(5),
    });
    let answer = api.post("/complete", &own, &complete(SHOP_KEY, &id)).await;
    assert_eq!((answer.status.as_u16(), answer.header("retry-after")), (503, Some("5")));
    assert_eq!(api.memory.inflight(SHOP_KEY), Some(1));
}

#[tokio::test]
async fn each_repository_has_its_own_rate_and_unreviewed_code_another() {
    let jobs = Jobs::new().await;
    let config = Config { rate: RateLimit::new(0.001, 2).unwrap(), ..open() };
    let api = jobs.api(config, jobs.sources()).await;
    let token = |repo: &str, reference: &str| jobs.token(&json!({"repository": repo, "ref": reference}));
    let (main, pull) = ("refs/heads/main", "refs/pull/7/merge");
    for (repo, reference, want) in [
        ("acme/shop", pull, [200, 200, 429]),
        ("acme/shop", main, [200, 200, 429]),
        ("acme/other", main, [200, 200, 429]),
    ] {
        for want in want {
            assert_eq!(api.route(&token(repo, reference)).await.status, want, "{repo} {reference}");
        }
    }
    assert_eq!(api.route(&token("acme/shop", main)).await.header("retry-after"), Some("1000"));
}

/// A call that comes from an address, perhaps through a proxy.
async fn from(api: &Api, peer: &str, forwarded: Option<&str>, token: &str) -> u16 {
    let mut request = Request::post("/route").header("authorization", format!("Bearer {token}"));
    if let Some(forwarded) = forwarded {
        request = request.header("x-forwarded-for", forwarded);
    }
    let mut request = request.body(Body::from(SHOP)).unwrap();
    let peer = SocketAddr::from((peer.parse::<IpAddr>().unwrap(), 4711));
    let read_by = Instant::now() + std::time::Duration::from_secs(15);
    request.extensions_mut().insert(Arrival { peer, read_by });
    api.router.service().oneshot(request).await.unwrap().status().as_u16()
}

#[tokio::test]
async fn an_address_may_have_so_many_tokens_verified() {
    let jobs = Jobs::new().await;
    let config = Config {
        source_rate: RateLimit::new(0.001, 2).unwrap(),
        trusted_proxies: "10.0.0.0/8".parse().unwrap(),
        ..open()
    };
    let api = jobs.api(config, jobs.sources()).await;
    let (good, forged) = (jobs.token(&json!({})), Key::curve("k1", "ES256").token(&jobs.issuer.claims(&json!({}))));
    for (peer, forwarded, token, want) in [
        ("192.0.2.1", None, &forged, 401),
        ("192.0.2.1", None, &forged, 401),
        ("192.0.2.1", None, &forged, 429),
        ("192.0.2.1", None, &good, 429),
        ("192.0.2.1", Some("198.51.100.1"), &good, 429),
        ("192.0.2.2", None, &good, 200),
        ("10.0.0.1", Some("192.0.2.1"), &good, 429),
        ("10.0.0.1", Some("198.51.100.1"), &good, 200),
        ("10.0.0.1", Some("192.0.2.1, 198.51.100.1"), &good, 200),
        ("2001:db8::1", None, &good, 200),
        ("2001:db8::2", None, &good, 200),
        ("2001:db8::3", None, &good, 429),
        ("2001:db8:0:1::1", None, &good, 200),
    ] {
        assert_eq!(from(&api, peer, forwarded, token).await, want, "{peer} {forwarded:?}");
    }
    let metric = format!(
        "buildkit_operator_oidc_verifications_total{{issuer=\"{}\",result=\"bad_signature\"}}",
        jobs.issuer.url
    );
    assert_eq!(api.metric(&metric), 2, "what is limited is not verified");
}

#[tokio::test]
async fn the_audit_log_says_who_and_why_not() {
    let log = super::super::answers::Log::default();
    let _capture = log.capture();
    let jobs = Jobs::new().await;
    let sources = Sources { repo_allowlist: Some("github.com/acme/*".to_owned()), ..jobs.sources() };
    let api = jobs.api(open(), sources).await;
    api.route(&jobs.token(&json!({"ref": "refs/pull/7/merge", "sub": "repo:acme/shop:pull_request\n\u{1b}[31m"})))
        .await;
    api.route(&jobs.token(&json!({"exp": now() - 100}))).await;
    api.route(&jobs.token(&json!({"repository": "other/repo"}))).await;
    let calls = log.calls();
    let field = |name: &str| calls.iter().map(|call| call[name].as_str().unwrap_or("-").to_owned()).collect::<Vec<_>>();
    assert_eq!(field("who"), ["oidc", "nobody", "nobody"]);
    assert_eq!(field("identity.provider"), ["github", "-", "-"]);
    assert_eq!(field("identity.subject"), ["repo:acme/shop:pull_request[31m", "-", "-"]);
    assert_eq!(field("identity.refused"), ["-", "expired", "not_allowed"]);
    assert_eq!(field("repo"), ["github.com/acme/shop", "-", "github.com/other/repo"]);
    assert_eq!(field("project.key")[0], format!("fork7-{SHOP_KEY}"));
}

#[tokio::test]
async fn an_open_api_with_providers_does_not_start() {
    let jobs = Jobs::new().await;
    let api = jobs.api(open(), jobs.sources()).await;
    let auth = Auth { open: true, issuers: Some(api.issuers.clone()), ..Auth::default() };
    assert!(auth.checked().unwrap_err().to_string().starts_with("--auth-open lets anybody act for any repository"));
}
