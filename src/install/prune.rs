//! Deleting what the installation no longer has.

use super::InstallError;
use crate::cluster::{Cluster, Event, RequestError, remains};
use crate::manifest::ObjectId;
use crate::plan::{self, Deletion, Desired, Pruned, Record, Remains, Wave};

/// What became of everything that is recorded and no longer desired.
pub(super) async fn pruned(
    cluster: &Cluster,
    desired: &Desired,
    installed: Option<&Record>,
) -> Result<Pruned, InstallError> {
    let unwanted = plan::unwanted(desired, installed);
    if unwanted.is_empty() {
        return Ok(Pruned::default());
    }
    let inventory = installed.map(|record| record.inventory.as_slice()).unwrap_or_default();
    let remains = remains::remains(cluster, unwanted, inventory).await;
    let remains = remains.map_err(|error| InstallError::Observe(vec![error]))?;
    for (entry, remains) in &remains {
        let why = match remains {
            Remains::NotOurs(why) => why.clone(),
            Remains::Kept => format!("annotation {} asks for it", remains::KEEP),
            Remains::Gone | Remains::Ours { .. } => continue,
        };
        cluster.report(Event::Kept { object: entry.id.clone(), why });
    }
    Ok(Pruned::new(remains))
}

/// Deletes objects that belong together, and tells when.
pub(super) async fn step(
    cluster: &Cluster,
    title: &str,
    deletions: &[Deletion],
    gone: impl FnMut(&ObjectId),
) -> Result<(), InstallError> {
    if deletions.is_empty() {
        return Ok(());
    }
    let began = super::clock();
    cluster.report(Event::Step { title: title.to_owned(), deletions: deletions.len() });
    prune(cluster, deletions, gone).await?;
    let duration_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    cluster.report(Event::StepDone { title: title.to_owned(), duration_ms });
    Ok(())
}

/// Deletes objects in order, those of one wave at once, and waits for each wave
/// to be gone. What cannot be deleted stays, and ends the run after the rest.
pub(super) async fn prune(
    cluster: &Cluster,
    deletions: &[Deletion],
    mut gone: impl FnMut(&ObjectId),
) -> Result<(), InstallError> {
    let mut failed = Vec::new();
    let place = |deletion: &Deletion| (deletion.runlevel, Wave::of(&deletion.id));
    for wave in deletions.chunk_by(|a, b| place(a) == place(b)) {
        if cluster.is_interrupted() {
            return Err(InstallError::Apply(RequestError::Interrupted));
        }
        let results = futures::future::join_all(wave.iter().map(|deletion| one(cluster, deletion))).await;
        for (deletion, result) in wave.iter().zip(results) {
            match result {
                Ok(()) => gone(&deletion.id),
                Err(RequestError::Interrupted) => return Err(InstallError::Apply(RequestError::Interrupted)),
                Err(error) => failed.push((deletion.id.clone(), error)),
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(InstallError::Undeleted(failed)) }
}

async fn one(cluster: &Cluster, deletion: &Deletion) -> Result<(), RequestError> {
    cluster.delete(&deletion.id, &deletion.uid).await?;
    cluster.gone(&deletion.id, &deletion.uid).await
}
