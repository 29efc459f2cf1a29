//! Plays the kubelet for tests that have no node: binds pods to a node that is
//! only an object, makes them Ready after a delay, and lets deleted ones go.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{Binding, Node, Pod};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::companion::{Builds, Companion};

/// The node that played pods are bound to.
pub(crate) const NODE: &str = "played";

/// The pods of a namespace come up while this lives.
pub(crate) struct Play {
    shared: Arc<Shared>,
    /// Ends the task with the test.
    task: JoinHandle<()>,
}

struct Shared {
    pods: Api<Pod>,
    script: watch::Sender<Script>,
    /// By name of the pod; the latest of that name.
    ready: Mutex<HashMap<String, Ready>>,
    changed: watch::Sender<()>,
    builds: Builds,
    /// By name of the pod, as `ready`.
    companions: Mutex<HashMap<String, Companion>>,
}

/// What the played kubelet does at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Script {
    /// Whether pods become Ready; deleted ones go in any case.
    pub(crate) on: bool,
    /// How long a pod takes from its creation seen to Ready.
    pub(crate) delay: Duration,
}

/// A pod that was made Ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    /// Immediately before the request that said so.
    pub(crate) at: Instant,
    /// The pod's address; a test can listen there.
    pub(crate) address: String,
    uid: String,
}

/// Creates the node object that played pods are bound to: controllers overlook
/// the pods of nodes that do not exist.
pub(crate) async fn create_node(client: Client) -> anyhow::Result<()> {
    let node: Node = serde_json::from_value(json!({"metadata": {"name": NODE}}))?;
    Api::<Node>::all(client).create(&PostParams::default(), &node).await.context("creating the played node")?;
    Ok(())
}

impl Play {
    /// Begins to play, switched on, in a namespace.
    pub(crate) fn start(client: Client, namespace: &str, delay: Duration) -> Self {
        let shared = Arc::new(Shared {
            pods: Api::namespaced(client, namespace),
            script: watch::Sender::new(Script { on: true, delay }),
            ready: Mutex::default(),
            changed: watch::Sender::new(()),
            builds: Builds::default(),
            companions: Mutex::default(),
        });
        let task = tokio::spawn(Arc::clone(&shared).follow());
        Self { shared, task }
    }

    /// Pods become Ready after the delay, from now on or again.
    pub(crate) fn switch_on(&self) {
        self.shared.script.send_modify(|script| script.on = true);
    }

    /// No pod becomes Ready any more; those that are stay so.
    pub(crate) fn switch_off(&self) {
        self.shared.script.send_modify(|script| script.on = false);
    }

    /// For pods that are seen from now on.
    pub(crate) fn set_delay(&self, delay: Duration) {
        self.shared.script.send_modify(|script| script.delay = delay);
    }

    /// What the companions of all its pods say.
    pub(crate) fn builds(&self) -> &Builds {
        &self.shared.builds
    }

    /// A pod's companion does not answer any more.
    pub(crate) fn silence(&self, pod: &str) {
        self.shared.companions.lock().unwrap_or_else(PoisonError::into_inner).remove(pod);
    }

    /// When, and at which address, a pod was made Ready. The cluster may see
    /// that a moment earlier: [`Play::wait_ready`] asks for a pod that is.
    pub(crate) fn ready(&self, pod: &str) -> Option<Ready> {
        self.shared.ready().get(pod).cloned()
    }

    /// Waits until a pod was made Ready.
    ///
    /// # Errors
    /// It was not within the limit.
    pub(crate) async fn wait_ready(&self, pod: &str, limit: Duration) -> anyhow::Result<Ready> {
        let mut changed = self.shared.changed.subscribe();
        let wait = async {
            loop {
                if let Some(ready) = self.ready(pod) {
                    return ready;
                }
                let _ = changed.changed().await;
            }
        };
        tokio::time::timeout(limit, wait).await.with_context(|| format!("pod \"{pod}\" is not ready in {limit:?}"))
    }

