//! Which pod keeps a workload from being ready.

use serde_json::Value;

use super::pod::waiting;
use super::{Trouble, text, trouble};

/// A pod and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Culprit {
    /// Name of the pod.
    pub pod: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// What is wrong with it.
    pub trouble: Trouble,
    /// Further pods of the workload that are not ready.
    pub others: Vec<String>,
}

/// The pod that explains best why a workload is not ready: only pods of its
/// current revision count, and what cannot pass comes before what may.
/// `sets` are ReplicaSets; only a Deployment needs them.
pub fn culprit<'a>(workload: &Value, sets: &[&Value], pods: impl IntoIterator<Item = &'a Value>) -> Option<Culprit> {
    let owner = Owner::of(workload, sets)?;
    let pods: Vec<&Value> = pods.into_iter().collect();
    if let Some(stuck) = stuck(workload, &owner, &pods) {
        return Some(stuck);
    }
    let mut troubled: Vec<Culprit> = pods
        .into_iter()
        .filter(|pod| owner.owns(pod) && pod.pointer("/metadata/deletionTimestamp").is_none())
        .filter_map(|pod| {
            Some(Culprit {
                pod: text(pod, "/metadata/name")?.to_owned(),
                namespace: text(pod, "/metadata/namespace").unwrap_or_default().to_owned(),
                trouble: trouble(pod).or_else(|| waiting(pod))?,
                others: Vec::new(),
            })
        })
        .collect();
    troubled.sort_by(|a, b| (!a.trouble.is_fatal(), &a.pod).cmp(&(!b.trouble.is_fatal(), &b.pod)));
    let mut troubled = troubled.into_iter();
    let first = troubled.next()?;
    Some(Culprit { others: troubled.map(|other| other.pod).collect(), ..first })
}

/// A pod of an earlier revision that is broken: a StatefulSet that goes in
/// order waits for it for ever, and never gets to the new revision.
fn stuck(workload: &Value, owner: &Owner<'_>, pods: &[&Value]) -> Option<Culprit> {
    let ordered = text(workload, "/kind") == Some("StatefulSet")
        && text(workload, "/spec/podManagementPolicy") != Some("Parallel")
        && text(workload, "/spec/updateStrategy/type") != Some("OnDelete");
    if !ordered {
        return None;
    }
    let earlier = |pod: &&&Value| {
        is_owned_by(pod, owner.uid) && !owner.owns(pod) && pod.pointer("/metadata/deletionTimestamp").is_none()
    };
    let mut broken = pods.iter().filter(earlier).filter_map(|pod| {
        let trouble = trouble(pod).filter(Trouble::is_fatal)?;
        let name = text(pod, "/metadata/name")?.to_owned();
        let namespace = text(pod, "/metadata/namespace").unwrap_or_default().to_owned();
        let trouble = trouble.stuck(&namespace, &name);
        Some(Culprit { pod: name, namespace, trouble, others: Vec::new() })
    });
    broken.next()
}

/// Who owns the pods of the current revision.
struct Owner<'a> {
    uid: &'a str,
    revision: Option<&'a str>,
}

impl<'a> Owner<'a> {
    fn of(workload: &'a Value, sets: &[&'a Value]) -> Option<Self> {
        let uid = text(workload, "/metadata/uid")?;
        match text(workload, "/kind")? {
            "Deployment" => {
                let set = current_set(workload, uid, sets)?;
                Some(Self { uid: text(set, "/metadata/uid")?, revision: None })
            }
            "StatefulSet" => Some(Self { uid, revision: text(workload, "/status/updateRevision") }),
            _ => Some(Self { uid, revision: None }),
        }
    }

    fn owns(&self, pod: &Value) -> bool {
        is_owned_by(pod, self.uid)
            && self.revision.is_none_or(|wanted| {
                pod.pointer("/metadata/labels/controller-revision-hash").is_none_or(|revision| revision == wanted)
            })
    }
}

/// The ReplicaSet that carries the Deployment's own revision.
pub(super) fn current_set<'a>(deployment: &Value, uid: &str, sets: &[&'a Value]) -> Option<&'a Value> {
    let revision = |object: &Value| object["metadata"]["annotations"]["deployment.kubernetes.io/revision"].clone();
    let wanted = revision(deployment);
    sets.iter().copied().find(|set| is_owned_by(set, uid) && revision(set) == wanted)
}

pub(super) fn is_owned_by(object: &Value, uid: &str) -> bool {
    let owners = object.pointer("/metadata/ownerReferences").and_then(Value::as_array);
    owners.is_some_and(|owners| owners.iter().any(|o| o["controller"] == true && o["uid"] == uid))
}
