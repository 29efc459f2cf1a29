//! Watches the daemon: one task asks, and publishes what it learns. Everything
//! else reads what it published, so nothing that a build step can call makes
//! work for the daemon, and no answer of ours ever waits for one of its.
#![expect(clippy::disallowed_methods, reason = "shell: observations have times")]

use std::pin::pin;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::daemon::{AskDaemon, Builds, Daemon};
use super::follow::Followers;
use super::metrics::Counters;
use super::observation::{Answer, Gate, Moment, Observation};

/// Pause between two questions.
const TICK: Duration = Duration::from_millis(400);
/// A daemon that has not answered for so long is not ready.
const LATE: Duration = Duration::from_secs(3);
/// A question is given up after so long. Longer than [`LATE`]: a starved
/// daemon's late answer still tells whether builds run.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often finished builds are asked for when nothing else says to: a build
/// may be shorter than the pause between two questions.
const HISTORY_EVERY: Duration = Duration::from_secs(2);

/// How much later it is asked for a history that was too large to be told.
const HISTORY_TOO_LARGE: Duration = Duration::from_secs(300);

/// What an answer told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// Which builds run, and which ended.
    WithHistory,
    /// Which builds run, but the history was too large.
    TooMuch,
    /// Which builds run.
    Active,
    /// Nothing: there was no answer.
    Nothing,
}

/// The monotonic clock of this process.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts at zero.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    pub fn now(self) -> Moment {
        self.0.elapsed()
    }
}

/// The task that watches a daemon.
#[derive(Debug)]
pub struct Observer {
    /// Whom to ask.
    pub daemon: Daemon,
    /// When.
    pub clock: Clock,
    /// Opened again when a new process serves; a change of it is a reason to
    /// ask at once.
    pub gate: watch::Sender<Gate>,
    /// Where to publish.
    pub observation: watch::Sender<Observation>,
    /// Where ended builds are counted.
    pub counters: Counters,
}

impl Observer {
    /// Watches for ever.
    pub async fn run(self) {
        let mut followers = Followers::new(self.daemon.clone());
        let mut gate = self.gate.subscribe();
        let mut history_at: Option<Moment> = None;
        loop {
            let asked = self.clock.now();
            // A drain is decided on what ended a moment ago, too.
            let due = history_at.is_none_or(|at| asked.saturating_sub(at) >= HISTORY_EVERY);
            let history = due || *gate.borrow_and_update() != Gate::Open;
            match self.look(asked, history, &mut followers).await {
                Told::WithHistory => history_at = Some(asked),
                // Nothing makes it smaller soon.
                Told::TooMuch => history_at = Some(asked + HISTORY_TOO_LARGE),
                Told::Active | Told::Nothing => {}
            }
            tokio::select! {
                () = sleep(TICK) => {}
                changed = gate.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Asks once. Returns what was told.
    async fn look(&self, asked: Moment, history: bool, followers: &mut Followers) -> Told {
        let before = self.observation.borrow().clone();
        let mut question = pin!(self.ask(&before, history));
        let answer = match timeout(LATE, &mut question).await {
            Ok(answer) => answer,
            Err(_) => {
                self.publish(before.silent(asked, self.clock.now()));
                question.await
            }
        };
        let now = self.clock.now();
        match answer {
            Ok((mut answer, told)) => {
                followers.complete(&mut answer.active);
                let process = answer.process;
                self.publish(before.answered(answer, asked, now, Timestamp::now()));
                self.gate.send_if_modified(|gate| {
                    let seen = gate.seen(process);
                    std::mem::replace(gate, seen) != seen
                });
                told
            }
            Err(AskDaemon::Gone(_)) => {
                self.publish(before.gone(asked, now));
                Told::Nothing
            }
            Err(error) => {
                tracing::debug!(%error, "the daemon does not answer");
                let last = self.observation.borrow().clone();
                self.publish(last.silent(asked, now));
                Told::Nothing
            }
        }
    }

    async fn ask(&self, before: &Observation, history: bool) -> Result<(Answer, Told), AskDaemon> {
        let (mut builds, mut told) = self.builds(history).await?;
        if !history && before.differs(&builds.active) {
            (builds, told) = self.builds(true).await?;
        }
        let process = self.daemon.process();
        let identity = if process == before.process { None } else { Some(self.daemon.identity(PATIENCE).await?) };
        let finished = (told == Told::WithHistory).then_some(builds.finished);
        Ok((Answer { active: builds.active, finished, identity, process }, told))
    }

    /// A history that cannot be told must not hide what runs.
    async fn builds(&self, history: bool) -> Result<(Builds, Told), AskDaemon> {
        if !history {
            return Ok((self.daemon.builds(false, PATIENCE).await?, Told::Active));
        }
        match self.daemon.builds(true, PATIENCE).await {
            Ok(builds) => Ok((builds, Told::WithHistory)),
            Err(error) if error.is_too_large() => {
                tracing::warn!(%error, "the daemon's history is too large to be read");
                Ok((self.daemon.builds(false, PATIENCE).await?, Told::TooMuch))
            }
            Err(error) => Err(error),
        }
    }

    fn publish(&self, next: Observation) {
        let before = self.observation.send_replace(next.clone());
        let (was, is) = (before.link.as_str(), next.link.as_str());
        if was != is {
            tracing::info!(daemon.link = is, daemon.was = was, builds = next.active.len(), "the daemon is {is}");
        }
        // What ended before this process began was counted by another.
        if before.process > 0 {
            next.ended_since(&before).into_iter().for_each(|build| self.counters.ended(build));
        }
    }
}
