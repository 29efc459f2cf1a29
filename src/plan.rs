//! The plan: what a run will change, in order.
//!
//! In: the desired objects, what the API server showed and predicted for each,
//! the record of the last run. Out: [`Plan`], a value that leaves nothing to
//! decide while it runs; it is printed exactly as it is executed, and Secret
//! data is masked in everything printed. Pure.

mod chart;
mod check;
mod contrast;
mod definition;
mod difference;
mod fields;
mod order;
mod ownership;
mod print;
mod prune;
mod record;
mod replace;
mod settled;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

pub use chart::{Carried, ReleaseValues};
pub use check::{Fault, check};
pub use definition::{Tightened, Tightening, dropped_served, dropped_stored, storage, tightened, violates};
pub use difference::{FieldChange, MASK, difference, is_secret, mask};
pub use order::Wave;
pub use ownership::{
    Consent, Contested, FieldConflict, FieldPolicy, HelmRelease, Policy, Resolution, drop_placeholders, helm_release,
    is_applied, is_ours, predecessors, resolve, taken_over, tracker, without, without_predecessors,
};
pub use prune::{Brake, Deletion, Pruned, Remains};
pub use record::{Entry, FORMAT, HISTORY, Origin, Progress, Record, Revision, Run, Settings};
pub use replace::{Cause, Loss, immutable, loss};
pub use settled::is_settled;

use crate::manifest::{Object, ObjectId, Runlevel};

/// What the API server showed for one desired object.
#[derive(Clone, PartialEq)]
pub enum Observation {
    /// It does not exist; the dry run of its creation passed.
    Absent,
    /// It does not exist, and its kind is not served yet: its definition comes
    /// with the bundle.
    Unserved,
    /// It exists, and is as it should be: an apply would change nothing.
    Settled {
        /// Which object that is.
        live: crate::readiness::Pin,
    },
    /// It exists.
    Present {
        /// As it is.
        live: Value,
        /// As the dry run says that it would become.
        predicted: Value,
        /// What it takes to get there.
        means: Means,
    },
    /// It exists, cannot be changed, and may be made anew.
    Immutable {
        /// As it is.
        live: Value,
        /// As it would be made.
        predicted: Value,
        /// `spec.selector cannot be changed`.
        why: String,
        /// What is lost on the way.
        loss: Loss,
    },
}

/// What an apply needs beside the manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Means {
    /// Fields are taken over from other managers.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Predecessors whose fields become ours first, so that what is not wanted goes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub predecessors: Vec<String>,
    /// Fields that are left to their owners.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub yields: Vec<String>,
    /// Versions of a definition that live objects are moved out of first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub migrates: Vec<String>,
}

/// What was observed for each desired object.
pub type Observations = BTreeMap<ObjectId, Observation>;

/// What shall be there.
#[derive(Clone, Debug, Default)]
pub struct Desired {
    /// Every object, once.
    pub objects: Vec<Object>,
    /// Secrets of authorities. They are written before everything that they
    /// signed: a run cut in between must leave no certificate whose authority's
    /// key is lost.
    pub authorities: BTreeSet<ObjectId>,
    /// Components that this run leaves as they are.
    pub untouched: BTreeSet<String>,
}

/// What a run will change.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Every level that has objects, in order.
    pub levels: Vec<Level>,
    /// What goes when every level is ready, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deletions: Vec<Deletion>,
    /// Releases that Helm is made to forget at the end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub releases: Vec<HelmRelease>,
    /// What is taken over of a release's values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<ReleaseValues>,
    /// Entries of the inventory that stay although nothing wants them.
    #[serde(skip)]
    pub kept: Vec<Entry>,
    /// What needs consent before anything is written.
    #[serde(skip)]
    pub brakes: Vec<(Option<ObjectId>, Brake)>,
    /// Objects that the same run has made before, for the sake of its lock.
    #[serde(skip)]
    pub made: usize,
    /// Whether the record must be written, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record: Option<String>,
}

/// One runlevel of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Level {
    /// Which one.
    pub runlevel: Runlevel,
    /// Its objects in order; those of one wave are written at once.
    pub changes: Vec<Change>,
}

/// One object of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// The object.
    #[serde(flatten)]
    pub id: ObjectId,
    /// Component that it belongs to.
    pub component: String,
    /// Position within its level.
    pub wave: Wave,
    /// What will be done.
    #[serde(flatten)]
    pub action: Action,
    /// UID and generation of the live object, for waiting on what stays as it is.
    #[serde(skip)]
    pub live: Option<crate::readiness::Pin>,
    /// What the record says of the object's content; Secret data left out.
    #[serde(skip)]
    pub digest: String,
    /// What it takes.
    #[serde(flatten)]
    pub means: Means,
    /// What is applied.
    #[serde(serialize_with = "Body::serialize_masked", rename = "object")]
    pub body: Body,
}

/// What will be done to an object.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "action", rename_all = "lowercase")]
pub enum Action {
    /// It will be created.
    Create,
    /// It will be changed.
    Configure {
        /// The fields that change.
        changes: Vec<FieldChange>,
    },
    /// It will be deleted and made anew.
    Recreate {
        /// The fields that change.
        changes: Vec<FieldChange>,
        /// Why it cannot be changed.
        why: String,
        /// What is lost on the way.
        loss: Loss,
    },
    /// It has done its work, and its time to live has removed it.
    Finished,
    /// It is as it should be and will not be written.
    Unchanged,
}

impl Action {
    /// Whether it writes.
    pub fn is_change(&self) -> bool {
        !matches!(self, Self::Unchanged | Self::Finished)
    }
}

/// A manifest that never shows Secret data when it is printed.
#[derive(Clone, PartialEq)]
pub struct Body(Arc<Value>);

