//! Deleting one object, waiting until it is gone, and saying why it is not.

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Preconditions, PropagationPolicy};
use kube::core::DynamicObject;
use kube::runtime::watcher;
use serde_json::Value;

use super::request::Target;
use super::{Cluster, Event, RequestError};
use crate::manifest::ObjectId;

/// Why an object that was deleted is still there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lingering {
    /// Each reason, in words.
    pub(crate) reasons: Vec<String>,
}

impl std::fmt::Display for Lingering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.reasons.as_slice() {
            [] => write!(f, "no finalizer holds it; the API server has not removed it yet"),
            reasons => write!(f, "{}", reasons.join("; ")),
        }
    }
}

impl Cluster {
    /// Deletes the object of that UID; whether it was there.
    pub(crate) async fn delete(&self, id: &ObjectId, uid: &str) -> Result<bool, RequestError> {
        let Some(resource) = self.find_resource(id).await? else { return Ok(false) };
        let target = Target { verb: "delete", object: id, resource: &resource };
        let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let params = DeleteParams {
            preconditions: Some(preconditions),
            propagation_policy: Some(PropagationPolicy::Background),
            ..DeleteParams::default()
        };
        match self.send(&target, target.collection().delete(&id.name, &params)).await {
            Ok(_) => {
                self.report(Event::Deleted { object: id.clone() });
                Ok(true)
            }
            // Gone, or another object of that name by now.
            Err(RequestError::Refused { code: 404 | 409, .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the object of that UID is gone.
    pub(crate) async fn gone(&self, id: &ObjectId, uid: &str) -> Result<(), RequestError> {
        let Some(resource) = self.find_resource(id).await? else { return Ok(()) };
        let api: Api<DynamicObject> = match &id.namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        };
        let mut changes = std::pin::pin!(watcher::watch_object(api, &id.name));
        let mut live = None;
        let mut said = false;
        loop {
            let patience =
                if said { self.limits.deadline } else { (super::request::now() + PATIENCE).min(self.limits.deadline) };
            let change = tokio::select! {
                change = tokio::time::timeout_at(patience, changes.next()) => change,
                () = self.interrupt.cancelled() => return Err(RequestError::Interrupted),
            };
            match change {
                Ok(Some(Ok(None)) | None) => break,
                Ok(Some(Ok(Some(object)))) if object.metadata.uid.as_deref() != Some(uid) => break,
                Ok(Some(Ok(Some(object)))) => live = serde_json::to_value(object).ok(),
                Ok(Some(Err(_))) => tokio::time::sleep(super::retry::pause(1, None)).await,
                Err(_) => {
                    let why = self.lingering(id, live.as_ref().unwrap_or(&Value::Null)).await;
                    if said || patience >= self.limits.deadline {
                        let request = format!("delete {id}");
                        return Err(RequestError::Deadline { request, last: Some(why.to_string()) });
                    }
                    self.report(Event::Waiting { object: id.clone(), why: format!("is being deleted: {why}") });
                    said = true;
                }
            }
        }
        if said {
            self.report(Event::Gone { object: id.clone() });
        }
        Ok(())
    }

    /// Which finalizers hold an object, whose they are, and whether those still live.
    pub(crate) async fn lingering(&self, id: &ObjectId, live: &Value) -> Lingering {
        let mut reasons = Vec::new();
        let finalizers = live.pointer("/metadata/finalizers").and_then(Value::as_array).into_iter().flatten();
        for finalizer in finalizers.filter_map(Value::as_str) {
            reasons.push(self.holder_of(live, finalizer).await);
        }
        // What keeps a namespace, its controller says itself.
        let conditions = live.pointer("/status/conditions").and_then(Value::as_array).into_iter().flatten();
        let namespace = id.kind == "Namespace" && id.group.is_empty();
        for condition in conditions.filter(|c| namespace && c["status"] == "True") {
            if let Some(message) = condition["message"].as_str() {
                reasons.push(message.trim_end_matches('.').to_owned());
            }
        }
        Lingering { reasons }
    }

    /// One finalizer in words.
    async fn holder_of(&self, live: &Value, finalizer: &str) -> String {
        let known = match finalizer {
            "kubernetes.io/pvc-protection" => Some("a pod still uses it"),
            "kubernetes.io/pv-protection" => Some("a claim is still bound to it"),
            "foregroundDeletion" => Some("what it owns is deleted first"),
            "orphan" => Some("the garbage collector of kube-controller-manager takes its owner references off"),
            "service.kubernetes.io/load-balancer-cleanup" => {
                Some("the cloud's controller removes the load balancer; is it running?")
            }
            "customresourcecleanup.apiextensions.k8s.io" => Some("its objects are deleted first"),
            _ => None,
        };
        if let Some(known) = known {
            return format!("finalizer \"{finalizer}\": {known}");
        }
        let Some(manager) = owner_of_finalizer(live, finalizer) else {
            return format!("finalizer \"{finalizer}\": nobody is known who would take it off");
        };
        let alive = match self.runs(&manager).await {
            Some(true) => "which is running: look at its log",
            Some(false) => "of which no pod is running: bring it back, and it takes the finalizer off",
            None => "which may or may not be running",
        };
        format!("finalizer \"{finalizer}\" of \"{manager}\", {alive}")
    }

    /// Whether a pod runs whose name, or one of whose containers, is like a
    /// field manager's.
    async fn runs(&self, manager: &str) -> Option<bool> {
        let pods: Api<Pod> = Api::all(self.client.clone());
        let list = tokio::time::timeout(PATIENCE, pods.list(&ListParams::default())).await.ok()?.ok()?;
        let is_like = |name: &str| name.contains(manager);
        let running = |pod: &Pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running");
        Some(list.items.iter().filter(|pod| running(pod)).any(|pod| {
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers).map(|c| c.name.as_str());
            pod.metadata.name.as_deref().into_iter().chain(containers).any(is_like)
        }))
    }
}

/// How long an object may take to go until it is told why.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);

/// The field manager that put a finalizer there.
fn owner_of_finalizer(live: &Value, finalizer: &str) -> Option<String> {
    let entries = live.pointer("/metadata/managedFields")?.as_array()?;
    let key = format!("v:{}", Value::from(finalizer));
    let owns =
        |entry: &&Value| entry.pointer("/fieldsV1/f:metadata/f:finalizers").is_some_and(|set| set.get(&key).is_some());
    entries.iter().find(owns)?.get("manager")?.as_str().map(str::to_owned)
}
