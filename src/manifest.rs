//! The bundle: embedded components, strict templates, parsed objects.
//!
//! In: the embedded files and resolved values. Out: [`Rendered`], the objects
//! of an installation in apply order. Rendering is pure and deterministic: the
//! same input gives the same bytes. No IO.

mod bundle;
mod check;
pub mod emit;
pub mod export;
pub mod fault;
mod kinds;
mod policy;
mod position;
mod render;
mod template;
mod yaml;

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::certificate::{CertificateSpec, Mode};

pub use bundle::{Bundle, Component, Declared, GLOBAL, Generated};
pub use fault::{Fault, Faults};
pub use policy::{Policy, Probe};
pub use render::{certificates, common_labels, render};
pub use template::{RenderError, Renderer};

pub(crate) use yaml::{Document, describe, kind_of, parse_mapping, parse_value};

/// `rc0` to `rc4`. A level is applied in parallel and waited for before the
/// next one starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Runlevel {
    /// Namespaces, custom resource definitions, classes.
    Rc0,
    /// Certificates, generated configuration, RBAC, network policies.
    Rc1,
    /// Optional services.
    Rc2,
    /// The control plane.
    Rc3,
    /// The gateway.
    Rc4,
}

impl Runlevel {
    /// All levels, in order.
    pub const ALL: [Self; 5] = [Self::Rc0, Self::Rc1, Self::Rc2, Self::Rc3, Self::Rc4];
}

impl fmt::Display for Runlevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rc{}", *self as u8)
    }
}

/// What identifies an object in a cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId {
    /// API group; empty for the core group.
    pub group: String,
    /// API version, for example `v1`.
    pub version: String,
    /// Kind, for example `Deployment`.
    pub kind: String,
    /// Namespace; `None` for what is cluster-scoped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
}

impl ObjectId {
    /// `group/version`, or `version` in the core group.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }
}

/// `Deployment buildkit-operator/buildkit-operator-buildd`.
impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name),
            None => write!(f, "{} {}", self.kind, self.name),
        }
    }
}

/// One rendered object. `body` holds the whole manifest, `apiVersion`, `kind`
/// and `metadata` included, with the common labels set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Object {
    /// Identity, as read from the body.
    pub id: ObjectId,
    /// The component that it belongs to.
    pub component: String,
    /// The level that it is applied in.
    pub runlevel: Runlevel,
    /// The manifest. Plans and records share it.
    pub body: Arc<Value>,
    /// `manifests/server/deployment.yaml.j2:12`, for messages.
    pub source: String,
}

/// A random value that is made once and kept: the API token, for example.
/// Its Secret is no template, because the value must not be rendered anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratedSecret {
    /// Component that it belongs to.
    pub component: String,
    /// Level that it is applied in.
    pub runlevel: Runlevel,
    /// Namespace of the Secret.
    pub namespace: String,
    /// Name of the Secret.
    pub name: String,
    /// Key within the Secret.
    pub key: String,
    /// Random bytes, written as URL-safe base64 without padding.
    pub bytes: usize,
    /// Labels that every object of the bundle carries.
    pub labels: std::collections::BTreeMap<String, String>,
}

/// Everything that a profile and its values ask for.
#[derive(Clone, Debug)]
pub struct Rendered {
    /// Name of the profile.
    pub profile: String,
    /// Namespace of the control plane, which also holds the record.
    pub operator_namespace: String,
    /// Objects in apply order: by runlevel, then by kind, then by name.
    pub objects: Vec<Object>,
    /// Certificates to make or keep; of [`Mode::Provided`], to look at. Those
    /// of cert-manager are among the objects.
    pub certificates: Vec<CertificateSpec>,
    /// Who makes them.
    pub mode: Mode,
    /// Random values to make or keep.
    pub generated: Vec<GeneratedSecret>,
    /// Random values that somebody else has to make.
    pub expected: Vec<GeneratedSecret>,
    /// What each component declares of its objects.
    pub policies: std::collections::BTreeMap<String, Policy>,
}

/// The Secrets that are made where they are needed, and are in no manifest.
/// As JSON it is what the server and the first step of an export are told by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declarations {
    /// Certificates to make or keep.
    pub certificates: Vec<CertificateSpec>,
    /// Random values to make or keep.
    pub generated: Vec<GeneratedSecret>,
}

impl Declarations {
    /// Name of the ConfigMap that holds it, in the namespace of the control plane.
    pub const CONFIG_MAP: &str = "buildkit-operator-secrets";

    /// Its key there.
    pub const KEY: &str = "secrets.json";

    /// Namespace and name of every Secret.
    pub fn places(&self) -> impl Iterator<Item = (String, String)> {
        let certificates = self.certificates.iter().map(|spec| (spec.namespace.clone(), spec.secret.clone()));
        let values = self.generated.iter().map(|value| (value.namespace.clone(), value.name.clone()));
        certificates.chain(values)
    }

    /// Whether there is nothing to make.
    pub fn is_empty(&self) -> bool {
        self.certificates.is_empty() && self.generated.is_empty()
    }
}

impl Rendered {
    /// The Secrets that we make.
    pub fn declarations(&self) -> Declarations {
        let certificates = if self.mode == Mode::Own { self.certificates.clone() } else { Vec::new() };
        Declarations { certificates, generated: self.generated.clone() }
    }
}
