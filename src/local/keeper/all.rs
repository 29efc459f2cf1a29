//! Which projects have a keeper: those that have something to do.
#![expect(clippy::disallowed_methods, reason = "shell: decisions are dated here")]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::task::TaskTracker;

use super::Keeper;
use crate::families::build_farm::lifecycle::{self, Want};
use crate::key::ProjectKey;
use crate::local::core::{Announced, Core};
use crate::local::process::Process;

/// All keepers.
#[derive(Debug)]
pub struct Keepers {
    core: Arc<Core>,
    kept: Mutex<HashSet<String>>,
    /// Daemons of an earlier run, until their keeper takes them over.
    found: Mutex<HashMap<String, Process>>,
    tasks: TaskTracker,
}

impl Keepers {
    /// With the daemons of an earlier run.
    pub fn new(core: Arc<Core>, found: HashMap<String, Process>) -> Arc<Self> {
        Arc::new(Self { core, kept: Mutex::default(), found: Mutex::new(found), tasks: TaskTracker::new() })
    }

    /// Keeps daemons until the farm ends and every one of them is down.
    pub async fn run(self: Arc<Self>, mut changes: UnboundedReceiver<String>) {
        for record in self.core.index.all() {
            if let Ok(key) = record.project.spec.key.parse::<ProjectKey>() {
                self.core.announce(&key, &record, Announced::Away);
                self.poke(key.as_str());
            }
        }
        let draining = self.core.draining.clone();
        while let Some(Some(key)) = draining.run_until_cancelled(changes.recv()).await {
            self.poke(&key);
        }
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Starts a keeper where one is needed.
    fn poke(self: &Arc<Self>, key: &str) {
        let Ok(key) = key.parse::<ProjectKey>() else { return };
        let mut kept = self.kept();
        if kept.contains(key.as_str()) || !self.needed(&key) {
            return;
        }
        kept.insert(key.to_string());
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner).remove(key.as_str());
        let keeper = Keeper::new(self.core.clone(), key);
        self.tasks.spawn(keeper.keep(self.clone(), found));
    }

    /// Whether a project has more than its record. One whose record has gone still has files.
    fn needed(&self, key: &ProjectKey) -> bool {
        if self.core.index.removals(key.as_str()) > 0 {
            return true;
        }
        let Some(record) = self.core.index.get(key.as_str()) else {
            return self.core.common.layout.daemon(key.as_str()).exists();
        };
        let wanted = lifecycle::want(&record.project, &self.core.settings, Timestamp::now()) != Want::Zero;
        let unreported = record.project.status.is_none();
        record.process.is_some()
            || lifecycle::is_fork(&record.project)
            || unreported
            || (wanted && !self.core.draining.is_cancelled())
    }

    /// Ends a keeper, unless something has come up.
    pub(super) fn retire(&self, key: &ProjectKey) -> bool {
        let mut kept = self.kept();
        let needed = self.needed(key) && !self.core.draining.is_cancelled();
        if !needed {
            kept.remove(key.as_str());
        }
        !needed
    }

    fn kept(&self) -> MutexGuard<'_, HashSet<String>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
