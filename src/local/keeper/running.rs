//! A daemon that runs, and those who watch it.

use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::companion::daemon::Daemon;
use crate::companion::observation::{Gate, Observation};
use crate::companion::observer::Observer;
use crate::families::build_farm::api::EndedBuild;
use crate::families::build_farm::project::remember;
use crate::local::core::{Core, instant};
use crate::local::process::Process;
use crate::provisioner::project::CacheRoom;

/// It ends with its keeper's wish, or by itself; dropped, it goes on.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) process: Process,
    /// How it is asked.
    pub(super) daemon: Daemon,
    /// What it says of its builds.
    pub(super) observation: watch::Receiver<Observation>,
    /// What it was started with.
    pub(super) fingerprint: String,
    pub(super) since: Instant,
    /// Room in its cache, when it was last looked at.
    pub(super) cache: Option<CacheRoom>,
    /// When it was last looked at.
    pub(super) kept_up: Option<Instant>,
    /// The newest build that was noted as ended.
    pub(super) noted: Option<String>,
    observer: JoinHandle<()>,
    _cache: OwnedMutexGuard<()>,
}

impl Running {
    pub(super) fn new(
        core: &Core,
        process: Process,
        daemon: Daemon,
        fingerprint: String,
        cache: OwnedMutexGuard<()>,
    ) -> Self {
        let (publish, observation) = watch::channel(Observation::default());
        let observer = Observer {
            daemon: daemon.clone(),
            clock: core.clock,
            gate: watch::Sender::new(Gate::Open),
            observation: publish,
            counters: core.counters.clone(),
        };
        let observer = tokio::spawn(observer.run());
        Self {
            process,
            daemon,
            observation,
            fingerprint,
            since: instant(),
            cache: None,
            kept_up: None,
            noted: None,
            observer,
            _cache: cache,
        }
    }

    /// Builds that have ended, if there is one that was not noted yet.
    pub(super) fn take_news(&mut self) -> Option<Vec<EndedBuild>> {
        let finished = self.observation.borrow().finished.clone();
        let newest = finished.first().map(|build| build.reference.clone());
        if newest == self.noted {
            return None;
        }
        self.noted = newest;
        Some(finished.iter().filter_map(remember).collect())
    }

    /// For how long it has run, as far as this process knows.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.observer.abort();
    }
}

/// Returns when a build has ended after the one that was noted. May be dropped and called again.
pub(super) async fn news(observation: &mut watch::Receiver<Observation>, noted: Option<&String>) {
    let is_news = |seen: &Observation| seen.finished.first().is_some_and(|build| Some(&build.reference) != noted);
    if observation.wait_for(is_news).await.is_err() {
        std::future::pending::<()>().await;
    }
}
