//! The way from a replica to the API server: a client over the model, with
//! delays, losses, refusals, and watches that lag or end.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::stream;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::sync::Notify;

use crate::model::{Change, Event, Kind, Preconditions, Refused, Stored, text};
use crate::world::World;

/// The machine that a replica runs on.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// How wrong its wall clock is.
    pub(crate) offset_ms: AtomicI64,
    condition: Mutex<Condition>,
    changed: Notify,
}

/// Whether bytes pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Up,
    /// Nothing passes for now.
    Frozen,
    /// The process is gone; what it has sent is on its way.
    Dead,
}

impl Node {
    pub(crate) fn new(name: String, offset_ms: i64) -> Self {
        Self {
            name,
            offset_ms: AtomicI64::new(offset_ms),
            condition: Mutex::new(Condition::Up),
            changed: Notify::new(),
        }
    }

    pub(crate) fn set(&self, condition: Condition) {
        *self.condition.lock().unwrap() = condition;
        self.changed.notify_waiters();
    }

    pub(crate) fn condition(&self) -> Condition {
        *self.condition.lock().unwrap()
    }

    /// Returns when bytes pass; never, once the process is gone.
    async fn passable(&self) {
        self.is(Condition::Up).await;
    }

    /// Returns when the process is gone.
    pub(crate) async fn died(&self) {
        self.is(Condition::Dead).await;
    }

    async fn is(&self, wanted: Condition) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.condition() == wanted {
                return;
            }
            changed.await;
        }
    }

    pub(crate) fn offset(&self) -> i64 {
        self.offset_ms.load(Ordering::Relaxed)
    }
}

/// One replica's connection.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) world: Arc<World>,
    pub(crate) node: Arc<Node>,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Reply = Result<Response<Body>, BoxError>;

impl tower::Service<Request<kube::client::Body>> for Link {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Reply> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        Box::pin(self.clone().exchange(request))
    }
}

/// What becomes of one exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Fine,
    RequestLost,
    ReplyLost,
    Refused(u16),
}

