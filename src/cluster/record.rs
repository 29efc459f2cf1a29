//! The record in the cluster: ConfigMap `bko-install` in the operator's
//! namespace, and parts beside it.
//!
//! Inventory and rendered objects may be large: they are compressed, cut, and
//! kept in ConfigMaps that are named by what they hold and never change. The
//! record names its parts, and is written after them: whoever reads it finds
//! them all. Parts that no record names any more are removed at the end of a run.

mod parts;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, ObjectMeta};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::apply::Mode;
use super::{Cluster, Event, RequestError};
use crate::manifest::ObjectId;
use crate::names::{INSTALLER_MANAGER, OPERATOR_NAMESPACE};
use crate::plan::{FORMAT, Record, Revision};

pub(crate) use parts::snapshot;
pub use parts::{PART, PartsError, Snapshot};

/// Name of the ConfigMap, and of the Lease beside it.
pub const NAME: &str = "bko-install";

/// The record's key within the ConfigMap.
const KEY: &str = "record.json";

/// Label by which a record is found in a cluster whose operator namespace is
/// not the default.
pub const LABEL: &str = "bko-install/record";

/// The record as it is written: the inventory is kept in parts.
#[derive(Serialize, Deserialize)]
struct Written {
    #[serde(flatten)]
    record: Record,
    /// Names of the inventory's parts, in order.
    #[serde(default, rename = "inventoryParts")]
    parts: Vec<String>,
}

/// Why the record cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The request failed.
    #[error("cannot {what} the record of the installation")]
    Request {
        /// `read` or `write`.
        what: &'static str,
        /// Why.
        source: RequestError,
    },
    /// It is no record.
    #[error("ConfigMap {namespace}/{NAME} holds no record of an installation")]
    Malformed {
        /// Namespace of the ConfigMap.
        namespace: String,
        /// Why.
        source: serde_json::Error,
    },
    /// A part of it cannot be had.
    #[error("the record of the installation in namespace \"{namespace}\" is damaged: {source}")]
    Damaged {
        /// Its namespace.
        namespace: String,
        /// What is wrong.
        source: PartsError,
    },
    /// A newer executable wrote it.
    #[error("ConfigMap {namespace}/{NAME} has format {found}; this bko-install knows formats up to {FORMAT}")]
    Newer {
        /// Namespace of the ConfigMap.
        namespace: String,
        /// Its format.
        found: u64,
    },
    /// There is more than one.
    #[error("there are installations in several namespaces: {}", namespaces.join(", "))]
    Several {
        /// Where.
        namespaces: Vec<String>,
    },
}

impl RecordError {
    /// How to mend it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Request { .. } => return None,
            Self::Malformed { namespace, .. } | Self::Damaged { namespace, .. } => {
                format!(
                    "restore it, or delete it and run again: `kubectl --namespace {namespace} delete configmap {NAME}`"
                )
            }
            Self::Newer { .. } => "use the newer bko-install that wrote it".into(),
            Self::Several { .. } => {
                "say which one is meant: `--namespace NAME`, or `--set namespaces.operator=NAME` for init and plan"
                    .into()
            }
        })
    }
}

/// The record in this namespace, if there is one.
///
/// # Errors
/// When it cannot be read or understood.
pub async fn load(cluster: &Cluster, namespace: &str) -> Result<Option<Record>, RecordError> {
    let live = cluster.get(&id(namespace)).await;
    match live.map_err(|source| RecordError::Request { what: "read", source })? {
        Some(live) => {
            let Written { mut record, parts } = parse(namespace, &live)?;
            if !parts.is_empty() {
                record.inventory = parts::load(cluster, namespace, &parts).await?;
            }
            Ok(Some(record))
        }
        None => Ok(None),
    }
}

/// The objects of a revision, without Secret data.
///
/// # Errors
/// When they cannot be read.
pub async fn objects(cluster: &Cluster, namespace: &str, revision: &Revision) -> Result<Snapshot, RecordError> {
    parts::load(cluster, namespace, &revision.objects).await
}

/// The record of the installation in the cluster, if there is one: in this
/// namespace, or, if that is the default, in any.
///
/// # Errors
/// When it cannot be read or understood, or when there are several.
pub async fn find(cluster: &Cluster, namespace: &str) -> Result<Option<Record>, RecordError> {
    match locate(cluster, namespace).await? {
        Some(namespace) => load(cluster, &namespace).await,
        None => Ok(None),
    }
}

