//! What the cluster remembers of an installation: never a secret.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Action, Change, Counts, Plan};
use crate::manifest::{Object, ObjectId, Runlevel};

/// Version of the record's format that this executable writes.
pub const FORMAT: u32 = 2;

/// How many revisions are kept.
pub const HISTORY: usize = 10;

/// The record of the last run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Version of the format.
    pub format: u32,
    /// The last run.
    #[serde(flatten)]
    pub run: Run,
    /// Everything that was ever applied and not yet removed. Kept in parts
    /// beside the record, as it may be large.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inventory: Vec<Entry>,
    /// Runs that wrote, the latest last.
    #[serde(default)]
    pub history: Vec<Revision>,
}

/// What a run was asked for, and how far it came.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Run {
    /// How far it came.
    pub state: Progress,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Version of the executable.
    pub version: String,
    /// What was asked for.
    #[serde(flatten)]
    pub settings: Settings,
    /// When it began to write.
    pub started: Timestamp,
    /// When it ended; absent while it runs, and when it was cut off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished: Option<Timestamp>,
}

/// One run that wrote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Revision {
    /// Its number, from 1.
    pub revision: u32,
    /// What it was.
    pub origin: Origin,
    /// The run itself.
    #[serde(flatten)]
    pub run: Run,
    /// What it changed.
    pub counts: Counts,
    /// Where its objects are kept, without Secret data.
    #[serde(default)]
    pub objects: Vec<String>,
}

/// What led to a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "run", content = "of")]
pub enum Origin {
    /// `cluster init`.
    Init,
    /// `cluster rollback` to an earlier revision.
    Rollback(u32),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Init => f.write_str("init"),
            Self::Rollback(revision) => write!(f, "rollback to {revision}"),
        }
    }
}

/// How far a run came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Progress {
    /// It has begun to write, and may have been cut off.
    Applying,
    /// Every level was ready.
    Installed,
    /// It ended with an error.
    Failed,
    /// It is being removed, and its removal may have been cut off.
    Uninstalling,
}

/// What an installation was asked for; carried over to later runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Settings {
    /// Name of the profile.
    pub profile: String,
    /// Values given on the command line, `component.key` to value; those
    /// declared secret are left out.
    #[serde(default)]
    pub overrides: BTreeMap<String, Value>,
    /// The image that is really used.
    #[serde(default)]
    pub image: String,
}

/// One object that the installation owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The object.
    #[serde(flatten)]
    pub id: ObjectId,
    /// Its UID; absent until its first apply has been answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Component that it belongs to.
    pub component: String,
    /// Level that it was applied in.
    pub runlevel: Runlevel,
    /// Digest of its manifest, Secret data left out.
    pub digest: String,
}

impl Record {
    /// The record to write before the first change: everything that will be
    /// applied, and everything that was applied before and is still there.
    pub fn intent(plan: &Plan, installed: Option<&Self>, settings: &Settings, origin: Origin, now: Timestamp) -> Self {
        let mut history = installed.map(|record| record.history.clone()).unwrap_or_default();
        let run = Run {
            state: Progress::Applying,
            message: None,
            version: crate::VERSION.into(),
            settings: settings.clone(),
            started: now,
            finished: None,
        };
        history.push(Revision {
            revision: history.last().map_or(1, |last| last.revision.saturating_add(1)),
            origin,
            run: run.clone(),
            counts: plan.counts(),
            objects: Vec::new(),
        });
        history.drain(..history.len().saturating_sub(HISTORY));
        Self { format: FORMAT, run, inventory: inventory(plan, installed), history }
    }

    /// Notes the UID of an applied object.
    pub fn applied(&mut self, id: &ObjectId, uid: &str) {
        if let Some(entry) = self.inventory.iter_mut().find(|entry| entry.id == *id) {
            entry.uid = Some(uid.to_owned());
        }
    }

    /// Notes that an object is gone.
    pub fn removed(&mut self, id: &ObjectId) {
        self.inventory.retain(|entry| place(&entry.id) != place(id));
    }

