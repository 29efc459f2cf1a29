//! Deployment, StatefulSet, DaemonSet, Job.

use serde_json::Value;

use super::{State, condition, count, text, unseen};

/// A control plane that has just started refuses its own controllers for some
/// moments, until its authorizer has read the roles: no fault of the object.
fn passes(why: &str) -> bool {
    why.contains("is forbidden: User \"system:serviceaccount:kube-system:")
}

pub(super) fn deployment(object: &Value) -> State {
    if let Some(state) = unseen(object) {
        return state;
    }
    if let Some(("True", why)) = condition(object, "ReplicaFailure") {
        return if passes(&why) { State::Pending(why) } else { State::Failed(why) };
    }
    if let Some(("False", why)) = condition(object, "Progressing")
        && why.starts_with("ProgressDeadlineExceeded")
    {
        return State::Failed(why);
    }
    let wanted = wanted(object);
    let (all, updated, available) = (
        count(object, "/status/replicas"),
        count(object, "/status/updatedReplicas"),
        count(object, "/status/availableReplicas"),
    );
    if updated < wanted {
        State::Pending(format!("{updated} of {wanted} replicas updated"))
    } else if all > updated {
        State::Pending(format!("{} old replicas still end", all - updated))
    } else if available < wanted {
        State::Pending(format!("{available} of {wanted} replicas available"))
    } else {
        State::Ready
    }
}

pub(super) fn stateful_set(object: &Value) -> State {
    if let Some(state) = unseen(object) {
        return state;
    }
    let wanted = wanted(object);
    let (ready, updated) = (count(object, "/status/readyReplicas"), count(object, "/status/updatedReplicas"));
    if ready < wanted {
        return State::Pending(format!("{ready} of {wanted} replicas ready"));
    }
    if count(object, "/status/replicas") > wanted {
        return State::Pending("surplus replicas still end".into());
    }
    // Pods below the partition keep the old revision on purpose; with
    // `OnDelete` nobody replaces them, so that their revision says nothing.
    let partition = count(object, "/spec/updateStrategy/rollingUpdate/partition");
    if text(object, "/spec/updateStrategy/type") == Some("OnDelete") {
        return State::Ready;
    }
    if partition > 0 {
        let wanted_updated = (wanted - partition).max(0);
        return if updated < wanted_updated {
            State::Pending(format!("{updated} of {wanted_updated} replicas updated above partition {partition}"))
        } else {
            State::Ready
        };
    }
    if text(object, "/status/currentRevision") != text(object, "/status/updateRevision") {
        return State::Pending(format!("{updated} of {wanted} replicas updated"));
    }
    State::Ready
}

pub(super) fn daemon_set(object: &Value) -> State {
    if let Some(state) = unseen(object) {
        return state;
    }
    let desired = count(object, "/status/desiredNumberScheduled");
    let (updated, available) =
        (count(object, "/status/updatedNumberScheduled"), count(object, "/status/numberAvailable"));
    if desired == 0 {
        State::Pending("no node matches it".into())
    } else if updated < desired {
        State::Pending(format!("updated on {updated} of {desired} nodes"))
    } else if available < desired {
        State::Pending(format!("available on {available} of {desired} nodes"))
    } else {
        State::Ready
    }
}

pub(super) fn job(object: &Value) -> State {
    if let Some(("True", why)) = condition(object, "Failed") {
        return State::Failed(why);
    }
    if let Some(("True", _)) = condition(object, "Complete") {
        return State::Ready;
    }
    if let Some(("True", _)) = condition(object, "Suspended") {
        return State::Pending("suspended".into());
    }
    match (count(object, "/status/active"), object.pointer("/status")) {
        (active, _) if active > 0 => State::Pending(format!("{active} pods still run")),
        (_, None) => State::Pending("no status yet".into()),
        _ => State::Pending("no pod has succeeded yet".into()),
    }
}

/// The API server fills in one replica where none is given.
fn wanted(object: &Value) -> i64 {
    object.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(1)
}
