//! A Deployment whose pods cannot be made: is that so now, or was it so before
//! this run mended the cause?
//!
//! Its controller tries again by and by, pauses longer each time, and leaves
//! the condition as it was at its first failure. So an old one says nothing
//! until the controller is known to have tried again.

use serde_json::Value;

use super::{Pin, State, condition_object, culprit, reason_and_message, text};

/// What else is known of a workload than itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct Around<'a> {
    /// Its ReplicaSets.
    pub sets: &'a [&'a Value],
    /// Whether its controller has failed again since it is looked at.
    pub failed_again: bool,
}

/// When a workload's failure to make pods began; nothing when it does not fail.
pub(super) fn began(object: &Value) -> Option<String> {
    let failure = failure(object)?;
    Some(text(failure, "/lastTransitionTime").unwrap_or_default().to_owned())
}

fn failure(object: &Value) -> Option<&Value> {
    condition_object(object, "ReplicaFailure").filter(|failure| text(failure, "/status") == Some("True"))
}

/// The state of a workload that a failure to make pods may be over for.
pub(super) fn weighed(state: State, object: &Value, pin: &Pin, around: Around<'_>) -> State {
    let (State::Failed(why), Some(failure)) = (&state, failure(object)) else { return state };
    if *why != reason_and_message(failure) {
        return state;
    }
    if of_another_revision(object, around.sets) {
        return State::Pending(format!("{why} (of an earlier revision)"));
    }
    let old = pin.failing_since.is_some() && pin.failing_since == began(object);
    if old && !around.failed_again {
        return State::Pending(format!("{why} (before this run; its controller will try again)"));
    }
    state
}

/// The Deployment repeats what any of its ReplicaSets says; only that of its
/// present revision has to make pods.
fn of_another_revision(object: &Value, sets: &[&Value]) -> bool {
    let uid = text(object, "/metadata/uid").unwrap_or_default();
    let fails = |set: &&&Value| failure(set).is_some();
    let current = culprit::current_set(object, uid, sets);
    current.is_some_and(|set| failure(set).is_none())
        && sets.iter().filter(|set| culprit::is_owned_by(set, uid)).any(|set| fails(&set))
}
