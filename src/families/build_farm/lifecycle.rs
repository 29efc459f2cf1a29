//! Whether a daemon is wanted, and until when: pure functions of the project
//! and the time. The same decisions serve every provisioner.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;

use super::api::{BuildProject, BuildProjectStatus, InflightEntry, Tier};
use super::settings::Settings;

/// Whether the daemon should run, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The tier is hot.
    Hot,
    /// Builds are in flight.
    Inflight,
    /// It was used less than one idle period ago.
    Recent,
    /// A client dialled it through the gateway a moment ago.
    Woken,
    /// Nothing wants it.
    Zero,
}

impl Want {
    /// Replicas of the StatefulSet.
    pub fn replicas(self) -> i32 {
        i32::from(self != Self::Zero)
    }
}

/// How long a dial keeps a daemon that nothing else wants: the 18 s for which the
/// gateway holds the client, two minutes beyond that so that its retry finds a
/// warmer daemon, and some seconds in which further dials cost no write.
pub const WAKE: Duration = Duration::from_secs(150);

/// A dial renews a wake that has less than this left.
pub const WAKE_LEFT: Duration = Duration::from_secs(138);

/// A fork is never reaped younger than this, so that it survives until its
/// first build is registered.
pub const FORK_REAP_GRACE: Duration = Duration::from_secs(90);

/// Entries that have not expired. An entry lives for `max_build` from its own
/// start, so that a leaked one never releases a sibling.
pub fn live_entries(
    status: &BuildProjectStatus,
    max_build: Duration,
    now: Timestamp,
) -> impl Iterator<Item = &InflightEntry> {
    status.inflight.iter().filter(move |entry| age(entry.since.0, now) <= max_build)
}

/// Routes count towards the cadence for this long.
pub const CADENCE_WINDOW: Duration = Duration::from_secs(24 * 3600);

/// Routes within the same of these count once: a burst is one use.
const CADENCE_STEP_SECONDS: i64 = 900;

/// Idle time after which this project's daemon goes to zero.
///
/// A project that builds often keeps its daemon longer: the base times the
/// number of quarter-hours of the last day in which it built, up to the cap.
/// Forks, and projects whose base is zero or beyond the cap, have their base.
pub fn effective_idle(project: &BuildProject, settings: &Settings, now: Timestamp) -> Duration {
    if is_fork(project) {
        return settings.fork_idle;
    }
    let base = Duration::from_secs(u64::try_from(project.spec.idle_timeout_sec).unwrap_or(0));
    let cap = settings.adaptive_idle_max;
    if base.is_zero() || base >= cap {
        return base;
    }
    base.saturating_mul(cadence(project, now).max(1)).min(cap)
}

/// In how many quarter-hours of the last day a build was routed.
fn cadence(project: &BuildProject, now: Timestamp) -> u32 {
    let recent = project.status.iter().flat_map(|status| &status.recent_build_times);
    let steps: BTreeSet<i64> = recent.filter(|t| age(t.0, now) < CADENCE_WINDOW).map(|t| quarter_hour(t.0)).collect();
    u32::try_from(steps.len()).unwrap_or(u32::MAX)
}

/// The quarter-hour that a time lies in, counted from the epoch.
pub fn quarter_hour(t: Timestamp) -> i64 {
    t.as_second().div_euclid(CADENCE_STEP_SECONDS)
}

/// Whether the daemon should run now.
pub fn want(project: &BuildProject, settings: &Settings, now: Timestamp) -> Want {
    let default = BuildProjectStatus::default();
    let status = project.status.as_ref().unwrap_or(&default);
    if project.spec.tier == Tier::Hot {
        return Want::Hot;
    }
    if live_entries(status, settings.max_build, now).next().is_some() {
        return Want::Inflight;
    }
    match &status.last_build_time {
        Some(last) if age(last.0, now) < effective_idle(project, settings, now) => Want::Recent,
        _ if status.wake_until.as_ref().is_some_and(|until| now < until.0) => Want::Woken,
        _ => Want::Zero,
    }
}

/// Whether a dial alone may wake the daemon: names are hashes of public names
/// and the gateway sees no client certificate, so that somebody who may route
/// must have asked for this one lately.
pub fn wakeable(project: &BuildProject, settings: &Settings, now: Timestamp) -> bool {
    let status = project.status.iter();
    let mut asked = status.flat_map(|s| s.last_build_time.iter().chain(&s.recent_build_times));
    asked.any(|t| age(t.0, now) < settings.wake_window)
}

