//! From zero to a daemon that takes builds, and back to one that fell.
#![expect(clippy::disallowed_methods, reason = "shell: reads and writes what a daemon is started with")]

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::running::Running;
use super::{Keeper, Next};
use crate::companion::daemon::Daemon;
use crate::families::build_farm::health::{DaemonState, Fault};
use crate::local::certificates::replace;
use crate::local::configuration::Configuration;
use crate::local::core::{Announced, instant};
use crate::local::log;
use crate::local::process::{Exit, Process};
use crate::local::record::Record;
use crate::local::writer::{Change, WriteError};

/// A daemon that does not serve by then does not start.
const START: Duration = Duration::from_secs(60);

/// How long a fork waits for a cache whose daemon is going to zero.
const ENDING: Duration = Duration::from_secs(5);

/// Pause between two looks at one that starts, first and last.
const LOOK: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// One that ran for less than this before it fell cannot start.
const CANNOT_START: Duration = Duration::from_secs(10);

/// Pause after a start that failed, first and last.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

impl Keeper {
    pub(super) async fn start(&mut self, record: &Record) -> Result<Next, WriteError> {
        if let Some(left) = self.not_before.map(|at| at.saturating_duration_since(instant())).filter(|l| !l.is_zero()) {
            return Ok(Next::Wait(Some(left)));
        }
        if record.project.status_or_default().gate.closed {
            self.open_gate().await?;
        }
        let began = instant();
        self.state = DaemonState::Starting("waiting for the daemon to be ready".to_owned());
        self.publish(record, Some(self.live()), Announced::Away);
        self.report(1, false).await?;
        match self.launch(record).await {
            Ok(running) => {
                self.running = Some(running);
                (self.failures, self.not_before, self.observed, self.outdated) = (0, None, None, None);
                self.state = DaemonState::Ready;
                self.publish(record, Some(self.live()), Announced::Ready);
                let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                tracing::info!(project.key = self.key.as_str(), duration_ms = took, "the daemon is ready");
                Ok(Next::Again)
            }
            Err(why) => self.failed(record, &why).await,
        }
    }

    /// Tells why, and waits before the next try.
    async fn failed(&mut self, record: &Record, why: &str) -> Result<Next, WriteError> {
        let pause = BACKOFF.0.saturating_mul(1 << self.failures.min(6)).min(BACKOFF.1);
        self.failures += 1;
        self.not_before = Some(instant() + pause);
        tracing::error!(project.key = self.key.as_str(), error = why, "the daemon did not start");
        let message = why.to_owned();
        self.state = DaemonState::Failed(Fault { reason: "DaemonNotStarted", message, patience: None });
        self.publish(record, Some(self.live()), Announced::Away);
        self.report(1, false).await?;
        Ok(Next::Wait(Some(pause)))
    }

