//! What the installation is like now: readiness of every object, and drift
//! from what was installed. Writes nothing.

use std::collections::BTreeMap;

use futures::{StreamExt as _, stream};
use serde::Serialize;

use super::{InstallError, Installation, desired};
use crate::cluster::apply::Applied;
use crate::cluster::observe::{self, Policies, Rehearsed};
use crate::cluster::{Cluster, wait};
use crate::manifest::{Object, ObjectId, Runlevel};
use crate::plan::{self, Action, Change, Consent, Observation, Observations, Progress, Pruned, Record};
use crate::readiness::{self, Pin, State};

/// What the installation is like.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Always: there is an installation to tell of.
    pub installed: bool,
    /// How far the last run came.
    pub state: Progress,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Name of the profile.
    pub profile: String,
    /// Version of the executable that ran last.
    pub version: String,
    /// Namespace of the control plane.
    pub namespace: String,
    /// Image of our own pods.
    pub image: String,
    /// Levels in order.
    pub levels: Vec<LevelStatus>,
    /// Objects that do not exist.
    pub missing: Vec<ObjectId>,
    /// Objects that are not as they were installed.
    pub drift: Vec<Change>,
}

/// One level.
#[derive(Debug, Serialize)]
pub struct LevelStatus {
    /// Which one.
    pub runlevel: Runlevel,
    /// Its components by name.
    pub components: Vec<ComponentStatus>,
}

/// One component within a level.
#[derive(Debug, Serialize)]
pub struct ComponentStatus {
    /// Its name.
    pub name: String,
    /// How many objects it has there.
    pub objects: usize,
    /// Objects that are not ready, and why.
    pub pending: Vec<ObjectStatus>,
}

/// One object that is not ready.
#[derive(Debug, Serialize)]
pub struct ObjectStatus {
    /// The object.
    pub object: ObjectId,
    /// Why it is not.
    pub why: String,
    /// Whether the installation can do without.
    pub optional: bool,
}

impl Status {
    /// Whether the last run ended well and everything is ready.
    pub fn is_ready(&self) -> bool {
        let mut pending = self.levels.iter().flat_map(|level| &level.components).flat_map(|c| &c.pending);
        self.state == Progress::Installed && pending.all(|object| object.optional)
    }
}

/// Looks at everything that was installed.
///
/// # Errors
/// See [`InstallError`].
pub async fn status(cluster: &Cluster, installed: &Installation, record: &Record) -> Result<Status, InstallError> {
    let desired = desired::desired(cluster, &installed.rendered).await?;
    // A field that another manager has taken is drift here, not a conflict.
    let consent = Consent { force: true, look: true, adopt: false };
    let rehearsed = Rehearsed::default();
    let policies = &installed.rendered.policies;
    let observed = observe::observe(cluster, &desired.objects, policies, consent, &rehearsed).await;
    let observed = observed.map_err(InstallError::Observe)?;
    let plan = plan::plan(&desired, &observed, Pruned::default(), Some(record), &record.run.settings)
        .map_err(InstallError::Plan)?;
    let (missing, drift): (Vec<&Change>, Vec<&Change>) =
        plan.changes().filter(|change| change.action.is_change()).partition(|change| change.action == Action::Create);
    Ok(Status {
        installed: true,
        state: record.run.state,
        message: record.run.message.clone(),
        profile: record.run.settings.profile.clone(),
        version: record.run.version.clone(),
        namespace: installed.rendered.operator_namespace.clone(),
        image: record.run.settings.image.clone(),
        levels: levels(cluster, &desired.objects, &observed, &installed.rendered.policies).await,
        missing: missing.into_iter().map(|change| change.id.clone()).collect(),
        drift: drift.into_iter().cloned().collect(),
    })
}

async fn levels(
    cluster: &Cluster,
    objects: &[Object],
    observed: &Observations,
    policies: &Policies,
) -> Vec<LevelStatus> {
    let pending =
        stream::iter(objects)
            .map(|object| async move {
                (object.id.clone(), pending(cluster, object, observed.get(&object.id), policies).await)
            })
            .buffer_unordered(16)
            .filter_map(|(id, pending)| async { Some((id, pending?)) });
    let mut pending: BTreeMap<ObjectId, ObjectStatus> = pending.collect().await;
    let mut levels: BTreeMap<Runlevel, BTreeMap<String, ComponentStatus>> = BTreeMap::new();
    for object in objects {
        let name = object.component.clone();
        let new = ComponentStatus { name: name.clone(), objects: 0, pending: Vec::new() };
        let component = levels.entry(object.runlevel).or_default().entry(name).or_insert(new);
        component.objects += 1;
        component.pending.extend(pending.remove(&object.id));
    }
    let level = |(runlevel, components): (_, BTreeMap<_, _>)| LevelStatus {
        runlevel,
        components: components.into_values().collect(),
    };
    levels.into_iter().map(level).collect()
}

/// Why an object is not ready, down to its pods; nothing when it is.
async fn pending(
    cluster: &Cluster,
    object: &Object,
    observation: Option<&Observation>,
    policies: &Policies,
) -> Option<ObjectStatus> {
    let live = match observation {
        Some(Observation::Present { live, .. } | Observation::Immutable { live, .. }) => Some(live),
        _ => None,
    };
    let declared = wait::declared(policies, &object.component, &object.id);
    let (State::Pending(mut why) | State::Failed(mut why)) =
        readiness::assess_declared(live, &Pin::default(), declared)
    else {
        return None;
    };
    if live.is_none() {
        "does not exist".clone_into(&mut why);
    }
    let optional = live.is_some() && wait::is_optional(declared, &object.id);
    if let Some(live) = live.filter(|_| !optional) {
        let applied =
            Applied { id: object.id.clone(), component: object.component.clone(), pin: Pin::of(live), written: false };
        if let Some(explained) = wait::explain(cluster, applied, policies).await {
            if let Some(culprit) = explained.culprit {
                why = format!("{why}; pod \"{}\": {}", culprit.pod, culprit.trouble.describe());
            }
            if let Some(last) = explained.events.last() {
                why = format!("{why}; {last}");
            }
        }
    }
    Some(ObjectStatus { object: object.id.clone(), why, optional })
}
