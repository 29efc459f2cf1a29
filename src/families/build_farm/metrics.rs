//! Metrics of the controller, under the reference's names.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::truth::Busy;

/// Which way a daemon was scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Direction {
    /// From zero.
    #[expect(non_camel_case_types, reason = "the label's value")]
    up,
    /// To zero.
    #[expect(non_camel_case_types, reason = "the label's value")]
    down,
}

/// Labels of the scale counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ScaleLabels {
    /// Which way.
    pub direction: Direction,
}

/// Why a daemon that nothing registered wants was not taken down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Holder {
    /// BuildKit runs builds.
    #[expect(non_camel_case_types, reason = "the label's value")]
    builds,
    /// A client is connected through a gateway.
    #[expect(non_camel_case_types, reason = "the label's value")]
    stream,
    /// Somebody who could know does not answer, or the cluster does not act.
    #[expect(non_camel_case_types, reason = "the label's value")]
    silence,
}

impl From<&Busy> for Holder {
    fn from(busy: &Busy) -> Self {
        match busy {
            Busy::Builds(_) | Busy::JustBuilt => Self::builds,
            Busy::Stream(_) => Self::stream,
            Busy::Silent(_) | Busy::GatewaySilent(..) | Busy::GatewaysUnknown | Busy::Reachable => Self::silence,
        }
    }
}

/// Labels of the deferral counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DeferralLabels {
    /// What held the daemon.
    pub by: Holder,
}

/// Metrics of the controller.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Daemons that went to or left zero.
    pub scale_events: Family<ScaleLabels, Counter>,
    /// Daemons whose changed template waits for builds.
    pub rolls_held: Gauge,
    /// Containers of daemons that were killed for memory.
    pub oom_kills: Counter,
    /// Scale-downs put off because something holds the daemon that no entry stands for.
    pub deferrals: Family<DeferralLabels, Counter>,
    /// Reconciles that failed and are tried again.
    pub reconcile_errors: Counter,
}

impl Metrics {
    /// Adds the metrics to a registry.
    pub fn register(&self, registry: &mut Registry) {
        // A series that exists from the start lets alerts tell "none" from "absent".
        for direction in [Direction::up, Direction::down] {
            drop(self.scale_events.get_or_create(&ScaleLabels { direction }));
        }
        for by in [Holder::builds, Holder::stream, Holder::silence] {
            drop(self.deferrals.get_or_create(&DeferralLabels { by }));
        }
        registry.register(
            "buildkit_operator_scale_events",
            "Daemons that went to or left zero",
            self.scale_events.clone(),
        );
        registry.register(
            "buildkit_operator_daemon_rolls_held",
            "Daemons whose changed pod template waits for builds to end",
            self.rolls_held.clone(),
        );
        registry.register(
            "buildkit_operator_daemon_oom_kills",
            "Containers of daemons that were killed for memory",
            self.oom_kills.clone(),
        );
        registry.register(
            "buildkit_operator_scale_down_deferrals",
            "Scale-downs put off because something holds the daemon that no entry stands for",
            self.deferrals.clone(),
        );
        registry.register(
            "buildkit_operator_reconcile_errors",
            "Reconciles that failed and are tried again",
            self.reconcile_errors.clone(),
        );
    }
}

/// The project of a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ProjectLabel {
    /// Its key.
    pub project: String,
}

/// Metrics of daemons, as their companions tell. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct DaemonMetrics {
    /// Builds that BuildKit runs.
    pub active_builds: Family<ProjectLabel, Gauge>,
}

impl DaemonMetrics {
    /// Makes the metrics and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Builds that BuildKit runs on the project's daemon";
        registry.register("buildkit_operator_daemon_active_builds", help, metrics.active_builds.clone());
        metrics
    }

    /// What is known of a daemon: how many builds it runs, or nothing.
    pub fn tell(&self, project: &str, active: Option<usize>) {
        let label = ProjectLabel { project: project.to_owned() };
        match active {
            Some(builds) => {
                self.active_builds.get_or_create(&label).set(i64::try_from(builds).unwrap_or(i64::MAX));
            }
            None => drop(self.active_builds.remove(&label)),
        }
    }
}
