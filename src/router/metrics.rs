//! What the routing API counts.
#![expect(clippy::disallowed_methods, reason = "durations are measured here")]

use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

const ROUTE_SECONDS: [f64; 10] = [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 45.0, 90.0, 180.0];
const COLD_START_SECONDS: [f64; 11] = [1.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0];

/// How a well-formed `/route` ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The daemon was ready.
    Warm,
    /// The daemon had to start.
    Cold,
    /// An untrusted build got its fork's daemon.
    Untrusted,
    /// No endpoint was given; also when the client left.
    Error,
}

impl Outcome {
    /// As metrics and the audit log call it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
            Self::Untrusted => "untrusted",
            Self::Error => "error",
        }
    }

    fn labels(self) -> RouteLabels {
        [("result", self.as_str())]
    }
}

type RouteLabels = [(&'static str, &'static str); 1];

/// The metrics of the routing API; cheap to clone.
#[derive(Clone, Debug)]
pub struct Metrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    routes: Family<RouteLabels, Counter>,
    route_seconds: Histogram,
    cold_start_seconds: Histogram,
    cold_starts: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let routes = Family::<RouteLabels, Counter>::default();
        // A series that exists from the start lets alerts tell "none" from "absent".
        for result in [Outcome::Warm, Outcome::Cold, Outcome::Untrusted, Outcome::Error] {
            drop(routes.get_or_create(&result.labels()));
        }
        Self(Arc::new(Inner {
            routes,
            route_seconds: Histogram::new(ROUTE_SECONDS),
            cold_start_seconds: Histogram::new(COLD_START_SECONDS),
            cold_starts: Gauge::default(),
        }))
    }
}

impl Metrics {
    /// Makes the metrics and registers them under the reference's names.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let Inner { routes, route_seconds, cold_start_seconds, cold_starts } = &*metrics.0;
        // The encoder appends `_total` to the names of counters.
        registry.register("buildkit_operator_routes", "Well-formed calls of /route by result", routes.clone());
        registry.register(
            "buildkit_operator_route_duration_seconds",
            "Time from a well-formed /route to its answer",
            route_seconds.clone(),
        );
        registry.register(
            "buildkit_operator_coldstart_seconds",
            "Time that a successful cold route waited for its daemon, queue included",
            cold_start_seconds.clone(),
        );
        registry.register(
            "buildkit_operator_coldstarts_inflight",
            "Routes that hold one of --max-cold-starts slots",
            cold_starts.clone(),
        );
        metrics
    }

    /// Begins to measure one route. Counts an error unless told otherwise.
    pub(super) fn route(&self) -> RouteTimer {
        RouteTimer { metrics: self.clone(), started: Instant::now(), outcome: Outcome::Error }
    }

    /// Counts one cold start until dropped.
    pub(super) fn cold_start(&self) -> ColdStartCount {
        self.0.cold_starts.inc();
        ColdStartCount(self.clone())
    }
}

/// Measures one route, however it ends.
pub(super) struct RouteTimer {
    metrics: Metrics,
    started: Instant,
    outcome: Outcome,
}

impl RouteTimer {
    /// The route gets its endpoint.
    pub(super) fn succeed(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// The route has to wait for its daemon from now on.
    pub(super) fn cold_start(&self) -> ColdStartTimer {
        ColdStartTimer { metrics: self.metrics.clone(), started: Instant::now() }
    }
}

impl Drop for RouteTimer {
    fn drop(&mut self) {
        self.metrics.0.routes.get_or_create(&self.outcome.labels()).inc();
        self.metrics.0.route_seconds.observe(self.started.elapsed().as_secs_f64());
    }
}

/// Measures one wait for a daemon; one that fails is not observed.
pub(super) struct ColdStartTimer {
    metrics: Metrics,
    started: Instant,
}

impl ColdStartTimer {
    /// The daemon is ready.
    pub(super) fn succeed(self) {
        self.metrics.0.cold_start_seconds.observe(self.started.elapsed().as_secs_f64());
    }
}

/// One slot in use.
pub(super) struct ColdStartCount(Metrics);

impl Drop for ColdStartCount {
    fn drop(&mut self) {
        self.0.0.cold_starts.dec();
    }
}
