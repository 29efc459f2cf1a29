//! The content of a Secret that holds a certificate, and the object made of
//! it. Content is never printed, not even by `Debug`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value};

use super::CertificateSpec;
use crate::manifest::{Object, ObjectId};

/// Key of the certificates to trust.
pub(super) const CA: &str = "ca.pem";
/// Key of the authority's private key.
pub(super) const CA_KEY: &str = "ca-key.pem";
/// Key of an authority's successor, which does not sign yet.
pub(super) const NEXT: &str = "next-ca.pem";
/// Key of the successor's private key.
pub(super) const NEXT_KEY: &str = "next-ca-key.pem";
/// Key of certificates that nobody shall trust any more.
pub(super) const RETIRED: &str = "retired-ca.pem";
/// Key of the moment at which the present stage of a rotation began.
pub(super) const SINCE: &str = "rotation-since";
/// Key of the certificate.
pub(super) const CERT: &str = "cert.pem";
/// Key of the private key.
pub(super) const KEY: &str = "key.pem";

/// The data of a Secret, decoded. `Debug` shows keys and sizes only.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SecretData(BTreeMap<String, Vec<u8>>);

impl SecretData {
    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&[u8]> {
        self.0.get(key).map(Vec::as_slice)
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Takes the value under a key away.
    pub fn remove(&mut self, key: &str) -> Option<Vec<u8>> {
        self.0.remove(key)
    }

    /// Sets the value under a key.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Vec<u8>>) {
        self.0.insert(key.into(), value.into());
    }
}

impl<K: Into<String>, V: Into<Vec<u8>>> FromIterator<(K, V)> for SecretData {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect())
    }
}

impl fmt::Debug for SecretData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.0.iter().map(|(k, v)| (k, format!("{} bytes", v.len())))).finish()
    }
}

/// A Secret as it is in the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveSecret {
    /// Its data.
    pub data: SecretData,
    /// The cert-manager `Certificate` that keeps it, if one does.
    pub certificate_name: Option<String>,
    /// Its resource version.
    pub version: Option<String>,
}

/// Why a manifest is no Secret that can be read.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("Secret key \"{key}\" is not base64 text")]
pub struct ReadSecret {
    /// The key at fault.
    pub key: String,
}

const CERTIFICATE_NAME: &str = "cert-manager.io/certificate-name";

impl LiveSecret {
    /// Reads a Secret from its manifest, as the API server returns it.
    ///
    /// # Errors
    /// A value that is not base64.
    pub fn from_manifest(body: &Value) -> Result<Self, ReadSecret> {
        let mut data = SecretData::default();
        for (key, value) in body.get("data").and_then(Value::as_object).into_iter().flatten() {
            let decoded = value.as_str().and_then(|text| STANDARD.decode(text).ok());
            data.insert(key, decoded.ok_or_else(|| ReadSecret { key: key.clone() })?);
        }
        let name = body.pointer("/metadata/annotations").and_then(|a| a.get(CERTIFICATE_NAME)?.as_str());
        let version = body.pointer("/metadata/resourceVersion").and_then(Value::as_str);
        Ok(Self { data, certificate_name: name.map(str::to_owned), version: version.map(str::to_owned) })
    }
}

impl From<k8s_openapi::api::core::v1::Secret> for LiveSecret {
    fn from(secret: k8s_openapi::api::core::v1::Secret) -> Self {
        let annotations = secret.metadata.annotations.unwrap_or_default();
        Self {
            data: secret.data.unwrap_or_default().into_iter().map(|(k, v)| (k, v.0)).collect(),
            certificate_name: annotations.get(CERTIFICATE_NAME).cloned(),
            version: secret.metadata.resource_version,
        }
    }
}

/// The Secret that holds a certificate: type `Opaque`, labels of the
/// specification.
pub fn secret_object(spec: &CertificateSpec, data: &SecretData) -> Object {
    let encoded: Map<String, Value> = data.0.iter().map(|(k, v)| (k.clone(), STANDARD.encode(v).into())).collect();
    let labels: Map<String, Value> = spec.labels.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
    let metadata: Map<String, Value> = [
        ("name".to_owned(), Value::from(spec.secret.as_str())),
        ("namespace".to_owned(), Value::from(spec.namespace.as_str())),
        ("labels".to_owned(), Value::Object(labels)),
    ]
    .into_iter()
    .collect();
    let body: Map<String, Value> = [
        ("apiVersion".to_owned(), Value::from("v1")),
        ("kind".to_owned(), Value::from("Secret")),
        ("metadata".to_owned(), Value::Object(metadata)),
        ("type".to_owned(), Value::from("Opaque")),
        ("data".to_owned(), Value::Object(encoded)),
    ]
    .into_iter()
    .collect();
    Object {
        id: ObjectId {
            group: String::new(),
            version: "v1".to_owned(),
            kind: "Secret".to_owned(),
            namespace: Some(spec.namespace.clone()),
            name: spec.secret.clone(),
        },
        component: spec.component.clone(),
        runlevel: spec.runlevel,
        body: Arc::new(Value::Object(body)),
        source: spec.source.clone(),
    }
}
