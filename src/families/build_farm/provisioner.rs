//! The build farm as a [`Provisioner`]: a `BuildProject` per key, its status
//! for what is in flight, and the controller's daemon behind it.
#![expect(clippy::disallowed_methods, reason = "shell: budgets run on the monotonic clock")]

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use tokio::time::{Instant, timeout_at};

use super::api::{BuildProject, BuildProjectSpec, SecurityProfile};
use super::figures::Figures;
use super::health::DaemonState;
use super::ledger::{Operation, Outcome};
use super::project::{self, Known};
use super::settings::Settings;
use super::validate::servable;
use super::view::View;
use super::writer::{WriteError, Writer, describe, passes};
use crate::key::{Project, ProjectKey};
use crate::names::CONTROLLER_MANAGER;
use crate::provisioner::project::{Detail, Page, Selection};
use crate::provisioner::{BuildId, ProvisionError, Provisioner, Released};

/// Keeps daemons through the API server.
pub struct Farm {
    api: Api<BuildProject>,
    view: Arc<View>,
    writer: Arc<Writer>,
    figures: Arc<Figures>,
    settings: Arc<Settings>,
    /// How long an API outage is waited out before a caller is told.
    budget: Duration,
}

/// When to try again after an outage of the API server.
const RETRY_AFTER: Duration = Duration::from_secs(5);

impl Farm {
    /// A provisioner over the given caches. `budget` bounds every call.
    pub fn new(
        client: Client,
        view: Arc<View>,
        writer: Arc<Writer>,
        figures: Arc<Figures>,
        settings: Arc<Settings>,
        budget: Duration,
    ) -> Self {
        let api = Api::namespaced(client, &settings.namespace);
        Self { api, view, writer, figures, settings, budget }
    }

    /// Where the project's daemon is reached, and whether it takes builds now.
    fn state(&self, project: &BuildProject) -> (String, bool) {
        match project.name_any().parse() {
            Ok(key) => (endpoint(&key, &self.settings), self.ready(&key)),
            Err(_) => (String::new(), false),
        }
    }

    async fn submit(&self, key: &ProjectKey, operation: Operation) -> Result<Outcome, ProvisionError> {
        self.writer.submit(key.as_str(), operation, self.budget).await.map_err(|error| match error {
            WriteError::Gone => ProvisionError::Unavailable {
                message: format!("project {key} was deleted meanwhile"),
                retry_after: Duration::from_secs(1),
            },
            WriteError::Unavailable(_) => {
                ProvisionError::Unavailable { message: error.to_string(), retry_after: RETRY_AFTER }
            }
            WriteError::Refused(_) => ProvisionError::Refused(error.to_string()),
        })
    }

