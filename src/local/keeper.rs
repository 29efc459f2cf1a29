//! Keeps one daemon: starts it when it is wanted, watches it, and takes it
//! down when nothing wants or uses it. One task per project that has something
//! to do; what it does is decided by the build farm's pure functions.
#![expect(clippy::disallowed_methods, reason = "shell: decisions are dated here")]

mod all;
mod down;
mod running;
mod start;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::{Instant, sleep};

use super::core::{Announced, Core, instant};
use super::index::Live;
use super::process::{Exit, Process};
use super::record::Record;
use super::writer::{Change, WriteError};
use crate::families::build_farm::health::DaemonState;
use crate::families::build_farm::ledger::{Closing, Ended, Operation, Outcome};
use crate::families::build_farm::lifecycle::{self, Want};
use crate::families::build_farm::roll::{self, Cause, Roll, Seen};
use crate::families::build_farm::status::{Facts, Report};
use crate::families::build_farm::truth::{Busy, Observations};
use crate::key::ProjectKey;
pub use all::Keepers;
use running::Running;
pub(super) use start::chain;

/// When to try again what the store or the disk refused.
const RETRY: Duration = Duration::from_secs(2);

/// How often the output of a daemon is looked at, and its builds' entries.
const UPKEEP: Duration = Duration::from_secs(60);

/// What comes after a step.
#[derive(Debug)]
enum Next {
    /// Look again at once.
    Again,
    /// Look again when something changes, at the latest after this.
    Wait(Option<Duration>),
    /// Nothing is left to do.
    Rest,
}

struct Keeper {
    core: Arc<Core>,
    key: ProjectKey,
    running: Option<Running>,
    /// What routes are told.
    state: DaemonState,
    /// Starts that failed since one went well, and when the next may be.
    failures: u32,
    not_before: Option<Instant>,
    /// What was seen of its builds and streams, and what was last said of them.
    observed: Option<Observations>,
    told: Option<std::mem::Discriminant<Busy>>,
    /// Since when a changed configuration waits.
    held_since: Option<Timestamp>,
    /// Whether the configuration has changed, and when that was looked at.
    outdated: Option<(Instant, bool)>,
}

impl Keeper {
    fn new(core: Arc<Core>, key: ProjectKey) -> Self {
        let state = DaemonState::Starting("waiting for the daemon to leave zero".to_owned());
        Self {
            core,
            key,
            running: None,
            state,
            failures: 0,
            not_before: None,
            observed: None,
            told: None,
            held_since: None,
            outdated: None,
        }
    }

    async fn keep(mut self, keepers: Arc<Keepers>, found: Option<Process>) {
        if let Some(process) = found {
            self.adopt(process).await;
        }
        let (core, notify) = (self.core.clone(), self.core.index.listen(self.key.as_str()));
        loop {
            let mut changed = std::pin::pin!(notify.notified());
            changed.as_mut().enable();
            // Before the step: what comes while it lasts must end the wait after it.
            let (drained, cut) = (core.draining.is_cancelled(), core.cutting.is_cancelled());
            let step = self.step().await;
            let next = step.unwrap_or_else(|error| {
                tracing::warn!(project.key = self.key.as_str(), %error, "cannot go on, trying again");
                Next::Wait(Some(RETRY))
            });
            let after = match next {
                Next::Again => continue,
                Next::Rest if keepers.retire(&self.key) => return,
                Next::Rest => continue,
                Next::Wait(after) => after,
            };
            let exit = tokio::select! {
                () = changed => None,
                exit = ended_or_news(&mut self.running) => exit,
                () = pause(after) => None,
                () = core.draining.cancelled(), if !drained => None,
                () = core.cutting.cancelled(), if !cut => None,
            };
            if let Some(exit) = exit {
                self.fell(exit).await;
            }
        }
    }

    /// One pass.
    async fn step(&mut self) -> Result<Next, WriteError> {
        let removals = self.core.index.removals(self.key.as_str());
        let record = self.core.index.get(self.key.as_str());
        let Some(record) = record.filter(|_| removals == 0) else {
            self.erase().await;
            self.core.index.erased(self.key.as_str(), removals);
            *self = Self::new(self.core.clone(), self.key.clone());
            // One that was routed to meanwhile begins anew.
            let again = self.core.index.get(self.key.as_str()).is_some();
            return Ok(if again { Next::Again } else { Next::Rest });
        };
        if self.core.is_cut(self.key.as_str()) {
            return self.cut(&record).await;
        }
        if self.core.draining.is_cancelled() {
            return self.drain(&record).await;
        }
        let now = Timestamp::now();
        let want = lifecycle::want(&record.project, &self.core.settings, now);
        match (want, self.running.is_some()) {
            (Want::Zero, false) => self.rest(&record, now).await,
            (Want::Zero, true) => self.take_down(&record, Closing::Idle).await,
            // It was let in by an `up` that had been told to.
            (_, false) if self.key.is_fork() && !self.core.takes_forks() => self.rest(&record, now).await,
            (_, false) => self.start(&record).await,
            (_, true) => self.hold(&record, now).await,
        }
    }

    /// A daemon that is wanted and runs.
    async fn hold(&mut self, record: &Record, now: Timestamp) -> Result<Next, WriteError> {
        if record.project.status_or_default().gate.closed {
            self.reopen(record).await?;
        }
        let seen = self.seen(record, now);
        let roll = match roll::decide(&record.project, seen, &self.core.settings, now) {
            Roll::Now(Cause::Idle) => return self.take_down(record, Closing::Roll(seen)).await,
            Roll::Now(Cause::Overdue | Cause::Broken) => return self.take_down(record, Closing::Force(seen)).await,
            Roll::Hold(left) => Some(left),
            Roll::No(left) => left,
        };
        let unused = self.expire_unused(record, now, self.core.settings.unused_entry).await?;
        self.upkeep().await;
        self.note_builds().await?;
        self.report(1, seen.held_since.is_some()).await?;
        let change = lifecycle::next_change(&record.project, &self.core.settings, now);
        Ok(Next::Wait([roll, unused, change, Some(UPKEEP)].into_iter().flatten().min()))
    }

