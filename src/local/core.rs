//! What the parts of a farm on one host share.
#![expect(clippy::disallowed_methods, reason = "shell: looks are dated on the monotonic clock")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::certificates::Certificates;
use super::configuration::Common;
use super::index::Index;
use super::record::Record;
use super::runtime::Runtime;
use super::storage::Storage;
use super::writer::Writer;
use crate::companion::metrics::Counters;
use crate::companion::observer::Clock;
use crate::families::build_farm::settings::Settings;
use crate::gateway::directory::{Backend, Directory};
use crate::gateway::streams::Streams;
use crate::key::ProjectKey;

/// Shared by keepers, provisioner and control socket.
#[derive(Debug)]
pub struct Core {
    /// What all daemons have in common.
    pub common: Common,
    /// How they are run.
    pub runtime: Runtime,
    /// What decides.
    pub settings: Arc<Settings>,
    /// What is known.
    pub index: Arc<Index>,
    /// The way to change it.
    pub writer: Arc<Writer>,
    /// Certificates.
    pub certificates: Certificates,
    /// Caches.
    pub storage: Storage,
    /// What the gateway is told of daemons.
    pub directory: Arc<Directory>,
    /// What the gateway tells.
    pub streams: Arc<Streams>,
    /// Builds that ended.
    pub counters: Counters,
    /// The clock of all observations.
    pub clock: Clock,
    /// Snapshots kept of a cache.
    pub keep_snapshots: usize,
    /// Cancelled when the farm ends as soon as nothing runs.
    pub draining: CancellationToken,
    /// Cancelled when it ends whatever runs.
    pub cutting: CancellationToken,
    /// Who uses a cache: its daemon, or who copies it.
    pub caches: Caches,
    /// Daemons that go whatever runs there; those that have gone so, and when.
    pub cuts: Mutex<HashMap<String, Option<Instant>>>,
    /// Whether untrusted builds run beside others, with nothing but a process between them.
    pub unisolated_forks: bool,
}

impl Core {
    /// Where the daemon of a project listens.
    pub fn backend(&self, record: &Record) -> SocketAddr {
        SocketAddr::new(record.address.into(), self.common.port)
    }

    /// Where clients reach a daemon.
    pub fn endpoint(&self, key: &ProjectKey) -> String {
        self.index.get(key.as_str()).map(|record| self.endpoint_of(&record)).unwrap_or_default()
    }

    /// Where clients reach the daemon of a project.
    pub fn endpoint_of(&self, record: &Record) -> String {
        match (&self.settings.gateway, record.project.spec.key.parse::<ProjectKey>()) {
            (Some((domain, port)), Ok(key)) => key.gateway_endpoint(domain, *port),
            _ => format!("tcp://{}:{}", record.address, self.settings.port),
        }
    }

    /// Tells the gateway where a daemon is, and whether it takes new clients.
    pub fn announce(&self, key: &ProjectKey, record: &Record, state: Announced) {
        let address = vec![self.backend(record)];
        let backend = match state {
            Announced::Ready => Backend { ready: address, terminating: vec![] },
            Announced::Ending => Backend { ready: vec![], terminating: address },
            Announced::Away => Backend::default(),
        };
        self.directory.set_address(record.address.into(), key.daemon().parse().ok());
        self.directory.set(&key.daemon(), Some(backend));
    }

    fn cuts(&self) -> MutexGuard<'_, HashMap<String, Option<Instant>>> {
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a daemon go whatever runs there, once. Its keeper has to be told.
    pub fn cut(&self, key: &str) {
        let mut cuts = self.cuts();
        cuts.retain(|_, gone| gone.is_none_or(|at| at.elapsed() < AFTER_CUT));
        cuts.insert(key.to_owned(), None);
    }

    /// Whether it was said that a daemon goes whatever runs there.
    pub(super) fn is_cut(&self, key: &str) -> bool {
        matches!(self.cuts().get(key), Some(None))
    }

    /// It has gone.
    pub(super) fn uncut(&self, key: &str) {
        if let Some(gone) = self.cuts().get_mut(key) {
            gone.get_or_insert_with(instant);
        }
    }

    /// Whether whoever dials a daemon is likely a client whose build was cut.
    pub(super) fn was_cut(&self, key: &str) -> bool {
        self.cuts().get(key).is_some_and(|gone| gone.is_none_or(|at| at.elapsed() < AFTER_CUT))
    }

    /// Whether untrusted builds run here.
    pub(super) fn takes_forks(&self) -> bool {
        self.unisolated_forks || self.runtime.isolates()
    }

    /// Ends and unmounts what a dead daemon left below its cache. Only for who has that cache alone.
    pub(super) async fn clear(&self, key: &str) {
        self.runtime.clear(key, &self.common.layout.cache(key)).await;
    }

    /// A point on the monotonic clock.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }
}

/// For how long clients of builds that were cut dial again.
const AFTER_CUT: Duration = Duration::from_secs(5);

/// What the gateway may do with a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announced {
    /// Dial it.
    Ready,
    /// Dial it for builds that run there.
    Ending,
    /// Hold clients until it is ready.
    Away,
}

/// One user at a time for each cache.
#[derive(Debug, Default)]
pub struct Caches(Mutex<HashMap<String, Weak<tokio::sync::Mutex<()>>>>);

impl Caches {
    fn of(&self, key: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = all.get(key).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::new(tokio::sync::Mutex::new(()));
        all.insert(key.to_owned(), Arc::downgrade(&lock));
        lock
    }

    /// The cache, as soon as nobody else uses it.
    pub async fn take(&self, key: &str) -> OwnedMutexGuard<()> {
        self.of(key).lock_owned().await
    }

    /// The cache, if nobody else uses it.
    pub fn try_take(&self, key: &str) -> Option<OwnedMutexGuard<()>> {
        self.of(key).try_lock_owned().ok()
    }
}

/// Now, for what is only compared within this process.
pub(super) fn instant() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_cache_has_one_user() {
        let caches = Caches::default();
        let user = caches.take("p1").await;
        assert!(caches.try_take("p1").is_none() && caches.try_take("p2").is_some());
        drop(user);
        assert!(caches.try_take("p1").is_some());
    }
}
