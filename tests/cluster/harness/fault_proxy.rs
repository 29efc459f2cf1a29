//! A proxy in front of the real API server, for faults that it does not show by
//! itself: at the request that a test waits for, it calls the test, which ends
//! the sender in that moment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Request, StatusCode, header};
use axum::response::Response;
use hyper::body::Bytes;
use kube::Client;
use serde_json::json;
use tokio::sync::watch;

/// When the sender ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    /// The API server never gets the request.
    BeforeItIsSent,
    /// It gets it, perhaps after the sender has ended.
    AfterItIsSent,
    /// It has answered; the answer is lost.
    BeforeTheReply,
}

impl At {
    pub(crate) const ALL: [Self; 3] = [Self::BeforeItIsSent, Self::AfterItIsSent, Self::BeforeTheReply];
}

type Matches = Box<dyn Fn(&Parts, &[u8]) -> bool + Send + Sync>;

struct Rule {
    matches: Matches,
    /// How many such requests pass.
    spare: usize,
    at: At,
    act: Box<dyn FnOnce() + Send>,
}

struct Shared {
    client: Client,
    rule: Mutex<Option<Rule>>,
    hits: watch::Sender<usize>,
}

/// Serves until the value is dropped.
pub(crate) struct FaultProxy {
    shared: Arc<Shared>,
    kubeconfig: PathBuf,
    task: tokio::task::JoinHandle<()>,
}

impl FaultProxy {
    /// A proxy with the rights of `client`.
    pub(crate) async fn start(client: Client) -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { client, rule: Mutex::default(), hits: watch::Sender::default() });
        let state = shared.clone();
        let app = axum::Router::new().fallback(move |request| pass(state.clone(), request));
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap_or_default() });
        Ok(Self { shared, kubeconfig: write_kubeconfig(address)?, task })
    }

    /// For who is to speak through it.
    pub(crate) fn kubeconfig(&self) -> &std::path::Path {
        &self.kubeconfig
    }

    /// Calls `act` at the request after `spare` that match; once.
    pub(crate) fn arm(
        &self,
        matches: impl Fn(&Parts, &[u8]) -> bool + Send + Sync + 'static,
        spare: usize,
        at: At,
        act: impl FnOnce() + Send + 'static,
    ) {
        *self.shared.rule.lock().unwrap() = Some(Rule { matches: Box::new(matches), spare, at, act: Box::new(act) });
    }

    /// Forgets what it was armed with.
    pub(crate) fn disarm(&self) {
        *self.shared.rule.lock().unwrap() = None;
    }

    /// Waits until `act` was called so often in all.
    pub(crate) async fn hit(&self, times: usize) {
        let _ = self.shared.hits.subscribe().wait_for(|hits| *hits >= times).await;
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn write_kubeconfig(address: SocketAddr) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(format!("/run/bko/through-{}.json", address.port()));
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
        "clusters": [{"name": "proxy", "cluster": {"server": format!("http://{address}")}}],
        "users": [{"name": "proxy", "user": {}}],
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
    });
    std::fs::write(&path, config.to_string())?;
    Ok(path)
}

async fn pass(shared: Arc<Shared>, request: Request<Body>) -> Response {
    let (mut parts, body) = request.into_parts();
    let Ok(body) = axum::body::to_bytes(body, usize::MAX).await else { return failed() };
    parts.headers.remove(header::HOST);
    let rule = take(&shared, &parts, &body);
    let client = shared.client.clone();
    let forward = async move { send(client, parts, body).await };
    let Some(Rule { at, act, .. }) = rule else { return forward.await };
    match at {
        At::BeforeItIsSent => act(),
        At::AfterItIsSent => {
            tokio::spawn(forward);
            act();
        }
        At::BeforeTheReply => {
            forward.await;
            act();
        }
    }
    shared.hits.send_modify(|hits| *hits += 1);
    failed()
}

/// The rule, if its request has come.
fn take(shared: &Shared, parts: &Parts, body: &[u8]) -> Option<Rule> {
    let mut rule = shared.rule.lock().unwrap();
    let waiting = rule.as_mut().filter(|rule| (rule.matches)(parts, body))?;
    if waiting.spare > 0 {
        waiting.spare -= 1;
        return None;
    }
    rule.take()
}

async fn send(client: Client, parts: Parts, body: Bytes) -> Response {
    match client.send(Request::from_parts(parts, kube::client::Body::from(body))).await {
        Ok(response) => response.map(Body::new),
        Err(_) => failed(),
    }
}

fn failed() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response
}
