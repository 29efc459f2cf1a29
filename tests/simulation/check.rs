//! What must hold after every step.

use std::time::Duration;

use serde_json::Value;

use crate::builds::SLACK_MS;
use crate::cluster::is_shut;
use crate::model::{Change, Id, Kind, text};
use crate::world::{CLUSTER, State, held};

/// Annotation under which the gate's epoch stands on a StatefulSet.
const GATE_EPOCH: &str = "/metadata/annotations/buildkit-operator.socialgouv.github.io~1gate-epoch";

/// Annotation that says since when a changed template waits for builds.
const ROLL_HELD_SINCE: &str = "/metadata/annotations/buildkit-operator.socialgouv.github.io~1roll-held-since";

const SLACK: Duration = Duration::from_millis(SLACK_MS);

/// An object was written.
pub(crate) fn written(state: &mut State, who: &str, id: &Id, old: Option<&Value>, new: Option<&Value>) {
    match id.0 {
        Kind::StatefulSet if who != CLUSTER => set_written(state, id, old, new),
        Kind::Service if who != CLUSTER => service_written(state, id, old, new),
        Kind::Project => project_written(state, who, id, old, new),
        _ => {}
    }
}

fn set_written(state: &mut State, id: &Id, old: Option<&Value>, new: Option<&Value>) {
    let (Some(new), Some(old)) = (new, old) else { return };
    let key = id.1.trim_start_matches("buildkitd-").to_owned();
    let replicas = |set: &Value| set["spec"]["replicas"].as_i64().unwrap_or(1);
    let epoch = text(new, GATE_EPOCH).parse::<i64>().unwrap_or(0);
    let gate = state.status(&key)["gate"].clone();
    let current = gate["epoch"].as_i64().unwrap_or(0);
    if epoch < current {
        state.violate(format_args!(
            "a write of {} took effect that was decided under epoch {epoch}, now {current}",
            id.1
        ));
    }
    if replicas(new) < replicas(old) {
        if gate["closed"] != true {
            state.violate(format_args!("{} was taken to zero while its gate was open", id.1));
        }
        let held_for = held(state.model.now.ms, text(old, ROLL_HELD_SINCE));
        taken_down(state, &key, !text(old, ROLL_HELD_SINCE).is_empty(), held_for);
        return;
    }
    match (replicas(old) > 0, replicas(new) > 0) {
        (true, true) if gate["closed"] == true => state.reached("gate opened again, the daemon as it was"),
        (false, true) => state.reached("daemon brought back"),
        (false, false) if old["spec"]["template"] != new["spec"]["template"] => {
            state.reached("template taken at zero");
        }
        _ => {}
    }
    if text(old, ROLL_HELD_SINCE).is_empty() && !text(new, ROLL_HELD_SINCE).is_empty() {
        state.reached("roll held");
    }
    if old["spec"]["template"] != new["spec"]["template"] && replicas(old) > 0 {
        state.violate(format_args!("the template of {} was changed while it ran", id.1));
    }
}

fn service_written(state: &mut State, id: &Id, old: Option<&Value>, new: Option<&Value>) {
    let (Some(new), Some(old)) = (new, old) else { return };
    let gate = state.status(id.1.trim_start_matches("buildkitd-"))["gate"].clone();
    let (epoch, current) = (text(new, GATE_EPOCH).parse().unwrap_or(0), gate["epoch"].as_i64().unwrap_or(0));
    if epoch < current && text(new, GATE_EPOCH) != text(old, GATE_EPOCH) {
        state.violate(format_args!(
            "a write of Service {} took effect that was decided under epoch {epoch}, now {current}",
            id.1
        ));
    }
    match (is_shut(old), is_shut(new)) {
        (false, true) if gate["closed"] != true => {
            state.violate(format_args!("Service {} was shut while its gate was open", id.1));
        }
        (false, true) => state.reached("Service shut"),
        (true, false) => state.reached("Service opened again"),
        _ => {}
    }
}

