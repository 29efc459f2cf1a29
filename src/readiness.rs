//! Is an object really ready? One rule a kind.
//!
//! In: an object as the API server shows it, or nothing, and the [`Pin`] that
//! our apply returned. Out: [`State`]. Pure. "No status yet" is never ready,
//! and a status of an older generation or of another object says nothing.

mod certificate;
mod creation;
mod culprit;
mod declared;
mod network;
mod pod;
mod storage;
mod workload;

use serde_json::Value;

pub use creation::Around;
pub use culprit::{Culprit, culprit};
pub use declared::Declared;
pub use pod::{Trouble, Why, trouble};

/// What is known about an object's readiness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It does what it was made for.
    Ready,
    /// It may still become ready; says what it waits for.
    Pending(String),
    /// It will not become ready by waiting; says why.
    Failed(String),
}

/// Which object is meant, and from which generation on its status counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pin {
    /// UID that our apply returned; another object of that name is not ours.
    pub uid: Option<String>,
    /// Generation that our apply returned; `None` where a kind has none.
    pub generation: Option<i64>,
    /// When it began to fail to make pods, if it did so before anything that
    /// is waited for was changed.
    pub failing_since: Option<String>,
}

impl Pin {
    /// The pin of an object as the API server returned it.
    pub fn of(object: &Value) -> Self {
        Self {
            uid: object.pointer("/metadata/uid").and_then(Value::as_str).map(str::to_owned),
            generation: object.pointer("/metadata/generation").and_then(Value::as_i64),
            failing_since: creation::began(object),
        }
    }
}

/// Whether objects of this kind have a rule of their own; all others are ready
/// as soon as they exist.
pub fn has_rule(group: &str, kind: &str) -> bool {
    rule(group, kind).is_some()
}

/// Whether an installation can do without: an address of a load balancer may
/// never come, and a volume may wait for its first consumer.
pub fn is_optional(group: &str, kind: &str) -> bool {
    group.is_empty() && matches!(kind, "Service" | "PersistentVolumeClaim")
}

/// Judges one object. `None` is an object that does not exist.
pub fn assess(object: Option<&Value>, pin: &Pin) -> State {
    assess_declared(object, pin, None)
}

/// Judges one object, by what its component declares where the kind has no
/// rule of its own.
pub fn assess_declared(object: Option<&Value>, pin: &Pin, declared: Option<&Declared>) -> State {
    assess_among(object, pin, declared, Around::default())
}

/// Judges one object with what is around it.
pub fn assess_among(object: Option<&Value>, pin: &Pin, declared: Option<&Declared>, around: Around<'_>) -> State {
    let Some(object) = object else {
        return match pin.uid {
            Some(_) => State::Failed("was deleted".into()),
            None => State::Pending("does not exist yet".into()),
        };
    };
    if let Some(wanted) = &pin.uid
        && text(object, "/metadata/uid") != Some(wanted)
    {
        return State::Failed("was replaced by another object of that name".into());
    }
    if object.pointer("/metadata/deletionTimestamp").is_some() {
        return State::Failed("is being deleted".into());
    }
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64);
    if generation < pin.generation {
        return State::Pending("the API server's answer is older than what was applied".into());
    }
    let api_version = text(object, "/apiVersion").unwrap_or_default();
    let group = api_version.rsplit_once('/').map_or("", |(group, _)| group);
    match (rule(group, text(object, "/kind").unwrap_or_default()), declared) {
        (Some(rule), _) => creation::weighed(rule(object), object, pin, around),
        (None, Some(declared)) => declared.assess(object),
        (None, None) => State::Ready,
    }
}

type Rule = fn(&Value) -> State;

fn rule(group: &str, kind: &str) -> Option<Rule> {
    Some(match (group, kind) {
        ("apps", "Deployment") => workload::deployment,
        ("apps", "StatefulSet") => workload::stateful_set,
        ("apps", "DaemonSet") => workload::daemon_set,
        ("batch", "Job") => workload::job,
        ("", "Pod") => pod::pod,
        ("", "PersistentVolumeClaim") => storage::claim,
        ("", "Namespace") => storage::namespace,
        ("", "Service") => network::service,
        ("apiregistration.k8s.io", "APIService") => network::api_service,
        ("apiextensions.k8s.io", "CustomResourceDefinition") => network::definition,
        ("cert-manager.io", "Certificate" | "Issuer" | "ClusterIssuer") => certificate::issued,
        _ => return None,
    })
}

fn text<'a>(object: &'a Value, pointer: &str) -> Option<&'a str> {
    object.pointer(pointer).and_then(Value::as_str)
}

/// A count of the status; absent means zero, as the API server leaves zeros out.
fn count(object: &Value, pointer: &str) -> i64 {
    object.pointer(pointer).and_then(Value::as_i64).unwrap_or(0)
}

/// The condition of a type: its status, and its reason and message as one line.
fn condition<'a>(object: &'a Value, kind: &str) -> Option<(&'a str, String)> {
    let condition = condition_object(object, kind)?;
    Some((text(condition, "/status").unwrap_or("Unknown"), reason_and_message(condition)))
}

fn condition_object<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    let conditions = object.pointer("/status/conditions")?.as_array()?;
    conditions.iter().find(|condition| text(condition, "/type") == Some(kind))
}

fn reason_and_message(value: &Value) -> String {
    match (text(value, "/reason").unwrap_or_default(), text(value, "/message").unwrap_or_default()) {
        (reason, "") => reason.to_owned(),
        ("", message) => message.to_owned(),
        (reason, message) => format!("{reason}: {message}"),
    }
}

/// Pending as long as the controller has not seen the latest generation.
fn unseen(object: &Value) -> Option<State> {
    let observed = object.pointer("/status/observedGeneration").and_then(Value::as_i64);
    let generation = object.pointer("/metadata/generation").and_then(Value::as_i64);
    match observed {
        None => Some(State::Pending("no status yet".into())),
        Some(_) if observed < generation => Some(State::Pending("its controller has not seen the change yet".into())),
        Some(_) => None,
    }
}
