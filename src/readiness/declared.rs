//! When objects of other kinds are ready: by conditions that their component
//! declares.

use serde::Deserialize;
use serde_json::Value;

use super::{State, reason_and_message, text};

/// When objects of one kind are ready.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Declared {
    /// API group; empty for the core group.
    #[serde(default)]
    pub group: String,
    /// Kind.
    pub kind: String,
    /// Conditions that must be true.
    #[serde(default)]
    pub ready: Vec<String>,
    /// Conditions that, when true, say that waiting is of no use.
    #[serde(default)]
    pub failed: Vec<String>,
    /// Whether the installation can do without; unless said, as the kind's own rule has it.
    #[serde(default)]
    pub optional: Option<bool>,
}

impl Declared {
    /// Whether it speaks of this kind.
    pub fn is_of(&self, group: &str, kind: &str) -> bool {
        self.group == group && self.kind == kind
    }

    /// Judges an object that exists.
    pub(super) fn assess(&self, object: &Value) -> State {
        let conditions = object.pointer("/status/conditions").and_then(Value::as_array);
        let find = |kind: &str| conditions?.iter().find(|condition| text(condition, "/type") == Some(kind));
        let is_current = |value: &Value| {
            let observed = value.get("observedGeneration").and_then(Value::as_i64);
            let generation = object.pointer("/metadata/generation").and_then(Value::as_i64);
            observed.is_none_or(|observed| Some(observed) >= generation)
        };
        if !object.get("status").is_none_or(is_current) {
            return State::Pending("its controller has not seen the change yet".into());
        }
        let stalled = self.failed.iter().map(String::as_str).chain(["Stalled"]).filter_map(find);
        for condition in stalled.filter(|condition| is_current(condition)) {
            if text(condition, "/status") == Some("True") {
                return State::Failed(reason_and_message(condition));
            }
        }
        for kind in &self.ready {
            match find(kind) {
                Some(condition) if !is_current(condition) => {
                    return State::Pending(format!("condition {kind} is of an earlier generation"));
                }
                Some(condition) if text(condition, "/status") == Some("True") => {}
                Some(condition) => return State::Pending(format!("not {kind}: {}", reason_and_message(condition))),
                None => return State::Pending(format!("has no condition {kind} yet")),
            }
        }
        State::Ready
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn certificate(status: Value) -> State {
        let declared = Declared {
            group: "cert-manager.io".into(),
            kind: "Certificate".into(),
            ready: vec!["Ready".into()],
            failed: vec!["Denied".into()],
            optional: None,
        };
        declared.assess(&json!({"metadata": {"generation": 2}, "status": status}))
    }

    #[test]
    fn a_condition_counts_for_the_generation_that_it_saw() {
        let ready = |observed: u32| json!({"conditions": [{"type": "Ready", "status": "True", "observedGeneration": observed}]});
        assert_eq!(certificate(ready(2)), State::Ready);
        assert_eq!(certificate(ready(1)), State::Pending("condition Ready is of an earlier generation".into()));
        assert_eq!(certificate(json!({})), State::Pending("has no condition Ready yet".into()));
        let old = json!({"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True"}]});
        assert!(matches!(certificate(old), State::Pending(_)));
        let not = json!({"conditions": [{"type": "Ready", "status": "False", "reason": "Issuing", "message": "soon"}]});
        assert_eq!(certificate(not), State::Pending("not Ready: Issuing: soon".into()));
    }

    #[test]
    fn a_failure_condition_ends_the_waiting() {
        for kind in ["Denied", "Stalled"] {
            let status = json!({"conditions": [{"type": kind, "status": "True", "reason": "No", "message": "never"}]});
            assert_eq!(certificate(status), State::Failed("No: never".into()));
        }
    }
}
