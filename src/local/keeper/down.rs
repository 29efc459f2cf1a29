//! From a daemon to zero: look → close the gate → keep new clients away → quiet
//! for two seconds → stop. A build that arrives meanwhile ends that at once.
#![expect(clippy::disallowed_methods, reason = "shell: decisions are dated here")]

use std::time::Duration;

use jiff::Timestamp;

use super::{Keeper, Next};
use crate::families::build_farm::api;
use crate::families::build_farm::ledger::{Closing, Operation, Outcome};
use crate::families::build_farm::lifecycle;
use crate::families::build_farm::truth::{Answers, Busy, Observations, QUIET, Verdict, quiet, unused};
use crate::local::core::{Announced, Core, instant};
use crate::local::log;
use crate::local::record::Record;
use crate::local::witness;
use crate::local::writer::{Change, WriteError};
use crate::provisioner::project::CacheRoom;

/// A daemon that does not end by then is killed. It lets solves finish, and none runs.
const PATIENCE: Duration = Duration::from_secs(20);

/// The same where somebody wants its builds to end.
const GRACE: Duration = Duration::from_secs(2);

/// When a daemon that was busy is looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// When it is while the farm ends: somebody waits for that.
const DRAINING: Duration = Duration::from_millis(500);

/// While the farm ends, an entry that neither a build nor a stream has stood behind for this long counts no more.
const DRAINING_UNUSED: Duration = Duration::from_secs(30);

/// When entries that a build or a stream stands behind are looked at again.
const STILL_USED: Duration = Duration::from_secs(60);

/// How long a daemon may take to add up its cache.
const USAGE: Duration = Duration::from_secs(5);

/// What ends the asking.
enum Asked {
    Quiet,
    Busy(Busy),
    Wanted,
}

impl Keeper {
    /// Takes the daemon to zero, unless it is wanted after all, or something
    /// runs there that nobody registered.
    pub(super) async fn take_down(&mut self, record: &Record, closing: Closing) -> Result<Next, WriteError> {
        let key = self.key.clone();
        self.note_builds().await?;
        // What is forced is cut whatever runs there.
        let forced = matches!(closing, Closing::Force(_));
        if !forced && let Verdict::Busy(why) = self.look() {
            if record.project.status_or_default().gate.closed {
                self.reopen(record).await?;
            }
            return Ok(self.deferred(&why, again(&why)));
        }
        let close = Change::Apply(Operation::CloseGate(closing));
        if self.core.writer.submit(key.as_str(), close).await? == Outcome::StillWanted {
            return Ok(Next::Again);
        }
        self.publish(record, Some(self.live()), Announced::Ending);
        let asked = if forced { Asked::Quiet } else { self.ask_until_quiet(closing).await };
        match asked {
            Asked::Quiet => {}
            Asked::Wanted => {
                self.reopen(record).await?;
                return Ok(Next::Again);
            }
            Asked::Busy(why) => {
                self.reopen(record).await?;
                return Ok(self.deferred(&why, again(&why)));
            }
        }
        self.stop(record).await?;
        tracing::info!(project.key = self.key.as_str(), "scaled to zero");
        Ok(Next::Again)
    }

    /// The farm ends: as soon as nothing runs, or at once when it is cut.
    pub(super) async fn drain(&mut self, record: &Record) -> Result<Next, WriteError> {
        if self.running.is_none() {
            return Ok(Next::Rest);
        }
        if !self.core.cutting.is_cancelled() {
            self.note_builds().await?;
            let status = record.project.status_or_default();
            let mut entries = lifecycle::live_entries(&status, self.core.settings.max_build, Timestamp::now());
            if entries.next().is_some() {
                let age = self.core.settings.unused_entry.map_or(DRAINING_UNUSED, |age| age.min(DRAINING_UNUSED));
                let again = self.expire_unused(record, Timestamp::now(), Some(age)).await?;
                return Ok(Next::Wait(Some(again.map_or(LOOK_AGAIN, |again| again.min(LOOK_AGAIN)))));
            }
            if let Verdict::Busy(why) = self.look() {
                return Ok(self.deferred(&why, DRAINING));
            }
        }
        self.stop(record).await?;
        Ok(Next::Rest)
    }

