//! What this process knows of the farm: caches kept by watches, and who waits
//! for them to change. Nothing here polls.
#![expect(clippy::disallowed_methods, reason = "shell: notes when faults are first seen")]

mod follow;

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::Event;
use kube::{Client, Resource, ResourceExt};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::api::BuildProject;
use super::build;
use super::build::config::{Base, BaseError};
use super::health::{self, DaemonState, Fault};
use super::settings::Settings;
use super::signs::Signs;
use super::status;
use crate::key::ProjectKey;
use crate::runtime::clock::Clock;
pub(crate) use follow::next;

/// A fault by its reason, and by the epoch of the gate: what was seen before a
/// daemon went to zero says nothing of the next.
type FaultId = (&'static str, i64);

/// The caches. Shared by all roles of a process.
pub struct View {
    clock: Clock,
    namespace: String,
    writer: Mutex<Writer<BuildProject>>,
    projects: Store<BuildProject>,
    sets: Store<StatefulSet>,
    services: Store<Service>,
    pods: Store<Pod>,
    budgets: Store<PodDisruptionBudget>,
    /// How long a pod may wait for a node.
    unschedulable: Duration,
    signs: Mutex<HashMap<String, Signs>>,
    /// The last fault of each daemon, and when it was first seen.
    faults: Mutex<HashMap<String, (FaultId, Instant)>>,
    waiters: Mutex<HashMap<String, Weak<Notify>>>,
    triggers: Mutex<Option<mpsc::UnboundedSender<ObjectRef<BuildProject>>>>,
    filled: watch::Sender<bool>,
    /// What the user gave for all daemons; the error of the newest, if it has one.
    base: Mutex<(Base, Option<BaseError>)>,
}

impl View {
    /// Starts the watches; they end with `shutdown`.
    pub fn start(client: &Client, settings: &Settings, config_map: &str, shutdown: &CancellationToken) -> Arc<Self> {
        let (sets, services, pods, budgets) =
            (Writer::default(), Writer::default(), Writer::default(), Writer::default());
        let writer = Writer::<BuildProject>::default();
        let view = Arc::new(Self {
            namespace: settings.namespace.clone(),
            unschedulable: settings.unschedulable,
            clock: settings.clock.clone(),
            signs: Mutex::default(),
            faults: Mutex::default(),
            projects: writer.as_reader(),
            writer: Mutex::new(writer),
            sets: sets.as_reader(),
            services: services.as_reader(),
            pods: pods.as_reader(),
            budgets: budgets.as_reader(),
            waiters: Mutex::default(),
            triggers: Mutex::default(),
            filled: watch::Sender::new(false),
            base: Mutex::default(),
        });
        let (configured, first_look) = oneshot::channel();
        tokio::spawn(view.clone().follow_base(client.clone(), config_map.to_owned(), configured, shutdown.clone()));
        tokio::spawn(view.clone().fill(first_look));
        tokio::spawn(view.clone().follow_projects(client.clone(), shutdown.clone()));
        tokio::spawn(view.clone().follow(client.clone(), sets, shutdown.clone()));
        tokio::spawn(view.clone().follow(client.clone(), services, shutdown.clone()));
        tokio::spawn(view.clone().follow(client.clone(), pods, shutdown.clone()));
        tokio::spawn(view.clone().follow(client.clone(), budgets, shutdown.clone()));
        tokio::spawn(view.clone().follow_events(client.clone(), shutdown.clone()));
        view
    }

    /// Returns when every cache has been filled once.
    pub async fn synced(&self) {
        // The sender lives as long as this value, so that waiting cannot fail.
        let _ = self.filled.subscribe().wait_for(|filled| *filled).await;
    }

    /// Whether every cache has been filled once.
    pub fn is_synced(&self) -> bool {
        *self.filled.borrow()
    }

    /// A store wakes only one of those who wait for it: this is the one.
    async fn fill(self: Arc<Self>, base: oneshot::Receiver<()>) {
        let _ = tokio::join!(
            base,
            self.projects.wait_until_ready(),
            self.sets.wait_until_ready(),
            self.services.wait_until_ready(),
            self.pods.wait_until_ready(),
            self.budgets.wait_until_ready(),
        );
        self.filled.send_replace(true);
    }

    /// The newest known copy of a project.
    pub fn project(&self, key: &str) -> Option<Arc<BuildProject>> {
        self.projects.get(&self.reference(key))
    }

    /// The store that the reconcile queue reads.
    pub fn projects(&self) -> Store<BuildProject> {
        self.projects.clone()
    }

    /// The daemon's StatefulSet, if it is this project's.
    pub fn stateful_set(&self, key: &ProjectKey, project: &ObjectMeta) -> Option<Arc<StatefulSet>> {
        self.own(&self.sets, key, project)
    }

    /// The daemon's Service, if it is this project's.
    pub fn service(&self, key: &ProjectKey, project: &ObjectMeta) -> Option<Arc<Service>> {
        self.own(&self.services, key, project)
    }

    /// The daemon's pod.
    pub fn pod(&self, key: &ProjectKey) -> Option<Arc<Pod>> {
        self.pods.get(&ObjectRef::new(&format!("{}-0", key.daemon())).within(&self.namespace))
    }

    /// The pods of all daemons.
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        self.pods.state()
    }

    /// The daemon's disruption budget, if it is this project's.
    pub fn budget(&self, key: &ProjectKey, project: &ObjectMeta) -> Option<Arc<PodDisruptionBudget>> {
        self.own(&self.budgets, key, project)
    }

    /// What an earlier project of the same name has left goes with it, and tells
    /// nothing of this one.
    fn own<K>(&self, store: &Store<K>, key: &ProjectKey, project: &ObjectMeta) -> Option<Arc<K>>
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + Clone + 'static,
        K::DynamicType: Default + Eq + Hash + Clone,
    {
        let found = store.get(&ObjectRef::new(&key.daemon()).within(&self.namespace));
        found.filter(|object| !is_of_namesake(&**object, project))
    }

    /// Takes over a copy that a write returned, unless a newer one is known.
    pub fn publish(&self, project: BuildProject) {
        let name = project.name_any();
        {
            let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
            if self.project(&name).is_some_and(|known| known.version() >= project.version()) {
                return;
            }
            writer.apply_watcher_event(&Event::Apply(project));
        }
        self.notify(&name);
    }

    /// What the user gave for all daemons: the newest that can be read, and what
    /// is wrong with a newer one.
    pub fn base(&self) -> (Base, Option<BaseError>) {
        self.base.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Tells those who wait for news of a key that there are some.
    pub fn nudge(&self, key: &str) {
        self.notify(key);
    }

    /// Wakes whenever something about the key changes. Enable the notification
    /// before looking, or a change in between is missed.
    pub fn listen(&self, key: &str) -> Arc<Notify> {
        let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiters.get(key).and_then(Weak::upgrade) {
            return notify;
        }
        let notify = Arc::new(Notify::new());
        waiters.insert(key.to_owned(), Arc::downgrade(&notify));
        notify
    }

    /// Sends the key of everything that changes to the reconcile queue, from
    /// now until the receiver is dropped; first every known project.
    pub fn reconcile_queue(&self) -> mpsc::UnboundedReceiver<ObjectRef<BuildProject>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut triggers = self.triggers.lock().unwrap_or_else(PoisonError::into_inner);
        for project in self.projects.state() {
            let _ = sender.send(ObjectRef::from_obj(&*project));
        }
        *triggers = Some(sender);
        receiver
    }

    /// Whether a build can be sent to the daemon now.
    ///
    /// The gate is open, the StatefulSet asks for the daemon and its controller
    /// has seen that, the Service leads to it, and the pod of the current revision
    /// is ready and stays.
    pub fn daemon(&self, key: &ProjectKey) -> DaemonState {
        let starting = |why: &str| DaemonState::Starting(why.to_owned());
        let Some(project) = self.project(key.as_str()) else { return starting("waiting for the project") };
        let gate = project.status.as_ref().map(|status| status.gate).unwrap_or_default();
        if gate.closed {
            return starting("waiting for the daemon to come back from zero");
        }
        let Some(set) = self.stateful_set(key, &project.metadata) else {
            return starting("waiting for the StatefulSet");
        };
        // Each watch lags by itself: this copy may be of before the gate was closed.
        if build::epoch(&*set) < gate.epoch {
            return starting("waiting for news of the StatefulSet");
        }
        let (spec, state) = (set.spec.clone().unwrap_or_default(), set.status.clone().unwrap_or_default());
        if spec.replicas.unwrap_or(1) < 1 {
            return starting("waiting for the daemon to leave zero");
        }
        let pod = self.pod(key);
        if pod.as_ref().is_some_and(|pod| is_of_namesake(&**pod, &set.metadata)) {
            return starting("waiting for the pod");
        }
        let epoch = project.status.as_ref().map_or(0, |s| s.gate.epoch);
        if let Some(fault) = self.fault(key, epoch, pod.as_deref()) {
            return fault;
        }
        if pod.as_ref().is_some_and(|pod| pod.metadata.deletion_timestamp.is_some()) {
            return starting("waiting for the old pod to end");
        }
        let Some(pod) = pod else { return starting("waiting for the pod") };
        let revision = pod.labels().get("controller-revision-hash");
        let current =
            set.metadata.generation == state.observed_generation && revision == state.update_revision.as_ref();
        let ready = pod
            .status
            .iter()
            .flat_map(|s| s.conditions.iter().flatten())
            .any(|c| c.type_ == "Ready" && c.status == "True");
        let reachable = self.service(key, &project.metadata).is_some_and(|service| !build::is_shut(&service));
        match (current, ready) {
            (true, true) if reachable => DaemonState::Ready,
            (true, true) => starting("waiting for the Service"),
            (false, _) => starting("waiting for the current revision of the pod"),
            (true, false) => DaemonState::Starting(status::pod_pending(Some(&pod))),
        }
    }

    /// The state of a daemon that something is wrong with.
    fn fault(&self, key: &ProjectKey, epoch: i64, pod: Option<&Pod>) -> Option<DaemonState> {
        let signs = self.signs().get(key.as_str()).cloned().unwrap_or_default();
        let fault = health::find(pod, &signs, self.unschedulable, self.clock.now());
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(fault) = fault else {
            faults.remove(key.as_str());
            return None;
        };
        Some(first_seen(&mut faults, key.as_str(), epoch, fault, Instant::now()))
    }

    fn signs(&self) -> MutexGuard<'_, HashMap<String, Signs>> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reference(&self, key: &str) -> ObjectRef<BuildProject> {
        ObjectRef::new(key).within(&self.namespace)
    }

    fn notify(&self, key: &str) {
        {
            let mut waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
            match waiters.get(key).map(Weak::upgrade) {
                Some(Some(notify)) => notify.notify_waiters(),
                Some(None) => drop(waiters.remove(key)),
                None => {}
            }
        }
        let mut triggers = self.triggers.lock().unwrap_or_else(PoisonError::into_inner);
        if triggers.as_ref().is_some_and(|sender| sender.send(self.reference(key)).is_err()) {
            *triggers = None;
        }
    }
}

