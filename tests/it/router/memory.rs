//! A provisioner without a cluster: projects, entries and readiness in memory,
//! with faults and holds that no real cluster shows on demand.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bko_install::key::{Project, ProjectKey};
use bko_install::names::BUILDS_NAMESPACE;
use bko_install::provisioner::project::{Detail, InFlight, Page, Phase, Selection, Summary};
use bko_install::provisioner::{BuildId, ProvisionError, Provisioner, Released};
use tokio::sync::watch;

/// What a route asks of its provisioner, step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Step {
    Ensure,
    Touch,
    Begin,
    End,
    Repo,
    Wait,
}

/// Everything that can be seen from outside.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) pods_become_ready: bool,
    pub(crate) projects: BTreeMap<String, Daemon>,
    /// Not all projects are known yet.
    pub(crate) lists: bool,
    /// Calls that have begun.
    pub(crate) calls: BTreeMap<Step, usize>,
    /// Entries ever written.
    pub(crate) persisted: usize,
    /// Steps that go no further for now.
    held: Vec<Step>,
}

/// One project.
#[derive(Clone, Debug, Default)]
pub(crate) struct Daemon {
    /// What it was made for.
    pub(crate) project: Option<Project>,
    pub(crate) ready: bool,
    pub(crate) touched: usize,
    pub(crate) repo: String,
    /// Digests of builds, oldest first.
    pub(crate) inflight: Vec<String>,
}

type Fault = Box<dyn Fn() -> ProvisionError + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Memory {
    seen: watch::Sender<Seen>,
    faults: Arc<Mutex<HashMap<Step, Fault>>>,
    /// Time from being wanted to ready, once pods become ready at all.
    start: Duration,
    namespace: String,
    gateway_host: Option<String>,
    port: u16,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self::at(BUILDS_NAMESPACE, None, 1234)
    }

    /// Daemons in a namespace, reached at a port, through a gateway or not.
    pub(crate) fn at(namespace: &str, gateway_host: Option<String>, port: u16) -> Self {
        Self {
            seen: watch::Sender::default(),
            faults: Arc::default(),
            start: Duration::from_millis(20),
            namespace: namespace.to_owned(),
            gateway_host,
            port,
        }
    }

    pub(crate) fn ready() -> Self {
        let memory = Self::new();
        memory.let_pods_become_ready();
        memory
    }

    pub(crate) fn let_pods_become_ready(&self) {
        self.seen.send_modify(|seen| {
            seen.pods_become_ready = true;
            seen.projects.values_mut().for_each(|daemon| daemon.ready = true);
        });
    }

    /// From now on it is not known whether these are all projects.
    pub(crate) fn begin_to_list(&self) {
        self.seen.send_modify(|seen| seen.lists = true);
    }

    pub(crate) fn make_ready(&self, key: &str) {
        self.seen.send_modify(|seen| seen.projects.get_mut(key).unwrap().ready = true);
    }

    /// From here on a step fails.
    pub(crate) fn fail(&self, step: Step, fault: impl Fn() -> ProvisionError + Send + Sync + 'static) {
        self.faults.lock().unwrap().insert(step, Box::new(fault));
    }

    /// From here on a step works again.
    pub(crate) fn mend(&self, step: Step) {
        self.faults.lock().unwrap().remove(&step);
    }

    /// From here on a step waits until it is let go.
    pub(crate) fn hold(&self, step: Step) {
        self.seen.send_modify(|seen| seen.held.push(step));
    }

    pub(crate) fn let_go(&self, step: Step) {
        self.seen.send_modify(|seen| seen.held.retain(|held| *held != step));
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen.borrow().clone()
    }

    pub(crate) fn inflight(&self, key: &str) -> Option<usize> {
        self.seen.borrow().projects.get(key).map(|daemon| daemon.inflight.len())
    }

    /// Returns once something can be seen.
    pub(crate) async fn until(&self, what: impl FnMut(&Seen) -> bool) -> Seen {
        let mut changes = self.seen.subscribe();
        tokio::time::timeout(Duration::from_secs(20), changes.wait_for(what)).await.unwrap().unwrap().clone()
    }

    async fn step(&self, step: Step) -> Result<(), ProvisionError> {
        self.seen.send_modify(|seen| *seen.calls.entry(step).or_default() += 1);
        let mut changes = self.seen.subscribe();
        let _ = changes.wait_for(|seen| !seen.held.contains(&step)).await;
        match self.faults.lock().unwrap().get(&step) {
            Some(fault) => Err(fault()),
            None => Ok(()),
        }
    }
}

#[async_trait]
impl Provisioner for Memory {
    async fn ensure(&self, project: &Project) -> Result<ProjectKey, ProvisionError> {
        self.step(Step::Ensure).await?;
        if self.namespace != BUILDS_NAMESPACE {
            return Err(ProvisionError::Refused(format!("namespaces {:?} not found", self.namespace)));
        }
        let key = project.key();
        let name = key.to_string();
        let (mut born, mut starts) = (false, false);
        self.seen.send_modify(|seen| {
            born = !seen.projects.contains_key(&name);
            starts = seen.pods_become_ready;
            let daemon = seen.projects.entry(name.clone()).or_default();
            daemon.project = Some(project.clone());
            daemon.repo = project.repo.to_string();
        });
        if born && starts {
            let (seen, start) = (self.seen.clone(), self.start);
            tokio::spawn(async move {
                tokio::time::sleep(start).await;
                seen.send_modify(|seen| seen.projects.get_mut(&name).unwrap().ready = true);
            });
        }
        Ok(key)
    }