    /// Somebody ends it, whatever runs there.
    pub(super) async fn cut(&mut self, record: &Record) -> Result<Next, WriteError> {
        if self.running.is_some() {
            self.stop(record).await?;
            tracing::info!(project.key = self.key.as_str(), "stopped, with its builds");
        }
        self.core.uncut(self.key.as_str());
        Ok(Next::Again)
    }

    /// How long the daemon may take to end.
    pub(super) fn patience(&self) -> Duration {
        let cut = self.core.cutting.is_cancelled() || self.core.is_cut(self.key.as_str());
        if cut { GRACE } else { PATIENCE }
    }

    async fn stop(&mut self, record: &Record) -> Result<(), WriteError> {
        self.publish(record, None, Announced::Away);
        if let Some(mut running) = self.running.take() {
            running.process.stop(self.patience()).await;
            self.core.clear(self.key.as_str()).await;
        }
        self.core.uncut(self.key.as_str());
        (self.observed, self.told, self.held_since) = (None, None, None);
        self.core.writer.submit(self.key.as_str(), Change::Process(None)).await?;
        self.report(0, false).await?;
        self.snapshot(record).await;
        Ok(())
    }

    /// Undoes the closing of the gate. The daemon is as it was.
    pub(super) async fn reopen(&mut self, record: &Record) -> Result<(), WriteError> {
        self.publish(record, Some(self.live()), Announced::Ready);
        self.open_gate().await
    }

    /// Lets routes be answered again.
    pub(super) async fn open_gate(&self) -> Result<(), WriteError> {
        // Nobody but this keeper closes it.
        let record = self.core.index.get(self.key.as_str()).ok_or(WriteError::Gone)?;
        let epoch = record.project.status_or_default().gate.epoch;
        let open = Change::Apply(Operation::OpenGate { epoch });
        self.core.writer.submit(self.key.as_str(), open).await.map(drop)
    }

    fn deferred(&mut self, why: &Busy, again: Duration) -> Next {
        let kind = std::mem::discriminant(why);
        if self.told.replace(kind) != Some(kind) {
            tracing::info!(project.key = self.key.as_str(), reason = %why, "not scaled to zero");
        }
        Next::Wait(Some(again))
    }

    fn answers(&self) -> Answers {
        let seen = self.running.as_ref().map(|running| running.observation.borrow().clone());
        witness::answers(seen.as_ref(), self.core.streams.of(&self.key.daemon()), self.core.now())
    }

    /// Looks once, and judges it together with the looks before.
    fn look(&mut self) -> Verdict {
        let now = self.core.now();
        let observed = Observations::after(self.observed.as_ref(), self.answers(), now);
        let verdict = quiet(&observed, self.core.settings.max_build, now);
        self.observed = Some(observed);
        verdict
    }

    /// Asks until the daemon, asked since, has been quiet for [`QUIET`], or
    /// something else is the case.
    async fn ask_until_quiet(&mut self, closing: Closing) -> Asked {
        let (core, key) = (self.core.clone(), self.key.clone());
        let began = core.now();
        let Some(mut observation) = self.running.as_ref().map(|running| running.observation.clone()) else {
            return Asked::Quiet;
        };
        let mut wanted = std::pin::pin!(until_wanted(&core, key.as_str(), closing));
        loop {
            let asked = observation.borrow_and_update().asked;
            match self.look() {
                Verdict::Busy(why) => return Asked::Busy(why),
                Verdict::Quiet if asked >= began + QUIET => return Asked::Quiet,
                Verdict::Quiet => {}
            }
            tokio::select! {
                biased;
                () = &mut wanted => return Asked::Wanted,
                changed = observation.changed() => if changed.is_err() { return Asked::Wanted },
            }
        }
    }

