//! What the reconcile reports of a daemon: phase, replicas and conditions as a
//! pure function of what was observed.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::api::{BuildProjectStatus, Phase};
use super::build::config::BaseError;
use super::health::DaemonState;
use super::validate::Invalid;

/// The daemon can take builds.
pub const READY: &str = "Ready";
/// It is on its way to a state that is wanted.
pub const PROGRESSING: &str = "Progressing";
/// Somebody has to mend something.
pub const DEGRADED: &str = "Degraded";

/// The part of a status that the reconcile owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Where the daemon is in its life.
    pub phase: Phase,
    /// Replicas asked of the StatefulSet.
    pub replicas: i32,
    /// Where clients reach the daemon.
    pub endpoint: String,
    /// Generation of the project that this report is about.
    pub generation: i64,
    /// One of each type; other types on the object are left as they are.
    pub conditions: Vec<Verdict>,
}

/// One condition, before it is dated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// [`READY`], [`PROGRESSING`] or [`DEGRADED`].
    pub type_: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// In CamelCase.
    pub reason: &'static str,
    /// One sentence for people.
    pub message: String,
}

/// What a report is made from.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Replicas that the StatefulSet is asked for.
    pub replicas: i32,
    /// The daemon, as far as it is asked for.
    pub daemon: &'a DaemonState,
    /// Whether a changed template waits for builds to end.
    pub roll_held: bool,
    /// What is wrong with the configuration of all daemons.
    pub base: Option<&'a BaseError>,
}

impl Report {
    /// The report on a daemon.
    pub fn new(facts: Facts<'_>, endpoint: String, generation: i64) -> Self {
        let (phase, reason, message) = outcome(facts);
        let ready = verdict(READY, phase == Phase::Warm, reason, &message);
        let progressing = match phase {
            Phase::Scaling => verdict(PROGRESSING, true, reason, &message),
            _ if facts.roll_held => {
                verdict(PROGRESSING, true, "RollHeld", "a changed pod template waits for the builds in flight")
            }
            _ => verdict(PROGRESSING, false, "Settled", "as wanted"),
        };
        let degraded = match (phase, facts.base) {
            (Phase::Failed, _) => verdict(DEGRADED, true, reason, &message),
            (_, Some(fault)) => {
                let message = format!("the configuration of all daemons was not taken over: {fault}");
                verdict(DEGRADED, true, "ConfigurationRejected", &message)
            }
            _ => verdict(DEGRADED, false, "AsExpected", "nothing to mend"),
        };
        let conditions = vec![ready, progressing, degraded];
        Self { phase, replicas: facts.replicas, endpoint, generation, conditions }
    }

    /// The report on a project that no daemon can be built from.
    pub fn invalid(invalid: &Invalid, replicas: i32, generation: i64) -> Self {
        let message = invalid.to_string();
        let conditions = [(READY, false), (PROGRESSING, false), (DEGRADED, true)];
        let conditions = conditions.map(|(type_, holds)| verdict(type_, holds, "InvalidSpec", &message)).to_vec();
        Self { phase: Phase::Failed, replicas, endpoint: String::new(), generation, conditions }
    }

    /// Sets the reported fields. A condition that still says the same keeps
    /// its transition time, so that a steady daemon causes no write.
    pub fn apply(&self, status: &mut BuildProjectStatus, now: Timestamp) {
        status.phase = Some(self.phase);
        status.replicas = self.replicas;
        status.endpoint.clone_from(&self.endpoint);
        for verdict in &self.conditions {
            verdict.apply(&mut status.conditions, self.generation, now);
        }
    }
}

impl Verdict {
    fn apply(&self, conditions: &mut Vec<Condition>, generation: i64, now: Timestamp) {
        let state = if self.holds { "True" } else { "False" };
        let old = conditions.iter().position(|c| c.type_ == self.type_);
        let since = old.map(|i| &conditions[i]).filter(|c| c.status == state).map_or_else(
            || Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
            |c| c.last_transition_time.clone(),
        );
        let condition = Condition {
            type_: self.type_.to_owned(),
            status: state.to_owned(),
            reason: self.reason.to_owned(),
            message: self.message.clone(),
            observed_generation: Some(generation),
            last_transition_time: since,
        };
        match old {
            Some(i) => conditions[i] = condition,
            None => conditions.push(condition),
        }
    }
}

fn verdict(type_: &'static str, holds: bool, reason: &'static str, message: &str) -> Verdict {
    Verdict { type_, holds, reason, message: message.to_owned() }
}

