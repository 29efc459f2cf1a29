//! A daemon that runs, and those who watch it.

use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::companion::daemon::Daemon;
use crate::companion::observation::{Gate, Observation};
use crate::companion::observer::Observer;
use crate::local::core::{Core, instant};
use crate::local::process::Process;

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
        Self { process, daemon, observation, fingerprint, since: instant(), observer, _cache: cache }
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
