//! What makes something reachable: Service, APIService, CustomResourceDefinition.

use serde_json::Value;

use super::{State, condition, text};

pub(super) fn service(object: &Value) -> State {
    let given = |pointer: &str| object.pointer(pointer).and_then(Value::as_array).is_some_and(|a| !a.is_empty());
    if text(object, "/spec/type") != Some("LoadBalancer") || given("/spec/externalIPs") {
        return State::Ready;
    }
    let addressed = object.pointer("/status/loadBalancer/ingress").and_then(Value::as_array).is_some_and(|ingress| {
        ingress.iter().any(|i| ["/ip", "/hostname"].iter().any(|p| text(i, p).is_some_and(|a| !a.is_empty())))
    });
    if addressed { State::Ready } else { State::Pending("waits for a load balancer address".into()) }
}

pub(super) fn api_service(object: &Value) -> State {
    match condition(object, "Available") {
        Some(("True", _)) => State::Ready,
        Some((_, why)) => State::Pending(why),
        None => State::Pending("no status yet".into()),
    }
}

/// Established only; that discovery serves the kind is for the shell to see.
pub(super) fn definition(object: &Value) -> State {
    if let Some(("False", why)) = condition(object, "NamesAccepted") {
        return State::Failed(format!("its names are taken: {why}"));
    }
    match condition(object, "Established") {
        Some(("True", _)) => State::Ready,
        Some((_, why)) => State::Pending(format!("not established: {why}")),
        None => State::Pending("no status yet".into()),
    }
}
