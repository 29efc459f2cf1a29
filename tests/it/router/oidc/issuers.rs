//! Keys: how they come, how they change, and what happens while there are none.

use std::time::Duration;

use bko_install::issuers::Timing;
use serde_json::json;

use super::super::SHOP_KEY;
use super::super::issuer::{DISCOVERY, Issuer, KEYS, Key};
use super::{Api, patient, providers, why};

const UNAVAILABLE: &str = "the keys of the token's issuer are not known yet\n";

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Looks keys up again every so often.
fn eager(refresh: u64) -> Timing {
    Timing { refresh: millis(refresh), retry: millis(5), retry_most: millis(20), ..Timing::default() }
}

#[tokio::test]
async fn a_new_key_is_picked_up_at_its_first_use_and_an_old_one_is_dropped() {
    let (old, new) = (Key::rsa("old", "RS256"), Key::curve("new", "ES256"));
    let issuer = Issuer::start(&[&old]).await;
    let timing = Timing { ask_again: Duration::ZERO, ..patient() };
    let api = Api::start(providers(&json!([issuer.provider("github")])), timing).await;
    api.until_known(&issuer.url).await;
    let token = |key: &Key| key.token(&issuer.claims(&json!({})));
    assert_eq!(api.route(&token(&old)).await.status, 200);

    issuer.set_keys(&[&old, &new]);
    assert_eq!(api.route(&token(&new)).await.status, 200, "an unknown key id has the keys looked up");
    assert_eq!(api.route(&token(&old)).await.status, 200, "both are good meanwhile");
    issuer.set_keys(&[&new]);
    assert_eq!(api.route(&Key::rsa("none", "RS256").token(&issuer.claims(&json!({})))).await.status, 401);
    let answer = api.route(&token(&old)).await;
    assert_eq!(
        (answer.status.as_u16(), why(&answer)),
        (401, "no key of the issuer fits the token's key id and algorithm")
    );
    assert_eq!(api.route(&token(&new)).await.status, 200);
}

#[tokio::test]
async fn a_key_under_the_same_id_is_replaced_by_the_next_look_up() {
    let (old, new) = (Key::rsa("k1", "RS256"), Key::rsa("k1", "RS256"));
    let issuer = Issuer::start(&[&old]).await;
    let api = Api::start(providers(&json!([issuer.provider("github")])), eager(10)).await;
    api.until_known(&issuer.url).await;
    issuer.set_keys(&[&new]);
    issuer.until_asked(KEYS, issuer.asked() + 3).await;
    assert_eq!(api.route(&old.token(&issuer.claims(&json!({})))).await.status, 401);
    assert_eq!(api.route(&new.token(&issuer.claims(&json!({})))).await.status, 200);
}

#[tokio::test]
async fn unknown_key_ids_are_looked_up_once_a_minute_at_most() {
    let key = Key::curve("k1", "ES256");
    let issuer = Issuer::start(&[&key]).await;
    let timing = Timing { ask_again: millis(400), ..patient() };
    let api = Api::start(providers(&json!([issuer.provider("github")])), timing).await;
    api.until_known(&issuer.url).await;
    tokio::time::sleep(millis(400)).await;
    let forged: Vec<String> = (0..50)
        .map(|n| key.token_with(&json!({"alg": "ES256", "kid": format!("forged-{n}")}), &issuer.claims(&json!({}))))
        .collect();
    let began = std::time::Instant::now();
    let answers = futures::future::join_all(forged.iter().map(|token| api.route(token))).await;
    assert!(answers.iter().all(|answer| answer.status == 401));
    let most = 2 + usize::try_from(began.elapsed().as_millis() / 400).unwrap();
    assert!((2..=most).contains(&issuer.asked()), "{} look-ups, at most {most}", issuer.asked());
}

#[tokio::test]
async fn keys_stay_good_while_their_issuer_is_away_but_not_for_ever() {
    let key = Key::curve("k1", "ES256");
    let issuer = Issuer::start(&[&key]).await;
    let timing = Timing { stale: millis(1500), ..eager(10) };
    let api = Api::start(providers(&json!([issuer.provider("github")])), timing).await;
    api.until_known(&issuer.url).await;
    let token = key.token(&issuer.claims(&json!({})));
    issuer.change(|answers| answers.down = true);
    let failures = format!("buildkit_operator_oidc_refreshes_total{{issuer=\"{}\",result=\"failure\"}}", issuer.url);
    api.until_metric(&failures, 3).await;
    assert_eq!(api.route(&token).await.status, 200, "stale while revalidating");

    tokio::time::sleep(millis(1600)).await;
    let answer = api.route(&token).await;
    assert_eq!((answer.status.as_u16(), answer.body.as_str()), (503, UNAVAILABLE));
    issuer.change(|answers| answers.down = false);
    issuer.until_asked(KEYS, issuer.asked() + 2).await;
    assert_eq!(api.route(&token).await.status, 200, "and back");
}