    async fn touch(&self, key: &ProjectKey) -> Result<(), ProvisionError> {
        self.step(Step::Touch).await?;
        self.seen.send_modify(|seen| seen.projects.get_mut(key.as_str()).unwrap().touched += 1);
        Ok(())
    }

    /// As a store with a writer of its own has it: what was handed over is
    /// written, whether or not anybody still waits for it.
    async fn begin(&self, key: &ProjectKey, build: &BuildId) -> Result<(), ProvisionError> {
        let memory = self.clone();
        let (key, digest) = (key.to_string(), build.digest());
        let write = tokio::spawn(async move {
            memory.step(Step::Begin).await?;
            memory.seen.send_modify(|seen| {
                seen.persisted += 1;
                seen.projects.get_mut(&key).unwrap().inflight.push(digest);
            });
            Ok(())
        });
        write.await.unwrap()
    }

    async fn end(&self, key: &ProjectKey, build: Option<&BuildId>) -> Result<Released, ProvisionError> {
        self.step(Step::End).await?;
        let mut released = Released::Nothing;
        self.seen.send_modify(|seen| {
            let Some(daemon) = seen.projects.get_mut(key.as_str()) else { return };
            let place = match build {
                Some(build) => daemon.inflight.iter().position(|digest| *digest == build.digest()),
                None => (!daemon.inflight.is_empty()).then_some(0),
            };
            if let Some(place) = place {
                daemon.inflight.remove(place);
                released = Released::Entry;
            }
        });
        Ok(released)
    }

    async fn repo(&self, key: &ProjectKey) -> Result<Option<String>, ProvisionError> {
        self.step(Step::Repo).await?;
        Ok(self.seen.borrow().projects.get(key.as_str()).map(|daemon| daemon.repo.clone()))
    }

    fn ready(&self, key: &ProjectKey) -> bool {
        self.seen.borrow().projects.get(key.as_str()).is_some_and(|daemon| daemon.ready)
    }

    async fn wait_ready(&self, key: &ProjectKey, budget: Duration) -> Result<(), ProvisionError> {
        self.step(Step::Wait).await?;
        let mut changes = self.seen.subscribe();
        let ready = changes.wait_for(|seen| seen.projects.get(key.as_str()).is_some_and(|daemon| daemon.ready));
        match tokio::time::timeout(budget, ready).await {
            Ok(_) => Ok(()),
            Err(_) => Err(ProvisionError::NotReady { last: None }),
        }
    }

    fn endpoint(&self, key: &ProjectKey) -> String {
        match &self.gateway_host {
            Some(host) => key.gateway_endpoint(host, self.port),
            None => key.in_cluster_endpoint(&self.namespace, self.port),
        }
    }

    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn is_synced(&self) -> bool {
        !self.seen().lists
    }

    fn projects(&self, selection: &Selection<'_>) -> Page {
        let seen = self.seen.borrow().clone();
        let all = seen.projects.iter().map(|(key, daemon)| self.summary(key, daemon));
        let taken = all.filter(|project| selection.takes(&project.key, &project.repo, project.phase)).collect();
        selection.page(taken, |project| &project.key, Clone::clone)
    }

    fn project(&self, key: &ProjectKey) -> Option<Detail> {
        let seen = self.seen.borrow().clone();
        Some(Detail {
            summary: self.summary(key.as_str(), seen.projects.get(key.as_str())?),
            daemon: key.daemon(),
            namespace: self.namespace.clone(),
            tier: "warm".to_owned(),
            security_profile: "rootless".to_owned(),
            idle_seconds: 900,
            cache_volume_gi: 60,
            last_snapshot: None,
            buildkit: None,
            conditions: Vec::new(),
            builds: Vec::new(),
        })
    }
}

impl Memory {
    fn summary(&self, key: &str, daemon: &Daemon) -> Summary {
        let project = daemon.project.clone().unwrap();
        Summary {
            key: key.to_owned(),
            repo: project.repo.to_string(),
            name: project.name,
            target: project.target,
            arch: project.arch,
            fork: project.untrusted,
            endpoint: self.endpoint(&key.parse().unwrap()),
            phase: if daemon.ready { Phase::Warm } else { Phase::Scaling },
            since: None,
            reason: None,
            ready: daemon.ready,
            in_flight: InFlight { count: daemon.inflight.len(), since: None },
            active_builds: None,
            last_build: None,
            last_used: None,
            kept_by: None,
            idle_at: None,
            cache: None,
        }
    }
}

/// A memory that a server and a test share.
pub(crate) type Shared = Arc<Memory>;
