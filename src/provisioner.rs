//! What turns a project key into a running, addressable daemon.
//!
//! The routing API is written against this trait alone. Implementations: the
//! build farm on Kubernetes, and, later, one host without Kubernetes.

pub mod project;

use std::time::Duration;

use async_trait::async_trait;

use crate::key::{Project, ProjectKey};
use project::{Detail, Page, Selection};

/// One build, as its client holds it: 16 lower-case hex digits. Only its hash
/// is ever stored, so that a reader of the store can release nothing.
#[derive(Clone, PartialEq, Eq)]
pub struct BuildId(String);

/// Not 16 hex digits.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("malformed buildId")]
pub struct MalformedBuildId;

impl BuildId {
    /// A new random identifier.
    ///
    /// # Errors
    /// When the system has no randomness.
    #[expect(clippy::disallowed_methods, reason = "an identifier that nobody can guess")]
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes)?;
        Ok(Self(hex::encode(bytes)))
    }

    /// What the client sent. Upper case is well formed but names no entry.
    ///
    /// # Errors
    /// [`MalformedBuildId`] unless it is 16 hex digits.
    pub fn parse(s: &str) -> Result<Self, MalformedBuildId> {
        if s.len() == 16 && s.bytes().all(|b| b.is_ascii_hexdigit()) {
            Ok(Self(s.to_owned()))
        } else {
            Err(MalformedBuildId)
        }
    }

    /// The identifier itself, for the client's answer only.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// SHA-256 of the identifier as hex: what is stored.
    pub fn digest(&self) -> String {
        use sha2::{Digest, Sha256};
        hex::encode(Sha256::digest(self.0.as_bytes()))
    }
}

impl std::fmt::Debug for BuildId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BuildId(…)")
    }
}

/// What `end` found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Released {
    /// An entry was there and is gone.
    Entry,
    /// No entry matched; nothing was written.
    Nothing,
}

/// Why a project could not be provisioned.
#[derive(Debug, thiserror::Error)]
pub enum ProvisionError {
    /// The store of projects refused for a reason that waiting does not cure.
    #[error("{0}")]
    Refused(String),
    /// The caller may not have this.
    #[error("{0}")]
    Forbidden(String),
    /// The store of projects did not answer within the budget.
    #[error("{message}")]
    Unavailable {
        /// Outward message.
        message: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// The daemon did not become ready in time.
    #[error("timed out waiting for Ready replica")]
    NotReady {
        /// What it was last waiting for, for example `Pending: unbound PersistentVolumeClaim`.
        last: Option<String>,
    },
    /// More builds in flight than a project may have.
    #[error("project saturated: {inflight} builds in flight")]
    Saturated {
        /// How many are registered.
        inflight: usize,
    },
    /// The daemon cannot start until somebody mends something.
    #[error("{reason}")]
    Failed {
        /// The root cause.
        reason: String,
    },
}

/// Keeps one daemon per project key. All methods may be called concurrently,
/// also for one key: two first calls start one daemon.
#[async_trait]
pub trait Provisioner: Send + Sync + 'static {
    /// Makes the project exist, and, if it is new, wanted: a newborn counts as
    /// just used. An existing project's settings are left alone.
    async fn ensure(&self, project: &Project) -> Result<ProjectKey, ProvisionError>;

    /// Counts the project as used now, so that its daemon runs for one idle
    /// period, and starts when it is at zero. Registers no build.
    async fn touch(&self, key: &ProjectKey) -> Result<(), ProvisionError>;

    /// Registers a build. When this returns `Ok`, the entry is persisted.
    async fn begin(&self, key: &ProjectKey, build: &BuildId) -> Result<(), ProvisionError>;

    /// Releases a build: the named one, or, without a name, the oldest expired
    /// entry, else the oldest. Releasing twice, or an unknown key, is
    /// [`Released::Nothing`] and writes nothing.
    async fn end(&self, key: &ProjectKey, build: Option<&BuildId>) -> Result<Released, ProvisionError>;

    /// The repository whose builds the key is for; nothing when there is no
    /// such project. What cannot be told is an error, never nothing.
    async fn repo(&self, key: &ProjectKey) -> Result<Option<String>, ProvisionError>;

    /// Whether the daemon can take a build now. Answers from memory.
    fn ready(&self, key: &ProjectKey) -> bool;

    /// Returns as soon as the daemon can take a build.
    async fn wait_ready(&self, key: &ProjectKey, budget: Duration) -> Result<(), ProvisionError>;

    /// Where clients reach the daemon, for example `tcp://buildkitd-p….svc:1234`.
    fn endpoint(&self, key: &ProjectKey) -> String;

    /// The namespace that the daemon lives in, as `/route` reports it.
    fn namespace(&self) -> &str;

    /// Whether it knows all projects that there are.
    fn is_synced(&self) -> bool {
        true
    }

    /// One page of the projects that are asked for. Answers from memory.
    fn projects(&self, selection: &Selection<'_>) -> Page;

    /// All that is known of one project. Answers from memory.
    fn project(&self, key: &ProjectKey) -> Option<Detail>;
}
