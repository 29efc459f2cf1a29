//! What everything in a simulation shares: the modelled API server, time,
//! chance, the builds that clients run, and the record of what happened.

use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::builds::Builds;
use crate::model::{Id, KINDS, Kind, Model, Now, Refused, Stored, text};
use crate::seeds::Counts;

/// The true time at which every simulation begins.
const EPOCH: i64 = 1_800_000_000;

/// Who StatefulSet controller, kubelet and garbage collector are.
pub(crate) const CLUSTER: &str = "cluster";

/// What a simulation must reach, or it would check nothing there.
pub(crate) const STATES: &[&str] = &[
    "gate closed",
    "gate opened again, the daemon as it was",
    "Service shut",
    "Service opened again",
    "daemon at zero",
    "daemon brought back",
    "roll held",
    "roll between builds",
    "forced roll",
    "forced roll that cut a build",
    "template taken at zero",
    "fork reaped",
    "fork came again",
    "entry released",
    "entry expired",
    "build refused at the limit",
    "write refused for a conflict",
    "request lost",
    "reply lost",
    "request refused by a fault",
    "request that took seconds",
    "scale-down lost",
    "scale-down whose reply was lost",
    "scale-down refused for a conflict",
    "watch ended",
    "watch seconds behind",
    "crash",
    "crash of a leader while a gate is closed",
    "freeze",
    "freeze of a leader while a gate is closed",
    "lease given back",
    "change of the leader",
    "change of the leader while a gate is closed",
    "clock jump",
    "pod killed by others",
    "pod that waits for a build it was not told of",
];

pub(crate) struct World {
    state: Mutex<State>,
    /// Wake with every change of a kind, in the order of waiting: a watch channel
    /// wakes in one that it draws itself.
    changed: [Notify; KINDS],
    /// Wakes when daemons may be concerned.
    pub(crate) cluster: Notify,
    begin: Instant,
    pub(crate) temper: Temper,
}

/// What only one may touch at a time.
pub(crate) struct State {
    pub(crate) model: Model,
    pub(crate) chance: fastrand::Rng,
    pub(crate) builds: Builds,
    pub(crate) max_build: Duration,
    pub(crate) violation: Option<String>,
    /// Whether faults happen.
    pub(crate) stormy: bool,
    /// Writes of servers that changed something, leases aside.
    pub(crate) writes: u64,
    pub(crate) trace: Trace,
    pub(crate) reached: Counts,
    /// Daemons whose pod somebody else killed, and until when that may show.
    disturbed: Vec<(String, u64)>,
}

/// How bad this world is: probabilities in percent, drawn from the seed.
#[derive(Clone, Debug)]
pub(crate) struct Temper {
    /// A request or a reply that takes seconds.
    pub(crate) slow: u8,
    /// A request that gets lost, before or after it took effect.
    pub(crate) lost: u8,
    /// A watch that ends, or lags by seconds.
    pub(crate) watch: u8,
    /// Whether builds are untrusted. One project a world: the order in which
    /// several are reconciled is not decided by the seed.
    pub(crate) fork: bool,
    /// Whether nodes' clocks jump.
    pub(crate) jumps: bool,
    /// Whether builds last for hours: only those can be cut by a forced roll.
    pub(crate) long: bool,
    /// Whether daemons get a changed template.
    pub(crate) rolls: bool,
}

impl Temper {
    /// Age at which an entry that was never released stops holding its daemon.
    pub(crate) fn max_build(&self) -> Duration {
        Duration::from_secs(if self.long { 7200 } else { 180 })
    }
}

/// What happened.
pub(crate) struct Trace {
    /// Whether to print it as it happens.
    readable: bool,
    pub(crate) digest: u64,
}

impl World {
    pub(crate) fn new(seed: u64, readable: bool) -> Self {
        let mut chance = fastrand::Rng::with_seed(seed);
        let temper = Temper {
            slow: chance.u8(0..15),
            lost: chance.u8(0..8),
            watch: chance.u8(0..30),
            fork: chance.u8(0..4) == 0,
            jumps: chance.bool(),
            // One takes as long as twenty others.
            long: chance.u8(0..100) < 3,
            rolls: chance.u8(0..4) == 0,
        };
        let rolls = temper.long || temper.rolls;
        let temper = Temper { rolls, ..temper };
        let trace = Trace { readable, digest: 0xcbf2_9ce4_8422_2325 };
        let state = State {
            model: Model::default(),
            chance,
            builds: Builds::default(),
            max_build: temper.max_build(),
            violation: None,
            stormy: true,
            writes: 0,
            trace,
            reached: Counts::new(),
            disturbed: Vec::new(),
        };
        Self {
            state: Mutex::new(state),
            changed: [const { Notify::const_new() }; KINDS],
            cluster: Notify::new(),
            begin: Instant::now(),
            temper,
        }
    }

