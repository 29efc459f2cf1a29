//! What became of objects that are recorded and no longer wanted.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::APIResource;
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, ObjectList, Request, Resource as _};
use serde_json::Value;

use super::{Cluster, Event, RequestError};
use crate::manifest::ObjectId;
use crate::manifest::export::BOOTSTRAP;
use crate::names::{COMPONENT_LABEL, CONTROLLER_MANAGER, INSTALLER_MANAGER};
use crate::plan::{self, Brake, Entry, Remains};

/// How often pods that end are looked at.
const LOOK: Duration = Duration::from_millis(500);

/// The annotation that keeps an object.
pub const KEEP: &str = "bko-install/keep";

/// How much of what is foreign is told.
const SHOWN: usize = 5;

/// Looks at recorded objects. `inventory` is all that is ours: what a namespace
/// holds besides is foreign.
///
/// # Errors
/// When the cluster cannot be looked at.
pub async fn remains(
    cluster: &Cluster,
    entries: Vec<Entry>,
    inventory: &[Entry],
) -> Result<Vec<(Entry, Remains)>, RequestError> {
    let one = |entry: Entry| async move {
        let remains = look(cluster, &entry, inventory).await?;
        Ok::<_, RequestError>((entry, remains))
    };
    stream::iter(entries).map(one).buffer_unordered(cluster.limits.concurrency).try_collect().await
}

async fn look(cluster: &Cluster, entry: &Entry, inventory: &[Entry]) -> Result<Remains, RequestError> {
    if cluster.find_resource(&entry.id).await?.is_none() {
        return Ok(Remains::Gone);
    }
    let Some(live) = cluster.get(&entry.id).await? else { return Ok(Remains::Gone) };
    let uid = live.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default().to_owned();
    if entry.uid.as_ref().is_some_and(|recorded| *recorded != uid) {
        return Ok(Remains::NotOurs("it is another object of that name by now".into()));
    }
    if !plan::is_ours(&live) {
        return Ok(Remains::NotOurs("it is no longer labelled as ours".into()));
    }
    let annotations = live.pointer("/metadata/annotations");
    if annotations.and_then(|all| all.get(KEEP)).is_some_and(|keep| keep == "true") {
        return Ok(Remains::Kept);
    }
    if let Some(owner) = plan::tracker(&entry.id, &live) {
        return Err(RequestError::Tracked { object: Box::new(entry.id.clone()), owner });
    }
    let brakes = match (entry.id.group.as_str(), entry.id.kind.as_str()) {
        ("", "Namespace") => {
            let objects = cluster.foreign(&entry.id.name, inventory).await?;
            if objects.is_empty() { Vec::new() } else { vec![Brake::Foreign { objects }] }
        }
        ("apiextensions.k8s.io", "CustomResourceDefinition") => {
            let count = cluster.instances(&live).await?.len();
            if count == 0 { Vec::new() } else { vec![Brake::Instances { count }] }
        }
        ("", "PersistentVolumeClaim") => vec![Brake::Volume],
        _ => Vec::new(),
    };
    Ok(Remains::Ours { uid, brakes })
}

impl Cluster {
    /// Objects of a namespace that are neither recorded nor made by Kubernetes
    /// itself, nor owned by what is.
    pub(crate) async fn foreign(&self, namespace: &str, inventory: &[Entry]) -> Result<Vec<String>, RequestError> {
        let mut foreign: Vec<String> = self.strangers(namespace, inventory).await?.into_iter().map(shown).collect();
        foreign.sort();
        if foreign.len() > SHOWN {
            let more = foreign.len() - SHOWN;
            foreign.truncate(SHOWN);
            foreign.push(format!("and {more} more"));
        }
        Ok(foreign)
    }

    /// The same, all of them.
    pub(crate) async fn strangers(&self, namespace: &str, inventory: &[Entry]) -> Result<Vec<ObjectId>, RequestError> {
        let known: BTreeSet<(&str, &str, &str)> = inventory
            .iter()
            .filter(|entry| entry.id.namespace.as_deref() == Some(namespace))
            .map(|entry| (entry.id.group.as_str(), entry.id.kind.as_str(), entry.id.name.as_str()))
            .collect();
        let kinds = self.namespaced_kinds().await?;
        let lists = stream::iter(kinds).map(|(resource, kind)| async move {
            Ok::<_, RequestError>((kind, self.list(&resource, namespace).await?))
        });
        let lists: Vec<_> = lists.buffer_unordered(self.limits.concurrency).try_collect().await?;
        let mut foreign = Vec::new();
        for (kind, objects) in lists {
            for object in objects {
                let name = object.metadata.name.clone().unwrap_or_default();
                let own = known.contains(&(kind.group.as_str(), kind.kind.as_str(), name.as_str()));
                if !own && !is_made_by_kubernetes(&kind, &object) && !is_our_state(&kind, &object) {
                    foreign.push(ObjectId { namespace: Some(namespace.to_owned()), name, ..kind.clone() });
                }
            }
        }
        Ok(foreign)
    }

