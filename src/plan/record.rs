//! What the cluster remembers of an installation: never a secret.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Plan;
use crate::manifest::{ObjectId, Runlevel};

/// Version of the record's format that this executable writes.
pub const FORMAT: u32 = 1;

/// The record of the last run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Version of the format.
    pub format: u32,
    /// How far the last run came.
    pub state: Progress,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Version of the executable that ran last.
    pub version: String,
    /// What was asked for.
    #[serde(flatten)]
    pub settings: Settings,
    /// When the last run began to write.
    pub started: Timestamp,
    /// When it ended; absent while it runs, and when it was cut off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished: Option<Timestamp>,
    /// Everything that was ever applied and not yet removed.
    pub inventory: Vec<Entry>,
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
    pub fn intent(plan: &Plan, installed: Option<&Self>, settings: &Settings, now: Timestamp) -> Self {
        Self {
            format: FORMAT,
            state: Progress::Applying,
            message: None,
            version: crate::VERSION.into(),
            settings: settings.clone(),
            started: now,
            finished: None,
            inventory: inventory(plan, installed),
        }
    }

    /// Notes the UID of an applied object.
    pub fn applied(&mut self, id: &ObjectId, uid: &str) {
        if let Some(entry) = self.inventory.iter_mut().find(|entry| entry.id == *id) {
            entry.uid = Some(uid.to_owned());
        }
    }

    /// The record to write at the end: `failure` is why the run failed.
    pub fn outcome(&mut self, failure: Option<String>, now: Timestamp) {
        self.state = if failure.is_some() { Progress::Failed } else { Progress::Installed };
        self.message = failure;
        self.finished = Some(now);
    }
}

fn inventory(plan: &Plan, installed: Option<&Record>) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for level in &plan.levels {
        entries.extend(level.changes.iter().map(|change| Entry {
            id: change.id.clone(),
            uid: change.live.as_ref().and_then(|live| live.uid.clone()),
            component: change.component.clone(),
            runlevel: level.runlevel,
            digest: change.digest.clone(),
        }));
    }
    let is_planned = |id: &ObjectId| {
        let same = |e: &Entry| {
            (&e.id.group, &e.id.kind, &e.id.namespace, &e.id.name) == (&id.group, &id.kind, &id.namespace, &id.name)
        };
        plan.changes().any(|change| change.id == *id) || entries.iter().any(same)
    };
    let kept: Vec<Entry> =
        installed.into_iter().flat_map(|r| &r.inventory).filter(|e| !is_planned(&e.id)).cloned().collect();
    entries.extend(kept);
    entries
}

/// Why the record must be written even if no object changes.
pub(super) fn pending(plan: &Plan, installed: Option<&Record>, settings: &Settings) -> Option<String> {
    let Some(record) = installed else { return Some("first installation".into()) };
    if plan.changes().any(|change| change.action.is_change()) {
        return Some("objects change".into());
    }
    match record.state {
        Progress::Applying => return Some("the last run was cut off".into()),
        Progress::Failed => return Some("the last run failed".into()),
        Progress::Installed => {}
    }
    if record.settings.profile != settings.profile {
        return Some(format!("profile {} → {}", record.settings.profile, settings.profile));
    }
    if record.settings != *settings {
        return Some("other values or image".into());
    }
    if record.version != crate::VERSION {
        return Some(format!("version {} → {}", record.version, crate::VERSION));
    }
    (inventory(plan, installed) != record.inventory).then(|| "the inventory changes".into())
}
