//! Operations on a project's status: pure functions of the object and the
//! time. Every write of a status, by whichever role, is a batch of these, so
//! that no writer can undo another's work.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::api::{BuildProject, BuildProjectStatus, CacheRoom, EndedBuild, Gate, InflightEntry, LAST_BUILDS};
use super::lifecycle::{self, Want};
use super::roll::{self, Cause, Roll, Seen};
use super::settings::Settings;
use super::status::Report;

/// One operation.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A build was routed here. `id` is the digest of its identifier.
    Begin {
        /// Digest of the build's identifier.
        id: String,
    },
    /// A build was released; without a digest, the oldest one.
    End {
        /// Digest of the build's identifier.
        id: Option<String>,
    },
    /// Nobody has used these builds: neither a build nor a stream is there.
    Expire {
        /// Digests of their identifiers.
        ids: Vec<String>,
    },
    /// Somebody asked for the daemon without a build.
    Touch,
    /// A client dialled the daemon through the gateway.
    Wake,
    /// What the reconcile observed.
    Report(Box<Report>),
    /// What the daemon's history says of builds that ended.
    Ended(Box<Ended>),
    /// The daemon is about to be taken down.
    CloseGate(Closing),
    /// The daemon may be used again, if this closing of its gate is the last.
    OpenGate {
        /// The epoch under which it was closed.
        epoch: i64,
    },
}

/// Builds that ended, and the room on the cache volume then.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// In any order.
    pub builds: Vec<EndedBuild>,
    /// Where it is known.
    pub cache: Option<CacheRoom>,
}

/// Why a gate is closed, hence what must hold for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// Nothing wants the daemon any more.
    Idle,
    /// It is made anew, for what was seen of it, and no build is in flight.
    Roll(Seen),
    /// It is made anew whatever runs there: it is broken, or long overdue.
    Force(Seen),
}

impl Closing {
    /// Whether the reason still holds.
    pub fn holds(self, project: &BuildProject, settings: &Settings, now: Timestamp) -> bool {
        match self {
            Self::Idle => lifecycle::want(project, settings, now) == Want::Zero,
            Self::Roll(seen) => roll::decide(project, seen, settings, now) == Roll::Now(Cause::Idle),
            Self::Force(seen) => {
                matches!(roll::decide(project, seen, settings, now), Roll::Now(Cause::Overdue | Cause::Broken))
            }
        }
    }
}

/// What an operation did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It holds now.
    Done,
    /// Nothing matched, or nothing had to change.
    Nothing,
    /// Refused: this many builds are in flight.
    Saturated(usize),
    /// Refused: the daemon is wanted.
    StillWanted,
    /// Refused: nobody who may route has asked for the daemon lately.
    Forgotten,
}

/// Routes kept in `recentBuildTimes`.
const RECENT_ROUTES: usize = 30;

/// Applies one operation to the project's status.
pub fn apply(project: &mut BuildProject, operation: &Operation, settings: &Settings, now: Timestamp) -> Outcome {
    adopt(project, now);
    let outcome = match operation {
        Operation::Begin { id } => begin(project, id, settings, now),
        Operation::End { id: Some(id) } => end(status(project), |entries| entries.iter().position(|e| &e.id == id)),
        Operation::End { id: None } => end(status(project), oldest),
        Operation::Expire { ids } => {
            let entries = &mut status(project).inflight;
            let before = entries.len();
            entries.retain(|entry| !ids.contains(&entry.id));
            if entries.len() < before { Outcome::Done } else { Outcome::Nothing }
        }
        Operation::Touch => {
            status(project).last_build_time = Some(Time(whole_second(now)));
            Outcome::Done
        }
        Operation::Wake => wake(project, settings, now),
        Operation::Report(report) => {
            let max_build = settings.max_build;
            let status = status(project);
            status.wake_until = status.wake_until.take().filter(|until| now < until.0);
            status.inflight.retain(|entry| lifecycle::age(entry.since.0, now) <= max_build);
            report.apply(status, now);
            Outcome::Done
        }
        Operation::Ended(ended) => remember_builds(status(project), ended),
        Operation::CloseGate(closing) => close(project, *closing, settings, now),
        Operation::OpenGate { epoch } => match &mut status(project).gate {
            // Whoever was held up for long may find it closed anew.
            gate if gate.epoch == *epoch => set_gate(gate, false),
            _ => Outcome::Nothing,
        },
    };
    let status = status(project);
    status.inflight_builds = i32::try_from(status.inflight.len()).unwrap_or(i32::MAX);
    outcome
}