    /// Makes a Ready pod unready, as a failing probe would.
    ///
    /// # Errors
    /// The API server refuses.
    pub(crate) async fn make_unready(&self, pod: &str) -> anyhow::Result<()> {
        self.shared.ready().remove(pod);
        let status = json!({"status": {"conditions": conditions(false)}});
        self.shared.pods.patch_status(pod, &PatchParams::default(), &Patch::Strategic(status)).await?;
        Ok(())
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    fn ready(&self) -> MutexGuard<'_, HashMap<String, Ready>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn follow(self: Arc<Self>) {
        let mut bound = HashMap::new();
        let mut pods = pin!(watcher(self.pods.clone(), watcher::Config::default()).default_backoff().applied_objects());
        while let Some(event) = pods.next().await {
            // The watch comes back by itself, as after a restart of the API server.
            let Ok(pod) = event else { continue };
            let (name, uid) = (pod.name_any(), pod.uid().unwrap_or_default());
            if pod.metadata.deletion_timestamp.is_some() {
                bound.remove(&uid);
                self.let_go(&name, &uid).await;
            } else {
                bound.entry(uid).or_insert_with(|| AbortOnDrop(tokio::spawn(Arc::clone(&self).bring_up(pod))));
            }
        }
    }

    async fn let_go(&self, name: &str, uid: &str) {
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let _ = self.pods.delete(name, &at_once).await;
        let mut ready = self.ready();
        if ready.get(name).is_some_and(|ready| ready.uid == uid) {
            ready.remove(name);
            self.companions.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        }
    }

    async fn bring_up(self: Arc<Self>, pod: Pod) {
        let mut script = self.script.subscribe();
        let delay = script.borrow().delay;
        tokio::time::sleep(delay).await;
        let _ = script.wait_for(|script| script.on).await;
        // A test may have bound it meanwhile.
        let pod = self.pods.get(&pod.name_any()).await.unwrap_or(pod);
        if let Err(error) = self.make_ready(&pod).await {
            eprintln!("play: pod \"{}\" not made ready: {error:#}", pod.name_any());
        }
    }

    async fn make_ready(&self, pod: &Pod) -> anyhow::Result<()> {
        let (name, address) = (pod.name_any(), next_address());
        if pod.spec.as_ref().is_none_or(|spec| spec.node_name.is_none()) {
            let binding: Binding = serde_json::from_value(json!({
                "metadata": {"name": name},
                "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
            }))?;
            self.pods
                .create_subresource::<_, Value>("binding", &name, &PostParams::default(), &binding)
                .await
                .context("binding the pod")?;
        }
        let sidecars = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
        if sidecars.into_iter().any(|container| container.name == "companion") {
            let companion = Companion::start(&address, self.builds.clone()).await.context("playing the companion")?;
            self.companions.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), companion);
        }
        let at = Instant::now();
        let status = json!({"status": status(pod, &address)});
        self.pods.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status)).await?;
        let uid = pod.uid().unwrap_or_default();
        self.ready().insert(name, Ready { at, address, uid });
        self.changed.send_replace(());
        Ok(())
    }
}

struct AbortOnDrop(JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// No two pods of a cluster have the same.
fn next_address() -> String {
    static COUNT: AtomicU16 = AtomicU16::new(256);
    let [high, low] = COUNT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    format!("10.244.{high}.{low}")
}

fn conditions(ready: bool) -> Value {
    let status = if ready { "True" } else { "False" };
    json!([
        {"type": "PodScheduled", "status": "True"},
        {"type": "Initialized", "status": "True"},
        {"type": "ContainersReady", "status": status},
        {"type": "Ready", "status": status, "lastTransitionTime": jiff::Timestamp::now().to_string()},
    ])
}

fn status(pod: &Pod, address: &str) -> Value {
    let started = jiff::Timestamp::now().to_string();
    let running = |name: &str, image: &str| {
        json!({
            "name": name, "image": image, "imageID": "", "ready": true, "started": true, "restartCount": 0,
            "state": {"running": {"startedAt": started}},
        })
    };
    let spec = pod.spec.clone().unwrap_or_default();
    let containers = |list: &[k8s_openapi::api::core::v1::Container]| -> Vec<Value> {
        list.iter().map(|c| running(&c.name, c.image.as_deref().unwrap_or_default())).collect()
    };
    json!({
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": started,
        "conditions": conditions(true),
        "containerStatuses": containers(&spec.containers),
        "initContainerStatuses": containers(&spec.init_containers.unwrap_or_default()),
    })
}