    /// Whether the daemon runs as it would be started now.
    fn seen(&mut self, record: &Record, now: Timestamp) -> Seen {
        let looked = self.outdated.filter(|(at, _)| at.elapsed() < UPKEEP);
        let look = || {
            let current = self.running.as_ref().map(|running| running.fingerprint.as_str());
            self.fingerprint(record).is_some_and(|wanted| current != Some(&wanted))
        };
        let (at, outdated) = looked.unwrap_or_else(|| (instant(), look()));
        self.outdated = Some((at, outdated));
        let live = lifecycle::live_entries(&record.project.status_or_default(), self.core.settings.max_build, now)
            .next()
            .is_some();
        let held = (outdated && live).then(|| self.held_since.unwrap_or(now));
        self.held_since = held;
        Seen { outdated, held_since: held, failed_since: None }
    }

    /// At zero, and nothing wants it.
    async fn rest(&mut self, record: &Record, now: Timestamp) -> Result<Next, WriteError> {
        if record.process.is_some() {
            self.core.writer.submit(self.key.as_str(), Change::Process(None)).await?;
        }
        self.publish(record, None, Announced::Away);
        if lifecycle::is_fork(&record.project) {
            if self.core.writer.submit(self.key.as_str(), Change::Reap).await? == Outcome::Done {
                tracing::info!(project.key = self.key.as_str(), "reaped an idle fork and its cache");
                return Ok(Next::Again);
            }
            let born = record.project.metadata.creation_timestamp.as_ref().map_or(now, |t| t.0);
            let left = lifecycle::FORK_REAP_GRACE.saturating_sub(lifecycle::age(born, now));
            // What is older is still wanted, and is not let in.
            let left = if left.is_zero() { RETRY } else { left };
            return Ok(Next::Wait(Some(left + Duration::from_millis(50))));
        }
        self.report(0, false).await?;
        Ok(Next::Rest)
    }

    /// Its record has gone: everything else goes too.
    async fn erase(&mut self) {
        if let Some(mut running) = self.running.take() {
            running.process.stop(self.patience()).await;
        }
        self.core.uncut(self.key.as_str());
        self.core.index.set_live(self.key.as_str(), None);
        self.core.directory.set(&self.key.daemon(), None);
        let (layout, key) = (&self.core.common.layout, self.key.as_str());
        let _cache = self.core.caches.take(key).await;
        let _ = std::fs::remove_file(layout.socket(key));
        self.core.clear(key).await;
        if let Err(error) = self.core.storage.remove(&layout.cache(key)).await {
            let error = start::chain(&error);
            tracing::warn!(project.key = key, error, "a cache could not be removed whole, trying again later");
        }
        for name in self.core.storage.snapshots(key) {
            if let Err(error) = self.core.storage.remove(&layout.snapshots(key).join(name)).await {
                tracing::warn!(project.key = key, error = start::chain(&error), "a snapshot could not be removed");
            }
        }
        let _ = std::fs::remove_dir(layout.snapshots(key));
        // Last: it is what says that something is left to remove.
        match std::fs::remove_dir_all(layout.daemon(key)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(project.key = key, %error, "the folder of a daemon could not be removed");
            }
            _ => {}
        }
    }

    /// Tells everybody who reads.
    fn publish(&self, record: &Record, live: Option<Live>, announced: Announced) {
        self.core.announce(&self.key, record, announced);
        let known = self.core.index.live(self.key.as_str());
        let same = match (&known, &live) {
            (None, None) => true,
            (Some(known), Some(live)) => {
                known.state == live.state && known.observation.is_some() == live.observation.is_some()
            }
            _ => false,
        };
        if !same {
            self.core.index.set_live(self.key.as_str(), live);
        }
    }

    fn live(&self) -> Live {
        let observation = self.running.as_ref().map(|running| running.observation.clone());
        let cache = self.running.as_ref().and_then(|running| running.cache);
        Live { state: self.state.clone(), observation, cache }
    }

    /// Remembers builds that have ended, beyond the life of their daemon.
    async fn note_builds(&mut self) -> Result<(), WriteError> {
        let Some(builds) = self.running.as_mut().and_then(Running::take_news) else { return Ok(()) };
        self.look_at_cache().await;
        let ended = Operation::Ended(Box::new(Ended { builds, cache: None }));
        self.core.writer.submit(self.key.as_str(), Change::Apply(ended)).await.map(drop)
    }

    async fn report(&self, replicas: i32, roll_held: bool) -> Result<(), WriteError> {
        let facts = Facts { replicas, daemon: &self.state, roll_held, base: None };
        let report = Report::new(facts, self.core.endpoint(&self.key), 1);
        self.core.writer.submit(self.key.as_str(), Change::Apply(Operation::Report(Box::new(report)))).await.map(drop)
    }
}

/// Returns when the daemon has ended, or one of its builds. Neither does where nothing runs.
async fn ended_or_news(running: &mut Option<Running>) -> Option<Exit> {
    let Some(Running { process, observation, noted, .. }) = running else { return std::future::pending().await };
    tokio::select! {
        exit = process.ended() => Some(exit),
        () = running::news(observation, noted.as_ref()) => None,
    }
}

async fn pause(after: Option<Duration>) {
    match after {
        Some(after) => sleep(after).await,
        None => std::future::pending().await,
    }
}