    /// Creates the project, unless somebody else just has.
    async fn create(&self, project: &Project, key: &ProjectKey) -> Result<(), ProvisionError> {
        let object = BuildProject::new(key.as_str(), self.spec(project, key));
        let params = PostParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PostParams::default() };
        let deadline = Instant::now() + self.budget;
        let mut pause = Duration::from_millis(25);
        loop {
            let error = match self.api.create(&params, &object).await {
                Ok(created) => {
                    self.view.publish(created);
                    return Ok(());
                }
                Err(kube::Error::Api(status)) if status.is_already_exists() => return Ok(()),
                Err(error) => error,
            };
            if !passes(&error) {
                return Err(ProvisionError::Refused(refusal(&error)));
            }
            if Instant::now() + pause > deadline {
                return Err(ProvisionError::Unavailable { message: describe(&error), retry_after: RETRY_AFTER });
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    /// The specification of a new project. A fork takes storage, size and
    /// confinement from the project that it belongs to.
    fn spec(&self, project: &Project, key: &ProjectKey) -> BuildProjectSpec {
        let parent = key.is_fork().then(|| self.view.project(project.canonical_key().as_str())).flatten();
        let parent = parent.as_ref().map(|p| &p.spec);
        let seed = self.settings.project_defaults.seed(project);
        let idle = if key.is_fork() { self.settings.fork_idle } else { self.settings.idle };
        BuildProjectSpec {
            key: key.to_string(),
            repo: project.repo.to_string(),
            name: project.name.clone(),
            target: project.target.clone(),
            arch: project.arch,
            storage_class: parent.map_or_else(|| self.settings.storage_class.clone(), |p| p.storage_class.clone()),
            cache_volume_gi: parent
                .map_or_else(|| seed.cache_volume_gi.unwrap_or(self.settings.cache_volume_gi), |p| p.cache_volume_gi),
            tier: seed.tier.unwrap_or_default(),
            idle_timeout_sec: seed
                .idle_timeout_sec
                .unwrap_or_else(|| i32::try_from(idle.as_secs()).unwrap_or(i32::MAX)),
            snapshot_every_sec: 0,
            restore_from_snapshot: None,
            fanout: 0,
            s3_cache_policy: seed.s3_cache.unwrap_or_default(),
            security_profile: parent.map_or_else(SecurityProfile::default, |p| p.security_profile),
            resources: parent.map_or(seed.resources, |p| p.resources.clone()),
        }
    }
}

#[async_trait]
impl Provisioner for Farm {
    async fn ensure(&self, project: &Project) -> Result<ProjectKey, ProvisionError> {
        let key = project.key();
        servable(project.arch, &self.settings).map_err(|why| ProvisionError::Failed { reason: why.to_string() })?;
        if self.view.project(key.as_str()).is_none() {
            self.create(project, &key).await?;
        }
        Ok(key)
    }

    async fn touch(&self, key: &ProjectKey) -> Result<(), ProvisionError> {
        self.submit(key, Operation::Touch).await.map(|_| ())
    }

    async fn begin(&self, key: &ProjectKey, build: &BuildId) -> Result<(), ProvisionError> {
        match self.submit(key, Operation::Begin { id: build.digest() }).await? {
            Outcome::Saturated(inflight) => Err(ProvisionError::Saturated { inflight }),
            _ => Ok(()),
        }
    }

    async fn end(&self, key: &ProjectKey, build: Option<&BuildId>) -> Result<Released, ProvisionError> {
        let operation = Operation::End { id: build.map(BuildId::digest) };
        match self.writer.submit(key.as_str(), operation, self.budget).await {
            Ok(Outcome::Done) => Ok(Released::Entry),
            Ok(_) | Err(WriteError::Gone) => Ok(Released::Nothing),
            Err(error @ WriteError::Unavailable(_)) => {
                Err(ProvisionError::Unavailable { message: error.to_string(), retry_after: RETRY_AFTER })
            }
            Err(error @ WriteError::Refused(_)) => Err(ProvisionError::Refused(error.to_string())),
        }
    }

    async fn repo(&self, key: &ProjectKey) -> Result<Option<String>, ProvisionError> {
        if let Some(project) = self.view.project(key.as_str()) {
            return Ok(Some(project.spec.repo.clone()));
        }
        // Another replica may have made it just now.
        match self.api.get_opt(key.as_str()).await {
            Ok(project) => Ok(project.map(|project| project.spec.repo)),
            Err(error) => Err(ProvisionError::Unavailable { message: describe(&error), retry_after: RETRY_AFTER }),
        }
    }

    fn ready(&self, key: &ProjectKey) -> bool {
        self.view.daemon(key) == DaemonState::Ready
    }

    async fn wait_ready(&self, key: &ProjectKey, budget: Duration) -> Result<(), ProvisionError> {
        let deadline = Instant::now() + budget;
        let notify = self.view.listen(key.as_str());
        loop {
            let mut changed = std::pin::pin!(notify.notified());
            changed.as_mut().enable();
            let (last, patience) = match self.view.daemon(key) {
                DaemonState::Ready => return Ok(()),
                DaemonState::Failed(fault) => return Err(ProvisionError::Failed { reason: fault.to_string() }),
                DaemonState::Troubled(fault, left) => (fault.to_string(), left),
                DaemonState::Starting(why) => (why, None),
            };
            // A fault that is waited for too long becomes a failure without any change.
            let look_again = patience.map_or(deadline, |left| deadline.min(Instant::now() + left));
            if timeout_at(look_again, changed).await.is_err() && Instant::now() >= deadline {
                return Err(ProvisionError::NotReady { last: Some(last) });
            }
        }
    }

    fn endpoint(&self, key: &ProjectKey) -> String {
        endpoint(key, &self.settings)
    }

    fn namespace(&self) -> &str {
        &self.settings.namespace
    }

    fn is_synced(&self) -> bool {
        self.view.is_synced()
    }

    fn projects(&self, selection: &Selection<'_>) -> Page {
        let now = Timestamp::now();
        let mut taken = self.view.projects().state();
        taken.retain(|p| {
            let key = p.metadata.name.as_deref().unwrap_or_default();
            selection.takes(key, &p.spec.repo, project::phase(p))
        });
        selection.page(
            taken,
            |p| p.metadata.name.as_deref().unwrap_or_default(),
            |p| {
                let (endpoint, ready) = self.state(p);
                let told = self.figures.of(&p.name_any());
                project::summary(Known { project: p, ready, told: told.as_deref() }, endpoint, &self.settings, now)
            },
        )
    }

    fn project(&self, key: &ProjectKey) -> Option<Detail> {
        let found = self.view.project(key.as_str())?;
        let (endpoint, ready) = self.state(&found);
        let told = self.figures.of(key.as_str());
        let known = Known { project: &found, ready, told: told.as_deref() };
        Some(project::detail(known, endpoint, &self.settings, Timestamp::now()))
    }
}

/// Where clients reach a daemon: through the gateway when there is one.
pub fn endpoint(key: &ProjectKey, settings: &Settings) -> String {
    match &settings.gateway {
        Some((domain, port)) => key.gateway_endpoint(domain, *port),
        None => key.in_cluster_endpoint(&settings.namespace, settings.port),
    }
}

/// The API server answers a plain 404 when it does not know the type at all.
fn refusal(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 404 && status.message.contains("page not found") => {
            "the cluster does not know BuildProjects; run `bko-install cluster init`".to_owned()
        }
        error => describe(error),
    }
}
