//! The only place that takes a daemon down, and the one that brings it back.
//!
//! Down: ask whether anything runs there → close the gate (a compare-and-swap
//! that fails when a build arrived) → read the StatefulSet → have its Service
//! select nothing, until it has no endpoint → ask until it has been quiet for a
//! while → write the StatefulSet with the resourceVersion read. A build that
//! arrives while the gate is closed ends that at once. Up: write the StatefulSet
//! and the Service, which invalidates any older write still under way → open the
//! gate. Routes answer only while the gate is open.
#![expect(clippy::disallowed_methods, reason = "shell: decisions are dated, quiet is measured")]

use std::time::Duration;

use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;
use tokio::time::{Instant, sleep};

use super::super::api::Gate;
use super::super::build::{self, GATE_EPOCH, ROLL_HELD_SINCE, TEMPLATE_HASH, stamp};
use super::super::ledger::{Closing, Operation, Outcome};
use super::super::lifecycle;
use super::super::metrics::{DeferralLabels, Direction, Holder, ScaleLabels};
use super::super::truth::{Busy, QUIET, Verdict, unused};
use super::super::validate::Valid;
use super::{Controller, ReconcileError, STATUS_BUDGET, is_conflict, post_params};

/// How long to wait until the pod is seen to end after a scale to zero.
const SEEN_ENDING: Duration = Duration::from_secs(5);

/// When a daemon that was busy is looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// When it is, whose turn has not come.
const NEXT_TURN: Duration = Duration::from_secs(1);

/// When entries that a build or a stream stands behind are looked at again.
const STILL_USED: Duration = Duration::from_secs(60);

/// Pause between two looks at a daemon that is quiet so far.
const PAUSE: Duration = Duration::from_millis(1000);

/// Where a pass has left the StatefulSet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scaled {
    /// Replicas that it is asked for.
    pub(super) replicas: i32,
    /// When to look again, whatever else happens.
    pub(super) again: Option<Duration>,
}

impl Scaled {
    pub(super) fn to(replicas: i32) -> Self {
        Self { replicas, again: None }
    }

    fn kept(again: Duration) -> Self {
        Self { replicas: 1, again: Some(again) }
    }
}

/// What ends the asking.
enum Asked {
    /// It has been quiet for long enough.
    Quiet,
    /// It is not.
    Busy(Busy),
    /// A build arrived.
    Wanted,
}

impl Controller {
    /// Takes the daemon to zero, unless it is wanted after all, or something
    /// runs there that nobody registered.
    pub(super) async fn take_down(
        &self,
        valid: &Valid<'_>,
        desired: &StatefulSet,
        closing: Closing,
    ) -> Result<Scaled, ReconcileError> {
        let (key, name) = (valid.key.as_str(), valid.key.daemon());
        // Daemons that come up must not wait behind many that go down.
        let Ok(_turn) = self.going_down.try_acquire() else { return Ok(Scaled::kept(NEXT_TURN)) };
        let get = async || self.sets.get(&name).await.map_err(Self::error("get", format!("StatefulSet {name}")));
        // What is forced is cut whatever runs there; a broken daemon would not even answer.
        let forced = matches!(closing, Closing::Force(_));
        // First without the gate: a daemon that is busy for hours causes no writes.
        if !forced && let Verdict::Busy(why) = self.truth.look(&valid.key, self.settings.max_build).await {
            if self.gate_closed(key) {
                self.reopen(valid, &get().await?, desired).await?;
            }
            return Ok(self.deferred(key, &why));
        }
        // What was built last stands in its history, which goes to sleep with it.
        if !forced {
            self.figures.look(key).await;
            self.note_builds(key).await?;
        }
        if self.writer.submit(key, Operation::CloseGate(closing), STATUS_BUDGET).await? == Outcome::StillWanted {
            return Ok(Scaled::to(1));
        }
        // Read before the asking: whoever reopens the gate meanwhile, even on
        // another replica, changes its resourceVersion, and our write fails.
        let mut live = get().await?;
        let epoch = self.epoch(key);
        let asked = if forced { Asked::Quiet } else { self.ask_until_quiet(valid, closing, epoch).await? };
        match asked {
            Asked::Quiet => {}
            Asked::Wanted => {
                self.reopen(valid, &live, desired).await?;
                return Ok(Scaled::to(1));
            }
            Asked::Busy(why) => {
                self.reopen(valid, &live, desired).await?;
                return Ok(self.deferred(key, &why));
            }
        }
        set_replicas(&mut live, desired, 0, epoch);
        self.replace(live).await?;
        self.truth.forget(key);
        self.metrics.scale_events.get_or_create(&ScaleLabels { direction: Direction::down }).inc();
        tracing::info!(project.key = key, "scaled to zero");
        self.until_ending(valid).await;
        Ok(Scaled::to(0))
    }

