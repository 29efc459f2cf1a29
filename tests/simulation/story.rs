//! One simulation, from its seed: a storm of builds and faults, then calm.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::client::{self, Servers};
use crate::cluster;
use crate::model::Kind;
use crate::network::{Condition, Node};
use crate::replica::{IDLE, Replica};
use crate::seeds::Counts;
use crate::world::{CLUSTER, World};

/// Where the daemons' configuration is.
const CONFIG: &str = "buildkitd-config";

/// The number of the build that is routed when all is over.
const LAST: usize = 9_999;

/// What came of a seed.
pub(crate) struct Outcome {
    pub(crate) violation: Option<String>,
    /// Of what happened, to compare two runs.
    pub(crate) digest: u64,
    pub(crate) reached: Counts,
}

/// Plays one seed.
pub(crate) fn play(seed: u64, readable: bool) -> Outcome {
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let world = Arc::new(World::new(seed, readable));
        let story = Story::new(&world);
        tokio::select! {
            biased;
            () = violated(&world) => {}
            () = story.tell() => {}
        }
        let mut state = world.state();
        Outcome {
            violation: state.violation.take(),
            digest: state.trace.digest,
            reached: std::mem::take(&mut state.reached),
        }
    })
}

/// Looks once in a simulated second whether anything went wrong.
async fn violated(world: &World) {
    while world.violation().is_none() {
        sleep(Duration::from_secs(1)).await;
    }
}

struct Story {
    world: Arc<World>,
    servers: Servers,
    max_inflight: usize,
    /// Processes that were ever started.
    started: Mutex<u64>,
}

impl Story {
    fn new(world: &Arc<World>) -> Self {
        let max_inflight = if world.percent(20) { 3 } else { 2000 };
        Self { world: Arc::clone(world), servers: Servers::default(), max_inflight, started: Mutex::default() }
    }

    async fn tell(&self) {
        let world = &self.world;
        tokio::spawn(cluster::run(Arc::clone(world)));
        for index in 0..2 + world.below(2) {
            let offset = self.skew();
            self.start(Arc::new(Node::new(format!("server {index}"), offset)));
        }
        let jobs = self.storm().await;
        self.calm().await;
        for job in jobs {
            let _ = job.await;
        }
        self.settle().await;
    }

    /// Builds come and go while things break.
    async fn storm(&self) -> Vec<tokio::task::JoinHandle<()>> {
        let world = &self.world;
        let mut jobs = Vec::new();
        let changes = if world.temper.rolls { world.below(6) } else { u64::MAX };
        for round in 0..8 + world.below(16) {
            world.pause(10, if world.temper.long { 800_000 } else { 8_000 }).await;
            if round == changes {
                self.change_template();
            }
            if world.percent(25) {
                self.mishap().await;
            }
            // Bursts, and pauses in which daemons go to zero.
            let burst = if world.percent(20) { 5 } else { 1 };
            if world.percent(20) {
                self.dial();
            }
            if world.percent(25) {
                // Some end just when their daemon's idle time does.
                let most = if world.percent(50) { 32_000 } else { 60_000 };
                world.pause(22_000, most).await;
            }
            for _ in 0..burst {
                let (number, request) = (jobs.len(), self.request());
                jobs.push(tokio::spawn(client::job(Arc::clone(world), Arc::clone(&self.servers), number, request)));
            }
        }
        jobs
    }

    /// Everything that stands in the way ends.
    async fn calm(&self) {
        self.world.state().stormy = false;
        self.set_tier("warm");
        self.world.say("", "the storm is over");
        let servers = self.servers.lock().unwrap().clone();
        for server in servers {
            if server.node.condition() == Condition::Frozen {
                server.node.set(Condition::Up);
            }
        }
        sleep(Duration::from_secs(60)).await;
    }

