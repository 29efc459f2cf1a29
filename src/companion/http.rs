//! The companion over HTTP, for probes, the controller and Prometheus. Read
//! only, and answered from what is known: build steps share the pod's network.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use jiff::Timestamp;
use prometheus_client::registry::Registry;
use serde::Serialize;
use tokio::sync::watch;

use super::observation::{self, Build, Gate, Identity};
use super::upkeep::Sample;
use super::watch::Watch;

/// A sample older than this is none.
const STALE: Duration = Duration::from_secs(10);

/// What the endpoints answer from.
#[derive(Clone, Debug)]
pub struct Sources {
    /// The daemon and the gate.
    pub watch: Watch,
    /// The volume.
    pub samples: watch::Receiver<Option<Sample>>,
    /// Metrics.
    pub registry: Arc<Registry>,
    /// Snapshotter without which the daemon is not ready.
    pub snapshotter: Option<String>,
    /// Longest that a build may be alive without the daemon answering.
    pub longest: Duration,
}

/// The endpoints.
pub fn router(sources: Sources) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/livez", get(livez))
        .route("/usage", get(usage))
        .route("/builds", get(builds))
        .route("/metrics", get(metrics))
        .with_state(sources)
}

async fn readyz(State(sources): State<Sources>) -> Response {
    let watch = &sources.watch;
    verdict(observation::unready(&watch.observation(), watch.gate(), sources.snapshotter.as_deref()))
}

async fn livez(State(sources): State<Sources>) -> Response {
    let watch = &sources.watch;
    verdict(observation::dead(&watch.observation(), watch.clock.now(), sources.longest))
}

fn verdict(problem: Option<impl std::fmt::Display>) -> Response {
    match problem {
        None => (StatusCode::OK, "ok\n").into_response(),
        Some(problem) => (StatusCode::SERVICE_UNAVAILABLE, format!("{problem}\n")).into_response(),
    }
}

/// Body of `/usage`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Usage {
    bytes_used: u64,
    bytes_total: u64,
    inode_ratio: f64,
}

async fn usage(State(sources): State<Sources>) -> Response {
    let sample = *sources.samples.borrow();
    let fresh = sample.filter(|sample| sources.watch.clock.now().saturating_sub(sample.at) < STALE);
    let Some(Sample { volume, .. }) = fresh else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the cache's volume cannot be measured\n").into_response();
    };
    Json(Usage { bytes_used: volume.bytes_used, bytes_total: volume.bytes_total, inode_ratio: volume.inode_ratio() })
        .into_response()
}

/// Body of `/builds`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Builds {
    /// `answering`, `silent`, `gone` or `unknown`.
    daemon: &'static str,
    identity: Identity,
    draining: bool,
    /// Age of `active`: when the daemon last answered.
    heard_ms_ago: u64,
    /// Since a build last ran; absent when none was ever seen.
    idle_ms: Option<u64>,
    active: Vec<Build>,
    finished: Vec<Build>,
    /// When BuildKit last lost what it knew of its cache.
    cache_reset: Option<Timestamp>,
}

async fn builds(State(Sources { watch, samples, .. }): State<Sources>) -> impl IntoResponse {
    let cache_reset = samples.borrow().and_then(|sample| sample.reset);
    let seen = watch.observation();
    let now = watch.clock.now();
    let ago = |then: Duration| u64::try_from(now.saturating_sub(then).as_millis()).unwrap_or(u64::MAX);
    Json(Builds {
        daemon: seen.link.as_str(),
        draining: watch.gate() != Gate::Open,
        heard_ms_ago: ago(seen.heard),
        idle_ms: seen.last_activity.map(ago),
        identity: seen.identity,
        active: seen.active,
        finished: seen.finished,
        cache_reset,
    })
}

async fn metrics(State(sources): State<Sources>) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &sources.registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