    fn deferred(&self, key: &str, why: &Busy) -> Scaled {
        self.metrics.deferrals.get_or_create(&DeferralLabels { by: Holder::from(why) }).inc();
        if self.truth.is_news(key, why) {
            tracing::info!(project.key = key, reason = %why, "not scaled to zero");
        }
        Scaled::kept(LOOK_AGAIN)
    }

    /// Keeps new clients away, and asks until the daemon has been quiet for
    /// [`QUIET`] since, or something else is the case. A build that is registered
    /// meanwhile is not kept waiting.
    async fn ask_until_quiet(&self, valid: &Valid<'_>, closing: Closing, epoch: i64) -> Result<Asked, ReconcileError> {
        let asking = async {
            if !self.shut(&valid.key, epoch).await? {
                return Ok(Asked::Busy(Busy::Reachable));
            }
            let began = Instant::now();
            loop {
                let begun = Instant::now();
                match self.truth.look(&valid.key, self.settings.max_build).await {
                    Verdict::Busy(why) => return Ok(Asked::Busy(why)),
                    Verdict::Quiet if begun.duration_since(began) >= QUIET => return Ok(Asked::Quiet),
                    Verdict::Quiet => sleep(PAUSE).await,
                }
            }
        };
        tokio::select! {
            biased;
            () = self.until_wanted(valid, closing) => Ok(Asked::Wanted),
            asked = asking => asked,
        }
    }

    /// Returns when the daemon is wanted, or its gate is not ours any more.
    async fn until_wanted(&self, valid: &Valid<'_>, closing: Closing) {
        let (key, notify) = (valid.key.as_str(), self.view.listen(valid.key.as_str()));
        let epoch = self.epoch(key);
        loop {
            let mut changed = std::pin::pin!(notify.notified());
            changed.as_mut().enable();
            let Some(project) = self.view.project(key) else { return };
            let now = self.settings.clock.now();
            if !closing.holds(&project, &self.settings, now)
                || project.status_or_default().gate != (Gate { closed: true, epoch })
            {
                return;
            }
            changed.await;
        }
    }

    /// Releases entries that neither a build nor a stream has stood behind for
    /// so long that nobody will come. Returns when to look again.
    pub(super) async fn expire_unused(&self, valid: &Valid<'_>) -> Result<Option<Duration>, ReconcileError> {
        let (Some(age), true) = (self.settings.unused_entry, self.settings.companion.is_some()) else {
            return Ok(None);
        };
        let now = self.settings.clock.now();
        let ready_for = self.view.pod(&valid.key).and_then(|pod| lifecycle::ready_for(&pod, now));
        let due = match lifecycle::unused_due(valid.project, age, now) {
            // A client may have waited for its daemon for long.
            Some(Duration::ZERO) => age.saturating_sub(ready_for.unwrap_or_default()).min(STILL_USED),
            due => return Ok(due),
        };
        if !due.is_zero() {
            return Ok(Some(due));
        }
        let answers = self.truth.ask(&valid.key).await;
        if !unused(&answers, age, self.truth.now()) {
            return Ok(Some(STILL_USED));
        }
        let ids = lifecycle::older_entries(&valid.project.status_or_default(), age, now);
        tracing::info!(project.key = valid.key.as_str(), entries = ids.len(), "releasing entries that nobody uses");
        self.writer.submit(valid.key.as_str(), Operation::Expire { ids }, STATUS_BUDGET).await?;
        Ok(None)
    }

    /// Undoes the closing of the gate. The daemon is as it was.
    async fn reopen(&self, valid: &Valid<'_>, live: &StatefulSet, desired: &StatefulSet) -> Result<(), ReconcileError> {
        let epoch = self.epoch(valid.key.as_str());
        tokio::try_join!(self.bump(valid, live, desired, epoch + 1), self.open(&valid.key, epoch + 1))?;
        let stays = live.status.as_ref().is_some_and(|status| status.ready_replicas.unwrap_or(0) > 0);
        if stays && live.spec.as_ref().and_then(|spec| spec.replicas) != Some(0) {
            self.until_reachable(&valid.key).await?;
        }
        self.writer.submit(valid.key.as_str(), Operation::OpenGate { epoch }, STATUS_BUDGET).await?;
        Ok(())
    }

