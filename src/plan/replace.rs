//! When an object cannot be changed, may it be made anew?
//!
//! Only where the API server itself says that a field is immutable, and only
//! what can be lost without loss of data.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::ObjectId;

/// What is lost while an object is made anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// Nothing that anybody would notice.
    #[default]
    None,
    /// What it runs or leads to is away for a moment.
    Downtime,
    /// Data.
    Data,
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "nothing is lost",
            Self::Downtime => "downtime",
            Self::Data => "data would be lost",
        })
    }
}

/// One cause of a refusal, in the API server's words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cause {
    /// `FieldValueInvalid`.
    pub reason: String,
    /// `spec.selector`.
    pub field: String,
    /// `field is immutable`.
    pub message: String,
}

/// What is lost when this object is deleted and made anew.
pub fn loss(id: &ObjectId, live: &Value) -> Loss {
    match (id.group.as_str(), id.kind.as_str()) {
        ("batch", "Job")
        | ("rbac.authorization.k8s.io" | "scheduling.k8s.io" | "node.k8s.io" | "storage.k8s.io" | "policy", _)
        | ("", "ConfigMap" | "Secret" | "ServiceAccount") => Loss::None,
        ("apps", "Deployment" | "DaemonSet") | ("networking.k8s.io", "Ingress") | ("", "Service") => Loss::Downtime,
        ("apps", "StatefulSet") if live.pointer("/spec/volumeClaimTemplates").is_none_or(is_empty) => Loss::Downtime,
        _ => Loss::Data,
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

/// The immutable fields that a refusal is about; `None` when it is about
/// anything else as well.
pub fn immutable(code: u16, causes: &[Cause]) -> Option<String> {
    if code != 422 || causes.is_empty() || !causes.iter().all(is_immutability) {
        return None;
    }
    let field = |cause: &Cause| format!("{} cannot be changed", cause.field);
    let mut fields: Vec<String> = causes.iter().map(field).collect();
    fields.dedup();
    Some(fields.join(", "))
}

fn is_immutability(cause: &Cause) -> bool {
    let says = |text: &str| cause.message.contains(text);
    let reason = matches!(cause.reason.as_str(), "FieldValueInvalid" | "FieldValueForbidden");
    reason
        && (says("field is immutable")
            || says("is immutable after creation")
            || says("may not change once set")
            || says("may not be changed in an update")
            || says("cannot change roleRef")
            || (says("updates to ") && (says(" are forbidden") || says("is forbidden"))))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cause(message: &str) -> Cause {
        Cause { reason: "FieldValueInvalid".into(), field: "spec.selector".into(), message: message.into() }
    }

    #[test]
    fn only_the_api_servers_own_words_prove_immutability() {
        let yes = cause("Invalid value: …: field is immutable");
        assert_eq!(immutable(422, std::slice::from_ref(&yes)).unwrap(), "spec.selector cannot be changed");
        assert_eq!(immutable(409, std::slice::from_ref(&yes)), None);
        assert_eq!(immutable(422, &[]), None);
        assert_eq!(immutable(422, &[yes.clone(), cause("must be greater than zero")]), None);
        assert_eq!(immutable(422, &[Cause { reason: "FieldValueDuplicate".into(), ..yes }]), None);
        let sets = Cause {
            reason: "FieldValueForbidden".into(),
            ..cause("Forbidden: updates to statefulset spec for fields other than 'replicas', 'template' are forbidden")
        };
        assert!(immutable(422, &[sets]).is_some());
    }

    #[test]
    fn what_holds_data_is_never_made_anew() {
        let id = |group: &str, kind: &str| ObjectId {
            group: group.into(),
            version: "v1".into(),
            kind: kind.into(),
            namespace: None,
            name: "x".into(),
        };
        let with_caches = json!({"spec": {"volumeClaimTemplates": [{}]}});
        for (group, kind) in
            [("", "PersistentVolumeClaim"), ("", "Namespace"), ("example.org", "Thing"), ("apps", "StatefulSet")]
        {
            assert_eq!(loss(&id(group, kind), &with_caches), Loss::Data, "{kind}");
        }
        assert_eq!(loss(&id("apps", "StatefulSet"), &json!({})), Loss::Downtime);
        assert_eq!(loss(&id("batch", "Job"), &json!({})), Loss::None);
        assert_eq!(loss(&id("apps", "Deployment"), &json!({})), Loss::Downtime);
    }
}
