//! The driver: render → observe → plan → record the intent → for each
//! runlevel { apply → wait } → prune → record the outcome.
//!
//! Shell. A run that is cut off anywhere is completed by the next one.

mod adopt;
mod desired;
mod fault;
mod leftovers;
pub mod permissions;
mod preflight;
mod prune;
mod rollback;
mod run;
pub mod secrets;
mod status;
mod uninstall;

use jiff::Timestamp;

pub use adopt::{AdoptError, release_values, unadopt};
pub use fault::{ParseStopPoint, StopPoint};
pub use preflight::{Refusal, Reviewed, beyond, review};
pub use rollback::{prepare_rollback, rollback};
pub use status::{ComponentStatus, LevelStatus, ObjectStatus, Status, status};
pub use uninstall::{Removal, Scope, Step, prepare_uninstall, uninstall};

use crate::certificate::issue::IssueError;
use crate::cluster::lock::{self, LockError};
use crate::cluster::observe::{self, Rehearsed};
use crate::cluster::record::{self, RecordError};
use crate::cluster::wait::WaitError;
use crate::cluster::{Cluster, Event, RequestError};
use crate::manifest::{ObjectId, Rendered};
use crate::plan::{Brake, Consent, Desired, Origin, Plan, PlanError, Record, Settings, plan};

/// What is to be installed, and how.
#[derive(Clone, Debug)]
pub struct Installation {
    /// The rendered bundle.
    pub rendered: Rendered,
    /// What it was rendered from, for the record.
    pub settings: Settings,
    /// What is allowed, and what is left out.
    pub options: Options,
}

/// What a run may do.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Take over fields that other managers own.
    pub force_conflicts: bool,
    /// Install although checks of the cluster fail.
    pub skip_checks: bool,
    /// Take over an installation of a predecessor.
    pub adopt: bool,
    /// Delete what needs consent.
    pub confirm_prune: bool,
    /// Only these components, unless empty.
    pub only: Vec<String>,
    /// All but these components.
    pub skip: Vec<String>,
    /// Where to cut the run off, for tests of what follows.
    pub stop_after: Option<StopPoint>,
}

impl Options {
    fn consent(&self) -> Consent {
        Consent { adopt: self.adopt, force: self.force_conflicts, look: false }
    }

    /// Whether a run leaves a component as it is.
    pub fn leaves(&self, component: &str) -> bool {
        let named = |list: &[String]| list.iter().any(|name| name == component);
        named(&self.skip) || (!self.only.is_empty() && !named(&self.only))
    }
}

