//! Keeps the cache's volume from running full: one task measures, another
//! prunes when [`prune::decide`] says so.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::sleep;

use super::daemon::Daemon;
use super::memory::{self, Memory};
use super::metrics::Counters;
use super::observation::Moment;
use super::observer::Clock;
use super::prune::{self, Decision, FULL, Reason, Thresholds, Volume};
use super::reserve::Reserve;
use super::watch::Watch;

/// How often the volume is measured.
const SAMPLE_EVERY: Duration = Duration::from_secs(2);

/// How long a prune may take.
pub const PRUNE_LIMIT: Duration = Duration::from_secs(300);

/// The volume and the memory at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// When.
    pub at: Moment,
    /// The cache's volume.
    pub volume: Volume,
    /// The daemon's memory.
    pub memory: Memory,
    /// When BuildKit last found a database broken and began it anew: the cache
    /// that it knew of is lost.
    pub reset: Option<Timestamp>,
}

/// Measures for ever. A file system that hangs makes the last sample old, and
/// holds nothing else up.
pub async fn sample(cache_dir: PathBuf, daemon: Daemon, clock: Clock, publish: watch::Sender<Option<Sample>>) {
    let mut failing = false;
    loop {
        let (path, pid) = (cache_dir.clone(), daemon.pid());
        let measured = tokio::task::spawn_blocking(move || {
            Ok((volume(&path)?, pid.map(memory::read).unwrap_or_default(), last_reset(&path)))
        });
        match measured.await.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
            Ok((volume, memory, reset)) => {
                publish.send_replace(Some(Sample { at: clock.now(), volume, memory, reset }));
                failing = false;
            }
            Err(error) if !failing => {
                tracing::warn!(cache.dir = %cache_dir.display(), %error, "cannot measure the cache's volume");
                failing = true;
            }
            Err(_) => {}
        }
        sleep(SAMPLE_EVERY).await;
    }
}

fn volume(path: &PathBuf) -> std::io::Result<Volume> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(Volume {
        bytes_total: stat.f_blocks * stat.f_frsize,
        bytes_used: stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize,
        bytes_available: stat.f_bavail * stat.f_frsize,
        inodes_total: stat.f_files,
        inodes_used: stat.f_files.saturating_sub(stat.f_ffree),
    })
}

/// BuildKit keeps a broken database as `<name>.db.<id>.bak`, in its folder or in
/// that of its worker.
fn last_reset(path: &Path) -> Option<Timestamp> {
    let entries = |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().collect::<Vec<_>>();
    let own = entries(path);
    let workers = own.iter().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let theirs: Vec<_> = workers.flat_map(|worker| entries(&worker.path())).collect();
    let backups = own.iter().chain(&theirs).filter(|entry| {
        let name = entry.file_name();
        name.to_str().is_some_and(|name| name.contains(".db.") && name.ends_with(".bak"))
    });
    // A renamed file keeps the time of its last write; its inode changes.
    let changed = backups.filter_map(|entry| entry.metadata().ok()).map(|data| data.ctime());
    changed.max().and_then(|seconds| Timestamp::from_second(seconds).ok())
}

/// The task that prunes.
#[derive(Debug)]
pub struct Pruner {
    /// Whose cache.
    pub daemon: Daemon,
    /// Whether builds run.
    pub watch: Watch,
    /// The volume.
    pub samples: watch::Receiver<Option<Sample>>,
    /// When to prune.
    pub thresholds: Thresholds,
    /// Room that is given back to prune.
    pub reserve: Arc<Reserve>,
    /// Pause after a prune.
    pub pause: Duration,
    /// What was done.
    pub counters: Counters,
}

impl Pruner {
    /// Decides on every sample, for ever.
    pub async fn run(mut self) {
        let (mut held, mut reserved) = (None, true);
        while self.samples.changed().await.is_ok() {
            let Some(sample) = *self.samples.borrow_and_update() else { continue };
            let running = self.watch.observation().running();
            let (reason, min_free) = match prune::decide(&sample.volume, self.thresholds, running) {
                Decision::Enough => {
                    held = None;
                    reserved = self.keep_reserve(sample.volume, reserved).await;
                    continue;
                }
                Decision::Held(reason) => {
                    if held.replace(reason) != Some(reason) {
                        tracing::warn!(
                            prune.reason = reason.as_str(),
                            builds = running,
                            "little room is left, but the daemon builds or does not answer: not pruning"
                        );
                    }
                    continue;
                }
                Decision::All(reason) => (reason, None),
                Decision::UntilFree(bytes) => (Reason::Bytes, Some(bytes)),
            };
            held = None;
            self.prune(&sample.volume, reason, min_free).await;
            self.samples.mark_unchanged();
            sleep(self.pause).await;
        }
    }

    async fn prune(&self, volume: &Volume, reason: Reason, min_free: Option<u64>) {
        let (bytes_ratio, inode_ratio) = (volume.byte_ratio(), volume.inode_ratio());
        tracing::info!(prune.reason = reason.as_str(), bytes_ratio, inode_ratio, "little room is left: pruning");
        if volume.byte_ratio() >= FULL {
            self.give_reserve().await;
        }
        let mut pruned = self.daemon.prune(min_free, PRUNE_LIMIT).await;
        if matches!(&pruned, Err(error) if error.lacks_room()) && self.give_reserve().await {
            pruned = self.daemon.prune(min_free, PRUNE_LIMIT).await;
        }
        match pruned {
            Ok(pruned) if pruned.records == 0 => {
                tracing::error!(bytes_ratio, inode_ratio, "the volume is nearly full, and nothing can be pruned");
            }
            Ok(pruned) => {
                self.counters.pruned(reason, pruned);
                tracing::info!(prune.records = pruned.records, prune.bytes = pruned.bytes, "pruned");
            }
            Err(error) => tracing::warn!(%error, "could not prune"),
        }
    }
    /// Returns whether there is one; a failure is told once.
    async fn keep_reserve(&self, volume: Volume, reserved: bool) -> bool {
        let reserve = self.reserve.clone();
        let kept = tokio::task::spawn_blocking(move || reserve.keep(&volume)).await;
        match kept.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
            Ok(()) => true,
            Err(error) => {
                if reserved {
                    tracing::warn!(%error, "no room can be reserved on the cache's volume: once full, it may stay so");
                }
                false
            }
        }
    }

    async fn give_reserve(&self) -> bool {
        let reserve = self.reserve.clone();
        let given = tokio::task::spawn_blocking(move || reserve.give()).await;
        match given.unwrap_or_else(|error| Err(std::io::Error::other(error))) {
            Ok(given) => given,
            Err(error) => {
                tracing::warn!(%error, "the reserved room cannot be given back");
                false
            }
        }
    }
}
