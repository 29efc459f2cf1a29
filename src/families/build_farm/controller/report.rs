//! What a pass tells: the status, and Events about what is new.

use std::time::Duration;

use kube::ResourceExt;
use kube::runtime::controller::Action;

use super::super::api::{self, BuildProject};
use super::super::build::config::BaseError;
use super::super::health::{self, DaemonState};
use super::super::ledger::{Ended, Operation};
use super::super::moment::{self, Moment};
use super::super::project;
use super::super::provisioner::endpoint;
use super::super::status::{Facts, Report};
use super::super::validate::{Invalid, Valid};
use super::{Controller, ReconcileError, STATUS_BUDGET};
use crate::provisioner::project::CacheRoom;

impl Controller {
    /// Writes the report and tells what is new in it. Returns when the daemon's
    /// state changes by the passing of time alone.
    pub(super) async fn report(
        &self,
        valid: &Valid<'_>,
        replicas: i32,
        fault: Option<BaseError>,
    ) -> Result<Option<Duration>, ReconcileError> {
        let key = valid.key.as_str();
        let daemon = self.view.daemon(&valid.key);
        let roll_held = self.memory().holds(key);
        let facts = Facts { replicas, daemon: &daemon, roll_held, base: fault.as_ref() };
        let generation = valid.project.metadata.generation.unwrap_or(0);
        let report = Report::new(facts, endpoint(&valid.key, &self.settings), generation);
        let before = self.view.project(key).map(|p| p.status_or_default()).unwrap_or_default();
        let moments = moment::told_by(&before, &report);
        // Begun together, they are one write.
        let written = self.writer.submit(key, Operation::Report(Box::new(report)), STATUS_BUDGET);
        let (written, noted) = tokio::join!(written, self.note_builds(key));
        written?;
        noted?;
        moments.into_iter().for_each(|moment| self.notifier.tell(valid.project, moment));
        self.tell_ends(valid);
        Ok(match daemon {
            DaemonState::Troubled(_, left) if replicas > 0 => left,
            _ => None,
        })
    }

    /// Notes in the status which builds ended.
    pub(super) async fn note_builds(&self, key: &str) -> Result<(), ReconcileError> {
        let Some(told) = self.figures.of(key).filter(|told| !told.finished.is_empty()) else { return Ok(()) };
        let builds = told.finished.iter().filter_map(project::remember).collect();
        let bytes = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let room = |room: CacheRoom| api::CacheRoom {
            bytes_used: bytes(room.bytes_used),
            bytes_total: bytes(room.bytes_total),
        };
        let ended = Ended { builds, cache: told.cache.map(room) };
        self.writer.submit(key, Operation::Ended(Box::new(ended)), STATUS_BUDGET).await?;
        Ok(())
    }

    /// Tells of containers that ended and were started again, and of a cache that was lost.
    fn tell_ends(&self, valid: &Valid<'_>) {
        let ends = self.view.pod(&valid.key).map(|pod| health::ends(&pod)).unwrap_or_default();
        for end in self.memory().news(valid.key.as_str(), ends, self.begun) {
            if end.out_of_memory {
                self.metrics.oom_kills.inc();
            }
            self.notifier.tell(valid.project, Moment::Ended(end));
        }
        let lost = self.figures.of(valid.key.as_str()).and_then(|told| told.cache_reset);
        if lost.is_some_and(|at| self.memory().is_new_loss(valid.key.as_str(), at, self.begun)) {
            self.notifier.tell(valid.project, Moment::CacheLost);
        }
    }

    pub(super) async fn report_invalid(
        &self,
        project: &BuildProject,
        invalid: &Invalid,
    ) -> Result<Action, ReconcileError> {
        let generation = project.metadata.generation.unwrap_or(0);
        let before = project.status_or_default();
        let report = Report::invalid(invalid, before.replicas, generation);
        let moments = moment::told_by(&before, &report);
        self.writer.submit(&project.name_any(), Operation::Report(Box::new(report)), STATUS_BUDGET).await?;
        moments.into_iter().for_each(|moment| self.notifier.tell(project, moment));
        Ok(Action::await_change())
    }
}
