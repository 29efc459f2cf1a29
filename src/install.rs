//! The driver: render → observe → plan → record the intent → for each
//! runlevel { apply → wait } → record the outcome.
//!
//! Shell. A run that is cut off anywhere is completed by the next one.

mod desired;
mod fault;
mod preflight;
pub mod secrets;
mod status;

use jiff::Timestamp;

pub use fault::{ParseStopPoint, StopPoint};
pub use preflight::{Refusal, Reviewed, review};
pub use status::{ComponentStatus, LevelStatus, ObjectStatus, Status, status};

use crate::certificate::issue::IssueError;
use crate::cluster::apply::{self, Mode};
use crate::cluster::lock::{self, LockError};
use crate::cluster::record::{self, RecordError};
use crate::cluster::wait::{self, WaitError};
use crate::cluster::{Cluster, Event, RequestError, Verb, observe};
use crate::manifest::Rendered;
use crate::plan::{Action, Plan, PlanError, Record, Settings, plan};

/// What is to be installed, and how.
#[derive(Clone, Debug)]
pub struct Installation {
    /// The rendered bundle.
    pub rendered: Rendered,
    /// What it was rendered from, for the record.
    pub settings: Settings,
    /// Take over fields that other managers own.
    pub force_conflicts: bool,
    /// Install although checks of the cluster fail.
    pub skip_checks: bool,
    /// Where to cut the run off, for tests of what follows.
    pub stop_after: Option<StopPoint>,
}

impl Installation {
    /// An installation as it is, to be looked at.
    pub fn of(rendered: Rendered, settings: Settings) -> Self {
        Self { rendered, settings, force_conflicts: false, skip_checks: false, stop_after: None }
    }
}

/// Why an installation did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// What there is cannot be seen, or the API server refuses what is to be.
    #[error("{}", joined(.0))]
    Observe(Vec<RequestError>),
    /// A live Secret cannot be read.
    #[error("Secret {secret}: {why}")]
    ReadSecret {
        /// `namespace/name`.
        secret: String,
        /// Why.
        why: String,
    },
    /// Certificates cannot be made.
    #[error(transparent)]
    Certificates(IssueError),
    /// The operating system gives no random numbers.
    #[error("cannot make a random value")]
    Random(#[source] getrandom::Error),
    /// A defect of the planner.
    #[error("cannot plan")]
    Plan(#[source] PlanError),
    /// The record.
    #[error(transparent)]
    Record(RecordError),
    /// The lock.
    #[error(transparent)]
    Lock(LockError),
    /// The cluster is not fit for it; nothing was written.
    #[error(transparent)]
    Preflight(Box<Refusal>),
    /// An apply failed.
    #[error(transparent)]
    Apply(RequestError),
    /// Something is not ready.
    #[error(transparent)]
    Wait(WaitError),
}

fn joined(errors: &[RequestError]) -> String {
    match errors {
        [one] => one.to_string(),
        many => {
            let lines = many.iter().map(|error| format!("\n  {error}"));
            format!("{} things stand in the way:{}", many.len(), lines.collect::<String>())
        }
    }
}

/// Decides what a run would do. Writes nothing.
///
/// # Errors
/// See [`InstallError`].
pub async fn prepare(cluster: &Cluster, wanted: &Installation) -> Result<(Plan, Option<Record>), InstallError> {
    let namespace = &wanted.rendered.operator_namespace;
    let installed = record::load(cluster, namespace).await.map_err(InstallError::Record)?;
    let desired = desired::desired(cluster, &wanted.rendered).await?;
    let observed = observe::observe(cluster, &desired.objects, wanted.force_conflicts).await;
    let observed = observed.map_err(InstallError::Observe)?;
    let plan = plan(&desired, &observed, installed.as_ref(), &wanted.settings).map_err(InstallError::Plan)?;
    Ok((plan, installed))
}

/// Installs or upgrades, and returns the plan that was carried out. An empty
/// plan takes no lock and writes nothing; it still waits until all is ready.
///
/// # Errors
/// See [`InstallError`].
pub async fn init(cluster: &Cluster, wanted: &Installation) -> Result<Plan, InstallError> {
    let plan = preflight::checked(cluster, wanted, prepare(cluster, wanted).await).await?;
    if plan.is_empty() {
        cluster.report(Event::planned(&plan));
        cluster.report(Event::UpToDate);
        run_levels(cluster, &plan, None, wanted.stop_after).await?;
        return Ok(plan);
    }
    let namespace = &wanted.rendered.operator_namespace;
    make_namespace(cluster, &plan, namespace).await?;
    let lock = lock::take(cluster, namespace, fault::identity()).await.map_err(InstallError::Lock)?;
    let result = tokio::select! {
        result = init_locked(cluster, wanted) => result,
        () = lock.lost() => return Err(InstallError::Lock(LockError::Lost)),
    };
    lock.release().await;
    result
}

/// Looks again, now that nobody else writes, and carries out what it sees.
async fn init_locked(cluster: &Cluster, wanted: &Installation) -> Result<Plan, InstallError> {
    let namespace = &wanted.rendered.operator_namespace;
    let (plan, installed) = prepare(cluster, wanted).await?;
    cluster.report(Event::planned(&plan));
    let mut record = Record::intent(&plan, installed.as_ref(), &wanted.settings, now());
    record::save(cluster, namespace, &record).await.map_err(InstallError::Record)?;
    fault::stop_at(wanted.stop_after, StopPoint::Intent);
    let result = run_levels(cluster, &plan, Some(&mut record), wanted.stop_after).await;
    record.outcome(result.as_ref().err().map(ToString::to_string), now());
    let saved = record::save(&cluster.last_words(), namespace, &record).await;
    result.and(saved.map_err(InstallError::Record)).map(|()| plan)
}

async fn run_levels(
    cluster: &Cluster,
    plan: &Plan,
    mut record: Option<&mut Record>,
    stop_after: Option<StopPoint>,
) -> Result<(), InstallError> {
    let countdown = fault::Countdown::new(stop_after);
    for level in &plan.levels {
        let began = clock();
        let writes = level.changes.iter().filter(|change| change.action.is_change()).count();
        cluster.report(Event::Level { runlevel: level.runlevel, writes, objects: level.changes.len() });
        let applied = apply::level(cluster, level, |_| countdown.tick()).await.map_err(InstallError::Apply)?;
        for object in &applied {
            if let (Some(record), Some(uid)) = (record.as_deref_mut(), &object.pin.uid) {
                record.applied(&object.id, uid);
            }
        }
        wait::level(cluster, &applied).await.map_err(InstallError::Wait)?;
        let duration_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        cluster.report(Event::LevelReady { runlevel: level.runlevel, duration_ms });
        fault::stop_at(stop_after, StopPoint::Level(level.runlevel));
    }
    Ok(())
}

/// The one write before the intent: record and lock need a place.
async fn make_namespace(cluster: &Cluster, plan: &Plan, namespace: &str) -> Result<(), InstallError> {
    let change = plan.changes().find(|change| change.id.kind == "Namespace" && change.id.name == namespace);
    let Some(change) = change.filter(|change| change.action == Action::Create) else { return Ok(()) };
    let mode = Mode::Write { force: change.force };
    cluster.apply(&change.id, change.body.expose(), mode).await.map_err(InstallError::Apply)?;
    cluster.report(Event::Applied { object: change.id.clone(), verb: Verb::Created });
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the record says when a run began and ended")]
fn now() -> Timestamp {
    Timestamp::now()
}

#[expect(clippy::disallowed_methods, reason = "durations of levels are reported")]
fn clock() -> std::time::Instant {
    std::time::Instant::now()
}