impl Link {
    async fn exchange(self, request: Request<kube::client::Body>) -> Reply {
        let (head, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        self.node.passable().await;
        let fate = self.fate();
        self.delay().await;
        match fate {
            Fate::RequestLost => {
                self.world.say(&self.node.name, format_args!("request lost: {} {}", head.method, head.uri.path()));
                self.world.reached(if scales_down(&head.uri, &body) { "scale-down lost" } else { "request lost" });
                self.world.pause(0, 3_000).await;
                return self.lost().await;
            }
            Fate::Refused(code) => {
                self.world.reached("request refused by a fault");
                return Ok(refusal(Refused { code, reason: "Storm" }));
            }
            Fate::Fine | Fate::ReplyLost => {}
        }
        let reply = self.serve(&head.method, &head.uri, &body);
        let scale_down = scales_down(&head.uri, &body);
        if scale_down && reply.status() == StatusCode::CONFLICT {
            self.world.reached("scale-down refused for a conflict");
        }
        if fate == Fate::ReplyLost {
            self.world.reached(if scale_down { "scale-down whose reply was lost" } else { "reply lost" });
            self.world.say(&self.node.name, format_args!("reply lost: {} {}", head.method, head.uri.path()));
            self.world.pause(0, 3_000).await;
            return self.lost().await;
        }
        self.delay().await;
        self.node.passable().await;
        Ok(reply)
    }

    async fn lost(&self) -> Reply {
        self.node.passable().await;
        Err("connection reset by peer".into())
    }

    fn fate(&self) -> Fate {
        let mut state = self.world.state();
        let lost = self.world.temper.lost;
        if !state.stormy || state.chance.u8(0..100) >= lost {
            return Fate::Fine;
        }
        match state.chance.u8(0..7) {
            0..=2 => Fate::RequestLost,
            3..=5 => Fate::ReplyLost,
            _ => Fate::Refused([429, 500, 503, 504][state.chance.usize(0..4)]),
        }
    }

    async fn delay(&self) {
        let ms = {
            let mut state = self.world.state();
            let slow = state.stormy && state.chance.u8(0..100) < self.world.temper.slow;
            if slow {
                state.reached("request that took seconds");
            }
            match (slow, state.chance.u8(0..4)) {
                (true, 0) => state.chance.u64(5_000..40_000),
                (true, _) => state.chance.u64(100..5_000),
                (false, _) => state.chance.u64(1..15),
            }
        };
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    /// The request takes effect, now.
    fn serve(&self, method: &Method, uri: &http::Uri, body: &Bytes) -> Response<Body> {
        let segments: Vec<&str> = uri.path().split('/').skip_while(|s| *s != "namespaces").skip(2).collect();
        let query: Vec<(String, String)> = url(uri.query().unwrap_or_default());
        let parameter = |name: &str| query.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
        let Some(kind) = segments.first().and_then(|plural| Kind::from_plural(plural)) else {
            return refusal(crate::model::NOT_FOUND);
        };
        let parsed: Value = if body.is_empty() { Value::Null } else { serde_json::from_slice(body).unwrap() };
        let who = &self.node.name;
        let answer = match (method.as_str(), segments.get(1), segments.get(2)) {
            ("GET", None, _) if parameter("watch") == Some("true") => {
                let from = parameter("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(0);
                return self.watch(kind, selected(kind, &query), from);
            }
            ("GET", None, _) => return self.list(kind, selected(kind, &query).as_deref()),
            ("GET", Some(name), _) => {
                self.world.say(who, format_args!("get {}/{name}", kind.plural()));
                self.world.state().model.get(kind, name).cloned().ok_or(crate::model::NOT_FOUND)
            }
            ("POST", None, _) => {
                let id = (kind, text(&parsed, "/metadata/name").to_owned());
                self.world.change(who, "create", &id, &mut |model| model.create(kind, parsed.clone()))
            }
            ("PUT", Some(name), None) => {
                let id = (kind, (*name).to_owned());
                self.world.change(who, "replace", &id, &mut |model| model.replace(kind, name, parsed.clone()))
            }
            ("PUT", Some(name), Some(&"status")) => {
                let id = (kind, (*name).to_owned());
                self.world
                    .change(who, "write the status of", &id, &mut |model| model.replace_status(kind, name, &parsed))
            }
            ("PATCH", Some(name), None) => {
                let id = (kind, (*name).to_owned());
                self.world.change(who, "patch", &id, &mut |model| model.merge(kind, name, &parsed))
            }
            ("DELETE", Some(name), None) => {
                let wanted = |field| Some(text(&parsed["preconditions"], field).to_owned()).filter(|s| !s.is_empty());
                let preconditions = Preconditions { uid: wanted("/uid"), version: wanted("/resourceVersion") };
                let id = (kind, (*name).to_owned());
                self.world.change(who, "delete", &id, &mut |model| model.delete(kind, name, &preconditions))
            }
            other => panic!("the model knows no {other:?}"),
        };
        answer.map_or_else(refusal, |stored| found(&stored))
    }

    fn list(&self, kind: Kind, only: Option<&str>) -> Response<Body> {
        let state = self.world.state();
        let (version, name) = kind.type_meta();
        let items: Vec<&Value> = state
            .model
            .list(kind)
            .filter(|(name, _)| only.is_none_or(|only| only == *name))
            .map(|(_, stored)| &*stored.value)
            .collect();
        let metadata = json!({"resourceVersion": state.model.version().to_string()});
        let list = json!({"apiVersion": version, "kind": format!("{name}List"), "metadata": metadata, "items": items});
        Response::new(Body::from(list.to_string()))
    }

    fn watch(&self, kind: Kind, only: Option<String>, from: u64) -> Response<Body> {
        let begin = {
            let state = self.world.state();
            state.model.log.partition_point(|event| event.version <= from)
        };
        let follow = Follow { link: self.clone(), kind, only, next: begin, behind_ms: 0 };
        Response::new(Body::from_stream(stream::unfold(follow, Follow::line)))
    }
}

/// A watch under way.
struct Follow {
    link: Link,
    kind: Kind,
    only: Option<String>,
    next: usize,
    /// How far behind the truth it is at present.
    behind_ms: u64,
}

impl Follow {
    async fn line(mut self) -> Option<(Result<Bytes, BoxError>, Self)> {
        let event = self.event().await;
        let (world, node) = (Arc::clone(&self.link.world), Arc::clone(&self.link.node));
        let (ends, arrives) = {
            let mut state = world.state();
            let stormy = state.stormy && state.chance.u8(0..100) < world.temper.watch;
            let ends = stormy && state.chance.u8(0..4) == 0;
            // A connection that is behind stays so for a while.
            self.behind_ms = match (stormy, state.chance.u8(0..3)) {
                (true, 0) => state.chance.u64(5_000..30_000),
                (true, _) => state.chance.u64(50..5_000),
                (false, 0) => 0,
                (false, _) if state.stormy => self.behind_ms,
                (false, _) => 0,
            };
            if ends {
                state.reached("watch ended");
            } else if self.behind_ms >= 5_000 {
                state.reached("watch seconds behind");
            }
            (ends, event.at + self.behind_ms + state.chance.u64(1..20))
        };
        tokio::time::sleep(Duration::from_millis(arrives.saturating_sub(world.ms()))).await;
        node.passable().await;
        if ends {
            return None;
        }
        Some((Ok(line(&event)), self))
    }

    async fn event(&mut self) -> Event {
        let world = Arc::clone(&self.link.world);
        loop {
            let mut changed = pin!(world.changed(self.kind).notified());
            changed.as_mut().enable();
            {
                let state = world.state();
                while let Some(event) = state.model.log.get(self.next) {
                    self.next += 1;
                    if event.id.0 == self.kind && self.only.as_ref().is_none_or(|only| *only == event.id.1) {
                        return event.clone();
                    }
                }
            }
            changed.await;
        }
    }
}

/// Whether a request takes a daemon to zero.
fn scales_down(uri: &http::Uri, body: &Bytes) -> bool {
    let is_set = uri.path().contains("/statefulsets/") && !body.is_empty();
    is_set && serde_json::from_slice::<Value>(body).is_ok_and(|set| set["spec"]["replicas"] == 0)
}

/// The one object that a list or watch is about, if it is about one. Slices are
/// named as their Service; everything else that is here is a daemon's.
fn selected(kind: Kind, query: &[(String, String)]) -> Option<String> {
    query.iter().find_map(|(name, value)| match name.as_str() {
        "fieldSelector" => value.strip_prefix("metadata.name=").map(str::to_owned),
        "labelSelector" if kind == Kind::Slice => {
            Some(value.strip_prefix("kubernetes.io/service-name=").unwrap_or("nobody").to_owned())
        }
        _ => None,
    })
}

fn line(event: &Event) -> Bytes {
    let change = match event.change {
        Change::Added => "ADDED",
        Change::Modified => "MODIFIED",
        Change::Deleted => "DELETED",
    };
    let mut line = format!("{{\"type\":\"{change}\",\"object\":").into_bytes();
    line.extend_from_slice(&event.json);
    line.extend_from_slice(b"}\n");
    line.into()
}

fn found(stored: &Stored) -> Response<Body> {
    Response::new(Body::from(stored.json.clone()))
}

fn refusal(refused: Refused) -> Response<Body> {
    let Refused { code, reason } = refused;
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": reason, "reason": reason, "code": code});
    let mut response = Response::new(Body::from(status.to_string()));
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}

/// Pairs of a query.
fn url(query: &str) -> Vec<(String, String)> {
    let decode = |text: &str| text.replace("%3D", "=").replace("%2F", "/");
    query.split('&').filter_map(|pair| pair.split_once('=')).map(|(n, v)| (decode(n), decode(v))).collect()
}
