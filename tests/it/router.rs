//! The routing API over a provisioner in memory: on real sockets where the wire
//! or a connection matters, else as a service under paused time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "this is a test, also outside of #[test] functions"
)]

pub(crate) mod answers;
mod cancel;
mod connections;
pub(crate) mod memory;
mod oidc;
mod openapi;
mod projects;
mod ps;
mod tls;
mod wire;

#[path = "../vectors/differences.rs"]
mod differences;

#[path = "../vectors/issuer.rs"]
mod issuer;

#[path = "../vectors/replay.rs"]
mod replay;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use bko_install::router::{Auth, Config, Metrics, RateLimit, Router, Secret, Timeouts, TrustedProxies, run};
use http_body_util::BodyExt;
use memory::Memory;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

const SHOP: &str = r#"{"repo":"https://github.com/acme/shop","arch":"amd64"}"#;
const SHOP_KEY: &str = "p41bd34a2227aca39";

/// Open, without a limit, with the reference's defaults.
pub(crate) fn open() -> Config {
    Config {
        auth: Auth { open: true, ..Auth::default() },
        rate: RateLimit::new(0.0, 0).unwrap(),
        source_rate: RateLimit::new(0.0, 0).unwrap(),
        max_cold_starts: 8.try_into().unwrap(),
        route_wait: Duration::from_secs(180),
        require_build_id: false,
        trusted_proxies: TrustedProxies::default(),
    }
}

pub(crate) fn tokens() -> Config {
    let (token, admin_token) = (Some(Secret::new("s3cret")), Some(Secret::new("root-tok")));
    Config { auth: Auth { token, admin_token, ..Auth::default() }, ..open() }
}

/// An answer in parts.
#[derive(Debug)]
struct Answered {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answered {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// One call without a socket.
async fn call(router: &Router, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answered {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let (head, body) = router.service().oneshot(request).await.unwrap().into_parts();
    let body = String::from_utf8(body.collect().await.unwrap().to_bytes().to_vec()).unwrap();
    Answered { status: head.status, headers: head.headers, body }
}

async fn post(router: &Router, path: &str, body: &str) -> Answered {
    call(router, "POST", path, &[], body).await
}

/// A server on a real socket.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    shutdown: CancellationToken,
    done: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(config: Config, memory: &Arc<Memory>, timeouts: Timeouts) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let auth = config.auth.clone();
        let router = Router::new(config, memory.clone(), Metrics::default());
        let shutdown = CancellationToken::new();
        tokio::spawn(auth.keep_fresh(shutdown.clone()));
        let done = tokio::spawn(run(listener, router, timeouts, None, shutdown.clone()));
        Self { address, shutdown, done }
    }

    async fn stop(self) {
        self.shutdown.cancel();
        tokio::time::timeout(Duration::from_secs(20), self.done).await.unwrap().unwrap();
    }
}