/// The namespace of that record.
///
/// # Errors
/// When it cannot be looked for, or when there are several.
pub async fn locate(cluster: &Cluster, namespace: &str) -> Result<Option<String>, RecordError> {
    let live = cluster.get(&id(namespace)).await;
    if live.map_err(|source| RecordError::Request { what: "read", source })?.is_some() {
        return Ok(Some(namespace.to_owned()));
    }
    if namespace != OPERATOR_NAMESPACE {
        return Ok(None);
    }
    let all: Api<ConfigMap> = Api::all(cluster.client.clone());
    // Who may not look everywhere sees the default namespace only.
    let Ok(list) = all.list_metadata(&ListParams::default().labels(LABEL)).await else { return Ok(None) };
    let mut namespaces: Vec<String> = list.items.into_iter().filter_map(|map| map.metadata.namespace).collect();
    match namespaces.len() {
        0 | 1 => Ok(namespaces.pop()),
        _ => Err(RecordError::Several { namespaces }),
    }
}

/// Writes the record. With `snapshot`, it becomes what the last revision
/// remembers of its objects.
///
/// # Errors
/// When it cannot be written.
pub async fn save(
    cluster: &Cluster,
    namespace: &str,
    record: &mut Record,
    snapshot: Option<&Snapshot>,
) -> Result<(), RecordError> {
    if let (Some(snapshot), Some(last)) = (snapshot, record.history.last_mut()) {
        last.objects = parts::save(cluster, namespace, snapshot).await?;
    }
    let malformed = |source| RecordError::Malformed { namespace: namespace.to_owned(), source };
    let parts = parts::save(cluster, namespace, &record.inventory).await?;
    let written = Written { record: Record { inventory: Vec::new(), ..record.clone() }, parts };
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(NAME.into()),
            namespace: Some(namespace.into()),
            labels: Some(BTreeMap::from([
                ("app.kubernetes.io/managed-by".into(), INSTALLER_MANAGER.into()),
                (LABEL.into(), String::new()),
            ])),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([(KEY.into(), serde_json::to_string(&written).map_err(malformed)?)])),
        ..ConfigMap::default()
    };
    let body = serde_json::to_value(map).map_err(malformed)?;
    let saved = cluster.apply(&id(namespace), &body, Mode::Write { force: true }).await;
    saved.map_err(|source| RecordError::Request { what: "write", source })?;
    cluster.report(Event::Recorded { state: record.run.state });
    if record.run.finished.is_some() {
        let revisions = record.history.iter().flat_map(|revision| &revision.objects);
        let named: BTreeSet<&String> = written.parts.iter().chain(revisions).collect();
        parts::sweep(cluster, namespace, &named).await;
    }
    Ok(())
}

/// Deletes the record and its parts.
///
/// # Errors
/// When it cannot be deleted.
pub async fn delete(cluster: &Cluster, namespace: &str) -> Result<(), RecordError> {
    parts::sweep(cluster, namespace, &BTreeSet::new()).await;
    let failed = |source| RecordError::Request { what: "delete", source };
    let id = id(namespace);
    let live = cluster.get(&id).await.map_err(failed)?;
    let uid = live.as_ref().and_then(|live| live.pointer("/metadata/uid")?.as_str());
    match uid {
        Some(uid) => cluster.delete(&id, uid).await.map(drop).map_err(failed),
        None => Ok(()),
    }
}

fn id(namespace: &str) -> ObjectId {
    map_id(namespace, NAME)
}

fn map_id(namespace: &str, name: &str) -> ObjectId {
    ObjectId {
        group: String::new(),
        version: "v1".into(),
        kind: "ConfigMap".into(),
        namespace: Some(namespace.into()),
        name: name.into(),
    }
}

fn parse(namespace: &str, live: &Value) -> Result<Written, RecordError> {
    let malformed = |source| RecordError::Malformed { namespace: namespace.to_owned(), source };
    let text = live.pointer("/data").and_then(|data| data.get(KEY)).and_then(Value::as_str).unwrap_or_default();
    let value: Value = serde_json::from_str(text).map_err(malformed)?;
    match value.get("format").and_then(Value::as_u64) {
        Some(found) if found > u64::from(FORMAT) => Err(RecordError::Newer { namespace: namespace.to_owned(), found }),
        _ => serde_json::from_value(value).map_err(malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(record: &str) -> Value {
        serde_json::json!({ "data": { KEY: record } })
    }

    #[test]
    fn a_newer_format_is_refused_and_not_misread() {
        let Err(error) = parse("farm", &map(r#"{"format": 3, "whatever": true}"#)) else { panic!("was read") };
        assert!(matches!(error, RecordError::Newer { found: 3, .. }), "{error}");
    }

    #[test]
    fn what_is_no_record_names_its_place_and_a_way_out() {
        for text in ["", "{", "{}", r#"{"format": 1}"#] {
            let Err(error) = parse("farm", &map(text)) else { panic!("{text} was read") };
            assert_eq!(error.to_string(), "ConfigMap farm/bko-install holds no record of an installation");
            assert!(error.hint().unwrap().contains("--namespace farm delete configmap bko-install"));
        }
    }
}
