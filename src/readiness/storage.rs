//! PersistentVolumeClaim and Namespace.

use serde_json::Value;

use super::{State, text};

pub(super) fn claim(object: &Value) -> State {
    match text(object, "/status/phase") {
        Some("Bound") => State::Ready,
        Some("Lost") => State::Failed(match text(object, "/spec/volumeName") {
            Some(volume) => format!("its volume \"{volume}\" is lost"),
            None => "its volume is lost".into(),
        }),
        Some(_) => State::Pending("waits for a volume".into()),
        None => State::Pending("no status yet".into()),
    }
}

pub(super) fn namespace(object: &Value) -> State {
    match text(object, "/status/phase") {
        Some("Active") => State::Ready,
        Some("Terminating") => State::Failed("is being deleted".into()),
        _ => State::Pending("no status yet".into()),
    }
}
