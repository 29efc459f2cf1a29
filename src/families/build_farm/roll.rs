//! When a running daemon is made anew: for a changed pod template, or because
//! it is broken. Pure.
//!
//! A changed template waits for the builds in flight. When it has waited for
//! as long as a build may take, it waits only until no build is younger than
//! an hour: a forced roll never cuts a younger one. A broken daemon runs no
//! builds, so it is rolled at once.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

use super::api::{BuildProject, Tier};
use super::lifecycle::{age, live_entries};
use super::settings::Settings;

/// A hot daemon takes a changed template after this long without a build.
pub const HOT_ROLL_IDLE: Duration = Duration::from_secs(600);

/// Every build has at least this long before a roll may cut it.
pub const YOUNG: Duration = Duration::from_secs(3600);

/// A daemon that failed for this long on its current template is made anew:
/// what broke may be within its pod, or mended by now.
pub const BROKEN_BOUNCE: Duration = Duration::from_secs(300);

/// What was observed of a running daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Whether its template differs from the one that is wanted.
    pub outdated: bool,
    /// Since when the changed template waits.
    pub held_since: Option<Timestamp>,
    /// Since when it has failed; see [`super::health::DaemonState::Failed`].
    pub failed_since: Option<Timestamp>,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Roll {
    /// Nothing now, and nothing later by the passing of time alone, unless told.
    No(Option<Duration>),
    /// The changed template waits for builds; look again after this long.
    Hold(Duration),
    /// It is made anew.
    Now(Cause),
}

/// Why it is made anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// No build is in flight.
    Idle,
    /// The template has waited for as long as a build may take.
    Overdue,
    /// It is broken.
    Broken,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "its template changed and no build is in flight",
            Self::Overdue => "its template changed and has waited for as long as a build may take",
            Self::Broken => "it is broken",
        })
    }
}

