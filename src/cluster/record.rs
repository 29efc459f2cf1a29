//! The record in the cluster: ConfigMap `bko-install` in the operator's namespace.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, ListParams, ObjectMeta};
use serde_json::Value;

use super::apply::Mode;
use super::{Cluster, Event, RequestError};
use crate::manifest::ObjectId;
use crate::names::{INSTALLER_MANAGER, OPERATOR_NAMESPACE};
use crate::plan::{FORMAT, Record};

/// Name of the ConfigMap, and of the Lease beside it.
pub const NAME: &str = "bko-install";

/// The record's key within the ConfigMap. Later formats may add further keys,
/// for history and for what does not fit into one object.
const KEY: &str = "record.json";

/// Label by which a record is found in a cluster whose operator namespace is
/// not the default.
const LABEL: &str = "bko-install/record";

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
            Self::Malformed { namespace, .. } => {
                format!(
                    "restore it, or delete it and run again: `kubectl --namespace {namespace} delete configmap {NAME}`"
                )
            }
            Self::Newer { .. } => "use the newer bko-install that wrote it".into(),
            Self::Several { .. } => "say which one is meant, with `--set` for its operator namespace".into(),
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
        Some(live) => parse(namespace, &live).map(Some),
        None => Ok(None),
    }
}

/// The record of the installation in the cluster, if there is one: in this
/// namespace, or, if that is the default, in any.
///
/// # Errors
/// When it cannot be read or understood, or when there are several.
pub async fn find(cluster: &Cluster, namespace: &str) -> Result<Option<Record>, RecordError> {
    if let Some(record) = load(cluster, namespace).await? {
        return Ok(Some(record));
    }
    if namespace != OPERATOR_NAMESPACE {
        return Ok(None);
    }
    let all: Api<ConfigMap> = Api::all(cluster.client.clone());
    // Who may not look everywhere sees the default namespace only.
    let Ok(list) = all.list(&ListParams::default().labels(LABEL)).await else { return Ok(None) };
    let namespaces: Vec<String> = list.items.into_iter().filter_map(|map| map.metadata.namespace).collect();
    match namespaces.as_slice() {
        [] => Ok(None),
        [namespace] => load(cluster, namespace).await,
        _ => Err(RecordError::Several { namespaces }),
    }
}

/// Writes the record.
///
/// # Errors
/// When it cannot be written.
pub async fn save(cluster: &Cluster, namespace: &str, record: &Record) -> Result<(), RecordError> {
    let malformed = |source| RecordError::Malformed { namespace: namespace.to_owned(), source };
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
        data: Some(BTreeMap::from([(KEY.into(), serde_json::to_string(record).map_err(malformed)?)])),
        ..ConfigMap::default()
    };
    let body = serde_json::to_value(map).map_err(malformed)?;
    let saved = cluster.apply(&id(namespace), &body, Mode::Write { force: true }).await;
    saved.map_err(|source| RecordError::Request { what: "write", source })?;
    cluster.report(Event::Recorded { state: record.state });
    Ok(())
}

fn id(namespace: &str) -> ObjectId {
    ObjectId {
        group: String::new(),
        version: "v1".into(),
        kind: "ConfigMap".into(),
        namespace: Some(namespace.into()),
        name: NAME.into(),
    }
}

fn parse(namespace: &str, live: &Value) -> Result<Record, RecordError> {
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
        let error = parse("farm", &map(r#"{"format": 2, "whatever": true}"#)).unwrap_err();
        assert!(matches!(error, RecordError::Newer { found: 2, .. }), "{error}");
    }

    #[test]
    fn what_is_no_record_names_its_place_and_a_way_out() {
        for text in ["", "{", "{}", r#"{"format": 1}"#] {
            let error = parse("farm", &map(text)).unwrap_err();
            assert_eq!(error.to_string(), "ConfigMap farm/bko-install holds no record of an installation");
            assert!(error.hint().unwrap().contains("--namespace farm delete configmap bko-install"));
        }
    }
}
