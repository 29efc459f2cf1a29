//! Identities of CI providers: real tokens, of a real issuer over HTTPS,
//! against the routing API.

mod attacks;
mod issuers;
mod rules;

use std::sync::Arc;
use std::time::Duration;

use bko_install::identity::config::{Config as Identities, Sources};
use bko_install::issuers::{Issuers, Timing};
use bko_install::router::{Auth, Config, Metrics, Router};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::issuer::{Issuer, Key};
use super::memory::Memory;
use super::{Answered, SHOP, call, open};

/// The routing API with identity providers.
struct Api {
    router: Router,
    memory: Arc<Memory>,
    issuers: Issuers,
    _stop: DropGuard,
}

/// Nothing is looked up again by itself within a test.
fn patient() -> Timing {
    Timing { refresh: Duration::from_secs(600), ..Timing::default() }
}

fn providers(providers: &Value) -> Sources {
    Sources { providers: Some(providers.to_string()), ..Sources::default() }
}

impl Api {
    async fn start(sources: Sources, timing: Timing) -> Self {
        Self::with(open(), sources, timing).await
    }

    async fn with(config: Config, sources: Sources, timing: Timing) -> Self {
        let issuers = Issuers::new(Identities::read(sources).unwrap().unwrap(), None, timing).unwrap();
        let auth = Auth { open: false, issuers: Some(issuers.clone()), ..config.auth.clone() }.checked().unwrap();
        let stop = CancellationToken::new();
        tokio::spawn(auth.clone().keep_fresh(stop.clone()));
        let memory = Arc::new(Memory::ready());
        let router = Router::new(Config { auth, ..config }, memory.clone(), Metrics::default());
        Self { router, memory, issuers, _stop: stop.drop_guard() }
    }

    /// With one GitHub-like issuer, whose keys are known.
    async fn of(issuer: &Issuer) -> Self {
        let api = Self::start(providers(&json!([issuer.provider("github")])), patient()).await;
        issuer.until_asked(super::issuer::KEYS, 1).await;
        api.until_known(&issuer.url).await;
        api
    }

    /// Returns when the keys of an issuer are known.
    async fn until_known(&self, issuer: &str) {
        let metric = format!("buildkit_operator_oidc_refreshes_total{{issuer=\"{issuer}\",result=\"success\"}}");
        self.until_metric(&metric, 1).await;
    }

    async fn until_metric(&self, series: &str, least: u64) {
        let reached = async {
            while self.metric(series) < least {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(20), reached).await;
        assert!(waited.is_ok(), "{series} is {}", self.metric(series));
    }

    fn metric(&self, series: &str) -> u64 {
        let mut registry = prometheus_client::registry::Registry::default();
        self.issuers.metrics().register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.map_or(0, |value| value.trim().parse().unwrap())
    }

    async fn post(&self, path: &str, token: &str, body: &str) -> Answered {
        let bearer = format!("Bearer {token}");
        call(&self.router, "POST", path, &[("authorization", &bearer)], body).await
    }

    async fn route(&self, token: &str) -> Answered {
        self.post("/route", token, SHOP).await
    }
}

/// Why a token was refused, as its client is told.
fn why(answer: &Answered) -> &str {
    let header = answer.header("www-authenticate").unwrap_or_default();
    header.split("error_description=\"").nth(1).unwrap_or_default().trim_end_matches('"')
}

#[tokio::test]
async fn a_token_of_every_algorithm_is_accepted() {
    let mut keys: Vec<Key> = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]
        .iter()
        .map(|algorithm| Key::rsa(algorithm, algorithm))
        .collect();
    keys.extend(["ES256", "ES384"].map(|algorithm| Key::curve(algorithm, algorithm)));
    keys.push(Key::edwards("Ed"));
    let issuer = Issuer::start(&keys.iter().collect::<Vec<_>>()).await;
    let api = Api::of(&issuer).await;
    for key in &keys {
        let answer = api.route(&key.token(&issuer.claims(&json!({})))).await;
        assert_eq!(answer.status, 200, "{} {answer:?}", key.algorithm);
        assert_eq!(answer.json()["key"], super::SHOP_KEY);
    }
    assert_eq!(issuer.asked(), 1);
}