/// Decides about a daemon that is wanted and running.
pub fn decide(project: &BuildProject, seen: Seen, settings: &Settings, now: Timestamp) -> Roll {
    if let Some(since) = seen.failed_since {
        let left = BROKEN_BOUNCE.saturating_sub(age(since, now));
        return if seen.outdated || left.is_zero() { Roll::Now(Cause::Broken) } else { Roll::No(Some(left)) };
    }
    if !seen.outdated {
        return Roll::No(None);
    }
    let status = project.status_or_default();
    let held = seen.held_since.map_or(Duration::ZERO, |since| age(since, now));
    let overdue = settings.max_build.saturating_sub(held);
    let youngest = live_entries(&status, settings.max_build, now).map(|entry| age(entry.since.0, now)).min();
    match youngest {
        Some(youngest) => match overdue.max(YOUNG.saturating_sub(youngest)) {
            Duration::ZERO => Roll::Now(Cause::Overdue),
            left => Roll::Hold(left),
        },
        None if overdue.is_zero() => Roll::Now(Cause::Idle),
        // At zero it takes the template anyway.
        None if project.spec.tier == Tier::Warm => Roll::No(None),
        None => {
            let idle = status.last_build_time.map_or(HOT_ROLL_IDLE, |last| age(last.0, now));
            match HOT_ROLL_IDLE.saturating_sub(idle) {
                Duration::ZERO => Roll::Now(Cause::Idle),
                left => Roll::No(Some(left)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::lifecycle::tests::{at, project};
    use super::*;

    fn hot(inflight: &[i64], last: Option<i64>) -> BuildProject {
        let mut project = project("p1", inflight, last);
        project.spec.tier = Tier::Hot;
        project
    }

    #[test]
    fn a_changed_template_waits_for_builds_within_bounds() {
        let settings = Settings::default();
        let (changed, secs) = (Seen { outdated: true, ..Seen::default() }, Duration::from_secs);
        let held = Seen { held_since: Some(at(0)), ..changed };
        let broken = Seen { failed_since: Some(at(0)), ..Seen::default() };
        for (name, project, seen, now, roll) in [
            ("nothing changed", project("p1", &[0], Some(0)), Seen::default(), 9000, Roll::No(None)),
            ("warm without builds: at zero", project("p1", &[], Some(0)), changed, 100, Roll::No(None)),
            ("hot, used lately", hot(&[], Some(0)), changed, 100, Roll::No(Some(secs(500)))),
            ("hot, idle", hot(&[], Some(0)), changed, 600, Roll::Now(Cause::Idle)),
            ("hot, never used", hot(&[], None), changed, 0, Roll::Now(Cause::Idle)),
            ("a build in flight", project("p1", &[0], Some(0)), changed, 10, Roll::Hold(secs(7200))),
            ("a build of an hour is not cut", project("p1", &[0], Some(0)), held, 3601, Roll::Hold(secs(3599))),
            ("overdue, a young build", project("p1", &[7000], Some(7000)), held, 7300, Roll::Hold(secs(3300))),
            ("overdue, none is young", project("p1", &[3000, 3600], None), held, 7200, Roll::Now(Cause::Overdue)),
            ("overdue, between builds", project("p1", &[], Some(7100)), held, 7200, Roll::Now(Cause::Idle)),
            ("a leaked entry holds nothing", hot(&[0], Some(0)), held, 7201, Roll::Now(Cause::Idle)),
            (
                "broken, changed",
                project("p1", &[0], Some(0)),
                Seen { outdated: true, ..broken },
                0,
                Roll::Now(Cause::Broken),
            ),
            ("broken", project("p1", &[0], Some(0)), broken, 100, Roll::No(Some(secs(200)))),
            ("broken for long", project("p1", &[0], Some(0)), broken, 300, Roll::Now(Cause::Broken)),
        ] {
            assert_eq!(decide(&project, seen, &settings, at(now)), roll, "{name}");
        }
    }

    proptest! {
        /// No live build younger than an hour is cut, none at all before the
        /// template has waited for as long as a build may take, and a hold ends
        /// when it said it would, if no build arrives.
        #[test]
        fn builds_are_protected_and_holds_end(
            inflight in proptest::collection::vec(0..20_000_i64, 0..5), tier_hot: bool, max in 1..10_000_u64,
            held in proptest::option::of(0..20_000_i64), now in 0..20_000_i64,
        ) {
            let settings = Settings { max_build: Duration::from_secs(max), ..Settings::default() };
            let inflight: Vec<i64> = inflight.into_iter().filter(|since| *since <= now).collect();
            let mut project = project("p1", &inflight, inflight.iter().max().copied());
            project.spec.tier = if tier_hot { Tier::Hot } else { Tier::Warm };
            let held = held.filter(|since| *since <= now);
            let seen = Seen { outdated: true, held_since: held.map(at), failed_since: None };
            let status = project.status_or_default();
            let live: Vec<_> = live_entries(&status, settings.max_build, at(now)).collect();
            match decide(&project, seen, &settings, at(now)) {
                Roll::Now(Cause::Broken) => prop_assert!(false, "it is not broken"),
                Roll::Now(_) => {
                    prop_assert!(live.iter().all(|entry| age(entry.since.0, at(now)) >= YOUNG));
                    prop_assert!(live.is_empty() || held.is_some_and(|since| now - since >= i64::try_from(max).unwrap()));
                }
                Roll::Hold(left) => {
                    prop_assert!(!live.is_empty() && left <= settings.max_build.max(YOUNG));
                    let seen = Seen { held_since: Some(at(held.unwrap_or(now))), ..seen };
                    let later = decide(&project, seen, &settings, at(now) + left + Duration::from_secs(1));
                    prop_assert!(!matches!(later, Roll::Hold(_)), "{later:?}");
                }
                Roll::No(_) => prop_assert!(live.is_empty()),
            }
        }
    }
}
