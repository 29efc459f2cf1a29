//! Certificates: what is wanted, and what to do about what there is.
//!
//! In: `certs/*.yaml` rendered with the values, the live Secrets, the time.
//! Out: keep, issue or renew, and why. Pure; keys are made in
//! [`issue`](self), which draws randomness and is called by the shell.

use crate::manifest::Runlevel;

/// One certificate that the bundle declares.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Labels of its Secret.
    pub labels: std::collections::BTreeMap<String, String>,
}