fn outcome(facts: Facts<'_>) -> (Phase, &'static str, String) {
    match (facts.replicas, facts.daemon) {
        (0, _) => (Phase::Idle, "ScaledToZero", "at zero, the cache is kept".to_owned()),
        (_, DaemonState::Ready) => (Phase::Warm, "DaemonReady", "ready for builds".to_owned()),
        (_, DaemonState::Failed(fault)) => (Phase::Failed, fault.reason, fault.message.clone()),
        (_, DaemonState::Troubled(fault, _)) => (Phase::Scaling, fault.reason, fault.message.clone()),
        // Of the many steps of a start none is worth a write.
        (_, DaemonState::Starting(_)) => (Phase::Scaling, "DaemonStarting", "waiting for the daemon".to_owned()),
    }
}

/// Since when a condition holds; `None` when it does not.
pub fn holds_since(status: &BuildProjectStatus, type_: &str) -> Option<Timestamp> {
    let condition = status.conditions.iter().find(|c| c.type_ == type_)?;
    (condition.status == "True").then_some(condition.last_transition_time.0)
}

/// Why a pod that has not failed is not ready yet, for messages.
pub fn pod_pending(pod: Option<&Pod>) -> String {
    let Some(status) = pod.and_then(|p| p.status.as_ref()) else { return "waiting for the pod".to_owned() };
    let unscheduled = status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled" && c.status == "False");
    if let Some(message) = unscheduled.and_then(|c| c.message.as_deref()) {
        return format!("not scheduled: {message}");
    }
    let waiting =
        status.container_statuses.iter().flatten().find_map(|c| c.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
    match waiting {
        Some(reason) => format!("starting: {reason}"),
        None => "waiting for the daemon to be ready".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::health::Fault;
    use super::*;

    fn facts(replicas: i32, daemon: &DaemonState) -> Facts<'_> {
        Facts { replicas, daemon, roll_held: false, base: None }
    }

    /// `Ready Progressing Degraded` as `TFF`, and their reasons.
    fn summary(report: &Report) -> (Phase, String, Vec<&'static str>) {
        let states = report.conditions.iter().map(|c| if c.holds { 'T' } else { 'F' }).collect();
        (report.phase, states, report.conditions.iter().map(|c| c.reason).collect())
    }

    #[test]
    fn conditions_follow_from_the_daemon() {
        let fault = Fault { reason: "ImageNotFound", message: "no such image".into(), patience: None };
        let rejected = BaseError::NotATable("worker");
        let (ready, starting) = (DaemonState::Ready, DaemonState::Starting("x".into()));
        let (troubled, failed) = (DaemonState::Troubled(fault.clone(), None), DaemonState::Failed(fault));
        for (facts, phase, states, reasons) in [
            (facts(0, &starting), Phase::Idle, "FFF", ["ScaledToZero", "Settled", "AsExpected"]),
            (facts(1, &starting), Phase::Scaling, "FTF", ["DaemonStarting", "DaemonStarting", "AsExpected"]),
            (facts(1, &ready), Phase::Warm, "TFF", ["DaemonReady", "Settled", "AsExpected"]),
            (facts(1, &troubled), Phase::Scaling, "FTF", ["ImageNotFound", "ImageNotFound", "AsExpected"]),
            (facts(1, &failed), Phase::Failed, "FFT", ["ImageNotFound", "Settled", "ImageNotFound"]),
            (
                Facts { roll_held: true, ..facts(1, &ready) },
                Phase::Warm,
                "TTF",
                ["DaemonReady", "RollHeld", "AsExpected"],
            ),
            (
                Facts { base: Some(&rejected), ..facts(1, &ready) },
                Phase::Warm,
                "TFT",
                ["DaemonReady", "Settled", "ConfigurationRejected"],
            ),
        ] {
            let report = Report::new(facts, String::new(), 1);
            assert_eq!(summary(&report), (phase, states.to_owned(), reasons.to_vec()), "{facts:?}");
        }
        let invalid = Report::invalid(&Invalid::Deleting, 0, 1);
        assert_eq!(summary(&invalid).1, "FFT");
    }

    #[test]
    fn a_report_that_says_the_same_changes_nothing() {
        let report = Report::new(facts(1, &DaemonState::Ready), "tcp://x".into(), 1);
        let mut status = BuildProjectStatus::default();
        report.apply(&mut status, Timestamp::from_second(10).unwrap());
        let once = status.clone();
        report.apply(&mut status, Timestamp::from_second(20).unwrap());
        assert_eq!(status, once);
        let idle = Report::new(facts(0, &DaemonState::Ready), "tcp://x".into(), 1);
        idle.apply(&mut status, Timestamp::from_second(30).unwrap());
        assert_eq!(status.conditions[0].last_transition_time, Time(Timestamp::from_second(30).unwrap()));
        assert_eq!(status.conditions[2], once.conditions[2], "what has not changed keeps its time");
        assert_eq!(holds_since(&once, READY), Some(Timestamp::from_second(10).unwrap()));
        assert_eq!(holds_since(&status, READY), None);
    }
}