impl Body {
    /// The manifest as it goes to the API server.
    pub fn expose(&self) -> &Value {
        &self.0
    }

    /// The manifest with Secret data masked.
    pub fn masked(&self) -> Value {
        mask(Value::clone(&self.0))
    }

    fn serialize_masked<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.masked().serialize(serializer)
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.masked())
    }
}

impl Plan {
    /// Whether nothing at all will be written.
    pub fn is_empty(&self) -> bool {
        self.record.is_none()
            && self.deletions.is_empty()
            && self.releases.is_empty()
            && self.changes().all(|change| !change.action.is_change())
    }

    /// All objects, in order.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.levels.iter().flat_map(|level| &level.changes)
    }

    /// How many objects are created, configured, recreated, deleted, unchanged.
    pub fn counts(&self) -> Counts {
        let counts = Counts { delete: self.deletions.len(), ..Counts::default() };
        let mut counts = self.changes().fold(counts, |mut counts, change| {
            *match change.action {
                Action::Create => &mut counts.create,
                Action::Configure { .. } => &mut counts.configure,
                Action::Recreate { .. } => &mut counts.recreate,
                Action::Unchanged | Action::Finished => &mut counts.unchanged,
            } += 1;
            counts
        });
        let made = self.made.min(counts.unchanged);
        counts.create += made;
        counts.unchanged -= made;
        counts
    }
}

/// How many objects each action concerns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Counts {
    /// To be created.
    pub create: usize,
    /// To be changed.
    pub configure: usize,
    /// To be deleted and made anew.
    #[serde(default)]
    pub recreate: usize,
    /// To be deleted.
    #[serde(default)]
    pub delete: usize,
    /// Already as they should be.
    pub unchanged: usize,
}

/// Why no plan can be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    /// A desired object was never looked at.
    #[error("{0} was not observed")]
    NotObserved(ObjectId),
}

/// Decides what a run will change. `remains` is what became of recorded
/// objects that are no longer desired.
///
/// # Errors
/// When a desired object has no observation.
pub fn plan(
    desired: &Desired,
    observed: &Observations,
    remains: Pruned,
    installed: Option<&Record>,
    settings: &Settings,
) -> Result<Plan, PlanError> {
    let mut levels: BTreeMap<Runlevel, Vec<Change>> = BTreeMap::new();
    for object in &desired.objects {
        let observation = observed.get(&object.id).ok_or_else(|| PlanError::NotObserved(object.id.clone()))?;
        let wave = if desired.authorities.contains(&object.id) { Wave::Authorities } else { Wave::of(&object.id) };
        let mut change = change(object, wave, observation);
        if let Some(uid) = record::finished(object, &change, installed) {
            change.action = Action::Finished;
            change.live = Some(crate::readiness::Pin { uid: Some(uid), ..Default::default() });
        }
        levels.entry(object.runlevel).or_default().push(change);
    }
    let mut levels: Vec<Level> = levels.into_iter().map(|(runlevel, changes)| Level { runlevel, changes }).collect();
    for level in &mut levels {
        level.changes.sort_by(|a, b| (a.wave, &a.id).cmp(&(b.wave, &b.id)));
    }
    let recorded = installed.map_or(0, |record| record.inventory.len());
    let brakes = remains.brakes(recorded);
    let Pruned { deletions, mut kept, .. } = remains;
    let untouched = installed.into_iter().flat_map(|record| &record.inventory);
    kept.extend(untouched.filter(|entry| desired.untouched.contains(&entry.component)).cloned());
    let mut plan = Plan { levels, deletions, releases: Vec::new(), values: None, kept, brakes, made: 0, record: None };
    plan.record = record::pending(&plan, installed, settings);
    Ok(plan)
}

/// The recorded objects that are no longer desired.
pub fn unwanted(desired: &Desired, installed: Option<&Record>) -> Vec<Entry> {
    let wanted: BTreeSet<_> = desired.objects.iter().map(|object| record::place(&object.id)).collect();
    let inventory = installed.into_iter().flat_map(|record| &record.inventory);
    let unwanted = inventory
        .filter(|entry| !desired.untouched.contains(&entry.component) && !wanted.contains(&record::place(&entry.id)));
    unwanted.cloned().collect()
}

fn change(object: &Object, wave: Wave, observation: &Observation) -> Change {
    let pin = |live| Some(crate::readiness::Pin::of(live));
    let (action, live, means) = match observation {
        Observation::Absent | Observation::Unserved => (Action::Create, None, Means::default()),
        Observation::Settled { live } => (Action::Unchanged, Some(live.clone()), Means::default()),
        Observation::Present { live, predicted, means } => {
            let mut changes = difference(live, predicted);
            if changes.is_empty() && !means.predecessors.is_empty() {
                changes.push(FieldChange::of_ownership(&means.predecessors));
            }
            let action = if changes.is_empty() { Action::Unchanged } else { Action::Configure { changes } };
            (action, pin(live), means.clone())
        }
        Observation::Immutable { live, predicted, why, loss } => {
            let changes = difference(live, predicted);
            (Action::Recreate { changes, why: why.clone(), loss: *loss }, pin(live), Means::default())
        }
    };
    Change {
        id: object.id.clone(),
        component: object.component.clone(),
        wave,
        action,
        live,
        digest: digest(&object.body),
        body: Body(without(&object.body, &means.yields)),
        means,
    }
}

/// A digest of a manifest's content. Secret data does not go into it: a digest
/// of a weak secret would give the secret away.
fn digest(body: &Value) -> String {
    let mut canonical = mask(body.clone());
    canonical.sort_all_objects();
    let hash = Sha256::digest(canonical.to_string().as_bytes());
    format!("sha256:{}", hex::encode(&hash[..16]))
}