fn status(project: &mut BuildProject) -> &mut BuildProjectStatus {
    project.status.get_or_insert_default()
}

fn begin(project: &mut BuildProject, id: &str, settings: &Settings, now: Timestamp) -> Outcome {
    let fork = lifecycle::is_fork(project);
    let status = status(project);
    // A write whose answer was lost is applied again: it must not count twice.
    if status.inflight.iter().any(|entry| entry.id == id) {
        return Outcome::Done;
    }
    let live = lifecycle::live_entries(status, settings.max_build, now).count();
    if live >= settings.max_inflight {
        return Outcome::Saturated(live);
    }
    status.inflight.retain(|entry| lifecycle::age(entry.since.0, now) <= settings.max_build);
    status.inflight.push(InflightEntry { id: id.to_owned(), since: Time(now) });
    status.last_build_time = Some(Time(whole_second(now)));
    if !fork {
        remember(&mut status.recent_build_times, now);
    }
    Outcome::Done
}

/// Keeps the newest builds. Nothing changes unless one is new, so that a steady
/// farm causes no write however often it is told of its history.
fn remember_builds(status: &mut BuildProjectStatus, ended: &Ended) -> Outcome {
    let known = |builds: &[EndedBuild], build: &EndedBuild| builds.iter().any(|b| b.reference == build.reference);
    let mut builds = status.last_builds.clone();
    builds.extend(ended.builds.iter().filter(|build| !known(&status.last_builds, build)).cloned());
    builds.sort_by_key(|build| std::cmp::Reverse(build.completed.0));
    builds.truncate(LAST_BUILDS);
    if builds.iter().all(|build| known(&status.last_builds, build)) {
        return Outcome::Nothing;
    }
    status.last_builds = builds;
    status.cache = ended.cache.or(status.cache);
    Outcome::Done
}

/// A daemon that is wanted for long enough anyway needs no wake, so that dials
/// of a warm project write nothing. A wake renews no window: it is no route.
fn wake(project: &mut BuildProject, settings: &Settings, now: Timestamp) -> Outcome {
    if lifecycle::want(project, settings, now + lifecycle::WAKE_LEFT) != Want::Zero {
        return Outcome::Nothing;
    }
    if !lifecycle::wakeable(project, settings, now) {
        return Outcome::Forgotten;
    }
    status(project).wake_until = Some(Time(now + lifecycle::WAKE));
    Outcome::Done
}

/// Adds a route to the cadence. Where room is short, routes of a quarter-hour
/// that has others give way first: a burst must not erase the day before it.
fn remember(recent: &mut Vec<Time>, now: Timestamp) {
    recent.push(Time(whole_second(now)));
    recent.retain(|t| lifecycle::age(t.0, now) < lifecycle::CADENCE_WINDOW);
    while recent.len() > RECENT_ROUTES {
        let same = |pair: &[Time]| lifecycle::quarter_hour(pair[0].0) == lifecycle::quarter_hour(pair[1].0);
        let spare = recent.windows(2).position(same).unwrap_or(0);
        recent.remove(spare);
    }
}

/// Statuses of older controllers may count builds without listing them. Each
/// gets an entry as old as the last build, so that it holds the daemon and
/// expires like any other.
fn adopt(project: &mut BuildProject, now: Timestamp) {
    let Some(status) = &mut project.status else { return };
    if !status.inflight.is_empty() {
        return;
    }
    let since = status.last_build_time.clone().unwrap_or(Time(now));
    let count = usize::try_from(status.inflight_builds).unwrap_or(0).min(super::api::MAX_INFLIGHT);
    status.inflight = (0..count).map(|i| InflightEntry { id: format!("adopted-{i}"), since: since.clone() }).collect();
}