impl Installation {
    /// An installation as it is, to be looked at.
    pub fn of(rendered: Rendered, settings: Settings) -> Self {
        Self { rendered, settings, options: Options::default() }
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
    /// A request failed.
    #[error(transparent)]
    Apply(RequestError),
    /// Something is not ready.
    #[error(transparent)]
    Wait(WaitError),
    /// Something needs consent.
    #[error("{}", braked(.0))]
    Braked(Vec<(Option<ObjectId>, Brake)>),
    /// Something could not be deleted; it stays recorded.
    #[error("{}", undeleted(.0))]
    Undeleted(Vec<(ObjectId, RequestError)>),
    /// There is nothing to roll back to, or to remove.
    #[error("{0}")]
    Nothing(String),
    /// A Secret that an earlier revision needs is gone.
    #[error("Secret {0} of that revision does not exist any more")]
    LostSecret(String),
    /// Builds run.
    #[error("{} builds run: {}", .0.len(), .0.join(", "))]
    Builds(Vec<String>),
    /// A predecessor's release.
    #[error(transparent)]
    Adopt(AdoptError),
}

fn braked(brakes: &[(Option<ObjectId>, Brake)]) -> String {
    let lines = brakes.iter().map(|(object, brake)| match object {
        Some(object) => format!("\n  {object} {brake}"),
        None => format!("\n  {brake}"),
    });
    format!("this would delete more than is done without consent:{}", lines.collect::<String>())
}

fn undeleted(failed: &[(ObjectId, RequestError)]) -> String {
    let lines = failed.iter().map(|(object, error)| format!("\n  {object}: {error}"));
    format!("{} of the objects could not be deleted, and stay recorded:{}", failed.len(), lines.collect::<String>())
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

/// What a run would do, and what it needs for that.
#[derive(Debug)]
pub struct Prepared {
    /// The changes.
    pub plan: Plan,
    /// What shall be there.
    pub desired: Desired,
    /// The record of the last run.
    pub installed: Option<Record>,
}

/// Decides what a run would do. Writes nothing.
///
/// # Errors
/// See [`InstallError`].
pub async fn prepare(cluster: &Cluster, wanted: &Installation) -> Result<Prepared, InstallError> {
    prepare_again(cluster, wanted, &Rehearsed::default()).await
}

/// The same, when a part of it has been rehearsed.
async fn prepare_again(
    cluster: &Cluster,
    wanted: &Installation,
    rehearsed: &Rehearsed,
) -> Result<Prepared, InstallError> {
    let namespace = &wanted.rendered.operator_namespace;
    let installed = record::load(cluster, namespace).await.map_err(InstallError::Record)?;
    let mut desired = desired::desired(cluster, &wanted.rendered).await?;
    desired::leave_out(&mut desired, installed.as_ref(), |component| wanted.options.leaves(component));
    decide(cluster, wanted, desired, installed, rehearsed).await
}

/// Decides how to get to what is desired.
async fn decide(
    cluster: &Cluster,
    wanted: &Installation,
    desired: Desired,
    installed: Option<Record>,
    rehearsed: &Rehearsed,
) -> Result<Prepared, InstallError> {
    let Installation { rendered, settings, options } = wanted;
    let (policies, consent) = (&rendered.policies, options.consent());
    let observed = observe::observe(cluster, &desired.objects, policies, consent, rehearsed).await;
    let observed = observed.map_err(InstallError::Observe)?;
    let pruned = prune::pruned(cluster, &desired, installed.as_ref()).await?;
    let mut plan = plan(&desired, &observed, pruned, installed.as_ref(), settings).map_err(InstallError::Plan)?;
    if options.adopt {
        adopt::extend(cluster, &mut plan, &observed, &rendered.operator_namespace).await?;
    }
    Ok(Prepared { plan, desired, installed })
}

/// Installs or upgrades, and returns the plan that was carried out. An empty
/// plan takes no lock and writes nothing; it still waits until all is ready.
///
/// # Errors
/// See [`InstallError`].
pub async fn init(cluster: &Cluster, wanted: &Installation) -> Result<Plan, InstallError> {
    let prepared = prepare(cluster, wanted).await.map(|prepared| (prepared.plan, prepared.installed));
    let plan = preflight::checked(cluster, wanted, prepared).await?;
    if plan.is_empty() {
        cluster.report(Event::planned(&plan));
        cluster.report(Event::UpToDate);
        run::levels(cluster, &plan, &wanted.rendered.policies, &mut run::Journal::none(&wanted.options)).await?;
        return Ok(plan);
    }
    run::brake(&plan, &wanted.options)?;
    let made = run::make_namespace(cluster, &plan, &wanted.rendered.operator_namespace).await?;
    let rehearsed = Rehearsed::of(&plan);
    drop(plan);
    locked(cluster, &wanted.rendered.operator_namespace, async {
        // Looks again, now that nobody else writes, and carries out what it sees.
        let mut prepared = prepare_again(cluster, wanted, &rehearsed).await?;
        prepared.plan.made = usize::from(made);
        run::carry_out(cluster, wanted, prepared, Origin::Init).await
    })
    .await
}

/// Does something while nobody else may.
async fn locked<T>(
    cluster: &Cluster,
    namespace: &str,
    run: impl Future<Output = Result<T, InstallError>>,
) -> Result<T, InstallError> {
    let lock = lock::take(cluster, namespace, fault::identity()).await.map_err(InstallError::Lock)?;
    let result = tokio::select! {
        result = run => result,
        () = lock.lost() => return Err(InstallError::Lock(LockError::Lost)),
    };
    lock.release().await;
    result
}

#[expect(clippy::disallowed_methods, reason = "the record says when a run began and ended")]
fn now() -> Timestamp {
    Timestamp::now()
}

#[expect(clippy::disallowed_methods, reason = "durations of levels are reported")]
fn clock() -> std::time::Instant {
    std::time::Instant::now()
}
