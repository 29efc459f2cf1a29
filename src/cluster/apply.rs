//! Server-side apply: one object, and one level of a plan.

use std::sync::atomic::{AtomicBool, Ordering};

use futures::{StreamExt as _, stream};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::request::Target;
use super::{Cluster, Event, RequestError, Verb, retry, wait};
use crate::manifest::ObjectId;
use crate::names::INSTALLER_MANAGER;
use crate::plan::{self, Action, Change, Level, Wave};
use crate::readiness::Pin;

/// Whether an apply writes, and whether it takes over fields of other managers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The API server only says what it would do.
    DryRun {
        /// Take over fields of other managers.
        force: bool,
    },
    /// The API server does it.
    Write {
        /// Take over fields of other managers.
        force: bool,
    },
}

/// What an apply returned, or what there was when none was needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The object.
    pub id: ObjectId,
    /// Component that it belongs to.
    pub component: String,
    /// Which object, and from which generation on its status counts.
    pub pin: Pin,
    /// Whether it was written.
    pub written: bool,
}

impl Cluster {
    /// Applies one object and returns it as the API server has it then.
    pub(crate) async fn apply(&self, id: &ObjectId, body: &Value, mode: Mode) -> Result<Value, RequestError> {
        let resource = self.resource(id).await?;
        let (dry_run, force) = match mode {
            Mode::DryRun { force } => (true, force),
            Mode::Write { force } => (false, force),
        };
        let verb = if dry_run { "check" } else { "apply" };
        let params = PatchParams { dry_run, force, ..PatchParams::apply(INSTALLER_MANAGER) }.validation_strict();
        let target = Target { verb, object: id, resource: &resource };
        self.send(&target, target.collection().patch(&id.name, &params, &Patch::Apply(body))).await
    }
}

impl Cluster {
    /// What the API server would make of an update; nothing is written.
    pub(super) async fn rehearse_update(&self, id: &ObjectId, body: &Value) -> Result<Value, RequestError> {
        let resource = self.resource(id).await?;
        let target = Target { verb: "check", object: id, resource: &resource };
        let params = PostParams { dry_run: true, field_manager: Some(INSTALLER_MANAGER.into()) };
        let bytes = serde_json::to_vec(body).unwrap_or_default();
        self.send(&target, target.collection().replace(&id.name, &params, bytes)).await
    }

    /// Makes the fields of an object's predecessors ours, so that those we do
    /// not want go with the next apply.
    async fn take_over(&self, id: &ObjectId) -> Result<(), RequestError> {
        let resource = self.resource(id).await?;
        let target = Target { verb: "take over", object: id, resource: &resource };
        for attempt in 1.. {
            let Some(live) = self.get(id).await? else { return Ok(()) };
            let unmanaged = live.pointer("/metadata/managedFields").is_none();
            if unmanaged || plan::predecessors(&live).is_empty() {
                return Ok(());
            }
            let patch = json!({"metadata": {
                "resourceVersion": live["metadata"]["resourceVersion"],
                "managedFields": plan::taken_over(&live),
            }});
            let params = PatchParams { field_manager: Some(INSTALLER_MANAGER.into()), ..PatchParams::default() };
            match self.send(&target, target.collection().patch(&id.name, &params, &Patch::Merge(patch))).await {
                Ok(_) => return Ok(()),
                // It has changed since it was looked at.
                Err(error @ RequestError::Refused { code: 409, .. }) => {
                    let pause = self.pause(&target.to_string(), error.to_string(), retry::pause(attempt, None)).await?;
                    if attempt >= 10 || !pause {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Applies the changes of a level, wave by wave, and returns what every object
/// of the level has to be waited for. After the first error, and after an
/// interruption, no request is begun any more; those in flight end in peace.
///
/// # Errors
/// The first error.
pub async fn level(
    cluster: &Cluster,
    level: &Level,
    written: impl Fn(&ObjectId),
) -> Result<Vec<Applied>, RequestError> {
    let mut applied = Vec::with_capacity(level.changes.len());
    for wave in level.changes.chunk_by(|a, b| a.wave == b.wave) {
        let first = applied.len();
        applied.extend(apply_wave(cluster, wave, &written).await?);
        if wave.first().is_some_and(|change| change.wave == Wave::Definitions) {
            wait::until_served(cluster, wave, &applied[first..]).await?;
        }
    }
    Ok(applied)
}

async fn apply_wave(
    cluster: &Cluster,
    wave: &[Change],
    written: &impl Fn(&ObjectId),
) -> Result<Vec<Applied>, RequestError> {
    let stopped = AtomicBool::new(false);
    let go_on = || !cluster.is_interrupted() && !stopped.load(Ordering::Relaxed);
    let (mut applied, mut failed) = (Vec::new(), None);
    let mut results = stream::iter(wave)
        .take_while(|_| std::future::ready(go_on()))
        .map(|change| apply_change(cluster, change))
        .buffer_unordered(cluster.limits.concurrency);
    while let Some(result) = results.next().await {
        match result {
            Ok(Some(done)) => {
                if done.written {
                    written(&done.id);
                }
                applied.push(done);
            }
            Ok(None) => {}
            Err(error) => {
                stopped.store(true, Ordering::Relaxed);
                failed.get_or_insert(error);
            }
        }
    }
    match failed {
        Some(error) => Err(error),
        None if cluster.is_interrupted() => Err(RequestError::Interrupted),
        None => Ok(applied),
    }
}

/// Applies one change, and returns what is to be waited for.
async fn apply_change(cluster: &Cluster, change: &Change) -> Result<Option<Applied>, RequestError> {
    let verb = match change.action {
        Action::Create => Verb::Created,
        Action::Configure { .. } => Verb::Configured,
        Action::Recreate { .. } => Verb::Recreated,
        Action::Unchanged => {
            let pin = change.live.clone().unwrap_or_default();
            return Ok(Some(applied(change, pin, false)));
        }
        Action::Finished => return Ok(None),
    };
    if !change.means.migrates.is_empty() {
        cluster.migrate(&change.id).await?;
    }
    if !change.means.predecessors.is_empty() {
        cluster.take_over(&change.id).await?;
    }
    if let (Action::Recreate { .. }, Some(uid)) = (&change.action, change.live.as_ref().and_then(|pin| pin.uid.clone()))
    {
        cluster.delete(&change.id, &uid).await?;
        cluster.gone(&change.id, &uid).await?;
    }
    let mode = Mode::Write { force: change.means.force };
    let mut attempt = 0;
    let live = loop {
        match cluster.apply(&change.id, change.body.expose(), mode).await {
            Ok(live) => break live,
            // A definition that was applied a moment ago may not be served yet.
            Err(error @ RequestError::NotServed { .. }) => {
                attempt += 1;
                cluster.kinds.forget(&change.id);
                let request = format!("apply {}", change.id);
                if !cluster.pause(&request, error.to_string(), retry::pause(attempt, None)).await? {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    };
    let live = if !change.means.predecessors.is_empty() && !plan::predecessors(&live).is_empty() {
        // It had no field management before this apply.
        cluster.take_over(&change.id).await?;
        cluster.apply(&change.id, change.body.expose(), mode).await?
    } else {
        live
    };
    cluster.report(Event::Applied { object: change.id.clone(), verb });
    Ok(Some(applied(change, Pin::of(&live), true)))
}

fn applied(change: &Change, pin: Pin, written: bool) -> Applied {
    Applied { id: change.id.clone(), component: change.component.clone(), pin, written }
}
