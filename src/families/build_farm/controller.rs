//! The reconcile: observe → validate → build → apply → status, for one project
//! at a time, many projects at once, on the leader only.

mod endpoint;
mod guard;
mod memory;
mod notify;
mod report;
mod roll;
pub mod scale;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::runtime::controller::{Action, Config, applier};
use kube::{Api, Client, ResourceExt};
use tokio::sync::{Semaphore, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

use super::api::BuildProject;
use super::build::{self, Resources};
use super::figures::Figures;
use super::ledger::{Closing, Operation};
use super::lifecycle::{self, Want};
use super::metrics::Metrics;
use super::moment::Moment;
use super::settings::Settings;
use super::truth::ask::Truth;
use super::validate::{Invalid, Valid, servable, validate};
use super::view::View;
use super::writer::{WriteError, Writer, describe};
use crate::names::CONTROLLER_MANAGER;
use memory::Memory;
use notify::Notifier;
use scale::Scaled;

/// What a reconcile works with.
pub struct Controller {
    view: Arc<View>,
    writer: Arc<Writer>,
    settings: Arc<Settings>,
    metrics: Arc<Metrics>,
    sets: Api<StatefulSet>,
    services: Api<Service>,
    slices: Api<EndpointSlice>,
    projects: Api<BuildProject>,
    claims: Api<PersistentVolumeClaim>,
    budgets: Api<PodDisruptionBudget>,
    notifier: Notifier,
    memory: Mutex<Memory>,
    /// Ends of containers before this are of no interest.
    begun: Timestamp,
    truth: Arc<Truth>,
    figures: Arc<Figures>,
    going_down: Semaphore,
}

/// Those who can tell what daemons do.
pub struct Seen {
    /// Asked before a daemon is taken down.
    pub truth: Arc<Truth>,
    /// Asks in the background.
    pub figures: Arc<Figures>,
}

/// Why a reconcile is tried again.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// An object could not be written or read.
    #[error("{verb} {object}: {}", describe(.source))]
    Object {
        /// What was tried.
        verb: &'static str,
        /// On what.
        object: String,
        /// The API server's answer.
        source: Box<kube::Error>,
    },
    /// The status could not be written.
    #[error(transparent)]
    Status(#[from] WriteError),
}

/// Projects at once, and how many of them may be on their way down, which takes seconds.
const CONCURRENCY: u16 = 48;
const GOING_DOWN: usize = 32;
const RETRY: Duration = Duration::from_secs(2);
const STATUS_BUDGET: Duration = Duration::from_secs(30);

impl Controller {
    /// A controller over the given caches.
    pub fn new(
        client: Client,
        view: Arc<View>,
        writer: Arc<Writer>,
        settings: Arc<Settings>,
        metrics: Arc<Metrics>,
        Seen { truth, figures }: Seen,
    ) -> Arc<Self> {
        let namespace = settings.namespace.clone();
        Arc::new(Self {
            view,
            writer,
            metrics,
            sets: Api::namespaced(client.clone(), &namespace),
            services: Api::namespaced(client.clone(), &namespace),
            slices: Api::namespaced(client.clone(), &namespace),
            projects: Api::namespaced(client.clone(), &namespace),
            claims: Api::namespaced(client.clone(), &namespace),
            budgets: Api::namespaced(client.clone(), &namespace),
            notifier: Notifier::start(client),
            memory: Mutex::default(),
            begun: settings.clock.now(),
            truth,
            figures,
            going_down: Semaphore::new(GOING_DOWN),
            settings,
        })
    }

    /// Reconciles while this process leads, until `shutdown`.
    pub async fn run(self: Arc<Self>, mut leading: watch::Receiver<bool>, shutdown: CancellationToken) {
        if shutdown.run_until_cancelled(self.view.synced()).await.is_none() {
            return;
        }
        loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                lead = leading.wait_for(|leads| *leads) => if lead.is_err() { return },
            }
            let queue = UnboundedReceiverStream::new(self.view.reconcile_queue()).map(Ok::<_, Infallible>);
            let config = Config::default().concurrency(CONCURRENCY);
            let store = self.view.projects();
            let mut results =
                Box::pin(applier(|p, c| Box::pin(reconcile(p, c)), retry, self.clone(), store, queue, config));
            let mut lost = leading.clone();
            loop {
                tokio::select! {
                    biased;
                    () = shutdown.cancelled() => return,
                    Ok(_) = lost.wait_for(|leads| !*leads) => break,
                    result = results.next() => if result.is_none() { break },
                }
            }
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count_held(&self, rolls: usize) {
        self.metrics.rolls_held.set(i64::try_from(rolls).unwrap_or(i64::MAX));
    }

    fn error(verb: &'static str, object: String) -> impl FnOnce(kube::Error) -> ReconcileError {
        move |source| ReconcileError::Object { verb, object, source: Box::new(source) }
    }
}

/// One pass over one project.
async fn reconcile(project: Arc<BuildProject>, ctx: Arc<Controller>) -> Result<Action, ReconcileError> {
    // The queue may hold an older copy than the one that a write returned.
    let project = ctx.view.project(&project.name_any()).unwrap_or(project);
    let valid = validate(&project);
    let valid = match valid.and_then(|valid| servable(valid.spec.arch, &ctx.settings).map(|()| valid)) {
        Ok(valid) => valid,
        Err(Invalid::Deleting) => {
            ctx.count_held(ctx.memory().forget(&project.name_any()));
            return Ok(Action::await_change());
        }
        Err(invalid) => return ctx.report_invalid(&project, &invalid).await,
    };
    let (base, fault) = ctx.view.base();
    let live = ctx.view.stateful_set(&valid.key, &valid.project.metadata);
    let resources = build::build(&valid, &build::as_made(&ctx.settings, live.as_deref()), &base);
    let Some(scaled) = ctx.apply(&valid, resources).await? else { return Ok(Action::await_change()) };
    let now = ctx.settings.clock.now();
    let guard = ctx.guard(&valid, scaled.replicas, now).await;
    let patience = ctx.report(&valid, scaled.replicas, fault).await?;
    Ok(lifecycle::next_change(&project, &ctx.settings, now)
        .into_iter()
        .chain(reap_in(&project, now))
        .chain([scaled.again, guard, patience].into_iter().flatten())
        .min()
        .map_or_else(Action::await_change, Action::requeue))
}

/// A newborn fork that nothing wants is looked at again when it may be reaped.
fn reap_in(project: &BuildProject, now: Timestamp) -> Option<Duration> {
    let born = project.metadata.creation_timestamp.as_ref()?;
    let left = lifecycle::FORK_REAP_GRACE.checked_sub(lifecycle::age(born.0, now))?;
    lifecycle::is_fork(project).then_some(left + Duration::from_millis(50))
}

fn retry(project: Arc<BuildProject>, error: &ReconcileError, ctx: Arc<Controller>) -> Action {
    let conflict = matches!(error, ReconcileError::Object { source, .. } if is_conflict(source));
    if conflict {
        // Somebody else wrote in between; the watch brings the newer copy.
        return Action::requeue(Duration::from_millis(100));
    }
    ctx.metrics.reconcile_errors.inc();
    tracing::warn!(project.key = project.name_any(), %error, "reconcile failed, trying again");
    Action::requeue(RETRY)
}

fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_conflict())
}

