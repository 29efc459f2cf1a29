//! The steps of a daemon's life that are told as Kubernetes Events. Pure.

use kube::runtime::events::{Event, EventType};

use super::api::{BuildProjectStatus, Phase};
use super::health::{End, Fault};
use super::roll::Cause;
use super::status::{DEGRADED, Report};

/// One step, told once when it happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moment {
    /// The daemon's objects were made.
    Created,
    /// It left zero.
    ScaledUp,
    /// It takes builds.
    Ready,
    /// It went to zero because nothing wants it.
    ScaledToZero,
    /// A changed template waits for builds to end.
    RollHeld,
    /// It goes through zero to come back with its template.
    Rolled(Cause),
    /// It cannot start, or not work as told, until somebody mends something.
    Failed(Fault),
    /// A container ended and was started again.
    Ended(End),
    /// BuildKit found a database broken, and began it anew.
    CacheLost,
    /// An idle fork was deleted with its cache.
    Reaped,
}

impl Moment {
    /// As an Event about the project.
    pub fn event(&self) -> Event {
        let (type_, reason, action, note) = match self {
            Self::Created => (EventType::Normal, "DaemonCreated", "Create", "made the daemon and its cache".to_owned()),
            Self::ScaledUp => (EventType::Normal, "ScaledUp", "Scale", "the daemon leaves zero".to_owned()),
            Self::Ready => (EventType::Normal, "DaemonReady", "Observe", "the daemon is ready for builds".to_owned()),
            Self::ScaledToZero => {
                (EventType::Normal, "ScaledToZero", "Scale", "nothing wants the daemon; its cache is kept".to_owned())
            }
            Self::RollHeld => {
                let note = "a changed pod template waits for the builds in flight";
                (EventType::Normal, "RollHeld", "Roll", note.to_owned())
            }
            Self::Rolled(cause) => {
                let type_ = if *cause == Cause::Idle { EventType::Normal } else { EventType::Warning };
                (type_, "Rolled", "Roll", format!("the daemon is made anew: {cause}"))
            }
            Self::Failed(fault) => (EventType::Warning, fault.reason, "Observe", fault.message.clone()),
            Self::Ended(end) => {
                let reason = if end.out_of_memory { "OutOfMemory" } else { "DaemonRestarted" };
                let note = format!("container {} {end} and was started again", end.container);
                (EventType::Warning, reason, "Observe", note)
            }
            Self::CacheLost => {
                let note = "BuildKit found its database broken, as a process that was killed may leave it, and began anew: \
                            what it had cached is lost";
                (EventType::Warning, "CacheLost", "Observe", note.to_owned())
            }
            Self::Reaped => {
                (EventType::Normal, "ForkReaped", "Delete", "deleted the idle fork with its cache".to_owned())
            }
        };
        let note = note.char_indices().take_while(|(at, _)| *at < NOTE_BYTES).map(|(_, c)| c).collect();
        Event { type_, reason: reason.to_owned(), note: Some(note), action: action.to_owned(), secondary: None }
    }
}

/// The API server refuses notes of 1,024 bytes and more.
const NOTE_BYTES: usize = 1000;

/// What a report tells that the status before it did not.
pub fn told_by(before: &BuildProjectStatus, report: &Report) -> Vec<Moment> {
    let mut moments = Vec::new();
    if report.phase == Phase::Warm && before.phase != Some(Phase::Warm) {
        moments.push(Moment::Ready);
    }
    let known = before.conditions.iter().find(|c| c.type_ == DEGRADED && c.status == "True");
    for verdict in report.conditions.iter().filter(|v| v.type_ == DEGRADED && v.holds) {
        if known.is_none_or(|known| known.reason != verdict.reason) {
            let fault = Fault { reason: verdict.reason, message: verdict.message.clone(), patience: None };
            moments.push(Moment::Failed(fault));
        }
    }
    moments
}

#[cfg(test)]
mod tests {
    use super::super::health::DaemonState;
    use super::super::status::Facts;
    use super::*;

    fn report(daemon: &DaemonState) -> Report {
        Report::new(Facts { replicas: 1, daemon, roll_held: false, base: None }, String::new(), 1)
    }

    #[test]
    fn a_step_is_told_when_it_happens_and_not_again() {
        let fault = |reason| Fault { reason, message: "m".into(), patience: None };
        let now = jiff::Timestamp::from_second(1).unwrap();
        let mut status = BuildProjectStatus::default();
        let mut tell = |daemon: &DaemonState| {
            let report = report(daemon);
            let told = told_by(&status, &report);
            report.apply(&mut status, now);
            told
        };
        assert_eq!(tell(&DaemonState::Starting(String::new())), []);
        assert_eq!(tell(&DaemonState::Failed(fault("A"))), [Moment::Failed(fault("A"))]);
        assert_eq!(tell(&DaemonState::Failed(fault("A"))), []);
        assert_eq!(tell(&DaemonState::Failed(fault("B"))), [Moment::Failed(fault("B"))]);
        assert_eq!(tell(&DaemonState::Ready), [Moment::Ready]);
        assert_eq!(tell(&DaemonState::Ready), []);
        assert_eq!(tell(&DaemonState::Failed(fault("B"))), [Moment::Failed(fault("B"))]);
    }

    #[test]
    fn a_note_is_cut_to_what_the_api_server_takes() {
        let fault = Fault { reason: "R", message: "é".repeat(2000), patience: None };
        let note = Moment::Failed(fault).event().note.unwrap();
        assert!(note.len() <= 1001 && note.len() > 990, "{}", note.len());
    }
}
