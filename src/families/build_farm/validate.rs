//! From a `BuildProject` as it stands in the cluster to one that a daemon can
//! be built from. Pure. [`Valid`] is the only type that `build` accepts.

use super::api::{BuildProject, BuildProjectSpec};
use super::settings::Settings;
use crate::key::{Arch, KeyError, ProjectKey};

/// A project that a daemon can be built from.
#[derive(Clone, Debug)]
pub struct Valid<'a> {
    /// Its key.
    pub key: ProjectKey,
    /// Its object, for the owner reference.
    pub project: &'a BuildProject,
    /// Its specification.
    pub spec: &'a BuildProjectSpec,
}

/// Why no daemon can be built.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Invalid {
    /// The key is not one.
    #[error("spec.key: {0}")]
    Key(#[from] KeyError),
    /// Object and key differ, so that routes would never find the daemon.
    #[error("spec.key is \"{key}\" but the object is named \"{name}\"; they must be equal")]
    NameIsNotKey {
        /// The key.
        key: String,
        /// The object's name.
        name: String,
    },
    /// There is no companion for its architecture.
    #[error(
        "spec.arch is \"{arch}\", and the companion's image is for {}: install an image of that architecture too, and \
         add it to images.architectures",
        list(known)
    )]
    Architecture {
        /// The project's.
        arch: Arch,
        /// Those of the image.
        known: Vec<Arch>,
    },
    /// It is going away; nothing is made for it any more.
    #[error("the object is being deleted")]
    Deleting,
}

fn list(architectures: &[Arch]) -> String {
    architectures.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
}

/// Whether a daemon of this architecture would have its companion: the pod
/// would never start without.
///
/// # Errors
/// [`Invalid::Architecture`].
pub fn servable(arch: Arch, settings: &Settings) -> Result<(), Invalid> {
    let known = &settings.companion_architectures;
    if settings.companion.is_none() || known.is_empty() || known.contains(&arch) {
        return Ok(());
    }
    Err(Invalid::Architecture { arch, known: known.clone() })
}

/// Checks a project.
///
/// # Errors
/// The first reason why no daemon can be built.
pub fn validate(project: &BuildProject) -> Result<Valid<'_>, Invalid> {
    if project.metadata.deletion_timestamp.is_some() {
        return Err(Invalid::Deleting);
    }
    let key: ProjectKey = project.spec.key.parse()?;
    let name = project.metadata.name.clone().unwrap_or_default();
    if key.as_str() != name {
        return Err(Invalid::NameIsNotKey { key: key.to_string(), name });
    }
    Ok(Valid { key, project, spec: &project.spec })
}
