//! One file a component, named so that their order is the order of applying.

use serde_json::Value;

use super::{BOOTSTRAP, File, Group, documents};
use crate::manifest::Object;

/// How long an ended first step stays, in seconds: a day.
const SHOWN: u32 = 86_400;

/// Nobody prunes what is applied by hand: the first step goes by itself when it
/// has been seen. GitOps prunes it, and would make one that is gone anew.
fn mortal(object: &Object) -> Value {
    let mut body = (*object.body).clone();
    if object.component == BOOTSTRAP.1 && object.id.kind == "Job" {
        body["spec"]["ttlSecondsAfterFinished"] = SHOWN.into();
    }
    body
}

pub(super) fn name(number: usize, group: &Group<'_>) -> String {
    format!("{number:02}-{}-{}.yaml", group.runlevel, group.component)
}

pub(super) fn files(groups: &[Group<'_>]) -> Vec<File> {
    let file = |(number, group): (usize, &Group<'_>)| {
        let bodies: Vec<Value> = group.objects.iter().map(|object| mortal(object)).collect();
        (name(number, group), documents(&bodies))
    };
    groups.iter().enumerate().map(file).collect()
}
