//! Metrics of one daemon. Those of the volume have the reference's names.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
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

/// What happened since this process began.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    builds: Family<ResultLabel, Counter>,
    steps: Counter,
    cached_steps: Counter,
    build_seconds: Counter<f64, std::sync::atomic::AtomicU64>,
    prunes: Family<ReasonLabel, Counter>,
    pruned_bytes: Counter,
}

impl Counters {
    /// Adds the counters to a registry.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("buildkit_operator_companion");
        registry.register("builds", "Builds that ended", self.builds.clone());
        registry.register("build_steps", "Steps of the builds that ended", self.steps.clone());
        registry.register("build_steps_cached", "Steps that the cache answered", self.cached_steps.clone());
        registry.register("build_seconds", "Duration of the builds that ended", self.build_seconds.clone());
        registry.register("prunes", "Prunes of the cache for want of room", self.prunes.clone());
        registry.register("pruned_bytes", "Bytes that these prunes removed", self.pruned_bytes.clone());
    }

    /// Counts a build that ended.
    pub fn ended(&self, build: &Build) {
        let result = if build.error.is_none() { "ok" } else { "error" };
        self.builds.get_or_create(&ResultLabel { result }).inc();
        self.steps.inc_by(build.steps_total.into());
        self.cached_steps.inc_by(build.steps_cached.into());
        if let (Some(started), Some(completed)) = (build.started, build.completed) {
            self.build_seconds.inc_by(completed.duration_since(started).as_secs_f64().max(0.0));
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
    if let Some(kills) = sample.memory.oom_kills {
        let kills = ConstCounter::new(kills);
        let help = "Processes of the daemon's cgroup that were killed for memory";
        let name = "buildkit_operator_companion_oom_kills";
        kills.encode(out.encode_descriptor(name, help, None, kills.metric_type())?)?;
    }
    Ok(())
}

fn gauge(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let gauge = ConstGauge::new(value);
    gauge.encode(out.encode_descriptor(name, help, None, gauge.metric_type())?)
}

fn ratio(out: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: f64) -> fmt::Result {
    let gauge = ConstGauge::new(value);
    gauge.encode(out.encode_descriptor(name, help, None, gauge.metric_type())?)
}