impl Controller {
    /// Makes the cluster match. Returns where that has left the StatefulSet;
    /// `None` when the project itself was deleted.
    async fn apply(&self, valid: &Valid<'_>, resources: Resources) -> Result<Option<Scaled>, ReconcileError> {
        let Resources { stateful_set, service } = resources;
        self.apply_service(valid, service).await?;
        let now = self.settings.clock.now();
        let want = lifecycle::want(valid.project, &self.settings, now);
        let Some(live) = self.view.stateful_set(&valid.key, &valid.project.metadata) else {
            let replicas = self.create_stateful_set(valid, stateful_set, want).await?;
            return Ok(Some(Scaled::to(replicas)));
        };
        let running = live.spec.as_ref().and_then(|s| s.replicas).unwrap_or(1) > 0;
        let outdated = build::TEMPLATE_HASH;
        let outdated = live.annotations().get(outdated) != stateful_set.annotations().get(outdated);
        let gate = valid.project.status_or_default().gate;
        let scaled = match (want, running) {
            (Want::Zero, false) if lifecycle::reap(valid.project, &self.settings, now) => {
                return self.reap(valid).await.map(|gone| (!gone).then_some(Scaled::to(0)));
            }
            (Want::Zero, false) if outdated => self.refresh(valid, &stateful_set).await.map(|()| Scaled::to(0))?,
            (Want::Zero, false) => Scaled::to(0),
            (Want::Zero, true) => self.retire(valid, &stateful_set).await?,
            (_, true) if !gate.closed && build::epoch(&*live) >= gate.epoch => {
                self.keep(valid, &live, &stateful_set, now).await?
            }
            (_, _) => self.revive(valid, &live, &stateful_set).await?,
        };
        if scaled.replicas == 0 {
            self.count_held(self.memory().hold(valid.key.as_str(), false));
        }
        Ok(Some(scaled))
    }

