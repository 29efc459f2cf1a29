//! What must hold of every plan, checked by code that shares nothing with the
//! planner.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::{Action, Plan};
use crate::manifest::{Object, ObjectId};

/// A broken invariant of a plan.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Fault {
    /// A desired object is not in the plan.
    #[error("{0} is missing")]
    Missing(ObjectId),
    /// An object is there twice.
    #[error("{0} is planned twice")]
    Twice(ObjectId),
    /// An object that nobody wants.
    #[error("{0} is not desired")]
    NotDesired(ObjectId),
    /// Levels or waves out of order.
    #[error("{0} comes too late or too early")]
    Order(ObjectId),
    /// A change without a field that changes, or the other way round.
    #[error("{0} says that it changes, and shows no field")]
    NoField(ObjectId),
    /// Secret data in the printed form.
    #[error("{0} shows its data")]
    Secret(ObjectId),
}

/// Every broken invariant of a plan for these desired objects.
pub fn check(plan: &Plan, desired: &[Object]) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut seen = BTreeSet::new();
    for change in plan.changes() {
        if !seen.insert(&change.id) {
            faults.push(Fault::Twice(change.id.clone()));
        }
        let (Action::Configure { changes } | Action::Recreate { changes, .. }) = &change.action else { continue };
        if changes.is_empty() {
            faults.push(Fault::NoField(change.id.clone()));
        }
    }
    let wanted: BTreeSet<_> = desired.iter().map(|object| &object.id).collect();
    faults.extend(wanted.difference(&seen).map(|id| Fault::Missing((*id).clone())));
    faults.extend(seen.difference(&wanted).map(|id| Fault::NotDesired((*id).clone())));
    faults.extend(out_of_order(plan, desired));
    faults.extend(desired.iter().filter(|o| is_shown(plan, o)).map(|o| Fault::Secret(o.id.clone())));
    faults
}

fn out_of_order(plan: &Plan, desired: &[Object]) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut last = None;
    for level in &plan.levels {
        for change in &level.changes {
            let place = (level.runlevel, change.wave);
            let level_is_right = desired.iter().all(|o| o.id != change.id || o.runlevel == level.runlevel);
            if last.is_some_and(|last| last > place) || !level_is_right {
                faults.push(Fault::Order(change.id.clone()));
            }
            last = Some(place);
        }
    }
    faults
}

/// Whether any value of a Secret appears in what the plan prints, as written
/// or decoded.
fn is_shown(plan: &Plan, object: &Object) -> bool {
    if object.id.kind != "Secret" {
        return false;
    }
    let printed = [plan.to_string(), serde_json::to_string(plan).unwrap_or_default(), format!("{plan:?}")];
    let values = ["data", "stringData"].into_iter().filter_map(|key| object.body.get(key)?.as_object());
    values.flat_map(|map| map.values()).filter_map(Value::as_str).any(|value| {
        let decoded = STANDARD.decode(value).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        [Some(value.to_owned()), decoded]
            .into_iter()
            .flatten()
            // Short values appear in any text by chance.
            .filter(|value| value.len() >= 6)
            .any(|value| printed.iter().any(|text| text.contains(&value)))
    })
}
