//! What the companions of running daemons say of builds and of their caches,
//! asked in the background, so that nobody who wants to know waits for them.
#![expect(clippy::disallowed_methods, reason = "shell: asks at intervals")]

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::{Instant, interval};
use tokio_util::sync::CancellationToken;

use super::build::PROJECT_KEY;
use super::build::pod::COMPANION_PORT;
use super::metrics::DaemonMetrics;
use super::truth::ask::companion_of;
use super::view::View;
use crate::companion::observation::{Build, Identity};
use crate::provisioner::project::{BuildKit, CacheRoom};
use crate::runtime::internal::ask;

/// How often it is looked whose turn it is.
const TICK: Duration = Duration::from_millis(500);

/// How often a daemon is asked that builds, or is about to.
const BUSY: Duration = Duration::from_secs(2);

/// How often any other is asked. Who dialled it without a route is seen this late.
const QUIET: Duration = Duration::from_secs(10);

/// How long one answer may take.
const DEADLINE: Duration = Duration::from_secs(3);

/// Companions that are asked at once.
const AT_ONCE: usize = 32;

/// What a companion may say at most: build steps share its network, and what
/// they could say in its place must not fill our memory.
const ACTIVE: usize = 64;
const FINISHED: usize = 50;
const TEXT: usize = 200;

/// What one companion said last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Builds that run; `None` when the daemon does not say.
    pub active: Option<Vec<Build>>,
    /// Builds that ended, newest first.
    pub finished: Vec<Build>,
    /// Room on the cache volume.
    pub cache: Option<CacheRoom>,
    /// What serves.
    pub buildkit: BuildKit,
    /// When BuildKit last lost what it knew of its cache.
    pub cache_reset: Option<Timestamp>,
}

struct Daemon {
    told: Arc<Told>,
    pod: String,
    asked: Instant,
    asking: bool,
}

/// What all companions said last, by project key.
pub struct Figures {
    view: Arc<View>,
    daemons: Mutex<HashMap<String, Daemon>>,
    turns: Arc<Semaphore>,
    metrics: DaemonMetrics,
}

impl Figures {
    /// Knows nothing, and asks only when told to.
    pub fn new(view: Arc<View>, metrics: DaemonMetrics) -> Arc<Self> {
        let turns = Arc::new(Semaphore::new(AT_ONCE));
        Arc::new(Self { view, daemons: Mutex::default(), turns, metrics })
    }

    /// Starts to ask, until `shutdown`.
    pub fn start(view: Arc<View>, metrics: DaemonMetrics, shutdown: CancellationToken) -> Arc<Self> {
        let figures = Self::new(view, metrics);
        tokio::spawn(shutdown.run_until_cancelled_owned(figures.clone().run()));
        figures
    }

    /// What the companion of a project's daemon said last; `None` at zero.
    pub fn of(&self, key: &str) -> Option<Arc<Told>> {
        self.daemons().get(key).map(|daemon| daemon.told.clone())
    }

    /// Asks a daemon now, whoever's turn it is.
    pub async fn look(&self, key: &str) {
        let pods = self.view.pods();
        let found = pods.iter().find_map(|pod| watched(pod).filter(|(known, _)| known == key).zip(pod.uid()));
        if let Some(((key, address), pod)) = found {
            begin(&mut self.daemons(), &key, &pod);
            self.ask(&key, &pod, address).await;
        }
    }

