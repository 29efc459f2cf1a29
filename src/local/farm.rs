//! The provisioner of one host.
#![expect(clippy::disallowed_methods, reason = "shell: routes wait up to a deadline")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ResourceRequirements;
use tokio::time::{Instant, timeout_at};

use super::core::Core;
use super::index::Live;
use super::writer::{Change, WriteError};
use crate::companion::observation::Link;
use crate::families::build_farm::api::{BuildProjectSpec, S3CachePolicy, SecurityProfile, Tier};
use crate::families::build_farm::figures::Told;
use crate::families::build_farm::health::DaemonState;
use crate::families::build_farm::ledger::{Operation, Outcome};
use crate::families::build_farm::project::{self, Known};
use crate::key::{Arch, Project, ProjectKey};
use crate::provisioner::project::{BuildKit, Detail, Page, Selection};
use crate::provisioner::{BuildId, ProvisionError, Provisioner, Released};

/// When to try again what the store could not keep.
const RETRY_AFTER: Duration = Duration::from_secs(2);

/// How new projects are made.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// Whether untrusted builds run beside others, with nothing but a process between them.
    pub unisolated_forks: bool,
    /// Seconds between snapshots; none are taken at 0.
    pub snapshot_every: u32,
}

/// The farm.
#[derive(Debug)]
pub struct Farm {
    core: Arc<Core>,
    terms: Terms,
}

/// Whoever asks again makes it anew.
fn gone(key: &ProjectKey) -> ProvisionError {
    let message = format!("project {key} was removed meanwhile");
    ProvisionError::Unavailable { message, retry_after: Duration::from_secs(1) }
}

impl Farm {
    /// Over what the keepers work with, too.
    pub fn new(core: Arc<Core>, terms: Terms) -> Self {
        Self { core, terms }
    }

    async fn submit(&self, key: &ProjectKey, change: Change) -> Result<Outcome, ProvisionError> {
        self.core.writer.submit(key.as_str(), change).await.map_err(|error| match error {
            WriteError::Gone => gone(key),
            WriteError::NoAddress => ProvisionError::Refused(error.to_string()),
            WriteError::Store(_) | WriteError::Ended => {
                ProvisionError::Unavailable { message: error.to_string(), retry_after: RETRY_AFTER }
            }
        })
    }

    /// New builds are sent elsewhere, or later, while the farm ends.
    fn open(&self) -> Result<(), ProvisionError> {
        if self.core.draining.is_cancelled() {
            let message = "the farm is ending".to_owned();
            return Err(ProvisionError::Unavailable { message, retry_after: Duration::from_secs(10) });
        }
        Ok(())
    }

    /// What this host can build.
    fn accept(&self, project: &Project, key: &ProjectKey) -> Result<(), ProvisionError> {
        if key.is_fork() && !self.core.runtime.isolates() && !self.terms.unisolated_forks {
            return Err(ProvisionError::Forbidden(
                "untrusted builds are not isolated from others on this host; `--allow-unisolated-forks` lets them run \
                 all the same"
                    .to_owned(),
            ));
        }
        let own = if cfg!(target_arch = "aarch64") { Arch::Arm64 } else { Arch::Amd64 };
        if project.arch != own {
            return Err(ProvisionError::Forbidden(format!("this host builds {own} only, not {}", project.arch)));
        }
        Ok(())
    }

    fn spec(&self, project: &Project, key: &ProjectKey) -> BuildProjectSpec {
        let settings = &self.core.settings;
        let idle = if key.is_fork() { settings.fork_idle } else { settings.idle };
        BuildProjectSpec {
            key: key.to_string(),
            repo: project.repo.to_string(),
            name: project.name.clone(),
            target: project.target.clone(),
            arch: project.arch,
            storage_class: None,
            cache_volume_gi: settings.cache_volume_gi,
            tier: Tier::Warm,
            idle_timeout_sec: i32::try_from(idle.as_secs()).unwrap_or(i32::MAX),
            snapshot_every_sec: if key.is_fork() {
                0
            } else {
                i32::try_from(self.terms.snapshot_every).unwrap_or(i32::MAX)
            },
            restore_from_snapshot: None,
            fanout: 0,
            s3_cache_policy: S3CachePolicy::default(),
            security_profile: SecurityProfile::default(),
            resources: ResourceRequirements::default(),
        }
    }
}

