//! Keeps the daemon's disruption budget: there while builds are, gone otherwise.
//! A failure is logged and tried again; it does not hold up the reconcile.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::DeleteParams;

use super::super::build::disruption::{self, Change};
use super::super::lifecycle;
use super::super::validate::Valid;
use super::super::writer::describe;
use super::{Controller, RETRY, exists, is_missing, post_params};

impl Controller {
    /// Makes the budget match. Returns when to look again.
    pub(super) async fn guard(&self, valid: &Valid<'_>, replicas: i32, now: Timestamp) -> Option<Duration> {
        let key = valid.key.as_str();
        let status = valid.project.status_or_default();
        let builds = lifecycle::live_entries(&status, self.settings.max_build, now).next().is_some();
        let quiet = self.memory().quiet(key, builds, now);
        let there = self.view.budget(&valid.key, &valid.project.metadata).is_some();
        let name = valid.key.daemon();
        let (verb, result) = match disruption::change(there, builds, replicas > 0, quiet) {
            Change::None => return None,
            Change::DeleteIn(left) => return Some(left + Duration::from_millis(50)),
            Change::Create => {
                let budget = disruption::budget(valid, &self.settings);
                ("create", exists(self.budgets.create(&post_params(), &budget).await))
            }
            Change::Delete => match self.budgets.delete(&name, &DeleteParams::default()).await {
                Err(error) if !is_missing(&error) => ("delete", Err(error)),
                _ => ("delete", Ok(())),
            },
        };
        let error = result.err()?;
        tracing::warn!(
            project.key = key,
            error = describe(&error),
            "could not {verb} PodDisruptionBudget {name}, trying again"
        );
        Some(RETRY)
    }
}