/// How long until [`want`] can change by the passing of time alone; `None` when
/// only an event can change it.
pub fn next_change(project: &BuildProject, settings: &Settings, now: Timestamp) -> Option<Duration> {
    let status = project.status.as_ref()?;
    let entries = status.inflight.iter().map(|entry| remaining(entry.since.0, settings.max_build, now));
    let idle = effective_idle(project, settings, now);
    let idle = status.last_build_time.as_ref().map(|last| remaining(last.0, idle, now));
    // A route that leaves the window may shorten the idle time.
    let cadence = status.recent_build_times.iter().map(|t| remaining(t.0, CADENCE_WINDOW, now));
    let wake = status.wake_until.as_ref().filter(|until| now < until.0);
    let wake = wake.map(|until| remaining(now, age(now, until.0), now));
    entries.chain(idle).chain(cadence).chain(wake).filter(|left| !left.is_zero()).min()
}

/// How long until the oldest entry is `age` old, so that it may be asked whether
/// anybody uses it; `None` without entries.
pub fn unused_due(project: &BuildProject, age: Duration, now: Timestamp) -> Option<Duration> {
    let entries = project.status.iter().flat_map(|status| &status.inflight);
    entries.map(|entry| age.saturating_sub(self::age(entry.since.0, now))).min()
}

/// Identifiers of the entries that are at least `age` old.
pub fn older_entries(status: &BuildProjectStatus, age: Duration, now: Timestamp) -> Vec<String> {
    let old = status.inflight.iter().filter(|entry| self::age(entry.since.0, now) >= age);
    old.map(|entry| entry.id.clone()).collect()
}

/// For how long a pod has been ready; `None` when it is not.
pub fn ready_for(pod: &Pod, now: Timestamp) -> Option<Duration> {
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let ready = conditions.find(|c| c.type_ == "Ready" && c.status == "True")?;
    ready.last_transition_time.as_ref().map(|since| age(since.0, now))
}

/// Whether a fork that nothing wants may be deleted with its cache.
pub fn reap(project: &BuildProject, settings: &Settings, now: Timestamp) -> bool {
    let born = project.metadata.creation_timestamp.as_ref().map_or(now, |t| t.0);
    is_fork(project) && want(project, settings, now) == Want::Zero && age(born, now) >= FORK_REAP_GRACE
}

/// Whether this is the ephemeral daemon of a project's untrusted builds.
pub fn is_fork(project: &BuildProject) -> bool {
    project.spec.key.starts_with("fork")
}

/// Time since `then`; zero when `then` lies in the future.
pub fn age(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or(Duration::ZERO)
}

