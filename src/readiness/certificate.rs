//! What cert-manager keeps.

use serde_json::Value;

use super::{State, condition_object, reason_and_message, text};

/// Issuers and certificates: their condition says of which generation it speaks.
pub(super) fn issued(object: &Value) -> State {
    let Some(ready) = condition_object(object, "Ready") else { return State::Pending("no status yet".into()) };
    let observed = ready.get("observedGeneration").and_then(Value::as_i64);
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64);
    if observed < generation {
        return State::Pending("cert-manager has not seen the change yet".into());
    }
    match text(ready, "/status") {
        Some("True") => State::Ready,
        _ => State::Pending(match (reason_and_message(ready), condition_object(object, "Issuing")) {
            (why, Some(issuing)) if text(issuing, "/status") == Some("False") => {
                format!("{why}; {}", reason_and_message(issuing))
            }
            (why, _) => why,
        }),
    }
}