#[tokio::test]
async fn an_issuer_that_is_away_at_the_start_costs_only_its_own_tokens() {
    let key = Key::curve("k1", "ES256");
    let (away, there) = (Issuer::start(&[&key]).await, Issuer::start(&[&key]).await);
    away.change(|answers| answers.down = true);
    let config = json!([away.provider("github"), there.provider("forgejo")]);
    let api = Api::start(providers(&config), eager(600_000)).await;
    api.until_known(&there.url).await;
    let token = key.token(&away.claims(&json!({})));
    let answer = api.route(&token).await;
    assert_eq!((answer.status.as_u16(), answer.body.as_str()), (503, UNAVAILABLE));
    assert_eq!(answer.header("retry-after"), Some("5"));
    assert!(api.memory.seen().projects.is_empty());
    let routed = api.route(&key.token(&there.claims(&json!({})))).await;
    assert_eq!(routed.status, 200);

    // Whoever knows a live build's id may end it; who does not, learns when to come back.
    let complete = |id: &str| format!(r#"{{"key":"{SHOP_KEY}","buildId":"{id}"}}"#);
    assert_eq!(api.post("/complete", &token, &complete("0123456789abcdef")).await.status, 503);
    assert_eq!(api.post("/complete", &token, &format!(r#"{{"key":"{SHOP_KEY}"}}"#)).await.status, 503);
    let id = routed.json()["buildId"].as_str().unwrap().to_owned();
    assert_eq!(api.post("/complete", &token, &complete(&id)).await.status, 204);
    assert_eq!(api.memory.inflight(SHOP_KEY), Some(0));

    away.change(|answers| answers.down = false);
    api.until_known(&away.url).await;
    assert_eq!(api.route(&token).await.status, 200);
}

#[tokio::test]
async fn what_an_issuer_must_not_answer_is_not_believed() {
    let key = Key::curve("k1", "ES256");
    let elsewhere = Issuer::start(&[&key]).await;
    let body = |issuer: &str, keys: &str| json!({"issuer": issuer, "jwks_uri": keys}).to_string();
    let issuer = Issuer::start(&[&key]).await;
    let (url, keys) = (issuer.url.clone(), format!("{}/keys", issuer.url));
    let other_keys = format!("{}/keys", elsewhere.url);
    let other_discovery = format!("{}/.well-known/openid-configuration", elsewhere.url);
    let own = String::new;
    let table = [
        ("a redirect of the discovery", DISCOVERY, (302, other_discovery.clone(), own()), "redirects are not followed"),
        ("a permanent one", DISCOVERY, (308, other_discovery, own()), "redirects are not followed"),
        ("a redirect of the keys", KEYS, (307, other_keys.clone(), own()), "redirects are not followed"),
        ("another issuer", DISCOVERY, (200, own(), body(&elsewhere.url, &other_keys)), "which is another"),
        ("a look-alike", DISCOVERY, (200, own(), body(&format!("{url}//"), &keys)), "which is another"),
        ("keys without TLS", DISCOVERY, (200, own(), body(&url, &keys.replace("https", "http"))), "want an https URL"),
        ("keys in a file", DISCOVERY, (200, own(), body(&url, "file:///etc/passwd")), "want an https URL"),
        ("no document", DISCOVERY, (200, own(), "<html>".to_owned()), "is no discovery document"),
        ("no issuer", DISCOVERY, (200, own(), json!({"jwks_uri": keys}).to_string()), "is no discovery document"),
        ("an error", DISCOVERY, (500, own(), own()), "the answer is 500"),
        ("a huge document", DISCOVERY, (200, own(), " ".repeat(70_000)), "more than 65536 bytes"),
        ("a huge key set", KEYS, (200, own(), " ".repeat(300_000)), "more than 262144 bytes"),
        ("no key set", KEYS, (200, own(), "[]".to_owned()), "is no key set"),
        ("too many keys", KEYS, (200, own(), json!({"keys": vec![json!({}); 101]}).to_string()), "101 keys"),
    ];
    for (name, path, answer, want) in table {
        let log = super::super::answers::Log::default();
        let _capture = log.capture();
        issuer.change(|answers| answers.paths = [(path.to_owned(), answer)].into());
        let api = Api::start(providers(&json!([issuer.provider("github")])), eager(600_000)).await;
        let failures = format!("buildkit_operator_oidc_refreshes_total{{issuer=\"{url}\",result=\"failure\"}}");
        api.until_metric(&failures, 1).await;
        let answer = api.route(&key.token(&issuer.claims(&json!({})))).await;
        assert_eq!(answer.status, 503, "{name}");
        assert!(log.text().contains(want), "{name}: {}", log.text());
    }
    assert_eq!(elsewhere.asked(), 0, "nothing was followed");
}

#[tokio::test]
async fn an_issuer_that_says_nothing_is_given_up() {
    let key = Key::curve("k1", "ES256");
    let issuer = Issuer::start(&[&key]).await;
    issuer.change(|answers| answers.silent = true);
    let timing = Timing { budget: millis(50), ..eager(600_000) };
    let api = Api::start(providers(&json!([issuer.provider("github")])), timing).await;
    let failures = format!("buildkit_operator_oidc_refreshes_total{{issuer=\"{}\",result=\"failure\"}}", issuer.url);
    api.until_metric(&failures, 2).await;
    assert_eq!(api.route(&key.token(&issuer.claims(&json!({})))).await.status, 503);
    issuer.change(|answers| answers.silent = false);
    api.until_known(&issuer.url).await;
    assert_eq!(api.route(&key.token(&issuer.claims(&json!({})))).await.status, 200);
}

#[tokio::test]
async fn an_authority_that_is_not_ours_is_not_believed() {
    let key = Key::curve("k1", "ES256");
    let (issuer, stranger) = (Issuer::start(&[&key]).await, Issuer::start(&[&key]).await);
    for ca_file in [Some(stranger.ca_file.path()), None] {
        let mut provider = issuer.provider("github");
        provider["caFile"] = json!(ca_file);
        let api = Api::start(providers(&json!([provider])), eager(600_000)).await;
        let failures =
            format!("buildkit_operator_oidc_refreshes_total{{issuer=\"{}\",result=\"failure\"}}", issuer.url);
        api.until_metric(&failures, 1).await;
        assert_eq!(api.route(&key.token(&issuer.claims(&json!({})))).await.status, 503);
    }
    assert_eq!(issuer.asked(), 0);
}