    /// Without builds and faults everything goes to rest, and comes back.
    async fn settle(&self) {
        let world = &self.world;
        // Entries of builds that vanished expire.
        let patience = tokio::time::Instant::now() + world.temper.max_build();
        while self.entries() > 0 && tokio::time::Instant::now() < patience {
            sleep(Duration::from_secs(20)).await;
        }
        sleep(IDLE + Duration::from_secs(90)).await;
        let writes = world.state().writes;
        sleep(Duration::from_secs(60)).await;
        {
            let mut state = world.state();
            let more = state.writes - writes;
            if more > 0 {
                state.violate(format_args!("{more} writes in a minute in which nothing happened"));
            }
            let projects: Vec<_> =
                state.model.list(Kind::Project).map(|(name, p)| (name.to_owned(), p.value.clone())).collect();
            for (name, project) in projects {
                self.at_rest(&mut state, &name, &project);
            }
        }
        if client::route(world, &self.servers, LAST, &self.request()).await.is_none() {
            world.violate("a route in calm weather is not answered");
        }
    }

    /// Entries of all projects.
    fn entries(&self) -> usize {
        let state = self.world.state();
        let inflight = |project: &Value| project["status"]["inflight"].as_array().map_or(0, Vec::len);
        state.model.list(Kind::Project).map(|(_, project)| inflight(&project.value)).sum()
    }

    fn at_rest(&self, state: &mut crate::world::State, name: &str, project: &Value) {
        if let Some(entries) = project["status"]["inflight"].as_array().filter(|entries| !entries.is_empty()) {
            state.violate(format_args!("project {name} holds {} entries for ever", entries.len()));
        }
        let set = state.model.get(Kind::StatefulSet, &format!("buildkitd-{name}"));
        if set.is_none_or(|set| set.value["spec"]["replicas"] != 0) {
            state.violate(format_args!("project {name} is not at zero, though nothing wants it"));
        }
    }

    fn request(&self) -> Value {
        json!({"repo": "https://github.com/acme/shop", "arch": "amd64", "untrusted": self.world.temper.fork})
    }

    /// An administrator changes the configuration of all daemons.
    fn change_template(&self) {
        let world = &self.world;
        let map = json!({"metadata": {"name": CONFIG}, "data": {"buildkitd.toml": "debug = true"}});
        let _ = world.change(CLUSTER, "configure", &(Kind::ConfigMap, CONFIG.to_owned()), &mut |model| {
            model.create(Kind::ConfigMap, map.clone())
        });
        // A daemon that is always on has no other time to take it.
        if world.percent(30) {
            self.set_tier("hot");
        }
    }

    fn set_tier(&self, tier: &str) {
        let world = &self.world;
        let keys: Vec<String> = world.state().model.list(Kind::Project).map(|(name, _)| name.to_owned()).collect();
        for key in keys {
            let _ = world.change(CLUSTER, "set the tier of", &(Kind::Project, key.clone()), &mut |model| {
                model.merge(Kind::Project, &key, &json!({"spec": {"tier": tier}}))
            });
        }
    }

    /// A client dials a daemon directly, past the gate: the one way to it that
    /// the gate does not close.
    fn dial(&self) {
        let world = &self.world;
        let build = world.below(60_000);
        let mut state = world.state();
        let keys: Vec<String> = state.model.list(Kind::Project).map(|(name, _)| name.to_owned()).collect();
        let pods: Vec<_> = keys.iter().filter_map(|key| state.serving(key)).collect();
        for pod in pods {
            let until = state.model.now.ms + build;
            state.say("a client", format_args!("dials {pod} past the gate"));
            state.builds.dialed(&pod, until);
        }
    }