    fn daemons(&self) -> MutexGuard<'_, HashMap<String, Daemon>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(self: Arc<Self>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            for (key, pod, address) in self.due() {
                let Ok(turn) = self.turns.clone().acquire_owned().await else { return };
                let figures = self.clone();
                tokio::spawn(async move {
                    figures.ask(&key, &pod, address).await;
                    drop(turn);
                });
            }
        }
    }

    /// Whose turn it is; those that have gone are forgotten.
    fn due(&self) -> Vec<(String, String, IpAddr)> {
        let pods = self.view.pods();
        let running: Vec<_> = pods.iter().filter_map(|pod| Some((watched(pod)?, pod.uid()?))).collect();
        let keys: HashSet<&str> = running.iter().map(|((key, _), _)| key.as_str()).collect();
        let mut daemons = self.daemons();
        daemons.retain(|key, _| {
            let runs = keys.contains(key.as_str());
            if !runs {
                self.metrics.tell(key, None);
            }
            runs
        });
        let is_due = |(key, pod): (&String, &String)| match daemons.get(key) {
            Some(daemon) if daemon.pod == *pod => !daemon.asking && daemon.asked.elapsed() >= self.pause(key, daemon),
            _ => true,
        };
        let due: Vec<_> = running.iter().filter(|((key, _), pod)| is_due((key, pod))).cloned().collect();
        due.iter().for_each(|((key, _), pod)| begin(&mut daemons, key, pod));
        due.into_iter().map(|((key, address), pod)| (key, pod, address)).collect()
    }

    fn pause(&self, key: &str, daemon: &Daemon) -> Duration {
        let builds = daemon.told.active.as_ref().is_some_and(|active| !active.is_empty());
        let routed =
            || self.view.project(key).is_some_and(|p| p.status.as_ref().is_some_and(|s| s.inflight_builds > 0));
        if builds || routed() { BUSY } else { QUIET }
    }

    async fn ask(&self, key: &str, pod: &str, address: IpAddr) {
        let address = SocketAddr::new(address, COMPANION_PORT);
        let (builds, usage) = tokio::join!(
            ask::<Builds>(address, "/builds", None, DEADLINE),
            ask::<CacheRoom>(address, "/usage", None, DEADLINE),
        );
        let news = {
            let mut daemons = self.daemons();
            // What a pod says that has gone is of no interest.
            let Some(daemon) = daemons.get_mut(key).filter(|daemon| daemon.pod == pod) else { return };
            let next = daemon.told.after(builds.ok(), usage.ok());
            let news = next.finished != daemon.told.finished || next.cache_reset != daemon.told.cache_reset;
            self.metrics.tell(key, next.active.as_ref().map(Vec::len));
            (daemon.told, daemon.asking, daemon.asked) = (Arc::new(next), false, Instant::now());
            news
        };
        if news {
            self.view.nudge(key);
        }
    }
}

/// Notes that a daemon is being asked; another pod's answers are forgotten.
fn begin(daemons: &mut HashMap<String, Daemon>, key: &str, pod: &str) {
    let daemon = daemons.entry(key.to_owned()).or_insert_with(|| Daemon::new(pod));
    if daemon.pod != pod {
        *daemon = Daemon::new(pod);
    }
    (daemon.asking, daemon.asked) = (true, Instant::now());
}

impl Daemon {
    fn new(pod: &str) -> Self {
        Self { told: Arc::default(), pod: pod.to_owned(), asked: Instant::now(), asking: false }
    }
}

/// Key and address of a daemon that runs beside a companion.
fn watched(pod: &Arc<Pod>) -> Option<(String, IpAddr)> {
    Some((pod.labels().get(PROJECT_KEY)?.clone(), companion_of(pod)?))
}

/// What the companion's `/builds` says.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Builds {
    daemon: String,
    identity: Identity,
    active: Vec<Build>,
    finished: Vec<Build>,
    cache_reset: Option<Timestamp>,
}

impl Told {
    /// What is known after another question. Who does not answer may be starved:
    /// what runs there is then not known, the rest stands.
    fn after(&self, builds: Option<Builds>, usage: Option<CacheRoom>) -> Self {
        let cache = usage.or(self.cache);
        let Some(builds) = builds else { return Self { active: None, cache, ..self.clone() } };
        let finished = builds.finished.into_iter().take(FINISHED).map(clipped).collect();
        let active =
            (builds.daemon == "answering").then(|| builds.active.into_iter().take(ACTIVE).map(clipped).collect());
        let Identity { version, snapshotter } = builds.identity;
        let buildkit = BuildKit { version: clip(version), snapshotter: clip(snapshotter) };
        Self { active, finished, cache, buildkit, cache_reset: builds.cache_reset }
    }
}

fn clipped(build: Build) -> Build {
    Build { reference: clip(build.reference), error: build.error.map(clip), step: build.step.map(clip), ..build }
}

/// Printable, and no longer than it has to be.
fn clip(text: String) -> String {
    text.chars().filter(|c| !c.is_control()).take(TEXT).collect()
}
