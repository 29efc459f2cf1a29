//! What the gateway counts.
//!
//! `accepted` = `active` + all of `rejected` + all of `close`: every connection
//! is rejected or closed exactly once.

use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::Rejection;
use super::relay::Close;
use super::wake::Verdict;

/// The gateway's metrics, `buildkit_operator_gateway_*`.
#[derive(Debug)]
pub struct Metrics {
    /// Connections accepted.
    pub accepted: Counter,
    /// Connections open now, in any stage.
    pub active: Gauge,
    /// Connections open now that have not shown a server name.
    pub peeking: Gauge,
    /// Connections open now that wait for their daemon.
    pub held: Gauge,
    /// Connections that a daemon was dialled for.
    pub routed: Counter,
    /// Connections refused with an alert.
    pub rejected: Family<RejectedLabels, Counter>,
    /// Connections that ended otherwise.
    pub close: Family<CloseLabels, Counter>,
    /// Bytes from clients to daemons, the ClientHello included.
    pub up: Counter,
    /// Bytes from daemons to clients.
    pub down: Counter,
    /// Wakes that the control plane was asked for.
    pub wakes: Family<WakeLabels, Counter>,
    /// Files of rules that were read again, by whether they are in force.
    pub reloads: Family<ReloadLabels, Counter>,
    bytes: Family<BytesLabels, Counter>,
    hello: Histogram,
    dial: Histogram,
    wake: Histogram,
}

/// Labels of `rejected`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RejectedLabels {
    /// Why.
    pub reason: Rejection,
}

/// Labels of `close`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CloseLabels {
    /// How it ended.
    pub cause: Close,
}

/// Labels of `wakes`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WakeLabels {
    /// What came of it.
    pub verdict: Verdict,
}

/// Labels of `reloads`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReloadLabels {
    /// `ok`, or `error`, and then what held before goes on to hold.
    pub result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BytesLabels {
    direction: Direction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Direction {
    Up,
    Down,
}

impl EncodeLabelValue for Direction {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&if matches!(self, Self::Up) { "up" } else { "down" }, encoder)
    }
}

impl EncodeLabelValue for Rejection {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.as_str(), encoder)
    }
}

impl EncodeLabelValue for Verdict {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.as_str(), encoder)
    }
}

impl EncodeLabelValue for Close {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        EncodeLabelValue::encode(&self.as_str(), encoder)
    }
}

impl Metrics {
    /// Makes the metrics and puts them into `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let bytes = Family::<BytesLabels, Counter>::default();
        let metrics = Self {
            accepted: Counter::default(),
            active: Gauge::default(),
            peeking: Gauge::default(),
            held: Gauge::default(),
            routed: Counter::default(),
            rejected: Family::default(),
            close: Family::default(),
            up: bytes.get_or_create_owned(&BytesLabels { direction: Direction::Up }),
            down: bytes.get_or_create_owned(&BytesLabels { direction: Direction::Down }),
            wakes: Family::default(),
            reloads: Family::default(),
            bytes,
            hello: Histogram::new([0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]),
            dial: Histogram::new([0.0005, 0.001, 0.0025, 0.01, 0.05, 0.25, 1.0, 5.0, 10.0]),
            wake: Histogram::new([0.1, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 15.0, 18.0]),
        };
        metrics.publish(registry.sub_registry_with_prefix("buildkit_operator_gateway"));
        metrics
    }

    fn publish(&self, registry: &mut Registry) {
        registry.register("accepted", "Connections accepted", self.accepted.clone());
        registry.register("active", "Connections open now, in any stage", self.active.clone());
        registry.register("peeking", "Connections open now without a server name", self.peeking.clone());
        registry.register("held", "Connections open now that wait for their daemon", self.held.clone());
        registry.register("routed", "Connections that a daemon was dialled for", self.routed.clone());
        registry.register("rejected", "Connections refused with an alert", self.rejected.clone());
        registry.register("close", "Connections that ended otherwise", self.close.clone());
        registry.register("bytes", "Bytes relayed, up towards daemons, down towards clients", self.bytes.clone());
        registry.register("wakes", "Wakes that the control plane was asked for", self.wakes.clone());
        registry.register("reloads", "Changed configuration files", self.reloads.clone());
        registry.register("hello_seconds", "From accept to a whole ClientHello", self.hello.clone());
        registry.register("dial_seconds", "Connecting to a daemon that is ready", self.dial.clone());
        registry.register("wake_seconds", "Held until the daemon was ready", self.wake.clone());
    }

    pub(super) fn hello(&self, took: Duration) {
        self.hello.observe(took.as_secs_f64());
    }

    pub(super) fn dialled(&self, took: Duration) {
        self.dial.observe(took.as_secs_f64());
    }

    pub(super) fn woken(&self, took: Duration) {
        self.wake.observe(took.as_secs_f64());
    }

    pub(super) fn wake_asked(&self, verdict: Verdict) {
        self.wakes.get_or_create(&WakeLabels { verdict }).inc();
    }

    pub(super) fn reloaded(&self, ok: bool) {
        self.reloads.get_or_create(&ReloadLabels { result: if ok { "ok" } else { "error" } }).inc();
    }

    pub(super) fn reject(&self, reason: Rejection) {
        self.rejected.get_or_create(&RejectedLabels { reason }).inc();
    }

    pub(super) fn closed(&self, cause: Close) {
        self.close.get_or_create(&CloseLabels { cause }).inc();
    }
}

/// One more in a gauge, for as long as it lives.
#[derive(Debug)]
pub(super) struct Counted(Gauge);

impl Counted {
    pub(super) fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