    /// The objects of a custom resource definition, in all namespaces.
    pub(crate) async fn instances(&self, definition: &Value) -> Result<Vec<(ObjectId, DynamicObject)>, RequestError> {
        let text = |pointer: &str| definition.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let versions = definition.pointer("/spec/versions").and_then(Value::as_array).into_iter().flatten();
        let served: Vec<_> = versions.filter(|version| version["served"] == true).collect();
        let stored = served.iter().find(|version| version["storage"] == true).or(served.first());
        let Some(version) = stored.and_then(|version| version["name"].as_str()) else { return Ok(Vec::new()) };
        let kind = ObjectId {
            group: text("/spec/group"),
            version: version.to_owned(),
            kind: text("/spec/names/kind"),
            namespace: None,
            name: String::new(),
        };
        let Some(resource) = self.find_resource(&kind).await? else { return Ok(Vec::new()) };
        let all = self.list_at(&kind, &resource, &ListParams::default(), Whole::Objects).await?;
        let id = |object: &DynamicObject| ObjectId {
            namespace: object.metadata.namespace.clone(),
            name: object.metadata.name.clone().unwrap_or_default(),
            ..kind.clone()
        };
        Ok(all.into_iter().map(|object| (id(&object), object)).collect())
    }

    async fn list(&self, resource: &ApiResource, namespace: &str) -> Result<Vec<DynamicObject>, RequestError> {
        let kind = ObjectId {
            group: resource.group.clone(),
            version: resource.version.clone(),
            kind: resource.kind.clone(),
            namespace: Some(namespace.to_owned()),
            name: String::new(),
        };
        self.list_at(&kind, resource, &ListParams::default(), Whole::Metadata).await
    }

    /// Objects of a kind with these labels, whole, in the namespace that `kind` names.
    pub(crate) async fn labelled(&self, kind: &ObjectId, labels: &str) -> Result<Vec<DynamicObject>, RequestError> {
        let Some(resource) = self.find_resource(kind).await? else { return Ok(Vec::new()) };
        self.list_at(kind, &resource, &ListParams::default().labels(labels), Whole::Objects).await
    }

    /// Returns when no pod is left in a namespace, at the deadline, and where
    /// nobody may look. A namespace that is deleted before is looked at again by
    /// its controller only after half its pods' grace, however soon they end.
    pub(crate) async fn without_pods(&self, namespace: &str) -> Result<(), RequestError> {
        let namespace = Some(namespace.to_owned());
        let (group, version, kind) = (String::new(), "v1".to_owned(), "Pod".to_owned());
        let kind = ObjectId { group, version, kind, namespace, name: String::new() };
        let resource = self.resource(&kind).await?;
        while super::request::now() < self.limits.deadline {
            match self.list_at(&kind, &resource, &ListParams::default(), Whole::Metadata).await {
                Ok(pods) if pods.is_empty() => return Ok(()),
                Err(RequestError::Forbidden { .. }) => return Ok(()),
                listed => drop(listed?),
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                () = self.interrupt.cancelled() => return Err(RequestError::Interrupted),
            }
        }
        Ok(())
    }

