//! The only place that takes a daemon down, and the one that brings it back.
//!
//! Down: close the gate (a compare-and-swap that fails when a build arrived) →
//! read the StatefulSet → write it with the resourceVersion just read. Up: write
//! the StatefulSet, which invalidates any older write still under way → open
//! the gate. Routes answer only while the gate is open.

use std::time::Duration;

use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;

use super::super::build::{GATE_EPOCH, ROLL_HELD_SINCE, TEMPLATE_HASH};
use super::super::ledger::{Closing, Operation, Outcome};
use super::super::metrics::{Direction, ScaleLabels};
use super::super::validate::Valid;
use super::{Controller, ReconcileError, STATUS_BUDGET, is_conflict, post_params};

/// How long to wait until the pod is seen to end after a scale to zero.
const SEEN_ENDING: Duration = Duration::from_secs(5);

impl Controller {
    /// Takes the daemon to zero, unless it is wanted after all. Returns the
    /// replicas that the StatefulSet is asked for afterwards.
    pub(super) async fn take_down(
        &self,
        valid: &Valid<'_>,
        desired: &StatefulSet,
        closing: Closing,
    ) -> Result<i32, ReconcileError> {
        let key = valid.key.as_str();
        if self.writer.submit(key, Operation::CloseGate(closing), STATUS_BUDGET).await? == Outcome::StillWanted {
            return Ok(1);
        }
        let name = valid.key.daemon();
        let mut live = self.sets.get(&name).await.map_err(Self::error("get", format!("StatefulSet {name}")))?;
        set_replicas(&mut live, desired, 0, self.epoch(key));
        self.replace(live).await?;
        self.metrics.scale_events.get_or_create(&ScaleLabels { direction: Direction::down }).inc();
        tracing::info!(project.key = key, "scaled to zero");
        self.until_ending(valid).await;
        Ok(0)
    }

    /// Brings the daemon back: with a changed template, if there is one, since
    /// nothing runs on it now.
    pub(super) async fn wake(
        &self,
        valid: &Valid<'_>,
        live: &StatefulSet,
        desired: &StatefulSet,
    ) -> Result<(), ReconcileError> {
        let key = valid.key.as_str();
        let mut next = live.clone();
        set_replicas(&mut next, desired, 1, self.epoch(key) + 1);
        if let Err(error) = self.replace(next).await {
            let stale = matches!(&error, ReconcileError::Object { source, .. } if is_conflict(source));
            if !stale {
                return Err(error);
            }
            let name = valid.key.daemon();
            let mut next = self.sets.get(&name).await.map_err(Self::error("get", format!("StatefulSet {name}")))?;
            set_replicas(&mut next, desired, 1, self.epoch(key) + 1);
            self.replace(next).await?;
        }
        self.writer.submit(key, Operation::OpenGate, STATUS_BUDGET).await?;
        self.metrics.scale_events.get_or_create(&ScaleLabels { direction: Direction::up }).inc();
        tracing::info!(project.key = key, "scaled up from zero");
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
/// others set, stays as it is.
fn set_replicas(live: &mut StatefulSet, desired: &StatefulSet, replicas: i32, epoch: i64) {
    let hash = desired.annotations().get(TEMPLATE_HASH).cloned().unwrap_or_default();
    let outdated = live.annotations().get(TEMPLATE_HASH) != Some(&hash);
    live.annotations_mut().insert(TEMPLATE_HASH.to_owned(), hash);
    live.annotations_mut().insert(GATE_EPOCH.to_owned(), epoch.to_string());
    live.status = None;
    if let (Some(spec), Some(desired)) = (&mut live.spec, &desired.spec) {
        spec.replicas = Some(replicas);
        if outdated {
            spec.template = desired.template.clone();
        }
    }
    live.annotations_mut().remove(ROLL_HELD_SINCE);
}
