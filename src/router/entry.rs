//! A build that is registered, until its client knows of it.

use std::sync::Arc;

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tracing::warn;

use crate::key::ProjectKey;
use crate::provisioner::{BuildId, ProvisionError, Provisioner};

/// The entry of one build. Unless kept, it is released when dropped, on a task
/// of its own: a failed cold start or a client that leaves ends no build, but
/// must not keep a daemon running either.
pub(super) struct Entry {
    provisioner: Arc<dyn Provisioner>,
    key: ProjectKey,
    build: BuildId,
    releases: TaskTracker,
    runtime: Handle,
    kept: bool,
}

impl Entry {
    /// Registers a build. The registration runs to its end even if nobody waits
    /// for it any more, and is then released: cut in the middle, it could be
    /// persisted after its own release.
    pub(super) async fn begin(
        provisioner: Arc<dyn Provisioner>,
        key: ProjectKey,
        build: BuildId,
        releases: TaskTracker,
    ) -> Result<Self, ProvisionError> {
        let entry =
            Self { provisioner, key, build, releases: releases.clone(), runtime: Handle::current(), kept: false };
        let registered = releases.spawn(async move {
            match entry.provisioner.begin(&entry.key, &entry.build).await {
                Ok(()) => Ok(entry),
                // Nobody knows whether it was persisted: release it.
                Err(error @ ProvisionError::Unavailable { .. }) => Err(error),
                Err(error) => {
                    entry.keep();
                    Err(error)
                }
            }
        });
        registered.await.unwrap_or_else(|error| Err(ProvisionError::Refused(error.to_string())))
    }

    /// The build's identifier.
    pub(super) fn build(&self) -> &BuildId {
        &self.build
    }

    /// From here on the client releases it.
    pub(super) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let (provisioner, key, build) = (Arc::clone(&self.provisioner), self.key.clone(), self.build.clone());
        self.releases.spawn_on(
            async move {
                if let Err(error) = provisioner.end(&key, Some(&build)).await {
                    warn!(project.key = %key, %error, "entry of a failed route stays until it expires");
                }
            },
            &self.runtime,
        );
    }
}