    /// Everything of a kind; nothing when it cannot be listed there.
    async fn list_at(
        &self,
        kind: &ObjectId,
        resource: &ApiResource,
        params: &ListParams,
        whole: Whole,
    ) -> Result<Vec<DynamicObject>, RequestError> {
        let request = match &kind.namespace {
            Some(namespace) => format!("list {} in namespace \"{namespace}\"", resource.plural),
            None => format!("list {} in the whole cluster", resource.plural),
        };
        let collection = Request::new(DynamicObject::url_path(resource, kind.namespace.as_deref()));
        let built = match whole {
            Whole::Objects => collection.list(params),
            Whole::Metadata => collection.list_metadata(params),
        };
        let built = built.map_err(|source| RequestError::Other {
            request: request.clone(),
            source: kube::Error::BuildRequest(source),
        })?;
        let list: Result<ObjectList<DynamicObject>, _> = self.send_raw(&request, kind, built).await;
        match list {
            Ok(list) => Ok(list.items),
            Err(RequestError::Refused { code: 404 | 405, .. }) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Every kind that lives in namespaces and can be listed and deleted. An
    /// API service that is down hides its kinds, and is named.
    pub(crate) async fn namespaced_kinds(&self) -> Result<Vec<(ApiResource, ObjectId)>, RequestError> {
        let none = ObjectId {
            group: String::new(),
            version: String::new(),
            kind: String::new(),
            namespace: None,
            name: String::new(),
        };
        let groups = self.repeat_plain("list API groups", &none, || self.client.list_api_groups()).await?;
        let mut versions = vec![(String::new(), "v1".to_owned())];
        versions.extend(groups.groups.into_iter().filter_map(|group| {
            let version = group.preferred_version.or(group.versions.into_iter().next())?;
            Some((group.name, version.version))
        }));
        let mut kinds = Vec::new();
        for (group, version) in versions {
            let id = ObjectId { group: group.clone(), version: version.clone(), ..none.clone() };
            let list = match self.kinds.list(&id).await {
                Ok(list) => list,
                Err(error) => {
                    let message =
                        format!("API {} does not answer: {error}; what it serves is not seen", id.api_version());
                    self.report(Event::Warning { message });
                    continue;
                }
            };
            let usable = |r: &APIResource| {
                r.namespaced
                    && !r.name.contains('/')
                    && ["list", "delete"].iter().all(|v| r.verbs.iter().any(|own| own == v))
            };
            for r in list.iter().filter(|r| usable(r)) {
                let kind = ObjectId { kind: r.kind.clone(), ..id.clone() };
                let gvk = kube::core::GroupVersionKind::gvk(&group, &version, &r.kind);
                kinds.push((ApiResource::from_gvk_with_plural(&gvk, &r.name), kind));
            }
        }
        Ok(kinds)
    }
}

fn shown(id: ObjectId) -> String {
    format!("{} {}", id.kind, id.name)
}

/// How much of an object is asked for.
#[derive(Clone, Copy)]
enum Whole {
    Objects,
    Metadata,
}

fn is_made_by_kubernetes(kind: &ObjectId, object: &DynamicObject) -> bool {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let owned = object.metadata.owner_references.as_ref().is_some_and(|owners| !owners.is_empty());
    let by = |label: &str| object.metadata.labels.as_ref().and_then(|labels| labels.get(label)).map(String::as_str);
    match (kind.group.as_str(), kind.kind.as_str()) {
        ("" | "events.k8s.io", "Event") | ("", "Endpoints") | ("metrics.k8s.io", _) => true,
        ("", "ConfigMap") => name == "kube-root-ca.crt",
        ("", "ServiceAccount") => name == "default",
        ("", "Secret") => {
            let annotations = object.metadata.annotations.as_ref();
            annotations.is_some_and(|all| all.contains_key("kubernetes.io/service-account.name"))
        }
        ("discovery.k8s.io", "EndpointSlice") => by("endpointslice.kubernetes.io/managed-by").is_some(),
        // A claim is data, whoever owns it.
        ("", "PersistentVolumeClaim") => false,
        _ => owned,
    }
}

/// What this installation, or the controller that it runs, has made besides
/// what is recorded: the record itself, leases. And what the first step of an
/// export needed: it is over when an installation takes over from the export.
fn is_our_state(kind: &ObjectId, object: &DynamicObject) -> bool {
    let label = |name: &str| object.metadata.labels.as_ref().and_then(|labels| labels.get(name)).map(String::as_str);
    if label(COMPONENT_LABEL) == Some(BOOTSTRAP.1) && label("app.kubernetes.io/managed-by") == Some(INSTALLER_MANAGER) {
        return true;
    }
    let managers = object.metadata.managed_fields.iter().flatten().filter_map(|entry| entry.manager.as_deref());
    let mut ours = managers.filter(|manager| matches!(*manager, INSTALLER_MANAGER | CONTROLLER_MANAGER | "buildd"));
    kind.kind != "PersistentVolumeClaim" && ours.next().is_some()
}
