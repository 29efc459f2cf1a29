//! An identity provider of the tests' own: HTTPS with an authority of its own,
//! keys that rotate, and every fault that a provider or an attacker has.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::http::{Request, Response};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use ring::rand::SystemRandom;
use ring::signature::{self, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RsaKeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

/// The audience that tokens are for.
pub(crate) const AUDIENCE: &str = "buildkit-operator";

/// A key pair and the algorithm that it signs with.
pub(crate) struct Key {
    pub(crate) id: String,
    pub(crate) algorithm: &'static str,
    pair: Pair,
}

enum Pair {
    Rsa(Box<RsaKeyPair>),
    Curve(EcdsaKeyPair, &'static str),
    Edwards(Ed25519KeyPair),
    /// Too weak for anything but the command; modulus, and the key in PEM.
    Weak(Vec<u8>, String),
}

fn openssl(args: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("openssl");
    let mut child =
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("openssl");
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "openssl {args:?}");
    output.stdout
}

impl Key {
    /// RS or PS, 2048 bits.
    pub(crate) fn rsa(id: &str, algorithm: &'static str) -> Self {
        let pem = openssl(&["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048"], b"");
        let der = PrivatePkcs8KeyDer::from_pem_slice(&pem).unwrap();
        let pair = Pair::Rsa(Box::new(RsaKeyPair::from_pkcs8(der.secret_pkcs8_der()).unwrap()));
        Self { id: id.to_owned(), algorithm, pair }
    }

    /// RS256 with 1024 bits.
    pub(crate) fn weak(id: &str) -> Self {
        let pem = openssl(&["genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:1024"], b"");
        let modulus = openssl(&["rsa", "-noout", "-modulus"], &pem);
        let modulus = String::from_utf8(modulus).unwrap().trim().trim_start_matches("Modulus=").to_owned();
        let pair = Pair::Weak(hex::decode(modulus).unwrap(), String::from_utf8(pem).unwrap());
        Self { id: id.to_owned(), algorithm: "RS256", pair }
    }

    /// ES256 or ES384.
    pub(crate) fn curve(id: &str, algorithm: &'static str) -> Self {
        let (kind, curve) = match algorithm {
            "ES256" => (&signature::ECDSA_P256_SHA256_FIXED_SIGNING, "P-256"),
            "ES384" => (&signature::ECDSA_P384_SHA384_FIXED_SIGNING, "P-384"),
            other => panic!("{other}"),
        };
        let random = SystemRandom::new();
        let der = EcdsaKeyPair::generate_pkcs8(kind, &random).unwrap();
        let pair = Pair::Curve(EcdsaKeyPair::from_pkcs8(kind, der.as_ref(), &random).unwrap(), curve);
        Self { id: id.to_owned(), algorithm, pair }
    }

    /// EdDSA.
    pub(crate) fn edwards(id: &str) -> Self {
        let der = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        let pair = Pair::Edwards(Ed25519KeyPair::from_pkcs8(der.as_ref()).unwrap());
        Self { id: id.to_owned(), algorithm: "EdDSA", pair }
    }

    /// The public half.
    pub(crate) fn jwk(&self) -> Value {
        let mut jwk = match &self.pair {
            Pair::Rsa(pair) => {
                let public = signature::RsaPublicKeyComponents::<Vec<u8>>::from(pair.public());
                json!({"kty": "RSA", "n": encode(&public.n), "e": encode(&public.e)})
            }
            Pair::Weak(modulus, _) => json!({"kty": "RSA", "n": encode(modulus), "e": "AQAB"}),
            Pair::Curve(pair, curve) => {
                let point = &pair.public_key().as_ref()[1..];
                let (x, y) = point.split_at(point.len() / 2);
                json!({"kty": "EC", "crv": curve, "x": encode(x), "y": encode(y)})
            }
            Pair::Edwards(pair) => json!({"kty": "OKP", "crv": "Ed25519", "x": encode(pair.public_key().as_ref())}),
        };
        jwk["kid"] = self.id.as_str().into();
        jwk["alg"] = self.algorithm.into();
        jwk["use"] = "sig".into();
        jwk
    }

    /// A signature of this key, by its algorithm.
    pub(crate) fn sign(&self, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match &self.pair {
            Pair::Rsa(pair) => {
                let encoding: &'static dyn signature::RsaEncoding = match self.algorithm {
                    "RS256" => &signature::RSA_PKCS1_SHA256,
                    "RS384" => &signature::RSA_PKCS1_SHA384,
                    "RS512" => &signature::RSA_PKCS1_SHA512,
                    "PS256" => &signature::RSA_PSS_SHA256,
                    "PS384" => &signature::RSA_PSS_SHA384,
                    "PS512" => &signature::RSA_PSS_SHA512,
                    other => panic!("{other}"),
                };
                let mut bytes = vec![0; pair.public().modulus_len()];
                pair.sign(encoding, &random, message, &mut bytes).unwrap();
                bytes
            }
            Pair::Weak(_, pem) => {
                let file = tempfile::NamedTempFile::new().unwrap();
                std::fs::write(file.path(), pem).unwrap();
                openssl(&["dgst", "-sha256", "-sign", file.path().to_str().unwrap()], message)
            }
            Pair::Curve(pair, _) => pair.sign(&random, message).unwrap().as_ref().to_vec(),
            Pair::Edwards(pair) => pair.sign(message).as_ref().to_vec(),
        }
    }

    /// A genuine token.
    pub(crate) fn token(&self, claims: &Value) -> String {
        self.token_with(&json!({"alg": self.algorithm, "kid": self.id, "typ": "JWT"}), claims)
    }

    /// A token with a header of one's own, genuinely signed.
    pub(crate) fn token_with(&self, header: &Value, claims: &Value) -> String {
        self.token_of(&header.to_string(), &claims.to_string())
    }

    /// A token of texts, genuinely signed.
    pub(crate) fn token_of(&self, header: &str, claims: &str) -> String {
        assemble(header, claims, |message| self.sign(message))
    }
}

