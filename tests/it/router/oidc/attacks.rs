//! What is tried against those who accept tokens, each refused for its own reason.

use ring::hmac;
use serde_json::{Value, json};

use super::super::answers::Log;
use super::super::issuer::{Issuer, Key, assemble, encode, now};
use super::super::{SHOP, call};
use super::{Api, patient, providers, why};

/// A name, a token, and what its sender is told.
type Attack = (&'static str, String, &'static str);

const KEY: &str = "no key of the issuer fits the token's key id and algorithm";
const SIGNATURE: &str = "the token's signature is wrong";
const ISSUER: &str = "the token's issuer is not configured";
const AUDIENCE: &str = "the token's audience is another";
const EARLY: &str = "the token is not valid yet";
const EXPIRED: &str = "the token has expired";
const HEADER: &str = "malformed token: its header is no JSON object of distinct names";
const CLAIMS: &str = "malformed token: its claims are no JSON object of distinct names";
const EXTENSIONS: &str = "malformed token: it needs extensions that are not supported";
const TYPE: &str = "malformed token: its type is not JWT";

/// The real issuer, another one that is configured too, and an attacker's keys.
struct Field {
    issuer: Issuer,
    other: Issuer,
    good: Key,
    /// Of the other issuer, under the id of `good`.
    same_id: Key,
    /// Of the other issuer.
    others: Key,
    /// Of nobody.
    forged: Key,
    weak: Key,
    curve: Key,
}

impl Field {
    async fn new() -> Self {
        let (good, same_id, others) = (Key::rsa("k1", "RS256"), Key::rsa("k1", "RS256"), Key::curve("o1", "ES256"));
        let (forged, weak, curve) = (Key::rsa("k1", "RS256"), Key::weak("weak"), Key::curve("c1", "ES256"));
        let issuer = Issuer::start(&[&good, &weak, &curve]).await;
        let encryption = json!({"use": "enc", "kid": "enc"});
        issuer.change(|answers| {
            let mut jwk = good.jwk();
            jwk["use"] = encryption["use"].clone();
            jwk["kid"] = encryption["kid"].clone();
            answers.keys.push(jwk);
            answers.keys.push(json!({"kty": "oct", "kid": "oct", "alg": "HS256", "k": encode(b"a shared secret")}));
            answers.keys.push(json!({"kty": "EC", "crv": "secp256k1", "kid": "k256", "x": "AA", "y": "AA"}));
        });
        let other = Issuer::start(&[&same_id, &others]).await;
        Self { issuer, other, good, same_id, others, forged, weak, curve }
    }

    fn claims(&self, others: &Value) -> Value {
        self.issuer.claims(others)
    }

    fn genuine(&self, others: &Value) -> String {
        self.good.token(&self.claims(others))
    }

    fn headed(&self, header: &Value) -> String {
        self.good.token_with(header, &self.claims(&json!({})))
    }

    /// A genuine claim set with more text before its end.
    fn claims_text(&self, more: &str) -> String {
        let text = self.claims(&json!({})).to_string();
        format!("{},{more}}}", text.trim_end_matches('}'))
    }

