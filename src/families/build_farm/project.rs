//! A project as people and programs see it, from its object and from what its
//! companion says. Pure.

use std::cmp::Reverse;

use jiff::{RoundMode, Timestamp, TimestampRound, Unit};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::ResourceExt;

use super::api::{self, BuildProject, BuildProjectStatus, EndedBuild, SecurityProfile, Tier};
use super::figures::Told;
use super::lifecycle::{self, Want};
use super::settings::Settings;
use super::status::{DEGRADED, PROGRESSING, READY};
use crate::companion::observation::Build;
use crate::provisioner::project::{
    ActiveBuild, CacheRoom, Condition, Detail, FinishedBuild, InFlight, KeptBy, Phase, Steps, Summary,
};

/// What is known of a project.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// The object.
    pub project: &'a BuildProject,
    /// Whether its daemon takes builds now.
    pub ready: bool,
    /// What the companion said last.
    pub told: Option<&'a Told>,
}

/// Ended builds of a [`Detail`].
const BUILDS: usize = 50;

fn phase_of(reported: api::Phase) -> Phase {
    match reported {
        api::Phase::Pending => Phase::Pending,
        api::Phase::Idle => Phase::Idle,
        api::Phase::Scaling => Phase::Scaling,
        api::Phase::Warm => Phase::Warm,
        api::Phase::Failed => Phase::Failed,
    }
}

/// The phase that the object reports.
pub fn phase(project: &BuildProject) -> Phase {
    project.status.as_ref().and_then(|status| status.phase).map_or(Phase::Pending, phase_of)
}

/// A project in a few lines.
pub fn summary(known: Known<'_>, endpoint: String, settings: &Settings, now: Timestamp) -> Summary {
    let Known { project, ready, told } = known;
    let status = project.status_or_default();
    let (spec, phase) = (&project.spec, phase(project));
    let want = lifecycle::want(project, settings, now);
    let entries: Vec<_> =
        lifecycle::live_entries(&status, settings.max_build, now).map(|entry| entry.since.0).collect();
    let told = told.filter(|_| phase != Phase::Idle);
    Summary {
        key: project.name_any(),
        repo: spec.repo.clone(),
        name: spec.name.clone(),
        target: spec.target.clone(),
        arch: spec.arch,
        fork: lifecycle::is_fork(project),
        endpoint,
        phase,
        since: since(&status, phase),
        reason: condition(&status, READY).map(|ready| ready.reason.clone()),
        ready,
        in_flight: InFlight { count: entries.len(), since: entries.into_iter().min() },
        active_builds: told.and_then(|told| told.active.as_deref()).map(|builds| builds.iter().map(active).collect()),
        last_build: ended(&status, told).into_iter().next(),
        last_used: status.last_build_time.as_ref().map(|time| time.0),
        kept_by: kept_by(want).filter(|_| phase != Phase::Idle),
        idle_at: idle_at(project, &status, want, settings, now),
        cache: told.and_then(|told| told.cache).or_else(|| status.cache.map(room)),
    }
}

/// A project with all that is known.
pub fn detail(known: Known<'_>, endpoint: String, settings: &Settings, now: Timestamp) -> Detail {
    let (project, summary) = (known.project, summary(known, endpoint, settings, now));
    let status = project.status_or_default();
    let told = known.told.filter(|_| summary.phase != Phase::Idle);
    let conditions = status.conditions.iter().map(|condition| Condition {
        type_: condition.type_.clone(),
        status: condition.status.clone(),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        since: condition.last_transition_time.0,
    });
    Detail {
        daemon: format!("{}{}", crate::names::DAEMON_PREFIX, summary.key),
        namespace: settings.namespace.clone(),
        tier: match project.spec.tier {
            Tier::Hot => "hot",
            Tier::Warm => "warm",
        }
        .to_owned(),
        security_profile: match project.spec.security_profile {
            SecurityProfile::Rootless => "rootless",
            SecurityProfile::Userns => "userns",
            SecurityProfile::Privileged => "privileged",
        }
        .to_owned(),
        idle_seconds: lifecycle::effective_idle(project, settings, now).as_secs(),
        cache_volume_gi: u32::try_from(project.spec.cache_volume_gi).unwrap_or(0),
        last_snapshot: Some(status.last_snapshot.clone()).filter(|name| !name.is_empty()),
        buildkit: told.map(|told| told.buildkit.clone()).filter(|buildkit| !buildkit.version.is_empty()),
        conditions: conditions.collect(),
        builds: ended(&status, told),
        summary,
    }
}