#[async_trait]
impl Provisioner for Farm {
    async fn ensure(&self, project: &Project) -> Result<ProjectKey, ProvisionError> {
        self.open()?;
        let key = project.key();
        self.accept(project, &key)?;
        if self.core.index.get(key.as_str()).is_none() {
            self.submit(&key, Change::Create(Box::new(self.spec(project, &key)))).await?;
        }
        Ok(key)
    }

    async fn touch(&self, key: &ProjectKey) -> Result<(), ProvisionError> {
        self.open()?;
        self.submit(key, Change::Apply(Operation::Touch)).await.map(drop)
    }

    async fn begin(&self, key: &ProjectKey, build: &BuildId) -> Result<(), ProvisionError> {
        self.open()?;
        match self.submit(key, Change::Apply(Operation::Begin { id: build.digest() })).await? {
            Outcome::Saturated(inflight) => Err(ProvisionError::Saturated { inflight }),
            _ => Ok(()),
        }
    }

    async fn end(&self, key: &ProjectKey, build: Option<&BuildId>) -> Result<Released, ProvisionError> {
        let operation = Operation::End { id: build.map(BuildId::digest) };
        match self.core.writer.submit(key.as_str(), Change::Apply(operation)).await {
            Ok(Outcome::Done) => Ok(Released::Entry),
            Ok(_) | Err(WriteError::Gone) => Ok(Released::Nothing),
            Err(error) => Err(ProvisionError::Unavailable { message: error.to_string(), retry_after: RETRY_AFTER }),
        }
    }

    async fn repo(&self, key: &ProjectKey) -> Result<Option<String>, ProvisionError> {
        Ok(self.core.index.get(key.as_str()).map(|record| record.project.spec.repo.clone()))
    }

    fn ready(&self, key: &ProjectKey) -> bool {
        self.core.index.daemon(key.as_str()) == DaemonState::Ready
    }

    async fn wait_ready(&self, key: &ProjectKey, budget: Duration) -> Result<(), ProvisionError> {
        let deadline = Instant::now() + budget;
        let notify = self.core.index.listen(key.as_str());
        loop {
            let mut changed = std::pin::pin!(notify.notified());
            changed.as_mut().enable();
            // It was there, and nobody makes it again for whoever waits here.
            if self.core.index.get(key.as_str()).is_none() {
                return Err(gone(key));
            }
            let last = match self.core.index.daemon(key.as_str()) {
                DaemonState::Ready => return Ok(()),
                DaemonState::Failed(fault) => return Err(ProvisionError::Failed { reason: fault.to_string() }),
                DaemonState::Troubled(fault, _) => fault.to_string(),
                DaemonState::Starting(why) => why,
            };
            if timeout_at(deadline, changed).await.is_err() {
                return Err(ProvisionError::NotReady { last: Some(last) });
            }
        }
    }

    fn endpoint(&self, key: &ProjectKey) -> String {
        self.core.endpoint(key)
    }

    fn namespace(&self) -> &str {
        &self.core.settings.namespace
    }

    fn projects(&self, selection: &Selection<'_>) -> Page {
        let now = Timestamp::now();
        let mut taken = self.core.index.all();
        taken.retain(|record| {
            let spec = &record.project.spec;
            selection.takes(&spec.key, &spec.repo, project::phase(&record.project))
        });
        selection.page(
            taken,
            |record| &record.project.spec.key,
            |record| {
                let live = self.core.index.live(&record.project.spec.key);
                let told = live.as_ref().and_then(told);
                let ready = live.is_some_and(|live| live.state == DaemonState::Ready);
                let endpoint = self.core.endpoint_of(record);
                let known = Known { project: &record.project, ready, told: told.as_ref() };
                project::summary(known, endpoint, &self.core.settings, now)
            },
        )
    }

    fn project(&self, key: &ProjectKey) -> Option<Detail> {
        let record = self.core.index.get(key.as_str())?;
        let live = self.core.index.live(key.as_str());
        let told = live.as_ref().and_then(told);
        let ready = live.is_some_and(|live| live.state == DaemonState::Ready);
        let known = Known { project: &record.project, ready, told: told.as_ref() };
        Some(project::detail(known, self.core.endpoint_of(&record), &self.core.settings, Timestamp::now()))
    }
}

/// What a daemon says of itself, as a companion would.
fn told(live: &Live) -> Option<Told> {
    let seen = live.observation.as_ref()?.borrow().clone();
    Some(Told {
        active: (seen.link == Link::Answering).then_some(seen.active),
        finished: seen.finished,
        cache: live.cache,
        cache_reset: None,
        buildkit: BuildKit { version: seen.identity.version, snapshotter: seen.identity.snapshotter },
    })
}
