//! What is known of the farm at this moment, for everybody who reads: the
//! records, which only the writer changes, and the daemons, which only their
//! keepers do. Nothing here waits.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, Weak};

use tokio::sync::{Notify, mpsc, watch};

use super::record::Record;
use crate::companion::observation::Observation;
use crate::families::build_farm::health::DaemonState;
use crate::provisioner::project::CacheRoom;

/// A daemon that is not at zero.
#[derive(Clone, Debug)]
pub struct Live {
    /// Whether it takes builds.
    pub state: DaemonState,
    /// What it says of its builds; none before its process answers.
    pub observation: Option<watch::Receiver<Observation>>,
    /// Room in its cache, when it was last looked at.
    pub cache: Option<CacheRoom>,
}

/// All of it.
#[derive(Debug)]
pub struct Index {
    records: RwLock<HashMap<String, Arc<Record>>>,
    live: RwLock<HashMap<String, Live>>,
    waiters: Mutex<HashMap<String, Weak<Notify>>>,
    /// Removals whose daemons and caches are still there, by key; a project of that name may be there again.
    removals: Mutex<HashMap<String, usize>>,
    /// Told the key of everything that changes.
    changes: mpsc::UnboundedSender<String>,
}

impl Index {
    /// With the records that the store has. The receiver hears of every change.
    pub fn new(records: HashMap<String, Arc<Record>>) -> (Arc<Self>, mpsc::UnboundedReceiver<String>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        let index = Self {
            records: RwLock::new(records),
            live: RwLock::default(),
            waiters: Mutex::default(),
            removals: Mutex::default(),
            changes,
        };
        (Arc::new(index), receiver)
    }

    fn records(&self) -> RwLockReadGuard<'_, HashMap<String, Arc<Record>>> {
        self.records.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// One project.
    pub fn get(&self, key: &str) -> Option<Arc<Record>> {
        self.records().get(key).cloned()
    }

    /// All projects.
    pub fn all(&self) -> Vec<Arc<Record>> {
        self.records().values().cloned().collect()
    }

    /// Whether a project has this address.
    pub fn takes(&self, address: Ipv4Addr) -> bool {
        self.records().values().any(|record| record.address == address)
    }

    /// Removals whose daemon and cache are still there.
    pub(super) fn removals(&self, key: &str) -> usize {
        self.removals.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied().unwrap_or(0)
    }

    /// So many removals have nothing left.
    pub(super) fn erased(&self, key: &str, count: usize) {
        let mut removals = self.removals.lock().unwrap_or_else(PoisonError::into_inner);
        let left = removals.remove(key).unwrap_or(0).saturating_sub(count);
        if left > 0 {
            removals.insert(key.to_owned(), left);
        }
    }

    /// Takes over what the writer has made persistent, and what it removed on the way.
    pub(super) fn publish(&self, changes: Vec<(String, Option<Arc<Record>>)>, removed: Vec<String>) {
        {
            let mut removals = self.removals.lock().unwrap_or_else(PoisonError::into_inner);
            removed.into_iter().for_each(|key| *removals.entry(key).or_default() += 1);
        }
        let mut keys = Vec::new();
        {
            let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
            for (key, record) in changes {
                match record {
                    Some(record) => records.insert(key.clone(), record),
                    None => records.remove(&key),
                };
                keys.push(key);
            }
        }
        keys.into_iter().for_each(|key| self.notify(key));
    }

    /// A daemon that is not at zero.
    pub fn live(&self, key: &str) -> Option<Live> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Takes over what a keeper knows of its daemon.
    pub(super) fn set_live(&self, key: &str, live: Option<Live>) {
        {
            let mut all = self.live.write().unwrap_or_else(PoisonError::into_inner);
            match live {
                Some(live) => all.insert(key.to_owned(), live),
                None => all.remove(key),
            };
        }
        self.notify(key.to_owned());
    }

    /// Whether a build can be sent to the daemon now.
    pub fn daemon(&self, key: &str) -> DaemonState {
        let starting = |why: &str| DaemonState::Starting(why.to_owned());
        let Some(record) = self.get(key) else { return starting("waiting for the project") };
        if record.project.status.as_ref().is_some_and(|status| status.gate.closed) {
            return starting("waiting for the daemon to come back from zero");
        }
        self.live(key).map_or_else(|| starting("waiting for the daemon to leave zero"), |live| live.state)
    }

    /// Wakes whenever something about the key changes. Enable the notification
    /// before looking, or a change in between is missed.
    pub fn listen(&self, key: &str) -> Arc<Notify> {
        let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiters.get(key).and_then(Weak::upgrade) {
            return notify;
        }
        let notify = Arc::new(Notify::new());
        waiters.insert(key.to_owned(), Arc::downgrade(&notify));
        notify
    }

    /// Lets the keeper of a project look again.
    pub(super) fn poke(&self, key: &str) {
        self.notify(key.to_owned());
    }

    fn notify(&self, key: String) {
        {
            let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
            match waiters.get(&key).map(Weak::upgrade) {
                Some(Some(notify)) => notify.notify_waiters(),
                Some(None) => drop(waiters.remove(&key)),
                None => {}
            }
        }
        // Nobody keeps daemons any more when the farm ends.
        let _ = self.changes.send(key);
    }
}