fn condition<'a>(
    status: &'a BuildProjectStatus,
    type_: &str,
) -> Option<&'a k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
    status.conditions.iter().find(|condition| condition.type_ == type_)
}

/// When the daemon came into its phase: when the conditions that tell the phase
/// from the others last changed.
fn since(status: &BuildProjectStatus, phase: Phase) -> Option<Timestamp> {
    let tells: &[&str] = match phase {
        Phase::Pending => return None,
        Phase::Warm => &[READY],
        Phase::Scaling => &[PROGRESSING],
        Phase::Idle => &[READY, PROGRESSING],
        Phase::Failed => &[READY, DEGRADED],
    };
    tells.iter().filter_map(|type_| condition(status, type_)).map(|c| c.last_transition_time.0).max()
}

fn kept_by(want: Want) -> Option<KeptBy> {
    match want {
        Want::Hot => Some(KeptBy::Hot),
        Want::Inflight => Some(KeptBy::InFlight),
        Want::Recent => Some(KeptBy::RecentUse),
        Want::Woken => Some(KeptBy::Dial),
        Want::Zero => None,
    }
}

fn idle_at(
    project: &BuildProject,
    status: &BuildProjectStatus,
    want: Want,
    settings: &Settings,
    now: Timestamp,
) -> Option<Timestamp> {
    match want {
        Want::Recent => {
            status.last_build_time.as_ref()?.0.checked_add(lifecycle::effective_idle(project, settings, now)).ok()
        }
        Want::Woken => status.wake_until.as_ref().map(|until| until.0),
        Want::Hot | Want::Inflight | Want::Zero => None,
    }
}

fn active(build: &Build) -> ActiveBuild {
    ActiveBuild {
        reference: build.reference.clone(),
        started: build.started,
        step: build.step.clone(),
        steps: steps(build).known(),
    }
}

fn steps(build: &Build) -> Steps {
    Steps { total: build.steps_total, cached: build.steps_cached, completed: build.steps_completed }
}

fn room(room: api::CacheRoom) -> CacheRoom {
    let bytes = |n: i64| u64::try_from(n).unwrap_or(0);
    CacheRoom { bytes_used: bytes(room.bytes_used), bytes_total: bytes(room.bytes_total) }
}

/// What the companion tells, and what the object remembers, newest first.
fn ended(status: &BuildProjectStatus, told: Option<&Told>) -> Vec<FinishedBuild> {
    let told = told.iter().flat_map(|told| &told.finished);
    let mut builds: Vec<FinishedBuild> = told.filter_map(finished).collect();
    for build in &status.last_builds {
        if !builds.iter().any(|known| known.reference == build.reference) {
            builds.extend(remembered(build));
        }
    }
    builds.sort_by_key(|build| Reverse(build.completed));
    builds.truncate(BUILDS);
    builds
}

fn finished(build: &Build) -> Option<FinishedBuild> {
    let (reference, error) = (build.reference.clone(), build.error.clone());
    FinishedBuild::new(reference, build.started, build.completed, steps(build), error)
}

fn remembered(build: &EndedBuild) -> Option<FinishedBuild> {
    let count = |n: i32| u32::try_from(n).unwrap_or(0);
    let steps = Steps {
        total: count(build.steps_total),
        cached: count(build.steps_cached),
        completed: count(build.steps_completed),
    };
    let error = Some(build.error.clone()).filter(|error| !error.is_empty());
    let started = build.started.as_ref().map(|time| time.0);
    FinishedBuild::new(build.reference.clone(), started, Some(build.completed.0), steps, error)
}

/// An ended build as the object remembers it; `None` for one that runs.
pub fn remember(build: &Build) -> Option<EndedBuild> {
    let count = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
    Some(EndedBuild {
        reference: build.reference.clone(),
        started: build.started.map(micro),
        completed: micro(build.completed?),
        steps_total: count(build.steps_total),
        steps_cached: count(build.steps_cached),
        steps_completed: count(build.steps_completed),
        error: build.error.clone().unwrap_or_default(),
    })
}

/// As it will be read back: what differs only by being written would be written
/// again and again.
fn micro(time: Timestamp) -> MicroTime {
    let down = TimestampRound::new().smallest(Unit::Microsecond).mode(RoundMode::Floor);
    time.round(down).unwrap_or(time).into()
}