    /// Releases entries that neither a build nor a stream has stood behind for
    /// so long that nobody will come. Returns when to look again.
    pub(super) async fn expire_unused(
        &mut self,
        record: &Record,
        now: Timestamp,
        age: Option<Duration>,
    ) -> Result<Option<Duration>, WriteError> {
        let Some(age) = age else { return Ok(None) };
        let ready_for = self.running.as_ref().map(super::running::Running::age).unwrap_or_default();
        let due = match lifecycle::unused_due(&record.project, age, now) {
            // A client may have waited for its daemon for long.
            Some(Duration::ZERO) => age.saturating_sub(ready_for).min(STILL_USED),
            due => return Ok(due),
        };
        if !due.is_zero() {
            return Ok(Some(due));
        }
        if !unused(&self.answers(), age, self.core.now()) {
            return Ok(Some(STILL_USED));
        }
        let ids = lifecycle::older_entries(&record.project.status_or_default(), age, now);
        tracing::info!(project.key = self.key.as_str(), entries = ids.len(), "releasing entries that nobody uses");
        self.core.writer.submit(self.key.as_str(), Change::Apply(Operation::Expire { ids })).await?;
        Ok(None)
    }

    /// Bounds the output of the daemon, and looks at its cache, once in a while.
    pub(super) async fn upkeep(&mut self) {
        let (layout, key) = (&self.core.common.layout, self.key.as_str());
        let Some(running) = &mut self.running else { return };
        if running.kept_up.is_some_and(|at| at.elapsed() < super::UPKEEP) {
            return;
        }
        running.kept_up = Some(instant());
        if let Err(error) = log::bound(layout, key) {
            tracing::warn!(project.key = key, %error, "the output of a daemon cannot be bounded");
        }
        self.look_at_cache().await;
    }

    /// Notes what the cache holds, beyond the life of its daemon.
    pub(super) async fn look_at_cache(&mut self) {
        let key = self.key.as_str();
        let (Some(running), Some(record)) = (&mut self.running, self.core.index.get(key)) else { return };
        let Ok(Some(cache)) = running.daemon.cache(USAGE).await else { return };
        let gi = u64::try_from(record.project.spec.cache_volume_gi).unwrap_or(0);
        running.cache = Some(CacheRoom { bytes_used: cache.bytes, bytes_total: gi << 30 });
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let room = api::CacheRoom { bytes_used: signed(cache.bytes), bytes_total: signed(gi << 30) };
        if let Err(error) = self.core.writer.submit(key, Change::Room(room)).await {
            tracing::warn!(project.key = key, %error, "the size of a cache could not be noted");
        }
    }

    /// Takes a snapshot of the cache at rest, if one is due, and removes those beyond the count.
    async fn snapshot(&self, record: &Record) {
        let (core, key) = (&self.core, self.key.as_str());
        let every = Duration::from_secs(u64::try_from(record.project.spec.snapshot_every_sec).unwrap_or(0));
        if every.is_zero() || self.key.is_fork() || core.draining.is_cancelled() {
            return;
        }
        let now = Timestamp::now();
        let newest = core.storage.snapshots(key).pop().and_then(|name| Timestamp::from_second(name.parse().ok()?).ok());
        if newest.is_some_and(|newest| newest <= now && lifecycle::age(newest, now) < every) {
            return;
        }
        // Newest by its name, too, when the clock was put back.
        let name = newest.map_or(now, |newest| now.max(newest + Duration::from_secs(1))).as_second().to_string();
        let _cache = core.caches.take(key).await;
        if let Err(error) = core.storage.snapshot(key, &name).await {
            tracing::warn!(project.key = key, %error, "a snapshot could not be taken");
            return;
        }
        let names = core.storage.snapshots(key);
        for name in names.iter().take(names.len().saturating_sub(core.keep_snapshots)) {
            if let Err(error) = core.storage.remove(&core.common.layout.snapshots(key).join(name)).await {
                tracing::warn!(project.key = key, %error, "an old snapshot could not be removed");
            }
        }
    }
}

/// When a daemon that is busy so is looked at again.
fn again(why: &Busy) -> Duration {
    if *why == Busy::JustBuilt { QUIET } else { LOOK_AGAIN }
}

/// Returns when the daemon is wanted, or its record has gone.
async fn until_wanted(core: &Core, key: &str, closing: Closing) {
    let notify = core.index.listen(key);
    loop {
        let mut changed = std::pin::pin!(notify.notified());
        changed.as_mut().enable();
        let Some(record) = core.index.get(key) else { return };
        let gate = record.project.status_or_default().gate;
        if !gate.closed || !closing.holds(&record.project, &core.settings, Timestamp::now()) {
            return;
        }
        changed.await;
    }
}