/// `header.claims.signature`.
pub(crate) fn assemble(header: &str, claims: &str, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
    let message = format!("{}.{}", encode(header.as_bytes()), encode(claims.as_bytes()));
    let signature = encode(&sign(message.as_bytes()));
    format!("{message}.{signature}")
}

pub(crate) fn encode(bytes: &[u8]) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap()
}

/// How an issuer answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    /// Cuts every connection.
    pub(crate) down: bool,
    /// Takes every connection, and answers nothing.
    pub(crate) silent: bool,
    /// The public keys.
    pub(crate) keys: Vec<Value>,
    /// Answers of one's own, by path: status, header `Location`, body.
    pub(crate) paths: BTreeMap<String, (u16, String, String)>,
    /// Requests so far, by path.
    pub(crate) asked: BTreeMap<String, usize>,
}

/// A running issuer; ends with the value.
pub(crate) struct Issuer {
    pub(crate) url: String,
    pub(crate) ca_file: tempfile::NamedTempFile,
    answers: watch::Sender<Answers>,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for Issuer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Issuer {
    /// Starts with these keys.
    pub(crate) async fn start(keys: &[&Key]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let url = format!("https://localhost:{}/api/actions", address.port());
        let (acceptor, ca) = certificates();
        let ca_file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(ca_file.path(), ca).unwrap();
        let answers =
            watch::Sender::new(Answers { keys: keys.iter().map(|k| k.jwk()).collect(), ..Answers::default() });
        let serving = tokio::spawn(serve(listener, acceptor, url.clone(), answers.clone()));
        Self { url, ca_file, answers, serving }
    }

    pub(crate) fn port(&self) -> u16 {
        self.url.strip_prefix("https://localhost:").unwrap().split('/').next().unwrap().parse().unwrap()
    }

    /// From here on it answers otherwise.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Answers)) {
        self.answers.send_modify(change);
    }

    pub(crate) fn set_keys(&self, keys: &[&Key]) {
        self.change(|answers| answers.keys = keys.iter().map(|key| key.jwk()).collect());
    }

    /// How often its keys were asked for.
    pub(crate) fn asked(&self) -> usize {
        self.answers.borrow().asked.get(KEYS).copied().unwrap_or_default()
    }

    /// Returns when its keys were asked for so often.
    pub(crate) async fn until_asked(&self, path: &str, times: usize) {
        let mut changes = self.answers.subscribe();
        let asked = changes.wait_for(|answers| answers.asked.get(path).is_some_and(|n| *n >= times));
        tokio::time::timeout(Duration::from_secs(20), asked).await.expect("nobody asks").unwrap();
    }

    /// The claims of a job of `acme/shop`, with some replaced; `null` takes one away.
    pub(crate) fn claims(&self, others: &Value) -> Value {
        let mut claims = json!({
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "repo:acme/shop:ref:refs/heads/main",
            "repository": "acme/shop",
            "ref": "refs/heads/main",
            "event_name": "push",
            "exp": now() + 300,
            "iat": now(),
            "nbf": now(),
        });
        for (name, value) in others.as_object().unwrap() {
            if value.is_null() {
                claims.as_object_mut().unwrap().remove(name);
            } else {
                claims[name] = value.clone();
            }
        }
        claims
    }

