//! One budget over all caches: when they come to more, those that nobody has
//! used for longest are pruned first, by BuildKit's own garbage collection, and
//! never one that a build uses.
#![expect(clippy::disallowed_methods, reason = "shell: judges entries at the time of asking")]

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustix::fs::statvfs;
use tokio::time::{Instant, sleep, timeout_at};

use super::core::Core;
use super::record::Record;
use super::writer::Change;
use crate::families::build_farm::api::CacheRoom;
use crate::families::build_farm::health::DaemonState;
use crate::families::build_farm::lifecycle;

/// How long a daemon may take to come up from zero to be pruned, and then to prune.
const START: Duration = Duration::from_secs(60);
const PRUNE: Duration = Duration::from_secs(600);

/// One cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Its project.
    pub key: String,
    /// Its size, when it was last looked at.
    pub bytes: u64,
    /// When a build last asked for it.
    pub used: Option<Timestamp>,
    /// Whether builds are in flight or run there.
    pub busy: bool,
}

/// What to prune, and by how much, so that all fit into the budget. Pure.
pub fn plan(mut caches: Vec<Cache>, budget: u64) -> Vec<(String, u64)> {
    let total: u64 = caches.iter().map(|cache| cache.bytes).sum();
    let mut excess = total.saturating_sub(budget);
    caches.retain(|cache| !cache.busy && cache.bytes > 0);
    caches.sort_by_key(|cache| cache.used);
    let mut prunes = Vec::new();
    for cache in caches {
        if excess == 0 {
            break;
        }
        let bytes = excess.min(cache.bytes);
        excess -= bytes;
        prunes.push((cache.key, bytes));
    }
    prunes
}

/// Keeps the budget until the farm ends; caches are added up `every` so often.
pub async fn keep(core: Arc<Core>, budget: u64, every: Duration) {
    while core.draining.run_until_cancelled(sleep(every)).await.is_some() {
        for (key, bytes) in plan(caches(&core), budget) {
            match core.draining.run_until_cancelled(prune(&core, &key, bytes)).await {
                Some(Ok(freed)) => tracing::info!(project.key = key, freed.bytes = freed, "pruned for the cache budget"),
                Some(Err(error)) => tracing::warn!(project.key = key, error, "a cache could not be pruned"),
                None => return,
            }
        }
    }
}

fn caches(core: &Core) -> Vec<Cache> {
    core.index.all().iter().map(|record| cache(core, record)).collect()
}

fn cache(core: &Core, record: &Record) -> Cache {
    let status = record.project.status_or_default();
    let live = core.index.live(&record.project.spec.key);
    let noted = status.cache.map(|room| u64::try_from(room.bytes_used).unwrap_or(0));
    let runs = live.as_ref().and_then(|live| live.observation.as_ref());
    let builds = runs.is_some_and(|observation| !observation.borrow().active.is_empty());
    let entries = lifecycle::live_entries(&status, core.settings.max_build, Timestamp::now()).next().is_some();
    Cache {
        key: record.project.spec.key.clone(),
        bytes: noted.unwrap_or(0),
        used: status.last_build_time.map(|time| time.0),
        busy: builds || entries,
    }
}

/// Has a daemon free some bytes of its cache; one at zero is up only for that.
async fn prune(core: &Core, key: &str, bytes: u64) -> Result<u64, String> {
    let said = |error: &dyn std::error::Error| error.to_string();
    let asleep = core.index.live(key).is_none();
    if asleep {
        // The last use stays what it was, or the cache would be the newest of all.
        core.writer.submit(key, Change::Wake).await.map_err(|error| said(&error))?;
        ready(core, key).await?;
    }
    let folder = core.common.layout.caches();
    let room = statvfs(&folder).map_err(|error| said(&error))?;
    let target = room.f_bavail * room.f_frsize + bytes;
    let daemon = core.common.client(key)?;
    let pruned = daemon.prune(Some(target), PRUNE).await.map_err(|error| said(&error))?;
    if let Ok(Some(left)) = daemon.cache(PRUNE).await {
        let total = core.index.get(key).and_then(|record| record.project.status.as_ref()?.cache).map(|r| r.bytes_total);
        let bytes_used = i64::try_from(left.bytes).unwrap_or(i64::MAX);
        let room = CacheRoom { bytes_used, bytes_total: total.unwrap_or(bytes_used) };
        core.writer.submit(key, Change::Room(room)).await.map_err(|error| said(&error))?;
    }
    Ok(pruned.bytes)
}

async fn ready(core: &Core, key: &str) -> Result<(), String> {
    let (deadline, notify) = (Instant::now() + START, core.index.listen(key));
    loop {
        let mut changed = std::pin::pin!(notify.notified());
        changed.as_mut().enable();
        let why = match core.index.daemon(key) {
            DaemonState::Ready => return Ok(()),
            DaemonState::Failed(fault) | DaemonState::Troubled(fault, _) => fault.to_string(),
            DaemonState::Starting(why) => why,
        };
        timeout_at(deadline, changed).await.map_err(|_| why)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(key: &str, bytes: u64, used: i64, busy: bool) -> Cache {
        Cache { key: key.into(), bytes, used: Some(Timestamp::from_second(used).unwrap()), busy }
    }

    #[test]
    fn the_least_recently_used_go_first_and_never_under_a_build() {
        let caches = || vec![cache("new", 40, 9, false), cache("busy", 50, 1, true), cache("old", 30, 2, false), cache("empty", 0, 0, false)];
        assert_eq!(plan(caches(), 120), []);
        assert_eq!(plan(caches(), 100), [("old".into(), 20)]);
        assert_eq!(plan(caches(), 80), [("old".into(), 30), ("new".into(), 10)]);
        assert_eq!(plan(caches(), 0), [("old".into(), 30), ("new".into(), 40)], "a build keeps its cache");
    }
}
