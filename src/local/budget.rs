//! One budget over all caches: when they come to more, those that nobody has
//! used for longest are pruned first, by BuildKit's own garbage collection, and
//! never one that a build uses.
#![expect(clippy::disallowed_methods, reason = "shell: judges entries at the time of asking")]

pub mod plan;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::{Instant, sleep, timeout_at};

use super::core::Core;
use super::record::Record;
use super::writer::Change;
use crate::families::build_farm::api::CacheRoom;
use crate::families::build_farm::health::DaemonState;
use crate::families::build_farm::lifecycle;
use plan::{Cache, plan};

/// How long a daemon may take to come up from zero to be pruned, and then to prune.
const START: Duration = Duration::from_secs(60);
const PRUNE: Duration = Duration::from_secs(600);

/// When each cache was last used that could give no more.
type Spent = HashMap<String, Option<Timestamp>>;

/// Keeps the budget until the farm ends; caches are added up `every` so often.
pub async fn keep(core: Arc<Core>, budget: u64, every: Duration) {
    let mut spent = Spent::new();
    while core.draining.run_until_cancelled(sleep(every)).await.is_some() {
        let caches = core.index.all().into_iter().map(|record| cache(&core, &record, &spent)).collect();
        for (key, bytes) in plan(caches, budget) {
            // A build may have come since.
            let Some(record) = core.index.get(&key) else { continue };
            let before = cache(&core, &record, &spent);
            if before.busy {
                continue;
            }
            match core.draining.run_until_cancelled(prune(&core, &key, bytes)).await {
                Some(Ok(freed)) => {
                    tracing::info!(project.key = key, freed.bytes = freed, "pruned for the cache budget");
                    // Or its daemon would be woken for nothing, again and again.
                    if freed < before.bytes.saturating_sub(bytes) {
                        spent.insert(key, before.used);
                    }
                }
                Some(Err(error)) => tracing::warn!(project.key = key, error, "a cache could not be pruned"),
                None => return,
            }
        }
    }
}

fn cache(core: &Core, record: &Record, spent: &Spent) -> Cache {
    let status = record.project.status_or_default();
    let key = record.project.spec.key.clone();
    let live = core.index.live(&key);
    let runs = live.as_ref().and_then(|live| live.observation.as_ref());
    let builds = runs.is_some_and(|observation| !observation.borrow().active.is_empty());
    let entries = lifecycle::live_entries(&status, core.settings.max_build, Timestamp::now()).next().is_some();
    let noted = status.cache.map(|room| u64::try_from(room.bytes_used).unwrap_or(0));
    let used = status.last_build_time.map(|time| time.0);
    let busy = builds || entries || spent.get(&key) == Some(&used);
    Cache { key, bytes: noted.unwrap_or(0), used, busy }
}

/// Has a daemon prune its cache to so many bytes; one at zero is up only for that.
async fn prune(core: &Core, key: &str, bytes: u64) -> Result<u64, String> {
    let said = |error: &dyn std::error::Error| error.to_string();
    if core.index.live(key).is_none() {
        // The last use stays what it was, or the cache would be the newest of all.
        core.writer.submit(key, Change::Wake).await.map_err(|error| said(&error))?;
        ready(core, key).await?;
    }
    let daemon = core.common.client(key)?;
    let pruned = daemon.prune_to(bytes, PRUNE).await.map_err(|error| said(&error))?;
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
