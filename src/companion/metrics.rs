//! Metrics of one daemon. Those of the volume have the reference's names.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use super::daemon::Pruned;
use super::observation::{Build, Gate, Link};
use super::prune::Reason;
use super::upkeep::Sample;
use super::watch::Watch;

/// A label with one name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ResultLabel {
    /// `ok` or `error`.
    pub result: &'static str,
}

/// Why.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    /// `inodes` or `bytes`.
    pub reason: &'static str,
}

/// Whether the cache answered.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CachedLabel {
    /// `true` or `false`.
    pub cached: &'static str,
}

const BUILD_SECONDS: [f64; 12] = [1.0, 2.0, 5.0, 10.0, 20.0, 45.0, 90.0, 180.0, 360.0, 900.0, 1800.0, 3600.0];

/// What happened since this process began.
#[derive(Clone, Debug)]
pub struct Counters {
    builds: Family<ResultLabel, Counter>,
    steps: Family<CachedLabel, Counter>,
    durations: Histogram,
    prunes: Family<ReasonLabel, Counter>,
    pruned_bytes: Counter,
}

impl Default for Counters {
    fn default() -> Self {
        let steps = Family::<CachedLabel, Counter>::default();
        // A series that exists from the start lets a share be computed.
        for cached in ["true", "false"] {
            drop(steps.get_or_create(&CachedLabel { cached }));
        }
        Self {
            builds: Family::default(),
            steps,
            durations: Histogram::new(BUILD_SECONDS),
            prunes: Family::default(),
            pruned_bytes: Counter::default(),
        }
    }
}

impl Counters {
    /// Adds the counters to a registry.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("buildkit_operator");
        let help = "Steps of the builds that ended, by whether the cache answered them";
        registry.register("build_steps", help, self.steps.clone());
        registry.register("build_duration_seconds", "Duration of the builds that ended", self.durations.clone());
        let registry = registry.sub_registry_with_prefix("companion");
        registry.register("builds", "Builds that ended", self.builds.clone());
        registry.register("prunes", "Prunes of the cache for want of room", self.prunes.clone());
        registry.register("pruned_bytes", "Bytes that these prunes removed", self.pruned_bytes.clone());
    }

    /// Counts a build that ended.
    pub fn ended(&self, build: &Build) {
        let result = if build.error.is_none() { "ok" } else { "error" };
        self.builds.get_or_create(&ResultLabel { result }).inc();
        let executed = build.steps_total.saturating_sub(build.steps_cached);
        for (cached, steps) in [("true", build.steps_cached), ("false", executed)] {
            self.steps.get_or_create(&CachedLabel { cached }).inc_by(steps.into());
        }
        if let (Some(started), Some(completed)) = (build.started, build.completed) {
            self.durations.observe(completed.duration_since(started).as_secs_f64().max(0.0));
        }
    }

    /// Counts a prune.
    pub fn pruned(&self, reason: Reason, pruned: Pruned) {
        self.prunes.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
        self.pruned_bytes.inc_by(pruned.bytes);
    }
}

/// What is true at the moment of a scrape. What is not known is left out.
#[derive(Debug)]
pub struct Present {
    /// The daemon.
    pub watch: Watch,
    /// The volume.
    pub samples: watch::Receiver<Option<Sample>>,
}

impl Collector for Present {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let out = &mut encoder;
        let daemon = self.watch.observation();
        let up = daemon.link == Link::Answering;
        gauge(out, "buildkit_operator_companion_daemon_up", "Whether the daemon answers", u64::from(up))?;
        let draining = self.watch.gate() != Gate::Open;
        gauge(out, "buildkit_operator_companion_draining", "Whether the gate is closed", u64::from(draining))?;
        if daemon.link != Link::Unknown {
            let active = u64::try_from(daemon.active.len()).unwrap_or(u64::MAX);
            gauge(out, "buildkit_operator_companion_active_builds", "Builds when the daemon last answered", active)?;
        }
        let sample = *self.samples.borrow();
        sample.map_or(Ok(()), |sample| encode(out, &sample))
    }
}

fn encode(out: &mut DescriptorEncoder<'_>, sample: &Sample) -> fmt::Result {
    let volume = &sample.volume;
    ratio(out, "inode_usage_ratio", "Share of the cache volume's inodes in use", volume.inode_ratio())?;
    gauge(out, "inode_used", "Inodes of the cache volume in use", volume.inodes_used)?;
    gauge(out, "inode_total", "Inodes of the cache volume", volume.inodes_total)?;
    gauge(out, "cache_bytes_used", "Bytes of the cache volume in use", volume.bytes_used)?;
    gauge(out, "cache_bytes_total", "Bytes of the cache volume", volume.bytes_total)?;
    if let Some(bytes) = sample.memory.resident {
        gauge(out, "buildkit_operator_companion_daemon_resident_bytes", "Resident memory of the daemon", bytes)?;
    }
    if let Some(bytes) = sample.memory.peak {
        gauge(out, "buildkit_operator_companion_memory_peak_bytes", "Peak memory of the daemon's cgroup", bytes)?;
    }
    if let Some(share) = sample.memory.pressure {
        let help = "Share of the last ten seconds in which the daemon or a step waited for memory";
        ratio(out, "buildkit_operator_companion_memory_pressure_ratio", help, share)?;
    }
    let killed = "Processes of the daemon's cgroup that were killed for memory";
    counter(out, "buildkit_operator_companion_oom_kills", killed, sample.memory.oom_kills)?;
    let throttled = "How often the daemon's cgroup was slowed down at memory.high";
    counter(out, "buildkit_operator_companion_memory_throttled", throttled, sample.memory.throttled)
}

fn counter(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: Option<u64>) -> fmt::Result {
    let Some(value) = value else { return Ok(()) };
    let counter = ConstCounter::new(value);
    counter.encode(out.encode_descriptor(name, help, None, counter.metric_type())?)
}

fn gauge(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let gauge = ConstGauge::new(value);
    gauge.encode(out.encode_descriptor(name, help, None, gauge.metric_type())?)
}

fn ratio(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: f64) -> fmt::Result {
    let gauge = ConstGauge::new(value);
    gauge.encode(out.encode_descriptor(name, help, None, gauge.metric_type())?)
}
