//! What the first step of an export has left, which no record knows.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::cluster::{Cluster, RequestError};
use crate::manifest::ObjectId;
use crate::manifest::export::BOOTSTRAP;
use crate::names::{COMPONENT_LABEL, INSTALLER_MANAGER};
use crate::plan::{Entry, Record};

/// Kinds of that step, all of version v1.
const KINDS: [(&str, &str); 4] = [
    ("batch", "Job"),
    ("rbac.authorization.k8s.io", "RoleBinding"),
    ("rbac.authorization.k8s.io", "Role"),
    ("", "ServiceAccount"),
];

/// All of it in the namespaces of an installation. Who may not look keeps it.
pub(super) async fn find(cluster: &Cluster, record: &Record) -> Result<Vec<(Entry, Value)>, RequestError> {
    let namespaces = record.inventory.iter().filter_map(|entry| entry.id.namespace.as_ref());
    let namespaces: BTreeSet<&String> = namespaces.collect();
    let (runlevel, component) = BOOTSTRAP;
    let labels = format!("app.kubernetes.io/managed-by={INSTALLER_MANAGER},{COMPONENT_LABEL}={component}");
    let known = |id: &ObjectId| record.inventory.iter().any(|entry| entry.id == *id);
    let mut found = Vec::new();
    for (namespace, (group, kind)) in namespaces.iter().flat_map(|name| KINDS.iter().map(move |kind| (name, kind))) {
        let kind = ObjectId {
            group: (*group).to_owned(),
            version: "v1".into(),
            kind: (*kind).to_owned(),
            namespace: Some((*namespace).clone()),
            name: String::new(),
        };
        let objects = match cluster.labelled(&kind, &labels).await {
            Err(RequestError::Forbidden { .. }) => continue,
            listed => listed?,
        };
        for object in objects {
            let id = ObjectId { name: object.metadata.name.clone().unwrap_or_default(), ..kind.clone() };
            let (uid, live) = (object.metadata.uid.clone(), serde_json::to_value(object).unwrap_or_default());
            let component = component.to_owned();
            if !known(&id) {
                found.push((Entry { id, uid, component, runlevel, digest: String::new() }, live));
            }
        }
    }
    Ok(found)
}