    /// The record to write at the end: `failure` is why the run failed.
    pub fn outcome(&mut self, failure: Option<String>, now: Timestamp) {
        self.run.state = if failure.is_some() { Progress::Failed } else { Progress::Installed };
        self.run.message = failure;
        self.run.finished = Some(now);
        if let Some(last) = self.history.last_mut() {
            last.run.clone_from(&self.run);
        }
    }

    /// The revision of a number; without one, the last that succeeded before
    /// the present one.
    pub fn revision(&self, number: Option<u32>) -> Option<&Revision> {
        match number {
            Some(number) => self.history.iter().find(|revision| revision.revision == number),
            None => {
                let earlier = self.history.iter().rev().skip(1);
                let mut good = earlier.filter(|revision| revision.run.state == Progress::Installed);
                good.find(|revision| !revision.objects.is_empty())
            }
        }
    }
}

/// What tells objects apart: the same object may be served in several versions.
pub(super) fn place(id: &ObjectId) -> (&str, &str, Option<&str>, &str) {
    (&id.group, &id.kind, id.namespace.as_deref(), &id.name)
}

fn inventory(plan: &Plan, installed: Option<&Record>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for level in &plan.levels {
        entries.extend(level.changes.iter().map(|change| Entry {
            id: change.id.clone(),
            uid: match change.action {
                // What is made anew gets another.
                Action::Recreate { .. } => None,
                _ => change.live.as_ref().and_then(|live| live.uid.clone()),
            },
            component: change.component.clone(),
            runlevel: level.runlevel,
            digest: change.digest.clone(),
        }));
    }
    // What is to be deleted stays until it is gone.
    let recorded: std::collections::BTreeMap<_, _> =
        installed.into_iter().flat_map(|record| &record.inventory).map(|entry| (place(&entry.id), entry)).collect();
    let doomed = plan.deletions.iter().filter_map(|deletion| recorded.get(&place(&deletion.id))).copied();
    entries.extend(doomed.chain(&plan.kept).cloned());
    entries
}

/// The UID of a Job that is gone because it has a time to live, if the run that
/// made it succeeded and it would be made the same.
pub(super) fn finished(object: &Object, change: &Change, installed: Option<&Record>) -> Option<String> {
    let is_job = object.id.group == "batch" && object.id.kind == "Job";
    let mortal = object.body.pointer("/spec/ttlSecondsAfterFinished").is_some_and(|ttl| ttl.is_number());
    if change.action != Action::Create || !is_job || !mortal {
        return None;
    }
    let record = installed.filter(|record| record.run.state == Progress::Installed)?;
    let entry = record.inventory.iter().find(|entry| place(&entry.id) == place(&object.id))?;
    entry.uid.clone().filter(|_| entry.digest == change.digest)
}

/// Why the record must be written even if no object changes.
pub(super) fn pending(plan: &Plan, installed: Option<&Record>, settings: &Settings) -> Option<String> {
    let Some(record) = installed else { return Some("first installation".into()) };
    if plan.changes().any(|change| change.action.is_change()) || !plan.deletions.is_empty() {
        return Some("objects change".into());
    }
    match record.run.state {
        Progress::Applying => return Some("the last run was cut off".into()),
        Progress::Failed => return Some("the last run failed".into()),
        Progress::Uninstalling => return Some("it is being uninstalled".into()),
        Progress::Installed => {}
    }
    if record.run.settings.profile != settings.profile {
        return Some(format!("profile {} → {}", record.run.settings.profile, settings.profile));
    }
    if record.run.settings != *settings {
        return Some("other values or image".into());
    }
    if record.run.version != crate::VERSION {
        return Some(format!("version {} → {}", record.run.version, crate::VERSION));
    }
    (sorted(inventory(plan, installed)) != sorted(record.inventory.clone())).then(|| "the inventory changes".into())
}

fn sorted(mut inventory: Vec<Entry>) -> Vec<Entry> {
    inventory.sort_by(|a, b| a.id.cmp(&b.id));
    inventory
}
