//! The routing API: `/route`, `/prewarm`, `/complete` and `/healthz` over a
//! [`Provisioner`], on the wire as the reference has them; and what can be read
//! of projects: `/projects`, `/projects/{key}` and `/openapi.json`.
//!
//! In go HTTP requests; out come answers, one audit line each, and metrics. It
//! knows nothing of Kubernetes. A request passes, in this order: identify →
//! rate → method → decode → validate → ensure → begin → ready? → queue → wait.

mod answer;
mod args;
mod audit;
mod client;
mod coldstart;
mod endpoints;
mod entry;
mod handlers;
mod identity;
mod limit;
mod metrics;
mod openapi;
mod projects;
mod request;
mod serve;
mod tokens;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::TaskTracker;

pub use args::{ConfigError, RouteArgs};
pub use client::{ParseNetwork, TrustedProxies};
pub use identity::{Auth, AuthError, GivenToken, Identity, Secret};
pub use limit::{RateError, RateLimit};
pub use metrics::Metrics;
pub use serve::{Arrival, Timeouts, run};
pub use tokens::{TokenDir, TokenDirError};

use crate::provisioner::Provisioner;
use coldstart::ColdStarts;

/// How the routing API behaves.
#[derive(Debug)]
pub struct Config {
    /// Who may call.
    pub auth: Auth,
    /// How often, each caller.
    pub rate: RateLimit,
    /// How often a source address may have a token verified.
    pub source_rate: RateLimit,
    /// How many routes may wait for a daemon at once; the others queue.
    pub max_cold_starts: NonZeroUsize,
    /// The whole time that one route may take: store, queue and wait together.
    pub route_wait: Duration,
    /// Whether `/complete` without a build id is refused.
    pub require_build_id: bool,
    /// Whose `X-Forwarded-For` is believed.
    pub trusted_proxies: TrustedProxies,
}

/// The routing API, ready to be served by [`run`].
#[derive(Clone, Debug)]
pub struct Router {
    app: axum::Router,
    releases: TaskTracker,
}

/// What every handler shares.
struct Shared {
    config: Config,
    provisioner: Arc<dyn Provisioner>,
    cold_starts: ColdStarts,
    metrics: Metrics,
    releases: TaskTracker,
    /// The document of `/openapi.json`.
    document: axum::body::Bytes,
}

impl Router {
    /// Builds the API over a provisioner.
    pub fn new(config: Config, provisioner: Arc<dyn Provisioner>, metrics: Metrics) -> Self {
        let releases = TaskTracker::new();
        let cold_starts = ColdStarts::new(config.max_cold_starts, metrics.clone());
        let document = openapi::document(&config).into();
        let shared =
            Arc::new(Shared { config, provisioner, cold_starts, metrics, releases: releases.clone(), document });
        let app = endpoints::ENDPOINTS
            .iter()
            .fold(axum::Router::new(), |app, endpoint| app.route(endpoint.path, (endpoint.handler)()));
        let app = app.fallback(answer::not_found).with_state(shared);
        Self { app, releases }
    }

    /// The API as a service, for a caller with its own connections.
    pub fn service(&self) -> axum::Router {
        self.app.clone()
    }

    /// Releases of builds that no client will run, still on their way.
    pub fn releases(&self) -> &TaskTracker {
        &self.releases
    }
}