/// Judges a fault by when it was first seen; another fault begins anew.
fn first_seen(
    faults: &mut HashMap<String, (FaultId, Instant)>,
    key: &str,
    epoch: i64,
    fault: Fault,
    now: Instant,
) -> DaemonState {
    let id = (fault.reason, epoch);
    let known = faults.entry(key.to_owned()).or_insert((id, now));
    if known.0 != id {
        *known = (id, now);
    }
    fault.judge(now.saturating_duration_since(known.1))
}

/// Whether an object belongs to an earlier owner of the same name: a fork that
/// was reaped comes again under its key, while this copy is still of the last.
fn is_of_namesake(object: &impl Resource, owner: &ObjectMeta) -> bool {
    let mut owners = object.meta().owner_references.iter().flatten();
    owners.find(|o| o.controller == Some(true)).is_some_and(|o| Some(&o.uid) != owner.uid.as_ref())
}

#[cfg(test)]
mod ready_tests;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_as_old_as_its_first_sight_in_this_life() {
        let fault = |reason| Fault { reason, message: String::new(), patience: Some(Duration::from_secs(5)) };
        let (mut faults, begun) = (HashMap::new(), Instant::now());
        let mut left = |reason, epoch, seconds| match first_seen(
            &mut faults,
            "p1",
            epoch,
            fault(reason),
            begun + Duration::from_secs(seconds),
        ) {
            DaemonState::Troubled(_, left) => left.map(|left| left.as_secs()),
            _ => None,
        };
        assert_eq!(left("A", 1, 0), Some(5));
        assert_eq!(left("A", 1, 3), Some(2));
        assert_eq!(left("B", 1, 4), Some(5), "another fault");
        assert_eq!(left("B", 1, 9), None, "failed");
        assert_eq!(left("B", 3, 90), Some(5), "after it was at zero");
    }

    #[test]
    fn a_pod_of_an_earlier_set_of_the_same_name_is_told_apart() {
        let owned = |uid: &str, controller: bool| -> Pod {
            serde_json::from_value(serde_json::json!({"metadata": {"name": "buildkitd-p1-0", "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "buildkitd-p1", "uid": uid, "controller": controller}
            ]}}))
            .unwrap()
        };
        let owner = ObjectMeta { uid: Some("now".into()), ..ObjectMeta::default() };
        assert!(is_of_namesake(&owned("before", true), &owner));
        assert!(!is_of_namesake(&owned("now", true), &owner));
        assert!(!is_of_namesake(&owned("before", false), &owner), "an owner that does not control it says nothing");
        assert!(!is_of_namesake(&Pod::default(), &owner), "adopted objects may have no owner");
    }
}