    /// A provider of the configuration.
    pub(crate) fn provider(&self, kind: &str) -> Value {
        json!({"type": kind, "issuer": self.url, "audience": AUDIENCE, "host": "github.com", "caFile": self.ca_file.path()})
    }
}

pub(crate) const DISCOVERY: &str = "/api/actions/.well-known/openid-configuration";
pub(crate) const KEYS: &str = "/api/actions/keys";

async fn serve(listener: TcpListener, acceptor: TlsAcceptor, url: String, answers: watch::Sender<Answers>) {
    loop {
        let (tcp, _): (_, SocketAddr) = listener.accept().await.unwrap();
        if answers.borrow().down {
            continue;
        }
        let (acceptor, url, answers) = (acceptor.clone(), url.clone(), answers.clone());
        tokio::spawn(async move {
            let Ok(tls) = acceptor.accept(tcp).await else { return };
            let service = service_fn(|request: Request<hyper::body::Incoming>| {
                let path = request.uri().path().to_owned();
                let (url, answers) = (url.clone(), answers.clone());
                async move {
                    if answers.borrow().silent {
                        std::future::pending::<()>().await;
                    }
                    let answer = answer(&path, &url, &answers.borrow());
                    answers.send_modify(|answers| *answers.asked.entry(path).or_default() += 1);
                    Ok::<_, std::convert::Infallible>(answer)
                }
            });
            let _ = http1::Builder::new().serve_connection(TokioIo::new(tls), service).await;
        });
    }
}

fn answer(path: &str, url: &str, answers: &Answers) -> Response<Body> {
    let (status, location, body) = match (answers.paths.get(path), path) {
        (Some(own), _) => own.clone(),
        (None, DISCOVERY) => {
            let document = json!({"issuer": url, "jwks_uri": format!("{url}/keys"), "id_token_signing_alg_values_supported": ["RS256"]});
            (200, String::new(), document.to_string())
        }
        (None, KEYS) => (200, String::new(), json!({"keys": answers.keys}).to_string()),
        _ => (404, String::new(), String::new()),
    };
    let mut response = Response::builder().status(status).header("content-type", "application/json");
    if !location.is_empty() {
        response = response.header("location", location);
    }
    response.body(Body::from(body)).unwrap()
}

/// A certificate for localhost, and its authority in PEM.
fn certificates() -> (TlsAcceptor, String) {
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&ca_key).unwrap();
    let signer = rcgen::Issuer::new(params, ca_key);
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &signer).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let config = config.with_no_client_auth().with_single_cert(vec![leaf.der().clone()], key).unwrap();
    (TlsAcceptor::from(Arc::new(config)), ca.pem())
}

/// The recorded servers' issuer: ours in its place.
pub(crate) struct Recorded {
    issuer: Issuer,
    key: Key,
    stranger: Key,
}

const PROVIDERS: &str = "BUILDKIT_OPERATOR_OIDC_PROVIDERS";

impl Recorded {
    /// For a recorded environment that has providers, which are then ours.
    pub(crate) async fn of(env: &mut BTreeMap<String, Value>) -> Option<Self> {
        let providers = env.get_mut(PROVIDERS)?;
        let (key, stranger) = (Key::rsa("k1", "RS256"), Key::rsa("k1", "RS256"));
        let issuer = Issuer::start(&[&key]).await;
        for provider in providers.as_array_mut().unwrap() {
            provider["issuer"] = issuer.url.as_str().into();
            provider["caFile"] = json!(issuer.ca_file.path());
        }
        *providers = providers.to_string().into();
        Some(Self { issuer, key, stranger })
    }

    /// What a `<jwt:…>` stands for. Tokens that the record calls expired have
    /// been so for 30 s there, and here for longer than our leeway of 60 s.
    pub(crate) fn token(&self, claims: &str) -> String {
        let mut claims: Value = serde_json::from_str(claims).unwrap();
        if claims["exp"] == "past" {
            claims["exp"] = (now() - 90).into();
        }
        let badly_signed = claims.as_object_mut().unwrap().remove("badly signed").is_some();
        let key = if badly_signed { &self.stranger } else { &self.key };
        key.token(&self.issuer.claims(&claims))
    }
}
