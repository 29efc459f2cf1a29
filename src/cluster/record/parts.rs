//! What does not fit into one object: compressed, cut into ConfigMaps that are
//! named by what they hold.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, DeleteParams, ListParams};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::super::Cluster;
use super::super::apply::Mode;
use super::{NAME, RecordError, map_id};
use crate::manifest::Object;
use crate::names::INSTALLER_MANAGER;
use crate::plan;

/// Label of the parts.
pub const PART: &str = "bko-install/record-part";

/// The objects of a revision, Secret data left out.
pub type Snapshot = Vec<Object>;

/// Compressed bytes of one part: as base64, and with its metadata, below the
/// 1 MiB that an object may have.
const SIZE: usize = 700 * 1024;

const KEY: &str = "part";

/// Why parts cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PartsError {
    /// One is missing.
    #[error("ConfigMap \"{0}\" is missing")]
    Missing(String),
    /// One does not hold what its name says.
    #[error("ConfigMap \"{0}\" does not hold what it should")]
    Changed(String),
    /// They do not decompress.
    #[error("its parts cannot be put together")]
    Compressed(#[source] std::io::Error),
    /// They are not what is expected.
    #[error("its parts are malformed")]
    Malformed(#[source] serde_json::Error),
}

/// Everything of a snapshot that may be remembered.
pub(crate) fn snapshot(objects: &[Object]) -> Snapshot {
    let masked = |object: &Object| match plan::is_secret(&object.body) {
        true => Arc::new(plan::mask(Value::clone(&object.body))),
        false => Arc::clone(&object.body),
    };
    objects.iter().map(|object| Object { body: masked(object), ..object.clone() }).collect()
}

/// Writes a value, unless it is there already, and returns the names of its parts.
pub(super) async fn save<T: Serialize + ?Sized>(
    cluster: &Cluster,
    namespace: &str,
    value: &T,
) -> Result<Vec<String>, RecordError> {
    let damaged = |source| RecordError::Damaged { namespace: namespace.to_owned(), source };
    let bytes = compress(value).map_err(damaged)?;
    let mut names = Vec::new();
    for part in bytes.chunks(SIZE) {
        let name = name_of(part);
        let request = |source| RecordError::Request { what: "write", source };
        if cluster.get(&map_id(namespace, &name)).await.map_err(request)?.is_none() {
            let body = json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "labels": {"app.kubernetes.io/managed-by": INSTALLER_MANAGER, PART: ""},
                },
                "immutable": true,
                "binaryData": {KEY: STANDARD.encode(part)},
            });
            cluster.apply(&map_id(namespace, &name), &body, Mode::Write { force: true }).await.map_err(request)?;
        }
        names.push(name);
    }
    Ok(names)
}

/// Reads what [`save`] has written.
pub(super) async fn load<T: DeserializeOwned>(
    cluster: &Cluster,
    namespace: &str,
    names: &[String],
) -> Result<T, RecordError> {
    let damaged = |source| RecordError::Damaged { namespace: namespace.to_owned(), source };
    let part = |name: String| async move {
        let map = cluster.get(&map_id(namespace, &name)).await;
        let map = map.map_err(|source| RecordError::Request { what: "read", source })?;
        let map = map.ok_or_else(|| damaged(PartsError::Missing(name.clone())))?;
        let text = map.pointer("/binaryData").and_then(|data| data.get(KEY)?.as_str()).unwrap_or_default();
        let bytes = STANDARD.decode(text).unwrap_or_default();
        if name_of(&bytes) == name { Ok(bytes) } else { Err(damaged(PartsError::Changed(name))) }
    };
    let parts: Vec<Vec<u8>> = stream::iter(names.to_vec()).map(part).buffered(8).try_collect().await?;
    expand(&parts.concat()).map_err(damaged)
}

/// Removes parts that nobody names. What fails is tried again by the next run.
pub(super) async fn sweep(cluster: &Cluster, namespace: &str, named: &BTreeSet<&String>) {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), namespace);
    let Ok(list) = maps.list_metadata(&ListParams::default().labels(PART)).await else { return };
    let names = list.items.into_iter().filter_map(|map| map.metadata.name);
    for name in names.filter(|name| !named.contains(name)) {
        if let Err(error) = maps.delete(&name, &DeleteParams::default()).await {
            tracing::debug!(part = %name, error = %error, "a part of an earlier record stays");
        }
    }
}

fn name_of(part: &[u8]) -> String {
    format!("{NAME}-{}", hex::encode(&Sha256::digest(part)[..8]))
}

fn compress<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, PartsError> {
    let text = serde_json::to_vec(value).map_err(PartsError::Malformed)?;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&text).map_err(PartsError::Compressed)?;
    encoder.finish().map_err(PartsError::Compressed)
}

fn expand<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, PartsError> {
    let mut text = Vec::new();
    GzDecoder::new(bytes).read_to_end(&mut text).map_err(PartsError::Compressed)?;
    serde_json::from_slice(&text).map_err(PartsError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_compressed_comes_back_and_is_named_by_its_content() {
        let value: Vec<u32> = (0..100_000).map(|n: u32| n.wrapping_mul(2_654_435_761)).collect();
        let bytes = compress(&value).unwrap();
        assert_eq!(expand::<Vec<u32>>(&bytes).unwrap(), value);
        assert!(matches!(expand::<Vec<u32>>(&bytes[..bytes.len() - 9]), Err(PartsError::Compressed(_))));
        assert!(matches!(expand::<Vec<String>>(&bytes), Err(PartsError::Malformed(_))));
        assert_eq!(name_of(&bytes), name_of(&compress(&value).unwrap()));
    }
}