    async fn mishap(&self) {
        let world = &self.world;
        let servers = self.servers.lock().unwrap().clone();
        let leader = servers.iter().position(|server| *server.leading.borrow());
        // Leaders are the ones that do harm.
        let index = match leader {
            Some(leader) if world.percent(70) => leader,
            _ => usize::try_from(world.below(servers.len() as u64)).unwrap(),
        };
        let server = Arc::clone(&servers[index]);
        match world.below(8) {
            0..=1 => {
                world.say(&server.node.name, "crashes");
                world.reached("crash");
                if *server.leading.borrow() && world.state().closed() {
                    world.reached("crash of a leader while a gate is closed");
                }
                server.crash();
                self.again(index, &server);
            }
            2 => {
                world.say(&server.node.name, "is asked to end");
                if *server.leading.borrow() {
                    world.reached("lease given back");
                }
                let offset = self.skew();
                server.terminate().await;
                self.replace(index, Arc::new(Node::new(server.node.name.clone(), offset)));
            }
            3..=5 => {
                world.say(&server.node.name, "freezes");
                world.reached("freeze");
                if *server.leading.borrow() && world.state().closed() {
                    world.reached("freeze of a leader while a gate is closed");
                }
                server.node.set(Condition::Frozen);
                let (world, node) = (Arc::clone(world), Arc::clone(&server.node));
                tokio::spawn(async move {
                    world.pause(1_000, 40_000).await;
                    if node.condition() == Condition::Frozen {
                        world.say(&node.name, "thaws");
                        node.set(Condition::Up);
                    }
                });
            }
            6 if world.temper.jumps => {
                world.reached("clock jump");
                let offset = self.skew();
                world.say(&server.node.name, format_args!("has a clock that is wrong by {offset} ms"));
                server.node.offset_ms.store(offset, std::sync::atomic::Ordering::Relaxed);
            }
            _ => {
                let keys: Vec<String> =
                    world.state().model.list(Kind::Project).map(|(name, _)| name.to_owned()).collect();
                if !keys.is_empty() {
                    let key = &keys[usize::try_from(world.below(keys.len() as u64)).unwrap()];
                    cluster::kill(world, key);
                }
            }
        }
    }

    /// How wrong a node's clock is.
    fn skew(&self) -> i64 {
        if !self.world.temper.jumps {
            return 0;
        }
        i64::try_from(self.world.below(40_000)).unwrap() - 20_000
    }

    /// Starts a crashed server again, some time later.
    fn again(&self, index: usize, server: &Replica) {
        let offset = server.node.offset();
        self.replace(index, Arc::new(Node::new(server.node.name.clone(), offset)));
    }

    fn start(&self, node: Arc<Node>) {
        let server = self.process(node);
        self.servers.lock().unwrap().push(Arc::new(server));
    }

    fn replace(&self, index: usize, node: Arc<Node>) {
        let server = self.process(node);
        self.servers.lock().unwrap()[index] = Arc::new(server);
    }

    fn process(&self, node: Arc<Node>) -> Replica {
        let mut started = self.started.lock().unwrap();
        *started += 1;
        let identity = format!("{} process {started}", node.name);
        let server = Replica::start(&self.world, node, identity, self.max_inflight);
        self.watch_leadership(&server);
        server
    }

    /// At most one process may believe that it leads.
    fn watch_leadership(&self, server: &Replica) {
        let (world, servers) = (Arc::clone(&self.world), Arc::clone(&self.servers));
        let (mut leading, name) = (server.leading.clone(), server.node.name.clone());
        tokio::spawn(async move {
            while leading.wait_for(|leads| *leads).await.is_ok() {
                world.say(&name, "leads");
                world.reached("change of the leader");
                if world.state().closed() {
                    world.reached("change of the leader while a gate is closed");
                }
                let alive = |server: &&Arc<Replica>| server.node.condition() != Condition::Dead;
                let leaders = servers.lock().unwrap().iter().filter(alive).filter(|s| *s.leading.borrow()).count();
                if leaders > 1 {
                    world.violate(format_args!("{leaders} servers lead at once"));
                }
                if leading.wait_for(|leads| !*leads).await.is_err() {
                    return;
                }
                world.say(&name, "leads no more");
            }
        });
    }
}
