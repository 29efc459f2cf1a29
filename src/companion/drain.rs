//! When a drain is over. Pure: observations and times in, a verdict out.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::observation::{Link, Moment, Observation};

/// How long no build must have run. A client makes several calls for one
/// build, and BuildKit knows of a build only within some of them.
pub const QUIET: Duration = Duration::from_secs(2);

/// How long a daemon that does not answer, and ran nothing when it last did,
/// is waited for. It cannot be asked, but a wedged one must not hold a repair.
pub const SILENCE: Duration = Duration::from_secs(60);

/// What was asked for, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// When the gate was closed. What was asked of the daemon before does not
    /// count: a build may have begun since.
    pub began: Moment,
    /// How long to wait at most.
    pub budget: Duration,
}

/// Why a drain is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// No build runs.
    Idle,
    /// No daemon listens.
    Gone,
    /// The daemon does not answer, and no build was known to run.
    Silent,
    /// Time is over; builds may be running.
    Budget,
    /// The done-file appeared.
    DoneFile,
    /// The gate was opened again.
    Reopened,
}

impl Outcome {
    /// Whether builds may still be running.
    pub fn cuts(self) -> bool {
        matches!(self, Self::Budget | Self::Reopened)
    }
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Look again.
    Wait,
    /// It is over.
    Done(Outcome),
}

/// Decides on a drain.
pub fn decide(drain: Drain, daemon: &Observation, now: Moment) -> Verdict {
    if now.saturating_sub(drain.began) >= drain.budget {
        return Verdict::Done(Outcome::Budget);
    }
    if daemon.asked < drain.began {
        return Verdict::Wait;
    }
    let quiet = |since: Moment| now.saturating_sub(since) >= QUIET;
    let was_busy = !daemon.active.is_empty();
    match daemon.link {
        Link::Answering if !was_busy && daemon.last_activity.is_none_or(quiet) => Verdict::Done(Outcome::Idle),
        // A daemon that stops closes its socket first and lets its builds end;
        // all that waiting could save is beyond reach then.
        Link::Gone(since) if !was_busy || quiet(since) => Verdict::Done(Outcome::Gone),
        Link::Silent(since) if !was_busy && now.saturating_sub(since) >= SILENCE => Verdict::Done(Outcome::Silent),
        Link::Unknown | Link::Answering | Link::Gone(_) | Link::Silent(_) => Verdict::Wait,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::observation::Build;
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;
    const DRAIN: Drain = Drain { began: Duration::from_secs(100), budget: Duration::from_secs(300) };

    fn observation(link: Link, active: usize, last_activity: Option<u64>, asked: u64) -> Observation {
        Observation {
            link,
            asked: S(asked),
            heard: S(asked),
            active: vec![Build::default(); active],
            last_activity: last_activity.map(S),
            ..Observation::default()
        }
    }

    #[test]
    fn a_drain_ends_when_nothing_can_be_cut_or_time_is_over() {
        use Link::{Answering, Gone, Silent, Unknown};
        use Outcome::{Budget, Idle};
        let done = Verdict::Done;
        for (link, active, last, asked, now, want) in [
            // Idle for long: at once, but only by an answer to a new question.
            (Answering, 0, None, 100, 100, done(Idle)),
            (Answering, 0, Some(50), 100, 100, done(Idle)),
            (Answering, 0, Some(50), 99, 100, Verdict::Wait),
            // A build runs, or ran a moment ago.
            (Answering, 1, Some(101), 101, 101, Verdict::Wait),
            (Answering, 1, Some(399), 399, 399, Verdict::Wait),
            (Answering, 0, Some(100), 101, 101, Verdict::Wait),
            (Answering, 0, Some(100), 102, 102, done(Idle)),
            // Time is over, whatever is known.
            (Answering, 1, Some(400), 400, 400, done(Budget)),
            (Unknown, 0, None, 0, 400, done(Budget)),
            (Silent(S(90)), 1, Some(90), 399, 400, done(Budget)),
            // Never heard.
            (Unknown, 0, None, 0, 110, Verdict::Wait),
            // No process: nothing to wait for.
            (Gone(S(90)), 0, Some(99), 100, 100, done(Outcome::Gone)),
            (Gone(S(100)), 1, Some(99), 101, 101, Verdict::Wait),
            (Gone(S(100)), 1, Some(99), 101, 102, done(Outcome::Gone)),
            // No answer: a build that ran may be alive.
            (Silent(S(101)), 1, Some(99), 300, 399, Verdict::Wait),
            (Silent(S(101)), 0, Some(50), 160, 160, Verdict::Wait),
            (Silent(S(101)), 0, Some(50), 161, 161, done(Outcome::Silent)),
        ] {
            let daemon = observation(link, active, last, asked);
            assert_eq!(decide(DRAIN, &daemon, S(now)), want, "{link:?} {active} {last:?} asked {asked} at {now}");
        }
    }

    proptest! {
        #[test]
        fn a_build_that_an_answering_daemon_runs_is_cut_by_the_budget_alone(
            active in 1usize..4, last in 0u64..500, asked in 0u64..500, now in 0u64..500,
        ) {
            let daemon = observation(Link::Answering, active, Some(last), asked);
            let verdict = decide(DRAIN, &daemon, S(now));
            prop_assert!(verdict == Verdict::Wait || (now >= 400 && verdict == Verdict::Done(Outcome::Budget)));
        }

        #[test]
        fn every_drain_ends(link in 0u8..4, active in 0usize..4, asked in 0u64..500, now in 400u64..500) {
            let link = [Link::Unknown, Link::Answering, Link::Silent(S(1)), Link::Gone(S(1))][usize::from(link)];
            let daemon = observation(link, active, None, asked);
            prop_assert!(matches!(decide(DRAIN, &daemon, S(now)), Verdict::Done(_)));
        }
    }
}