    async fn launch(&self, record: &Record) -> Result<Running, String> {
        let (core, key) = (&self.core, self.key.as_str());
        let layout = &core.common.layout;
        let cache = core.caches.take(key).await;
        core.clear(key).await;
        let folder = layout.daemon(key);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder.join("runtime"));
        made.map_err(|error| format!("cannot make \"{}\": {error}", folder.display()))?;
        self.seed(record).await?;
        let certificate = core.certificates.daemon(&self.key, record.address).map_err(|error| chain(&error))?;
        let daemon = self.configuration(record);
        let fingerprint = daemon.fingerprint(&certificate);
        let write = |path: PathBuf, content: &str| {
            replace(&path, content.as_bytes()).map_err(|error| format!("cannot write \"{}\": {error}", path.display()))
        };
        write(layout.configuration(key), &daemon.toml)?;
        write(running_as(&folder), &fingerprint)?;
        let _ = fs::remove_file(layout.socket(key));
        let log = layout.log(key);
        let _ = log::bound(layout, key);
        let from = fs::metadata(&log).map_or(0, |metadata| metadata.len());
        let mut process = core
            .runtime
            .start(key, &daemon.invocation, &log)
            .map_err(|error| format!("cannot run \"{}\": {error}", daemon.invocation.words[0].display()))?;
        // A process that nobody noted is found all the same: by its command line.
        if let Err(error) = core.writer.submit(key, Change::Process(Some(process.id()))).await {
            process.kill().await;
            return Err(error.to_string());
        }
        let client = self.core.common.client(self.key.as_str())?;
        let said = |exit: String| match log::last_word(&log, from) {
            Ok(Some(word)) => format!("{exit}: {word}"),
            _ => exit,
        };
        let serving = async { timeout(START, serves(&client)).await };
        let why = tokio::select! {
            exit = process.ended() => said(format!("buildkitd {exit}")),
            () = core.cutting.cancelled() => "the farm is ending".to_owned(),
            serving = serving => match serving {
                Ok(()) => return Ok(Running::new(core, process, client, fingerprint, cache)),
                Err(_) => said(format!("buildkitd did not serve within {} s", START.as_secs())),
            },
        };
        process.kill().await;
        core.clear(key).await;
        Err(why)
    }

    /// Makes the cache: a fork's from the cache that it is a fork of.
    async fn seed(&self, record: &Record) -> Result<(), String> {
        let (core, key) = (&self.core, self.key.as_str());
        let parent = key.find('p').filter(|_| self.key.is_fork()).map(|at| &key[at..]);
        let (mut seed, mut guard) = (None, None);
        if let Some(parent) = parent {
            guard = core.caches.try_take(parent);
            if guard.is_none() && core.index.live(parent).is_none() {
                // Its daemon is about to have ended.
                guard = timeout(ENDING, core.caches.take(parent)).await.ok();
            }
            if guard.is_some() {
                core.clear(parent).await;
            }
            let layout = &core.common.layout;
            let newest = || core.storage.snapshots(parent).pop().map(|name| layout.snapshots(parent).join(name));
            // A cache that is written to can only be copied in one go.
            let whole = (guard.is_some() || core.storage.copies_running()).then(|| layout.cache(parent));
            seed = whole.or_else(newest).filter(|seed| seed.exists());
        } else if let Some(name) = &record.project.spec.restore_from_snapshot {
            seed = Some(core.common.layout.snapshots(key).join(name));
        }
        let prepared = core.storage.prepare(key, seed.as_deref()).await;
        drop(guard);
        prepared.map_err(|error| chain(&error))
    }

    /// Takes over the daemon of an earlier run.
    pub(super) async fn adopt(&mut self, process: Process) {
        let (core, key) = (&self.core, self.key.as_str());
        let Some(record) = core.index.get(key) else { return };
        let Ok(client) = self.core.common.client(self.key.as_str()) else { return };
        let cache = core.caches.take(key).await;
        let folder = core.common.layout.daemon(key);
        let fingerprint = fs::read_to_string(running_as(&folder)).unwrap_or_default();
        let pid = process.id().pid;
        let mut running = Running::new(core, process, client.clone(), fingerprint, cache);
        // One that was cut half-way through its start may never serve.
        let serving = tokio::select! {
            _ = running.process.ended() => false,
            serving = timeout(START, serves(&client)) => serving.is_ok(),
        };
        if !serving {
            running.process.kill().await;
            return;
        }
        if record.process != Some(running.process.id()) {
            let _ = core.writer.submit(key, Change::Process(Some(running.process.id()))).await;
        }
        tracing::info!(project.key = key, process.pid = pid, "found a running daemon again");
        self.running = Some(running);
        self.state = DaemonState::Ready;
        let gate = record.project.status_or_default().gate;
        let announced = if gate.closed { Announced::Ending } else { Announced::Ready };
        self.publish(&record, Some(self.live()), announced);
    }

    /// The daemon ended by itself.
    pub(super) async fn fell(&mut self, exit: Exit) {
        let Some(mut running) = self.running.take() else { return };
        let age = running.age();
        // What it had started must not go on writing to the cache.
        running.process.kill().await;
        self.core.clear(self.key.as_str()).await;
        drop(running);
        let log = self.core.common.layout.log(self.key.as_str());
        let word = log::last_word(&log, 0).ok().flatten().unwrap_or_default();
        tracing::warn!(
            project.key = self.key.as_str(),
            log = word,
            "a daemon {exit} and is started again if it is wanted"
        );
        let _ = self.core.writer.submit(self.key.as_str(), Change::Process(None)).await;
        let Some(record) = self.core.index.get(self.key.as_str()) else { return };
        self.state = DaemonState::Starting("waiting for the daemon to be started again".to_owned());
        self.publish(&record, Some(self.live()), Announced::Away);
        if age < CANNOT_START {
            let why = format!("buildkitd {exit}: {word}");
            let _ = self.failed(&record, &why).await;
        }
    }

    /// What a start would use now; none where it cannot be told.
    pub(super) fn fingerprint(&self, record: &Record) -> Option<String> {
        let core = &self.core;
        let certificate = core.certificates.daemon(&self.key, record.address).ok()?;
        Some(self.configuration(record).fingerprint(&certificate))
    }

    fn configuration(&self, record: &Record) -> Configuration {
        let (core, key) = (&self.core, self.key.as_str());
        core.common.daemon(key, record.address, record.project.spec.cache_volume_gi, core.runtime.steps(key))
    }
}

/// Returns once a daemon answers.
async fn serves(client: &Daemon) {
    let mut pause = LOOK.0;
    while client.identity(Duration::from_secs(5)).await.is_err() {
        sleep(pause).await;
        pause = (pause * 3 / 2).min(LOOK.1);
    }
}

/// Where it is noted what a daemon was started with.
fn running_as(folder: &Path) -> PathBuf {
    folder.join("running-as")
}

/// An error and its causes in one line.
pub(in crate::local) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
