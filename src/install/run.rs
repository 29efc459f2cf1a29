//! Carrying out a plan: intent, levels, prune, outcome.

use super::{InstallError, Installation, Options, Prepared, StopPoint, adopt, clock, fault, now, prune};
use crate::cluster::apply::{self, Mode};
use crate::cluster::observe::Policies;
use crate::cluster::record::{self, Snapshot};
use crate::cluster::wait;
use crate::cluster::{Cluster, Event, PRUNED, Verb};
use crate::plan::{Action, Origin, Plan, Record};

/// What is noted while a plan is carried out.
pub(super) struct Journal<'a> {
    record: Option<&'a mut Record>,
    countdown: fault::Countdown,
    stop_after: Option<StopPoint>,
}

impl<'a> Journal<'a> {
    /// For a run that writes nothing.
    pub(super) fn none(options: &Options) -> Self {
        Self { record: None, countdown: fault::Countdown::new(options.stop_after), stop_after: options.stop_after }
    }

    fn of(record: &'a mut Record, options: &Options) -> Self {
        Self { record: Some(record), ..Self::none(options) }
    }
}

/// Refuses a plan that deletes more than is done without consent.
pub(super) fn brake(plan: &Plan, options: &Options) -> Result<(), InstallError> {
    if plan.brakes.is_empty() || options.confirm_prune {
        return Ok(());
    }
    Err(InstallError::Braked(plan.brakes.clone()))
}

/// The one write before the intent: record and lock need a place. Whether it was made.
pub(super) async fn make_namespace(cluster: &Cluster, plan: &Plan, namespace: &str) -> Result<bool, InstallError> {
    let change = plan.changes().find(|change| change.id.kind == "Namespace" && change.id.name == namespace);
    let Some(change) = change.filter(|change| change.action == Action::Create) else { return Ok(false) };
    let mode = Mode::Write { force: false };
    cluster.apply(&change.id, change.body.expose(), mode).await.map_err(InstallError::Apply)?;
    cluster.report(Event::Applied { object: change.id.clone(), verb: Verb::Created });
    Ok(true)
}

/// Records the intent, carries the plan out, records the outcome.
pub(super) async fn carry_out(
    cluster: &Cluster,
    wanted: &Installation,
    prepared: Prepared,
    origin: Origin,
) -> Result<Plan, InstallError> {
    let Prepared { plan, desired, installed } = prepared;
    let Installation { rendered, settings, options } = wanted;
    let namespace = &rendered.operator_namespace;
    brake(&plan, options)?;
    cluster.report(Event::planned(&plan));
    let mut record = Record::intent(&plan, installed.as_ref(), settings, origin, now());
    let snapshot: Snapshot = record::snapshot(&desired.objects);
    record::save(cluster, namespace, &mut record, Some(&snapshot)).await.map_err(InstallError::Record)?;
    drop(snapshot);
    fault::stop_at(options.stop_after, StopPoint::Intent);
    let result = write(cluster, wanted, &plan, &mut record).await;
    record.outcome(result.as_ref().err().map(ToString::to_string), now());
    let saved = record::save(&cluster.last_words(), namespace, &mut record, None).await;
    result.and(saved.map_err(InstallError::Record)).map(|()| plan)
}

async fn write(cluster: &Cluster, wanted: &Installation, plan: &Plan, record: &mut Record) -> Result<(), InstallError> {
    levels(cluster, plan, &wanted.rendered.policies, &mut Journal::of(record, &wanted.options)).await?;
    prune::step(cluster, PRUNED, &plan.deletions, |id| record.removed(id)).await?;
    for release in &plan.releases {
        adopt::forget(cluster, release).await.map_err(InstallError::Adopt)?;
    }
    Ok(())
}

/// Applies every level and waits for it.
pub(super) async fn levels(
    cluster: &Cluster,
    plan: &Plan,
    policies: &Policies,
    journal: &mut Journal<'_>,
) -> Result<(), InstallError> {
    for level in &plan.levels {
        let began = clock();
        let writes = level.changes.iter().filter(|change| change.action.is_change()).count();
        cluster.report(Event::Level { runlevel: level.runlevel, writes, objects: level.changes.len() });
        let applied = apply::level(cluster, level, |_| journal.countdown.tick()).await.map_err(InstallError::Apply)?;
        for object in applied.iter().filter(|object| object.written) {
            if let (Some(record), Some(uid)) = (journal.record.as_deref_mut(), &object.pin.uid) {
                record.applied(&object.id, uid);
            }
        }
        wait::level(cluster, &applied, policies).await.map_err(InstallError::Wait)?;
        let duration_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        cluster.report(Event::LevelReady { runlevel: level.runlevel, duration_ms });
        fault::stop_at(journal.stop_after, StopPoint::Level(level.runlevel));
    }
    Ok(())
}