    async fn retire(&self, valid: &Valid<'_>, desired: &StatefulSet) -> Result<Scaled, ReconcileError> {
        let scaled = self.take_down(valid, desired, Closing::Idle).await?;
        if scaled.replicas == 0 {
            self.notifier.tell(valid.project, Moment::ScaledToZero);
        }
        Ok(scaled)
    }

    /// A daemon that is wanted and runs.
    async fn keep(
        &self,
        valid: &Valid<'_>,
        live: &StatefulSet,
        desired: &StatefulSet,
        now: Timestamp,
    ) -> Result<Scaled, ReconcileError> {
        let rolled = self.roll(valid, live, desired, now).await?;
        if rolled.replicas == 0 {
            return Ok(rolled);
        }
        let unused = self.expire_unused(valid).await?;
        Ok(Scaled { again: rolled.again.into_iter().chain(unused).min(), ..rolled })
    }

    async fn revive(
        &self,
        valid: &Valid<'_>,
        live: &StatefulSet,
        desired: &StatefulSet,
    ) -> Result<Scaled, ReconcileError> {
        self.wake(valid, live, desired).await?;
        self.notifier.tell(valid.project, Moment::ScaledUp);
        Ok(Scaled::to(1))
    }

    async fn create_stateful_set(
        &self,
        valid: &Valid<'_>,
        mut set: StatefulSet,
        want: Want,
    ) -> Result<i32, ReconcileError> {
        let name = valid.key.daemon();
        if let Some(spec) = &mut set.spec {
            spec.replicas = Some(want.replicas());
        }
        // Somebody may have deleted the last one: this one is of the gate's epoch.
        let gate = valid.project.status_or_default().gate;
        if gate.epoch > 0 {
            build::stamp(&mut set, gate.epoch + i64::from(gate.closed && want.replicas() > 0));
        }
        let created = self.sets.create(&post_params(), &set).await;
        let is_new = created.is_ok();
        exists(created).map_err(Self::error("create", format!("StatefulSet {name}")))?;
        if is_new {
            self.notifier.tell(valid.project, Moment::Created);
        }
        if want.replicas() > 0 && gate.closed {
            self.open(&valid.key, gate.epoch + 1).await?;
            self.writer.submit(valid.key.as_str(), Operation::OpenGate { epoch: gate.epoch }, STATUS_BUDGET).await?;
        }
        Ok(want.replicas())
    }

    /// Deletes a fork with its cache, unless a build arrived meanwhile: the
    /// API server refuses when the project has changed since it was judged.
    async fn reap(&self, valid: &Valid<'_>) -> Result<bool, ReconcileError> {
        let name = valid.key.as_str();
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: valid.project.metadata.uid.clone(),
                resource_version: valid.project.metadata.resource_version.clone(),
            }),
            ..DeleteParams::default()
        };
        match self.projects.delete(name, &params).await {
            Ok(_) => {}
            Err(error) if is_conflict(&error) => return Ok(false),
            Err(error) if is_missing(&error) => {}
            Err(error) => return Err(Self::error("delete", format!("BuildProject {name}"))(error)),
        }
        let claim = valid.key.cache_claim();
        match self.claims.delete(&claim, &DeleteParams::default()).await {
            Err(error) if !is_missing(&error) => {
                Err(Self::error("delete", format!("PersistentVolumeClaim {claim}"))(error))
            }
            _ => {
                tracing::info!(project.key = name, "reaped an idle fork and its cache");
                self.notifier.tell(valid.project, Moment::Reaped);
                self.count_held(self.memory().forget(name));
                Ok(true)
            }
        }
    }
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PostParams::default() }
}

/// A create that finds the object there has reached its aim.
fn exists<K>(result: Result<K, kube::Error>) -> Result<(), kube::Error> {
    match result {
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Ok(()),
    }
}

fn is_missing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found())
}