    /// The state, at the present time.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        let ms = self.ms();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.model.now.ms != ms || state.model.now.text.is_empty() {
            state.model.now = Now { ms, text: timestamp(ms - ms % 1000, 0).to_string() };
        }
        state
    }

    /// Milliseconds since the world began.
    pub(crate) fn ms(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap()
    }

    /// What a wall clock shows that is wrong by `offset_ms`.
    pub(crate) fn wall(&self, offset_ms: i64) -> Timestamp {
        timestamp(self.ms(), offset_ms)
    }

    /// Does something to the model, and tells those who watch.
    pub(crate) fn change(&self, who: &str, what: &str, id: &Id, act: Act<'_>) -> Result<Stored, Refused> {
        let mut state = self.state();
        let before = state.model.version();
        let old = state.model.get(id.0, &id.1).map(|stored| stored.value.clone());
        let result = act(&mut state.model);
        let version = state.model.version();
        let outcome = match &result {
            Ok(_) if version == before => "nothing to change".to_owned(),
            Ok(_) => format!("version {version}"),
            Err(refused) => format!("refused: {} {}", refused.code, refused.reason),
        };
        state.say(who, format_args!("{what} {}: {outcome}", crate::model::describe(id)));
        if version != before {
            let new = result.as_ref().ok().map(|stored| stored.value.clone());
            crate::check::written(&mut state, who, id, old.as_deref(), new.as_deref());
            if id.0 != Kind::Lease && who != CLUSTER {
                state.writes += 1;
            }
            drop(state);
            self.changed(id.0).notify_waiters();
            if matches!(id.0, Kind::Project | Kind::StatefulSet | Kind::Service | Kind::Pod) {
                self.cluster.notify_waiters();
            }
        } else if who != CLUSTER && matches!(&result, Err(refused) if refused.code == 409) {
            state.reached("write refused for a conflict");
        }
        result
    }

    /// Wakes with every change of a kind.
    pub(crate) fn changed(&self, kind: Kind) -> &Notify {
        &self.changed[kind as usize]
    }

    /// A number below `end`.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.state().chance.u64(0..end)
    }

    /// True so often in a hundred.
    pub(crate) fn percent(&self, percent: u8) -> bool {
        self.state().chance.u8(0..100) < percent
    }

    /// Sleeps for something between the two, in milliseconds.
    pub(crate) async fn pause(&self, least: u64, most: u64) {
        let ms = least + self.below(most - least + 1);
        tokio::time::sleep(Duration::from_millis(ms)).await;
    }

    pub(crate) fn say(&self, who: &str, what: impl Display) {
        self.state().say(who, what);
    }

    pub(crate) fn violation(&self) -> Option<String> {
        self.state().violation.clone()
    }

    pub(crate) fn violate(&self, what: impl Display) {
        self.state().violate(what);
    }

    pub(crate) fn reached(&self, what: &'static str) {
        self.state().reached(what);
    }
}

/// What is done to the model.
pub(crate) type Act<'a> = &'a mut dyn FnMut(&mut Model) -> Result<Stored, Refused>;

impl State {
    /// Writes down what happened.
    pub(crate) fn say(&mut self, who: &str, what: impl Display) {
        let ms = self.model.now.ms;
        let line = format!("{:>4}.{:03}  {who:<11} {what}", ms / 1000, ms % 1000);
        for byte in line.bytes() {
            self.trace.digest = (self.trace.digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        if self.trace.readable {
            println!("{line}");
        }
    }

    /// Counts what a simulation must reach.
    pub(crate) fn reached(&mut self, what: &'static str) {
        *self.reached.entry(what).or_default() += 1;
    }

    /// Whether a daemon is on its way down.
    pub(crate) fn closed(&self) -> bool {
        self.model.list(Kind::Project).any(|(_, project)| project.value["status"]["gate"]["closed"] == true)
    }

    /// An invariant did not hold. The first one counts.
    pub(crate) fn violate(&mut self, what: impl Display) {
        let what = what.to_string();
        self.say("INVARIANT", &what);
        self.violation.get_or_insert(what);
    }

    /// A project's status.
    pub(crate) fn status(&self, key: &str) -> &Value {
        self.model.get(Kind::Project, key).map_or(&Value::Null, |stored| &stored.value["status"])
    }

    /// Somebody else than the farm kills a pod.
    pub(crate) fn disturb(&mut self, key: &str) {
        let until = self.model.now.ms + 60_000;
        self.disturbed.push((key.to_owned(), until));
    }

    /// Whether replicas may not have seen yet that a pod was killed.
    pub(crate) fn disturbed(&self, key: &str) -> bool {
        self.disturbed.iter().any(|(disturbed, until)| disturbed == key && self.model.now.ms < *until)
    }

    /// The uid of a daemon's pod, if a build can run there.
    pub(crate) fn serving(&self, key: &str) -> Option<String> {
        let pod = &self.model.get(Kind::Pod, &format!("buildkitd-{key}-0"))?.value;
        let ready = text(pod, "/status/conditions/0/status") == "True";
        (ready && pod["metadata"]["deletionTimestamp"].is_null()).then(|| text(pod, "/metadata/uid").to_owned())
    }
}

/// For how long something has been so that servers date by their clocks; zero
/// when it does not say since when.
pub(crate) fn held(now_ms: u64, since: &str) -> Duration {
    let since = since.parse::<Timestamp>().map_or(i64::MAX, |since| since.as_millisecond());
    let now = timestamp(now_ms, 0).as_millisecond();
    Duration::from_millis(u64::try_from(now.saturating_sub(since)).unwrap_or(0))
}

fn timestamp(ms: u64, offset_ms: i64) -> Timestamp {
    Timestamp::from_millisecond(EPOCH * 1000 + i64::try_from(ms).unwrap() + offset_ms).unwrap()
}