fn remaining(start: Timestamp, span: Duration, now: Timestamp) -> Duration {
    // Just past the deadline, since the comparisons above are strict on one side.
    let past = Duration::from_millis(50);
    (span + past).saturating_sub(age(start, now)).max(if age(start, now) > span { Duration::ZERO } else { past })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::api::{BuildProjectSpec, Gate};
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use proptest::prelude::*;

    pub(crate) fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    pub(crate) fn project(key: &str, inflight: &[i64], last: Option<i64>) -> BuildProject {
        let spec: BuildProjectSpec =
            serde_json::from_value(serde_json::json!({"key": key, "repo": "acme/shop", "arch": "amd64"})).unwrap();
        let mut project = BuildProject::new(key, spec);
        project.metadata.creation_timestamp = Some(Time(at(0)));
        project.status = Some(BuildProjectStatus {
            inflight: inflight
                .iter()
                .map(|since| InflightEntry { id: format!("id{since}"), since: Time(at(*since)) })
                .collect(),
            last_build_time: last.map(|s| Time(at(s))),
            gate: Gate::default(),
            ..Default::default()
        });
        project
    }

    #[test]
    fn a_daemon_is_wanted_while_hot_in_flight_or_recent() {
        let settings = Settings::default();
        let mut hot = project("p1", &[], None);
        hot.spec.tier = Tier::Hot;
        for (name, project, now, wanted) in [
            ("newborn without a build", project("p1", &[], None), 0, Want::Zero),
            ("hot", hot, 1_000_000, Want::Hot),
            ("in flight", project("p1", &[0], Some(0)), 7200, Want::Inflight),
            ("entry expired", project("p1", &[0], Some(0)), 7201, Want::Zero),
            ("a leak does not release its sibling", project("p1", &[0, 10], Some(10)), 7205, Want::Inflight),
            ("just used", project("p1", &[], Some(100)), 999, Want::Recent),
            ("idle timeout reached", project("p1", &[], Some(100)), 1000, Want::Zero),
            ("fork just used", project("forkp1", &[], Some(0)), 299, Want::Recent),
            ("fork idle", project("forkp1", &[], Some(0)), 300, Want::Zero),
            ("clock went back", project("p1", &[], Some(100)), 0, Want::Recent),
        ] {
            assert_eq!(want(&project, &settings, at(now)), wanted, "{name}");
        }
    }

    fn routed(times: impl IntoIterator<Item = i64>) -> BuildProject {
        let mut project = project("p1", &[], None);
        let status = project.status.as_mut().unwrap();
        status.recent_build_times = times.into_iter().map(|t| Time(at(t))).collect();
        status.last_build_time = status.recent_build_times.last().cloned();
        project
    }

    #[test]
    fn a_daemon_that_is_used_often_is_kept_longer() {
        const HOUR: i64 = 3600;
        let settings = Settings::default();
        let off = Settings { adaptive_idle_max: Duration::ZERO, ..Settings::default() };
        let mut short = routed((0..30).map(|i| i * 900));
        short.spec.idle_timeout_sec = 0;
        let mut long = routed((0..30).map(|i| i * 900));
        long.spec.idle_timeout_sec = 21_600;
        let mut fork = routed((0..4).map(|i| i * 900));
        fork.spec.key = "forkp1".into();
        for (name, project, settings, now, seconds) in [
            ("never routed", routed([]), &settings, 0, 900),
            ("once", routed([0]), &settings, 0, 900),
            ("a burst of 24 builds in ten minutes", routed((0..24).map(|i| i * 25)), &settings, 600, 900),
            ("three quarter-hours", routed([0, 10, 900, 1800]), &settings, 1800, 2700),
            ("what is a day old does not count", routed([0, 900, 1800]), &settings, 24 * HOUR + 900, 900),
            ("all day", routed((0..30).map(|i| i * 900)), &settings, 30 * 900, 21_600),
            ("switched off", routed([0, 900, 1800]), &off, 1800, 900),
            ("base zero", short, &settings, 30 * 900, 0),
            ("base at the cap", long, &settings, 30 * 900, 21_600),
            ("fork", fork, &settings, 3600, 300),
        ] {
            assert_eq!(effective_idle(&project, settings, at(now)), Duration::from_secs(seconds), "{name}");
        }
    }

    proptest! {
        /// The idle time lies between base and cap, grows with every route, and
        /// nothing changes before the time that the next look is set for.
        #[test]
        fn idle_is_bounded_and_constant_until_the_next_look(
            mut times in proptest::collection::vec(0..90_000_i64, 0..30), base in 0..40_000_i32, cap in 0..40_000_u64,
            now in 0..120_000_i64, part in 0.0..1.0_f64,
        ) {
            times.sort_unstable();
            let settings = Settings { adaptive_idle_max: Duration::from_secs(cap), ..Settings::default() };
            let mut project = routed(times.clone());
            project.spec.idle_timeout_sec = base;
            let (base, cap) = (Duration::from_secs(base.unsigned_abs().into()), Duration::from_secs(cap));
            let idle = effective_idle(&project, &settings, at(now));
            prop_assert!(base <= idle && idle <= base.max(cap));
            let wanted = want(&project, &settings, at(now));
            if let Some(wait) = next_change(&project, &settings, at(now)) {
                let before = at(now) + wait.saturating_sub(Duration::from_millis(60)).mul_f64(part);
                prop_assert_eq!(want(&project, &settings, before), wanted);
            } else {
                prop_assert_eq!(want(&project, &settings, at(now + 1_000_000)), wanted);
            }
            times.push(now);
            let mut more = routed(times);
            more.spec.idle_timeout_sec = i32::try_from(base.as_secs()).unwrap();
            prop_assert!(effective_idle(&more, &settings, at(now)) >= idle);
        }
    }

    #[test]
    fn the_next_look_is_just_after_the_decision_can_change() {
        let settings = Settings::default();
        let p = project("p1", &[0], Some(0));
        let wait = next_change(&p, &settings, at(100)).unwrap();
        assert_eq!(wait, Duration::from_millis(800_050));
        let p = project("p1", &[], Some(0));
        assert_eq!(next_change(&p, &settings, at(2000)), None);
        let at_the_edge = next_change(&p, &settings, at(900)).unwrap();
        assert!(at_the_edge > Duration::ZERO && at_the_edge < Duration::from_secs(1));
    }

    #[test]
    fn entries_are_asked_about_when_the_oldest_is_old_enough() {
        let (p, age) = (project("p1", &[100, 400], Some(400)), Duration::from_secs(600));
        assert_eq!(unused_due(&p, age, at(400)), Some(Duration::from_secs(300)));
        assert_eq!(unused_due(&p, age, at(700)), Some(Duration::ZERO));
        assert_eq!(unused_due(&project("p1", &[], None), age, at(700)), None);
        assert_eq!(older_entries(&p.status_or_default(), age, at(999)), ["id100"]);
        assert_eq!(older_entries(&p.status_or_default(), age, at(1000)), ["id100", "id400"]);
    }

    #[test]
    fn a_newborn_fork_is_not_reaped() {
        let settings = Settings { fork_idle: Duration::from_secs(5), ..Settings::default() };
        let fork = project("forkp1", &[], None);
        assert!(!reap(&fork, &settings, at(89)));
        assert!(reap(&fork, &settings, at(90)));
        assert!(!reap(&project("p1", &[], None), &settings, at(100_000)));
        assert!(!reap(&project("forkp1", &[80], Some(80)), &settings, at(200)));
    }
}
