//! Why a request to the API server did not succeed.

use crate::manifest::ObjectId;
use crate::plan::{Cause, Contested, FieldConflict, HelmRelease, Loss};

/// Why a request did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No connection, or it was lost.
    #[error("cannot {request}: the API server does not answer")]
    Unreachable {
        /// What was asked.
        request: String,
        /// Why.
        source: kube::Error,
    },
    /// The credentials are not accepted.
    #[error("cannot {request}: the API server does not accept the credentials")]
    Unauthorized {
        /// What was asked.
        request: String,
    },
    /// A permission is lacking.
    #[error("forbidden: {user} may not {permission}")]
    Forbidden {
        /// Who asked, as the API server calls them.
        user: String,
        /// `patch deployments.apps in namespace "x"`.
        permission: String,
    },
    /// Other managers own fields that would change.
    #[error("{object}: fields belong to other managers: {}", list(conflicts))]
    Conflict {
        /// The object.
        object: Box<ObjectId>,
        /// Each field and its manager.
        conflicts: Vec<FieldConflict>,
    },
    /// Other managers own fields that would change, and nobody has said that they may be taken.
    #[error("{object}: fields belong to other managers: {}", contested(fields))]
    Contested {
        /// The object.
        object: Box<ObjectId>,
        /// Each field, its manager, and both values.
        fields: Vec<Contested>,
    },
    /// A GitOps tool keeps the object as its repository says.
    #[error("{object} belongs to {owner}, which would undo what is done here")]
    Tracked {
        /// The object.
        object: Box<ObjectId>,
        /// `Argo CD application x`.
        owner: String,
    },
    /// Another installer's.
    #[error("{object} belongs to {release}")]
    Inherited {
        /// The object.
        object: Box<ObjectId>,
        /// The release.
        release: HelmRelease,
    },
    /// It cannot be changed, and may not be made anew.
    #[error("{object}: {why}, and making it anew is not allowed here: {loss}")]
    Immutable {
        /// The object.
        object: Box<ObjectId>,
        /// Which field.
        why: String,
        /// What would be lost.
        loss: Loss,
    },
    /// The API server refuses the object.
    #[error("{object}: {message}")]
    Refused {
        /// The object.
        object: Box<ObjectId>,
        /// The API server's words.
        message: String,
        /// Its HTTP status.
        code: u16,
        /// Field by field.
        causes: Vec<Cause>,
    },
    /// The API server's schema of the kind has no place for a field, or another
    /// type of value there.
    #[error("{object} does not fit the API server's schema: {why}")]
    Malformed {
        /// The object.
        object: Box<ObjectId>,
        /// `.spec.x: field not declared in schema`.
        why: String,
    },
    /// The kind is not served.
    #[error("{object}: the API server has no kind \"{}\" in \"{}\"", object.kind, object.api_version())]
    NotServed {
        /// The object.
        object: Box<ObjectId>,
    },
    /// A webhook could not be called until the deadline.
    #[error("{webhook} does not answer, and the API server refuses what it is to see: {why}")]
    Webhook {
        /// `webhook "a" of ValidatingWebhookConfiguration "b"`.
        webhook: String,
        /// The last reason.
        why: String,
    },
    /// The run's deadline has passed.
    #[error("cannot {request} before the deadline{}", last.as_ref().map(|l| format!(": {l}")).unwrap_or_default())]
    Deadline {
        /// What was asked.
        request: String,
        /// The last thing that went wrong.
        last: Option<String>,
    },
    /// The run was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// An answer that makes no sense.
    #[error("cannot {request}")]
    Other {
        /// What was asked.
        request: String,
        /// Why.
        source: kube::Error,
    },
}

fn list(conflicts: &[FieldConflict]) -> String {
    let texts = conflicts.iter().map(|conflict| format!("{} of \"{}\"", conflict.field, conflict.manager));
    texts.collect::<Vec<_>>().join(", ")
}

fn contested(fields: &[Contested]) -> String {
    match fields {
        [one] => one.to_string(),
        many => many.iter().map(|field| format!("\n  {field}")).collect(),
    }
}