    fn signatures(&self) -> Vec<Attack> {
        let claims = self.claims(&json!({})).to_string();
        let public = self.good.jwk().to_string();
        let hmac = |secret: &[u8], id: &str| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
            let header = json!({"alg": "HS256", "kid": id, "typ": "JWT"}).to_string();
            assemble(&header, &claims, |message| hmac::sign(&key, message).as_ref().to_vec())
        };
        let none = |alg: &str| assemble(&json!({"alg": alg, "kid": "k1"}).to_string(), &claims, |_| b"x".to_vec());
        let modulus = self.good.jwk()["n"].as_str().unwrap().to_owned();
        let genuine = self.genuine(&json!({}));
        let (message, signature) = genuine.rsplit_once('.').unwrap();
        let (header, _) = message.split_once('.').unwrap();
        let other_claims = encode(self.claims(&json!({"repository": "victim/secret"})).to_string().as_bytes());
        vec![
            ("alg none", none("none"), KEY),
            ("alg None", none("None"), KEY),
            ("alg none without signature", format!("{message}."), "malformed token: its signature is no base64url"),
            ("HMAC with the public key as JSON", hmac(public.as_bytes(), "k1"), KEY),
            ("HMAC with the modulus", hmac(modulus.as_bytes(), "k1"), KEY),
            ("HMAC with a symmetric key of the set", hmac(b"a shared secret", "oct"), KEY),
            ("HMAC with nothing", hmac(b"", "k1"), KEY),
            ("another algorithm of the family", self.headed(&json!({"alg": "RS512", "kid": "k1"})), KEY),
            ("PSS in the place of PKCS1", self.headed(&json!({"alg": "PS256", "kid": "k1"})), KEY),
            ("ES256 named for an RSA key", self.headed(&json!({"alg": "ES256", "kid": "k1"})), KEY),
            ("RS256 named for a curve's key", self.headed(&json!({"alg": "RS256", "kid": "c1"})), KEY),
            ("an algorithm nobody knows", self.headed(&json!({"alg": "XS1", "kid": "k1"})), KEY),
            ("no algorithm", self.headed(&json!({"kid": "k1"})), "malformed token: it names no algorithm"),
            ("a forged key", self.forged.token(&self.claims(&json!({}))), SIGNATURE),
            ("claims exchanged", format!("{header}.{other_claims}.{signature}"), SIGNATURE),
            (
                "a zero signature",
                assemble(&json!({"alg": "ES256", "kid": "c1"}).to_string(), &claims, |_| vec![0; 64]),
                SIGNATURE,
            ),
            ("a signature cut", format!("{message}.{}", &signature[..signature.len() - 2]), SIGNATURE),
            ("weak RSA", self.weak.token(&self.claims(&json!({}))), KEY),
            ("a key for encryption", self.headed(&json!({"alg": "RS256", "kid": "enc"})), KEY),
        ]
    }

    fn keys(&self) -> Vec<Attack> {
        let (jwk, forged) = (self.forged.jwk(), &self.forged);
        let brought = |name: &str, value: Value| {
            let header = json!({"alg": "RS256", "kid": "mine", name: value});
            forged.token_with(&header, &self.claims(&json!({})))
        };
        let under_k1 = |name: &str, value: Value| {
            let header = json!({"alg": "RS256", "kid": "k1", name: value});
            forged.token_with(&header, &self.claims(&json!({})))
        };
        let evil = json!(format!("{}/keys", self.other.url));
        let of_other = |key: &Key| key.token(&self.claims(&json!({})));
        vec![
            ("wrong kid", self.headed(&json!({"alg": "RS256", "kid": "k2"})), KEY),
            ("kid in another case", self.headed(&json!({"alg": "RS256", "kid": "K1"})), KEY),
            ("kid with a NUL", self.headed(&json!({"alg": "RS256", "kid": "k1\u{0}"})), KEY),
            ("kid as a path", self.headed(&json!({"alg": "RS256", "kid": "../../dev/null"})), KEY),
            (
                "kid as a number",
                self.headed(&json!({"alg": "RS256", "kid": 1})),
                "malformed token: its key id is no text",
            ),
            ("kid null", self.headed(&json!({"alg": "RS256", "kid": null})), "malformed token: its key id is no text"),
            ("kid empty", self.headed(&json!({"alg": "RS256", "kid": ""})), KEY),
            ("no kid, forged", self.forged.token_with(&json!({"alg": "RS256"}), &self.claims(&json!({}))), SIGNATURE),
            ("kid of another issuer", of_other(&self.others), KEY),
            ("another issuer's key under the same kid", of_other(&self.same_id), SIGNATURE),
            ("a key brought along as jwk", brought("jwk", jwk.clone()), KEY),
            ("a key brought along as jku", brought("jku", evil.clone()), KEY),
            ("a key brought along as x5u", brought("x5u", evil.clone()), KEY),
            ("a key brought along as x5c", brought("x5c", json!(["MIIB"])), KEY),
            ("jwk under a known kid", under_k1("jwk", jwk), SIGNATURE),
            ("jku under a known kid", under_k1("jku", evil), SIGNATURE),
            ("crit", self.headed(&json!({"alg": "RS256", "kid": "k1", "crit": ["exp"]})), EXTENSIONS),
            ("crit empty", self.headed(&json!({"alg": "RS256", "kid": "k1", "crit": []})), EXTENSIONS),
            ("b64", self.headed(&json!({"alg": "RS256", "kid": "k1", "b64": false})), EXTENSIONS),
            ("typ of a logout token", self.headed(&json!({"alg": "RS256", "kid": "k1", "typ": "logout+jwt"})), TYPE),
            ("typ as a number", self.headed(&json!({"alg": "RS256", "kid": "k1", "typ": 1})), TYPE),
        ]
    }

    fn claim_sets(&self) -> Vec<Attack> {
        let with = |others: Value| self.genuine(&others);
        vec![
            ("another audience", with(json!({"aud": "other"})), AUDIENCE),
            ("no audience", with(json!({"aud": null})), AUDIENCE),
            ("an empty audience", with(json!({"aud": ""})), AUDIENCE),
            ("an empty list of audiences", with(json!({"aud": []})), AUDIENCE),
            ("other audiences", with(json!({"aud": ["a", "b"]})), AUDIENCE),
            ("part of the audience", with(json!({"aud": "buildkit-operator2"})), AUDIENCE),
            ("audience in another case", with(json!({"aud": "Buildkit-Operator"})), AUDIENCE),
            ("audience as an object", with(json!({"aud": {"buildkit-operator": 1}})), AUDIENCE),
            ("expired", with(json!({"exp": now() - 61})), EXPIRED),
            ("expired long ago", with(json!({"exp": 0})), EXPIRED),
            ("negative exp", with(json!({"exp": -1})), EXPIRED),
            ("no exp", with(json!({"exp": null})), "the token's claim exp is missing"),
            ("exp as text", with(json!({"exp": "9999999999"})), "the token's claim exp is no number of seconds"),
            ("exp beyond all time", with(json!({"exp": 1e300})), "the token's claim exp is no number of seconds"),
            ("nbf in the future", with(json!({"nbf": now() + 120})), EARLY),
            ("iat in the future", with(json!({"iat": now() + 120})), EARLY),
            ("iat as text", with(json!({"iat": "now"})), "the token's claim iat is no number of seconds"),
            (
                "no repository",
                with(json!({"repository": null})),
                "the token's claim repository is missing, blank or no text",
            ),
            (
                "repository as a list",
                with(json!({"repository": ["acme/shop"]})),
                "the token's claim repository is missing, blank or no text",
            ),
            (
                "repository with a NUL",
                with(json!({"repository": "acme/shop\u{0}"})),
                "the token's claim repository is no path of a repository",
            ),
            (
                "repository that climbs",
                with(json!({"repository": "acme/../victim"})),
                "the token's claim repository is no path of a repository",
            ),
            (
                "repository with a host",
                with(json!({"repository": "https://evil.example/a"})),
                "the token's claim repository is no path of a repository",
            ),
        ]
    }

    fn look_alikes(&self) -> Vec<Attack> {
        let url = &self.issuer.url;
        let port = self.issuer.port();
        let from = |issuer: String| self.genuine(&json!({"iss": issuer}));
        vec![
            ("two slashes at the end", from(format!("{url}//")), ISSUER),
            ("issuer in another case", from(url.replace("localhost", "LocalHost")), ISSUER),
            ("scheme in another case", from(url.replace("https", "HTTPS")), ISSUER),
            ("without TLS", from(url.replace("https", "http")), ISSUER),
            ("with a user", from(url.replace("localhost", "localhost@evil.example")), ISSUER),
            ("a user like the issuer", from(format!("https://localhost:{port}@evil.example/api/actions")), ISSUER),
            ("another port", from(url.replace(&port.to_string(), "443")), ISSUER),
            ("with a suffix", from(format!("{url}.evil.example")), ISSUER),
            ("with a longer path", from(format!("{url}/evil")), ISSUER),
            ("with a query", from(format!("{url}?")), ISSUER),
            ("with a fragment", from(format!("{url}#")), ISSUER),
            ("with a space", from(format!("{url} ")), ISSUER),
            ("with a NUL", from(format!("{url}\u{0}")), ISSUER),
            ("a Cyrillic o", from(url.replace("localhost", "l\u{43e}calhost")), ISSUER),
            ("a dot after the host", from(url.replace("localhost", "localhost.")), ISSUER),
            ("percent for a slash", from(url.replace("/actions", "%2Factions")), ISSUER),
            ("a path that climbs", from(format!("{url}/../actions")), ISSUER),
            ("no issuer", self.genuine(&json!({"iss": null})), ISSUER),
            ("a list of issuers", self.genuine(&json!({"iss": [url]})), ISSUER),
            ("an attacker's issuer", self.forged.token(&self.claims(&json!({"iss": "https://evil.example"}))), ISSUER),
        ]
    }

    fn shapes(&self) -> Vec<Attack> {
        let header = json!({"alg": "RS256", "kid": "k1"}).to_string();
        let of = |header: &str, claims: &str| self.good.token_of(header, claims);
        let claims = self.claims(&json!({})).to_string();
        let genuine = self.genuine(&json!({}));
        let part = |n: usize| genuine.split('.').nth(n).unwrap();
        vec![
            ("a claim twice", of(&header, &self.claims_text(r#""repository":"victim/secret""#)), CLAIMS),
            ("a claim twice, once escaped", of(&header, &self.claims_text(r#""\u0061ud":"x""#)), CLAIMS),
            ("a claim twice within another", of(&header, &self.claims_text(r#""x":{"a":1,"a":2}"#)), CLAIMS),
            ("alg twice", of(r#"{"alg":"RS256","kid":"k1","alg":"none"}"#, &claims), HEADER),
            ("kid twice", of(r#"{"alg":"RS256","kid":"k1","kid":"k2"}"#, &claims), HEADER),
            (
                "oversized",
                of(&header, &self.claims_text(&format!(r#""x":"{}""#, "x".repeat(17_000)))),
                "malformed token: more than 16 KiB",
            ),
            (
                "nested too deep",
                of(&header, &self.claims_text(&format!(r#""x":{}1{}"#, "[".repeat(2000), "]".repeat(2000)))),
                CLAIMS,
            ),
            ("claims that are a list", of(&header, "[1]"), CLAIMS),
            ("claims that are null", of(&header, "null"), CLAIMS),
            ("claims with more behind them", of(&header, &format!("{claims} {{}}")), CLAIMS),
            ("a header that is no JSON", of("alg", &claims), HEADER),
            ("padding", format!("{}=.{}.{}", part(0), part(1), part(2)), HEADER),
            (
                "base64 of the other alphabet",
                format!("{}.{}.+/+/", part(0), part(1)),
                "malformed token: its signature is no base64url",
            ),
            ("three empty parts", "..".to_owned(), HEADER),
            ("no JWT, with two dots", "a.b.c".to_owned(), HEADER),
        ]
    }
}

#[tokio::test]
async fn every_known_attack_is_refused_for_its_own_reason_and_changes_nothing() {
    let log = Log::default();
    let _capture = log.capture();
    let field = Field::new().await;
    let config = json!([field.issuer.provider("github"), field.other.provider("forgejo")]);
    let api = Api::start(providers(&config), patient()).await;
    api.until_known(&field.issuer.url).await;
    api.until_known(&field.other.url).await;
    let tables = [field.signatures(), field.keys(), field.claim_sets(), field.look_alikes(), field.shapes()];
    let mut wrong = Vec::new();
    let mut sent = Vec::new();
    for (name, token, want) in tables.into_iter().flatten() {
        for path in ["/route", "/prewarm"] {
            let answer = api.post(path, &token, SHOP).await;
            if answer.status != 401 || answer.body != "Unauthorized\n" || why(&answer) != want {
                wrong.push(format!("{name}: {} {:?} {:?}, want {want:?}", answer.status, answer.body, why(&answer)));
            }
        }
        sent.push(token);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(api.memory.seen().projects.is_empty(), "{:?}", api.memory.seen().projects);

    // The field is not barren: what is genuine is accepted, in all its spellings.
    let mut genuine = vec![
        field.genuine(&json!({})),
        field.genuine(&json!({"iss": format!("{}/", field.issuer.url)})),
        field.genuine(&json!({"aud": ["other", "buildkit-operator"]})),
        field.genuine(&json!({"exp": now() - 30})),
        field.genuine(&json!({"nbf": now() + 30, "iat": now() + 30})),
        field.genuine(&json!({"nbf": null, "iat": null})),
        field.headed(&json!({"alg": "RS256"})),
        field.headed(&json!({"alg": "RS256", "kid": "k1", "typ": "jwt", "jku": "https://evil.example", "x5t": "x"})),
        field.curve.token(&field.claims(&json!({}))),
        field.others.token(&field.other.claims(&json!({}))),
    ];
    for token in &genuine {
        let answer = api.route(token).await;
        assert_eq!(answer.status, 200, "{answer:?} {}", why(&answer));
    }
    assert_eq!(
        (field.issuer.asked(), field.other.asked()),
        (1, 1),
        "unknown key ids are looked up once a minute at most"
    );
    let text = log.text();
    sent.append(&mut genuine);
    for token in sent.iter().filter(|token| token.len() > 40) {
        let signature = token.rsplit('.').next().unwrap();
        assert!(
            !text.contains(token.as_str()) && (signature.len() < 20 || !text.contains(signature)),
            "a token is logged"
        );
    }
    assert!(text.contains("\"identity.refused\":\"bad_signature\""), "the reason is logged");
}

#[tokio::test]
async fn what_does_not_look_like_a_token_is_not_verified() {
    let key = Key::curve("k1", "ES256");
    let issuer = Issuer::start(&[&key]).await;
    let api = Api::of(&issuer).await;
    for bearer in ["abc", "a.b", "a.b.c.d", "."] {
        let answer = api.route(bearer).await;
        assert_eq!((answer.status.as_u16(), why(&answer)), (401, ""), "{bearer}");
    }
    assert_eq!(call(&api.router, "POST", "/route", &[], SHOP).await.status, 401);
}