    /// Brings the daemon back: with a changed template, if there is one, since
    /// nothing runs on it now.
    pub(super) async fn wake(
        &self,
        valid: &Valid<'_>,
        live: &StatefulSet,
        desired: &StatefulSet,
    ) -> Result<(), ReconcileError> {
        self.reopen(valid, live, desired).await?;
        self.metrics.scale_events.get_or_create(&ScaleLabels { direction: Direction::up }).inc();
        tracing::info!(project.key = valid.key.as_str(), "scaled up from zero");
        Ok(())
    }

    /// Asks for the daemon, and changes the StatefulSet in any case.
    async fn bump(
        &self,
        valid: &Valid<'_>,
        live: &StatefulSet,
        desired: &StatefulSet,
        epoch: i64,
    ) -> Result<(), ReconcileError> {
        let mut next = live.clone();
        set_replicas(&mut next, desired, 1, epoch);
        if let Err(error) = self.replace(next).await {
            let stale = matches!(&error, ReconcileError::Object { source, .. } if is_conflict(source));
            if !stale {
                return Err(error);
            }
            let name = valid.key.daemon();
            let mut next = self.sets.get(&name).await.map_err(Self::error("get", format!("StatefulSet {name}")))?;
            // Another replica is further: this decision is of an older epoch.
            if build::epoch(&next) > epoch {
                return Err(error);
            }
            set_replicas(&mut next, desired, 1, epoch);
            self.replace(next).await?;
        }
        Ok(())
    }

    /// Gives a daemon at zero its changed template.
    pub(super) async fn refresh(&self, valid: &Valid<'_>, desired: &StatefulSet) -> Result<(), ReconcileError> {
        let name = valid.key.daemon();
        let mut live = self.sets.get(&name).await.map_err(Self::error("get", format!("StatefulSet {name}")))?;
        if live.spec.as_ref().and_then(|s| s.replicas) == Some(0) {
            set_replicas(&mut live, desired, 0, self.epoch(valid.key.as_str()));
            self.replace(live).await?;
        }
        Ok(())
    }

    async fn replace(&self, set: StatefulSet) -> Result<(), ReconcileError> {
        let name = set.name_any();
        self.sets
            .replace(&name, &post_params(), &set)
            .await
            .map(|_| ())
            .map_err(Self::error("replace", format!("StatefulSet {name}")))
    }

    fn epoch(&self, key: &str) -> i64 {
        self.view.project(key).map_or(0, |p| p.status_or_default().gate.epoch)
    }

    fn gate_closed(&self, key: &str) -> bool {
        self.view.project(key).is_some_and(|p| p.status_or_default().gate.closed)
    }

    /// A pod that is about to end may look ready for some milliseconds more.
    /// The next pass, which may open the gate, starts when that is over.
    async fn until_ending(&self, valid: &Valid<'_>) {
        let notify = self.view.listen(valid.key.as_str());
        let ending = async {
            loop {
                let mut changed = std::pin::pin!(notify.notified());
                changed.as_mut().enable();
                match self.view.pod(&valid.key) {
                    Some(pod) if pod.metadata.deletion_timestamp.is_none() => changed.await,
                    _ => return,
                }
            }
        };
        if tokio::time::timeout(SEEN_ENDING, ending).await.is_err() {
            tracing::warn!(project.key = valid.key.as_str(), "the pod was not seen to end after a scale to zero");
        }
    }
}

/// Sets replicas and template on the live object; what is immutable, and what
/// others set, stays as it is. A daemon that runs and goes on running keeps its
/// template: to change it would be to restart it.
fn set_replicas(live: &mut StatefulSet, desired: &StatefulSet, replicas: i32, epoch: i64) {
    let hash = desired.annotations().get(TEMPLATE_HASH).cloned().unwrap_or_default();
    let goes_on = replicas > 0 && live.spec.as_ref().and_then(|s| s.replicas).unwrap_or(1) > 0;
    let outdated = !goes_on && live.annotations().get(TEMPLATE_HASH) != Some(&hash);
    if outdated {
        live.annotations_mut().insert(TEMPLATE_HASH.to_owned(), hash);
    }
    live.annotations_mut().insert(GATE_EPOCH.to_owned(), epoch.to_string());
    live.status = None;
    if let (Some(spec), Some(desired)) = (&mut live.spec, &desired.spec) {
        spec.replicas = Some(replicas);
        if outdated {
            spec.template = desired.template.clone();
        }
    }
    live.annotations_mut().remove(ROLL_HELD_SINCE);
    if replicas > 0 && !goes_on {
        stamp(live, epoch);
    }
}
