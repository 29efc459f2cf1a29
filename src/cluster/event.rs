//! What happens during a run, as values.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use crate::manifest::{ObjectId, Runlevel};
use crate::plan::{Counts, Deletion, Level, Plan, Progress};

/// Where events go.
pub type Reporter = Arc<dyn Fn(Event) + Send + Sync>;

/// One thing that happened; never holds a secret.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The plan is made.
    Planned {
        /// How many objects each action concerns.
        #[serde(flatten)]
        counts: Counts,
        /// Every level that has objects, in order.
        levels: Vec<PlannedLevel>,
        /// What is deleted when every level is ready.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        steps: Vec<PlannedStep>,
    },
    /// An installation is about to be removed.
    Removing {
        /// What goes, in order.
        steps: Vec<PlannedStep>,
        /// What stays.
        kept: Vec<PlannedKept>,
    },
    /// Nothing has to be written.
    UpToDate,
    /// The record was written.
    Recorded {
        /// What it says.
        state: Progress,
    },
    /// A level begins.
    Level {
        /// Which one.
        runlevel: Runlevel,
        /// How many of its objects are written.
        writes: usize,
        /// How many objects it has.
        objects: usize,
    },
    /// An object was written.
    Applied {
        /// The object.
        object: ObjectId,
        /// What was done.
        verb: Verb,
    },
    /// Objects begin to be deleted.
    Step {
        /// What they are.
        title: String,
        /// How many they are.
        deletions: usize,
    },
    /// An object was deleted, or will be gone when its finalizers are done.
    Deleted {
        /// The object.
        object: ObjectId,
    },
    /// An object that was deleted, and had to be waited for, is gone.
    Gone {
        /// The object.
        object: ObjectId,
    },
    /// Every object of a step is gone.
    StepDone {
        /// Which one.
        title: String,
        /// Since the step began.
        duration_ms: u64,
    },
    /// An object that is no longer part of the installation stays.
    Kept {
        /// The object.
        object: ObjectId,
        /// Why.
        why: String,
    },
    /// An object is not ready yet.
    Waiting {
        /// The object.
        object: ObjectId,
        /// What it waits for.
        why: String,
    },
    /// An object that had to be waited for is ready.
    Ready {
        /// The object.
        object: ObjectId,
    },
    /// Every object of a level is ready.
    LevelReady {
        /// Which one.
        runlevel: Runlevel,
        /// Since the level began.
        duration_ms: u64,
    },
    /// A request is tried again.
    Retrying {
        /// What was asked.
        request: String,
        /// Why it did not succeed.
        why: String,
        /// Until the next attempt.
        delay_ms: u64,
    },
    /// The run was asked to end.
    Stopping,
    /// Something that a person should know and that does not stop the run.
    Warning {
        /// What.
        message: String,
    },
}

/// One level of the plan, for those who show it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedLevel {
    /// Which one.
    pub runlevel: Runlevel,
    /// Its components by name.
    pub components: Vec<PlannedComponent>,
}

/// One component within a level.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedComponent {
    /// Its name.
    pub name: String,
    /// How many of its objects are written.
    pub writes: usize,
    /// Its objects; as JSON, how many.
    #[serde(serialize_with = "count")]
    pub objects: Vec<ObjectId>,
}

fn count<S: serde::Serializer>(objects: &[ObjectId], serializer: S) -> Result<S::Ok, S::Error> {
    objects.len().serialize(serializer)
}

/// Objects that are deleted together.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedStep {
    /// What they are.
    pub title: String,
    /// The objects.
    pub objects: Vec<ObjectId>,
}

impl PlannedStep {
    /// The step that deletes these; nothing when there are none.
    pub fn of(title: &str, deletions: &[Deletion]) -> Option<Self> {
        let objects: Vec<ObjectId> = deletions.iter().map(|deletion| deletion.id.clone()).collect();
        (!objects.is_empty()).then(|| Self { title: title.to_owned(), objects })
    }
}

/// An object that stays.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedKept {
    /// The object.
    pub object: ObjectId,
    /// Why.
    pub why: String,
}

/// What is pruned, as a step.
pub(crate) const PRUNED: &str = "what is no longer wanted";

impl Event {
    /// A plan is made.
    pub fn planned(plan: &Plan) -> Self {
        let level = |level: &Level| {
            let mut components: BTreeMap<&str, PlannedComponent> = BTreeMap::new();
            for change in &level.changes {
                let new = || PlannedComponent { name: change.component.clone(), writes: 0, objects: Vec::new() };
                let component = components.entry(&change.component).or_insert_with(new);
                component.writes += usize::from(change.action.is_change());
                component.objects.push(change.id.clone());
            }
            PlannedLevel { runlevel: level.runlevel, components: components.into_values().collect() }
        };
        Self::Planned {
            counts: plan.counts(),
            levels: plan.levels.iter().map(level).collect(),
            steps: PlannedStep::of(PRUNED, &plan.deletions).into_iter().collect(),
        }
    }
}

/// What was done to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// It did not exist.
    Created,
    /// It was changed.
    Configured,
    /// It was deleted and made anew.
    Recreated,
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Planned { counts, .. } => write!(f, "plan: {counts}"),
            Self::Removing { steps, kept } => {
                let count: usize = steps.iter().map(|step| step.objects.len()).sum();
                write!(f, "removing: {count} to delete, {} kept", kept.len())
            }
            Self::UpToDate => write!(f, "nothing to write"),
            Self::Recorded { state: Progress::Applying } => write!(f, "recorded the intent"),
            Self::Recorded { state: Progress::Installed } => write!(f, "recorded the success"),
            Self::Recorded { state: Progress::Failed } => write!(f, "recorded the failure"),
            Self::Recorded { state: Progress::Uninstalling } => write!(f, "recorded that it is being uninstalled"),
            Self::Level { runlevel, writes, objects } => {
                write!(f, "{runlevel}: {writes} of {objects} objects to write")
            }
            Self::Applied { object, verb: Verb::Created } => write!(f, "created {object}"),
            Self::Applied { object, verb: Verb::Configured } => write!(f, "configured {object}"),
            Self::Applied { object, verb: Verb::Recreated } => write!(f, "recreated {object}"),
            Self::Step { title, deletions } => write!(f, "{title}: {deletions} to delete"),
            Self::Deleted { object } => write!(f, "deleted {object}"),
            Self::Gone { object } => write!(f, "gone {object}"),
            Self::StepDone { title, duration_ms } => write!(f, "{title}: gone after {duration_ms} ms"),
            Self::Kept { object, why } => write!(f, "kept {object}: {why}"),
            Self::Waiting { object, why } => write!(f, "waiting for {object}: {why}"),
            Self::Ready { object } => write!(f, "ready {object}"),
            Self::LevelReady { runlevel, duration_ms } => write!(f, "{runlevel}: ready after {duration_ms} ms"),
            Self::Retrying { request, why, delay_ms } => write!(f, "trying again in {delay_ms} ms to {request}: {why}"),
            Self::Stopping => write!(f, "stopping after the requests in flight; once more stops at once"),
            Self::Warning { message } => write!(f, "warning: {message}"),
        }
    }
}
