//! Carries out what [`roll`](super::super::roll) decides about a running daemon.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::super::build::{ROLL_HELD_SINCE, TEMPLATE_HASH};
use super::super::health::DaemonState;
use super::super::ledger::Closing;
use super::super::moment::Moment;
use super::super::roll::{self, Cause, Roll, Seen};
use super::super::status::{DEGRADED, holds_since};
use super::super::validate::Valid;
use super::scale::Scaled;
use super::{Controller, ReconcileError};
use crate::names::CONTROLLER_MANAGER;

impl Controller {
    /// Makes a running daemon anew if it is time.
    pub(super) async fn roll(
        &self,
        valid: &Valid<'_>,
        live: &StatefulSet,
        desired: &StatefulSet,
        now: Timestamp,
    ) -> Result<Scaled, ReconcileError> {
        let seen = self.seen(valid, live, desired, now);
        let decision = roll::decide(valid.project, seen, &self.settings, now);
        self.note_hold(valid, live, seen, decision, now).await?;
        match decision {
            Roll::No(again) => Ok(Scaled { replicas: 1, again }),
            Roll::Hold(left) => Ok(Scaled { replicas: 1, again: Some(left + Duration::from_millis(50)) }),
            Roll::Now(cause) => {
                let closing = if cause == Cause::Idle { Closing::Roll(seen) } else { Closing::Force(seen) };
                let scaled = self.take_down(valid, desired, closing).await?;
                if scaled.replicas == 0 {
                    self.notifier.tell(valid.project, Moment::Rolled(cause));
                }
                Ok(scaled)
            }
        }
    }

    fn seen(&self, valid: &Valid<'_>, live: &StatefulSet, desired: &StatefulSet, now: Timestamp) -> Seen {
        let failed = matches!(self.view.daemon(&valid.key), DaemonState::Failed(_));
        let since = || holds_since(&valid.project.status_or_default(), DEGRADED).unwrap_or(now);
        Seen {
            outdated: live.annotations().get(TEMPLATE_HASH) != desired.annotations().get(TEMPLATE_HASH),
            held_since: live.annotations().get(ROLL_HELD_SINCE).and_then(|since| since.parse().ok()),
            failed_since: failed.then(since),
        }
    }

    /// Writes down since when a roll is held: on the object, so that the next
    /// leader knows it. It stays until the template is taken, or not wanted.
    async fn note_hold(
        &self,
        valid: &Valid<'_>,
        live: &StatefulSet,
        seen: Seen,
        decision: Roll,
        now: Timestamp,
    ) -> Result<(), ReconcileError> {
        let held = matches!(decision, Roll::Hold(_));
        self.count_held(self.memory().hold(valid.key.as_str(), held));
        let since = match (seen.held_since, held) {
            (None, true) => Value::from(now.to_string()),
            (Some(_), false) if !seen.outdated => Value::Null,
            _ => return Ok(()),
        };
        let name = live.name_any();
        let patch = Patch::Merge(json!({"metadata": {"annotations": {ROLL_HELD_SINCE: since}}}));
        let params = PatchParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PatchParams::default() };
        self.sets.patch(&name, &params, &patch).await.map_err(Self::error("patch", format!("StatefulSet {name}")))?;
        if held {
            self.notifier.tell(valid.project, Moment::RollHeld);
        }
        Ok(())
    }
}