/// Only a roll that has been held for as long as a build may take cuts builds,
/// and none that is younger than an hour.
fn taken_down(state: &mut State, key: &str, was_held: bool, held_for: Duration) {
    let overdue = was_held && held_for + SLACK >= state.max_build;
    let now = state.model.now.ms;
    let cut: Vec<_> = state.builds.live(now).filter(|build| build.key == key).cloned().collect();
    for build in &cut {
        if overdue && build.is_old(now) {
            state.reached("forced roll that cut a build");
            state.builds.over(build.number);
        } else {
            state.violate(format_args!("buildkitd-{key} was taken to zero under build {}", build.number));
        }
    }
    let entries = state.status(key)["inflight"].as_array().is_some_and(|entries| !entries.is_empty());
    state.reached(match (was_held, entries) {
        (true, true) => "forced roll",
        (true, false) => "roll between builds",
        (false, _) => "daemon at zero",
    });
}

fn project_written(state: &mut State, who: &str, id: &Id, old: Option<&Value>, new: Option<&Value>) {
    gate_written(state, who, id, old, new);
    let empty = Vec::new();
    let entries = |project: Option<&Value>| -> Vec<Value> {
        project.and_then(|p| p["status"]["inflight"].as_array()).unwrap_or(&empty).clone()
    };
    let there = state.model.get(id.0, &id.1).is_some();
    let (old, new) = (entries(old), entries(new.filter(|_| there)));
    if new.iter().enumerate().any(|(i, entry)| new[..i].iter().any(|other| other["id"] == entry["id"])) {
        state.violate(format_args!("project {} has one entry twice", id.1));
    }
    let lost: Vec<_> = old.iter().filter(|entry| !new.iter().any(|kept| kept["id"] == entry["id"])).collect();
    for entry in lost {
        let digest = entry["id"].as_str().unwrap_or_default();
        if held(state.model.now.ms, text(entry, "/since")) > state.max_build + SLACK {
            state.reached("entry expired");
        }
        if let Some(build) = state.builds.of_entry(digest, state.model.now.ms) {
            state.violate(format_args!("project {} lost the entry of build {build}, which runs", id.1));
        }
    }
}

fn gate_written(state: &mut State, who: &str, id: &Id, old: Option<&Value>, new: Option<&Value>) {
    let there = state.model.get(id.0, &id.1).is_some();
    let closed = |project: Option<&Value>| project.is_some_and(|p| p["status"]["gate"]["closed"] == true);
    if !closed(old) && closed(new) {
        state.reached("gate closed");
    }
    match old {
        Some(_) if !there && who != CLUSTER => state.reached("fork reaped"),
        None if state.model.log.iter().any(|event| event.id == *id && event.change == Change::Deleted) => {
            state.reached("fork came again")
        }
        _ => {}
    }
}

/// A pod is taken away by its controller.
pub(crate) fn pod_taken(state: &mut State, pod: &Value) {
    let uid = text(pod, "/metadata/uid");
    let cut = state.builds.live(state.model.now.ms).find(|build| build.pod == uid).map(|build| build.number);
    if let Some(build) = cut {
        state.violate(format_args!("pod {} was taken away under build {build}", text(pod, "/metadata/name")));
    }
}

/// A route was answered with an endpoint. Returns the pod's uid.
pub(crate) fn answered(state: &mut State, who: &str, key: &str, digest: &str) -> Option<String> {
    let entries = state.status(key)["inflight"].as_array().cloned().unwrap_or_default();
    if !entries.iter().any(|entry| entry["id"] == digest) {
        state.violate(format_args!("{who} answered a route of {key} whose entry is not persisted"));
    }
    if state.model.get(Kind::Service, &format!("buildkitd-{key}")).is_none_or(|service| is_shut(&service.value)) {
        state.violate(format_args!("{who} answered a route of {key} whose Service leads nowhere"));
    }
    let pod = state.serving(key);
    if pod.is_none() && !state.disturbed(key) {
        state.violate(format_args!("{who} answered a route of {key} whose daemon does not serve"));
    }
    pod
}

/// A release was answered.
pub(crate) fn released(state: &mut State, who: &str, key: &str, digest: &str) {
    let entries = state.status(key)["inflight"].as_array().cloned().unwrap_or_default();
    if entries.iter().any(|entry| entry["id"] == digest) {
        state.violate(format_args!("{who} was told of its release, but its entry is still there"));
    }
}
