//! Whether a daemon is wanted, and until when: pure functions of the project
//! and the time. The same decisions serve every provisioner.

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
    /// Nothing wants it.
    Zero,
}

impl Want {
    /// Replicas of the StatefulSet.
    pub fn replicas(self) -> i32 {
        i32::from(self != Self::Zero)
    }
}

/// A hot daemon takes a changed template after this long without a build.
pub const HOT_ROLL_IDLE: Duration = Duration::from_secs(600);

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

/// Idle time after which this project's daemon goes to zero.
pub fn effective_idle(project: &BuildProject, settings: &Settings) -> Duration {
    if is_fork(project) {
        settings.fork_idle
    } else {
        Duration::from_secs(u64::try_from(project.spec.idle_timeout_sec).unwrap_or(0))
    }
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
        Some(last) if age(last.0, now) < effective_idle(project, settings) => Want::Recent,
        _ => Want::Zero,
    }
}

/// How long until [`want`] can change by the passing of time alone; `None` when
/// only an event can change it.
pub fn next_change(project: &BuildProject, settings: &Settings, now: Timestamp) -> Option<Duration> {
    let status = project.status.as_ref()?;
    let entries = status.inflight.iter().map(|entry| remaining(entry.since.0, settings.max_build, now));
    let idle = status.last_build_time.as_ref().map(|last| remaining(last.0, effective_idle(project, settings), now));
    entries.chain(idle).filter(|left| !left.is_zero()).min()
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

/// Whether a hot daemon may be restarted for a changed template.
pub fn may_roll_hot(project: &BuildProject, settings: &Settings, now: Timestamp) -> bool {
    let status = project.status_or_default();
    live_entries(&status, settings.max_build, now).next().is_none()
        && status.last_build_time.is_none_or(|last| age(last.0, now) >= HOT_ROLL_IDLE)
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
