//! Certificates: what is wanted, and what to do about what there is.
//!
//! In: `certs/*.yaml` rendered with the values, the live Secrets, the time.
//! Out: keep, issue, renew or leave alone, and why. Pure, but for [`issue`],
//! which draws randomness and is called by the shell.
//!
//! [`parse`] → [`CertificateSpec`]s; [`issue::materialise`] reads what lives
//! ([`LiveCertificate`]), decides ([`decide_authority`], [`decide_leaf`]) and
//! returns the Secrets; [`secret_object`] makes objects of them.

mod decide;
mod declare;
pub mod issue;
mod key;
mod live;
mod provided;
pub mod rotate;
mod secret;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use include_dir::{Dir, include_dir};
use serde::{Deserialize, Serialize};

use crate::manifest::Runlevel;

pub use decide::{Authority, Decision, Reason, decide_authority, decide_leaf};
pub use declare::{CertificateError, Fault, parse};
pub use live::{KeyState, Layout, LiveCertificate, Malformed};
pub use provided::{Gap, provided};
pub use secret::{LiveSecret, ReadSecret, SecretData, secret_object};

static CERTS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/certs");

/// Who makes the certificates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// We do: the installer, and the server while it runs.
    #[default]
    Own,
    /// cert-manager, from objects of the bundle.
    CertManager,
    /// Somebody else: they are looked at, and never made.
    Provided,
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(s: &str) -> Result<Self, UnknownMode> {
        match s {
            "self" => Ok(Self::Own),
            "cert-manager" => Ok(Self::CertManager),
            "provided" => Ok(Self::Provided),
            _ => Err(UnknownMode(s.to_owned())),
        }
    }
}

/// Why a text is no mode.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no mode of certificates: want self, cert-manager or provided")]
pub struct UnknownMode(String);

/// One certificate that the bundle declares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateSpec {
    /// Name within the bundle: `ca`, `daemon`, `client`.
    pub name: String,
    /// Component that it belongs to.
    pub component: String,
    /// Level that its Secret is applied in.
    pub runlevel: Runlevel,
    /// Namespace of its Secret.
    pub namespace: String,
    /// Name of its Secret.
    pub secret: String,
    /// Labels of its Secret; the bundle adds those that every object carries.
    pub labels: BTreeMap<String, String>,
    /// Common name of its subject.
    pub common_name: String,
    /// What it is for.
    pub role: Role,
    /// DNS names that it must cover, lower case; a leading `*.` is a wildcard.
    pub dns_names: Vec<String>,
    /// Addresses that it must cover.
    pub ip_addresses: Vec<IpAddr>,
    /// How long it is valid from its issue.
    #[serde(with = "seconds")]
    pub lifetime: Duration,
    /// How long before its end it is renewed; shorter than `lifetime`.
    #[serde(with = "seconds")]
    pub renew_before: Duration,
    /// Whether an installation whose authority is elsewhere can do without it.
    pub optional: bool,
    /// `certs/daemon.yaml`, for messages.
    pub source: String,
}

/// What a certificate is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Role {
    /// It signs others.
    Authority,
    /// It identifies a server, a client, or both.
    Leaf {
        /// Name of the certificate that signs it.
        issuer: String,
        /// What it may be used for, at least one.
        usages: Vec<Usage>,
    },
}

/// What a leaf certificate may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Usage {
    /// To identify a TLS server.
    ServerAuth,
    /// To identify a TLS client.
    ClientAuth,
}

impl CertificateSpec {
    /// `namespace/secret`, for messages.
    pub fn secret_path(&self) -> String {
        format!("{}/{}", self.namespace, self.secret)
    }

    /// Whether it signs others.
    pub fn is_authority(&self) -> bool {
        self.role == Role::Authority
    }
}

/// Durations as whole seconds.
mod seconds {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(duration.as_secs())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_secs)
    }
}

/// The declarations embedded in this executable: path and text, by path.
pub fn embedded() -> Vec<(String, String)> {
    let mut files: Vec<_> = CERTS
        .files()
        .filter_map(|file| Some((format!("certs/{}", file.path().display()), file.contents_utf8()?.to_owned())))
        .filter(|(path, _)| path.ends_with(".yaml"))
        .collect();
    files.sort();
    files
}

/// The command that hands the key of an adopted authority to the installer,
/// after which it issues and renews by itself.
pub fn hand_over_command(authority: &CertificateSpec) -> String {
    format!(
        "kubectl --namespace {} create secret generic {} --from-file={}=ca.pem --from-file={}=ca-key.pem \
         --dry-run=client --output=yaml | kubectl apply --server-side --filename=-",
        authority.namespace,
        authority.secret,
        secret::CA,
        secret::CA_KEY,
    )
}
