//! The gate, what is known of the daemon, and the drain that joins the two.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::timeout;

use super::daemon::Daemon;
use super::drain::{self, Drain, Outcome, Verdict};
use super::metrics::Counters;
use super::observation::{Gate, Observation};
use super::observer::{Clock, Observer};

/// How often a drain looks at the time and at its done-file.
const STEP: Duration = Duration::from_millis(250);

/// A handle on the gate and on what is known of the daemon.
#[derive(Clone, Debug)]
pub struct Watch {
    /// The clock of all moments here.
    pub clock: Clock,
    gate: watch::Sender<Gate>,
    observation: watch::Receiver<Observation>,
    done_file: Option<PathBuf>,
}

/// How a drain went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Drained {
    /// Why it is over.
    pub outcome: Outcome,
    /// Builds that ran when the daemon last answered.
    pub active_builds: usize,
    /// How long it took.
    pub waited_ms: u64,
}

impl Watch {
    /// A handle, and the task that must run for it. A drain ends early when
    /// `done_file` exists.
    pub fn new(daemon: Daemon, counters: Counters, done_file: Option<PathBuf>) -> (Self, Observer) {
        let clock = Clock::start();
        let (gate, _) = watch::channel(Gate::default());
        let (publish, observation) = watch::channel(Observation::default());
        let observer = Observer { daemon, clock, gate: gate.clone(), observation: publish, counters };
        (Self { clock, gate, observation, done_file }, observer)
    }

    /// The gate as it stands.
    pub fn gate(&self) -> Gate {
        *self.gate.borrow()
    }

    /// What is known of the daemon.
    pub fn observation(&self) -> Observation {
        self.observation.borrow().clone()
    }

    /// Opens the gate.
    pub fn open(&self) {
        if self.gate.send_replace(Gate::Open) != Gate::Open {
            tracing::info!("the gate is open");
        }
    }

    /// Closes the gate and waits until no build can be cut, or `budget` is
    /// over. The gate stays closed: for good, or, with `for_process`, until
    /// another process than the present one serves.
    pub async fn drain(&self, for_process: bool, budget: Duration) -> Drained {
        let drain = Drain { began: self.clock.now(), budget };
        let process = self.observation.borrow().process;
        let closed = if for_process { Gate::ClosedForProcess(process) } else { Gate::Closed };
        // Notifies even when nothing changes: the daemon is then asked at once.
        self.gate.send_modify(|gate| {
            if *gate != Gate::Closed {
                *gate = closed;
            }
        });
        tracing::info!(budget_s = budget.as_secs(), "draining");
        let outcome = self.drained(drain).await;
        let waited_ms = u64::try_from(self.clock.now().saturating_sub(drain.began).as_millis()).unwrap_or(u64::MAX);
        let active_builds = self.observation.borrow().active.len();
        tracing::info!(drain.outcome = ?outcome, builds = active_builds, duration_ms = waited_ms, "drained");
        Drained { outcome, active_builds, waited_ms }
    }

    async fn drained(&self, drain: Drain) -> Outcome {
        let mut observation = self.observation.clone();
        loop {
            if self.gate() == Gate::Open {
                return Outcome::Reopened;
            }
            if self.done_file.as_ref().is_some_and(|file| file.exists()) {
                return Outcome::DoneFile;
            }
            let verdict = drain::decide(drain, &observation.borrow_and_update(), self.clock.now());
            if let Verdict::Done(outcome) = verdict {
                return outcome;
            }
            // A news or a step, whichever is first; both lead to another look.
            let _ = timeout(STEP, observation.changed()).await;
        }
    }
}