fn end(status: &mut BuildProjectStatus, find: impl Fn(&[InflightEntry]) -> Option<usize>) -> Outcome {
    match find(&status.inflight) {
        Some(index) => {
            status.inflight.remove(index);
            Outcome::Done
        }
        None => Outcome::Nothing,
    }
}

/// The oldest entry is also the first to have expired, if any has.
fn oldest(entries: &[InflightEntry]) -> Option<usize> {
    entries.iter().enumerate().min_by_key(|(_, entry)| entry.since.0).map(|(index, _)| index)
}

fn close(project: &mut BuildProject, closing: Closing, settings: &Settings, now: Timestamp) -> Outcome {
    if closing.holds(project, settings, now) { set_gate(&mut status(project).gate, true) } else { Outcome::StillWanted }
}

fn set_gate(gate: &mut Gate, closed: bool) -> Outcome {
    if gate.closed == closed {
        return Outcome::Nothing;
    }
    *gate = Gate { closed, epoch: gate.epoch + 1 };
    Outcome::Done
}

/// Times that people read carry whole seconds, as the reference writes them.
fn whole_second(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::super::lifecycle::tests::{at, project};
    use super::*;

    fn ids(project: &BuildProject) -> Vec<String> {
        project.status_or_default().inflight.iter().map(|e| e.id.clone()).collect()
    }

    #[test]
    fn an_entry_is_added_counted_and_released_once() {
        let (mut p, settings) = (project("p1", &[], None), Settings::default());
        assert_eq!(apply(&mut p, &Operation::Begin { id: "a".into() }, &settings, at(5)), Outcome::Done);
        let status = p.status_or_default();
        assert_eq!(
            (status.inflight_builds, status.last_build_time, status.recent_build_times.len()),
            (1, Some(Time(at(5))), 1)
        );
        let release = Operation::End { id: Some("a".into()) };
        assert_eq!(apply(&mut p, &release, &settings, at(6)), Outcome::Done);
        assert_eq!(apply(&mut p, &release, &settings, at(6)), Outcome::Nothing);
        assert_eq!(p.status_or_default().inflight_builds, 0);
    }

    #[test]
    fn a_nameless_release_takes_the_oldest() {
        let (mut p, settings) = (project("p1", &[30, 10, 20], Some(30)), Settings::default());
        assert_eq!(apply(&mut p, &Operation::End { id: None }, &settings, at(40)), Outcome::Done);
        assert_eq!(ids(&p), ["id30", "id20"]);
    }

    #[test]
    fn unused_entries_expire_and_no_others() {
        let (mut p, settings) = (project("p1", &[10, 20, 30], Some(30)), Settings::default());
        let expire = Operation::Expire { ids: vec!["id10".into(), "id30".into(), "gone".into()] };
        assert_eq!(apply(&mut p, &expire, &settings, at(700)), Outcome::Done);
        assert_eq!((ids(&p), p.status_or_default().inflight_builds), (vec!["id20".to_owned()], 1));
        assert_eq!(apply(&mut p, &expire, &settings, at(700)), Outcome::Nothing);
    }

    #[test]
    fn forks_do_not_count_towards_the_cadence() {
        let (mut p, settings) = (project("forkp1", &[], None), Settings::default());
        apply(&mut p, &Operation::Begin { id: "a".into() }, &settings, at(5));
        assert!(p.status_or_default().recent_build_times.is_empty());
    }

    #[test]
    fn nothing_is_unpinned_and_the_limit_counts_live_entries_only() {
        let mut p = project("p1", &[0, 7000, 7100], Some(7100));
        let settings = Settings { max_inflight: 2, ..Settings::default() };
        assert_eq!(apply(&mut p, &Operation::Begin { id: "x".into() }, &settings, at(7201)), Outcome::Saturated(2));
        assert_eq!(ids(&p).len(), 3, "a refusal changes nothing");
        assert_eq!(apply(&mut p, &Operation::Begin { id: "x".into() }, &settings, at(14201)), Outcome::Done);
        assert_eq!(ids(&p), ["id7100", "x"]);
    }

    #[test]
    fn a_gate_does_not_close_on_a_wanted_daemon() {
        let (mut p, settings) = (project("p1", &[0], Some(0)), Settings::default());
        let close = Operation::CloseGate(Closing::Idle);
        assert_eq!(apply(&mut p, &close, &settings, at(5000)), Outcome::StillWanted);
        assert_eq!(p.status_or_default().gate, Gate::default());
        apply(&mut p, &Operation::End { id: None }, &settings, at(5000));
        assert_eq!(apply(&mut p, &close, &settings, at(5000)), Outcome::Done);
        assert_eq!(p.status_or_default().gate, Gate { closed: true, epoch: 1 });
        let open = Operation::OpenGate { epoch: 1 };
        assert_eq!(apply(&mut p, &open, &settings, at(5001)), Outcome::Done);
        assert_eq!(p.status_or_default().gate, Gate { closed: false, epoch: 2 });
        assert_eq!(apply(&mut p, &close, &settings, at(9000)), Outcome::Done);
        assert_eq!(apply(&mut p, &open, &settings, at(9001)), Outcome::Nothing, "decided under an older epoch");
        assert_eq!(p.status_or_default().gate, Gate { closed: true, epoch: 3 });
    }

    #[test]
    fn the_last_builds_are_kept_and_nothing_changes_without_a_new_one() {
        let build = |reference: &str, second| EndedBuild {
            reference: reference.into(),
            started: None,
            completed: at(second).into(),
            steps_total: 3,
            steps_cached: 1,
            steps_completed: 3,
            error: String::new(),
        };
        let ended = |builds: Vec<EndedBuild>, used| {
            Operation::Ended(Box::new(Ended { builds, cache: Some(CacheRoom { bytes_used: used, bytes_total: 9 }) }))
        };
        let (mut p, settings) = (project("p1", &[], None), Settings::default());
        let told: Vec<_> = (0..8).map(|i| build(&i.to_string(), 10 * i)).collect();
        assert_eq!(apply(&mut p, &ended(told.clone(), 1), &settings, at(100)), Outcome::Done);
        let refs = |p: &BuildProject| {
            p.status_or_default().last_builds.iter().map(|b| b.reference.clone()).collect::<String>()
        };
        assert_eq!(refs(&p), "76543");
        assert_eq!(apply(&mut p, &ended(told, 2), &settings, at(110)), Outcome::Nothing);
        assert_eq!(p.status_or_default().cache.map(|c| c.bytes_used), Some(1), "room alone is worth no write");
        assert_eq!(apply(&mut p, &ended(vec![build("x", 75)], 3), &settings, at(120)), Outcome::Done);
        assert_eq!((refs(&p).as_str(), p.status_or_default().cache.map(|c| c.bytes_used)), ("x7654", Some(3)));
        assert_eq!(apply(&mut p, &ended(vec![build("old", 1)], 4), &settings, at(130)), Outcome::Nothing);
    }

    #[test]
    fn a_dial_wakes_what_was_routed_lately_and_keeps_it_for_two_minutes() {
        const DAY: i64 = 24 * 3600;
        let (mut p, settings) = (project("p1", &[], Some(0)), Settings::default());
        let wake = |p: &mut BuildProject, second| apply(p, &Operation::Wake, &settings, at(second));
        assert_eq!(wake(&mut p, 100), Outcome::Nothing, "it is wanted for minutes to come");
        assert_eq!(wake(&mut p, 5000), Outcome::Done);
        let until = p.status_or_default().wake_until;
        assert_eq!(until, Some(Time(at(5150))));
        assert_eq!(lifecycle::want(&p, &settings, at(5149)), Want::Woken);
        assert_eq!(lifecycle::next_change(&p, &settings, at(5000)), Some(std::time::Duration::from_millis(150_050)));
        assert_eq!(lifecycle::want(&p, &settings, at(5150)), Want::Zero);
        assert_eq!(wake(&mut p, 5011), Outcome::Nothing, "further dials cost no write for a moment");
        assert_eq!(wake(&mut p, 5012), Outcome::Done);
        assert_eq!(wake(&mut p, DAY - 1), Outcome::Done);
        assert_eq!(wake(&mut p, DAY + 1000), Outcome::Forgotten, "a wake is no route");
        assert_eq!(p.status_or_default().last_build_time, Some(Time(at(0))));
        let never = Settings { wake_window: std::time::Duration::ZERO, ..Settings::default() };
        assert_eq!(apply(&mut p, &Operation::Wake, &never, at(5000)), Outcome::Nothing, "woken by then");
        p.status.as_mut().unwrap().wake_until = None;
        assert_eq!(apply(&mut p, &Operation::Wake, &never, at(5000)), Outcome::Forgotten);
        assert_eq!(wake(&mut project("p2", &[], None), 0), Outcome::Forgotten, "never routed");
    }

    #[test]
    fn the_gate_does_not_close_on_a_woken_daemon() {
        let (mut p, settings) = (project("p1", &[], Some(0)), Settings::default());
        let close = Operation::CloseGate(Closing::Idle);
        assert_eq!(apply(&mut p, &close, &settings, at(5000)), Outcome::Done);
        assert!(Closing::Idle.holds(&p, &settings, at(5001)));
        apply(&mut p, &Operation::Wake, &settings, at(5001));
        assert!(!Closing::Idle.holds(&p, &settings, at(5001)), "the wake wins");
        let epoch = p.status_or_default().gate.epoch;
        apply(&mut p, &Operation::OpenGate { epoch }, &settings, at(5002));
        assert_eq!(apply(&mut p, &close, &settings, at(5100)), Outcome::StillWanted);
        assert_eq!(apply(&mut p, &close, &settings, at(5151)), Outcome::Done);
    }

    #[test]
    fn a_burst_does_not_erase_the_day_before_it() {
        let (mut p, settings) = (project("p1", &[], None), Settings::default());
        let day = (0..20).map(|i| i * 1800);
        for (i, t) in day.chain((0..100).map(|i| 40_000 + i)).enumerate() {
            apply(&mut p, &Operation::Begin { id: i.to_string() }, &settings, at(t));
        }
        assert_eq!(p.status_or_default().recent_build_times.len(), 30);
        assert_eq!(lifecycle::effective_idle(&p, &settings, at(40_100)).as_secs(), 21 * 900);
    }

    #[test]
    fn builds_that_an_older_controller_counted_hold_their_daemon() {
        let (mut p, settings) = (project("p1", &[], Some(0)), Settings::default());
        p.status.as_mut().unwrap().inflight_builds = 2;
        let close = Operation::CloseGate(Closing::Idle);
        assert_eq!(apply(&mut p, &close, &settings, at(3600)), Outcome::StillWanted);
        assert_eq!(ids(&p), ["adopted-0", "adopted-1"]);
        assert_eq!(p.status_or_default().inflight[0].since, Time(at(0)));
        assert_eq!(apply(&mut p, &Operation::End { id: None }, &settings, at(3601)), Outcome::Done);
        assert_eq!(ids(&p), ["adopted-1"], "and are released like others");
        assert_eq!(apply(&mut p, &close, &settings, at(7201)), Outcome::Done, "and expire like others");
    }

    #[test]
    fn the_cadence_keeps_thirty_routes_of_a_day() {
        let (mut p, settings) = (project("p1", &[], None), Settings::default());
        for i in 0..40 {
            apply(&mut p, &Operation::Begin { id: i.to_string() }, &settings, at(i));
        }
        let recent = p.status_or_default().recent_build_times;
        assert_eq!((recent.len(), recent[0].0), (30, at(10)));
        apply(&mut p, &Operation::Begin { id: "late".into() }, &settings, at(24 * 3600 + 20));
        assert_eq!(p.status_or_default().recent_build_times.len(), 20);
    }
}
