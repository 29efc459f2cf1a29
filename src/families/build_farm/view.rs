//! What this process knows of the farm: caches kept by watches, and who waits
//! for them to change. Nothing here polls.
#![expect(clippy::disallowed_methods, reason = "shell: notes when faults are first seen")]

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Event as ClusterEvent, Pod, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::watcher::{self, Event, watch_object, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::api::BuildProject;
use super::build::config::{Base, BaseError};
use super::build::{self, DAEMON_SELECTOR, PROJECT_KEY};
use super::health::{self, DaemonState, Fault};
use super::settings::Settings;
use super::signs::{self, Sign, Signs};
use super::status;
use crate::key::ProjectKey;
use crate::runtime::clock::Clock;

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

    /// The daemon's StatefulSet.
    pub fn stateful_set(&self, key: &ProjectKey) -> Option<Arc<StatefulSet>> {
        self.sets.get(&ObjectRef::new(&key.daemon()).within(&self.namespace))
    }

    /// The daemon's Service.
    pub fn service(&self, key: &ProjectKey) -> Option<Arc<Service>> {
        self.services.get(&ObjectRef::new(&key.daemon()).within(&self.namespace))
    }

    /// The daemon's pod.
    pub fn pod(&self, key: &ProjectKey) -> Option<Arc<Pod>> {
        self.pods.get(&ObjectRef::new(&format!("{}-0", key.daemon())).within(&self.namespace))
    }

    /// The pods of all daemons.
    pub fn pods(&self) -> Vec<Arc<Pod>> {
        self.pods.state()
    }

    /// The daemon's disruption budget.
    pub fn budget(&self, key: &ProjectKey) -> Option<Arc<PodDisruptionBudget>> {
        self.budgets.get(&ObjectRef::new(&key.daemon()).within(&self.namespace))
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
    /// has seen that, and the pod of the current revision is ready and stays.
    pub fn daemon(&self, key: &ProjectKey) -> DaemonState {
        let starting = |why: &str| DaemonState::Starting(why.to_owned());
        let Some(project) = self.project(key.as_str()) else { return starting("waiting for the project") };
        let gate = project.status.as_ref().map(|status| status.gate).unwrap_or_default();
        if gate.closed {
            return starting("waiting for the daemon to come back from zero");
        }
        let Some(set) = self.stateful_set(key) else { return starting("waiting for the StatefulSet") };
        // Each watch lags by itself: this copy may be of before the gate was closed.
        if build::epoch(&*set) < gate.epoch || is_of_namesake(&*set, &project.metadata) {
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
        match (current, ready) {
            (true, true) => DaemonState::Ready,
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

    async fn follow_base(
        self: Arc<Self>,
        client: Client,
        name: String,
        first_look: oneshot::Sender<()>,
        shutdown: CancellationToken,
    ) {
        let api = Api::<ConfigMap>::namespaced(client, &self.namespace);
        let mut changes = Box::pin(watch_object(api, &name).default_backoff());
        let mut first_look = Some(first_look);
        while let Some(Some(change)) = shutdown.run_until_cancelled(changes.next()).await {
            match change {
                Ok(map) => self.take_base(&name, map.and_then(|map| map.data).unwrap_or_default()),
                Err(error) => {
                    tracing::warn!(object.kind = "ConfigMap", object.name = name, %error, "watch failed, trying again");
                    continue;
                }
            }
            if let Some(first_look) = first_look.take() {
                let _ = first_look.send(());
            }
            for project in self.projects.state() {
                self.notify(&project.name_any());
            }
        }
    }

    /// A configuration that cannot be read leaves the last one in force.
    fn take_base(&self, name: &str, data: BTreeMap<String, String>) {
        let text = data.get("buildkitd.toml").map_or("", String::as_str);
        let parsed = Base::parse(text, data.get("gc").map(String::as_str));
        let mut base = self.base.lock().unwrap_or_else(PoisonError::into_inner);
        match parsed {
            Ok(new) => *base = (new, None),
            Err(error) => {
                tracing::error!(object.kind = "ConfigMap", object.name = name, %error, "keeping the last configuration");
                base.1 = Some(error);
            }
        }
    }

    async fn follow_projects(self: Arc<Self>, client: Client, shutdown: CancellationToken) {
        let api = Api::<BuildProject>::namespaced(client, &self.namespace);
        let mut events = Box::pin(watcher(api, watcher::Config::default()).default_backoff());
        while let Some(event) = next(&mut events, "BuildProject", &shutdown).await {
            let name = match &event {
                Event::Apply(p) | Event::InitApply(p) | Event::Delete(p) => Some(p.name_any()),
                Event::Init | Event::InitDone => None,
            };
            {
                let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
                writer.apply_watcher_event(&self.newest(event));
            }
            if let Some(name) = name {
                self.notify(&name);
            }
        }
    }

    /// Replaces what a watch says by what is already known, if that is newer:
    /// the answer to a write may overtake the watch.
    fn newest(&self, event: Event<BuildProject>) -> Event<BuildProject> {
        let newer = |p: &BuildProject| {
            let known = self.project(&p.name_any())?;
            (known.metadata.uid == p.metadata.uid && known.version() > p.version()).then(|| (*known).clone())
        };
        match event {
            Event::Apply(p) => Event::Apply(newer(&p).unwrap_or(p)),
            Event::InitApply(p) => Event::InitApply(newer(&p).unwrap_or(p)),
            other => other,
        }
    }

    /// Without permission to read Events only some reasons are missing.
    async fn follow_events(self: Arc<Self>, client: Client, shutdown: CancellationToken) {
        let api = Api::<ClusterEvent>::namespaced(client, &self.namespace);
        let config = watcher::Config::default().fields(signs::SELECTOR);
        let mut events = Box::pin(watcher(api, config).default_backoff());
        while let Some(event) = next(&mut events, "Event", &shutdown).await {
            let (Event::Apply(said) | Event::InitApply(said) | Event::Delete(said)) = &event else { continue };
            let Some((key, sign)) = Sign::read(said) else { continue };
            let news = {
                let mut signs = self.signs();
                if matches!(event, Event::Delete(_)) {
                    let now = self.clock.now();
                    signs.retain(|_, signs| !signs.is_stale(now));
                    false
                } else {
                    signs.entry(key.clone()).or_default().note(sign)
                }
            };
            if news {
                self.notify(&key);
            }
        }
    }

    async fn follow<K>(self: Arc<Self>, client: Client, mut writer: Writer<K>, shutdown: CancellationToken)
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + Sync
            + 'static,
        K::DynamicType: Default + Eq + Hash + Clone,
    {
        let api = Api::<K>::namespaced(client, &self.namespace);
        let config = watcher::Config::default().labels(DAEMON_SELECTOR);
        let stream = watcher(api, config).default_backoff().modify(|object| {
            // Large and never read. Absent, not empty: an empty list in a write would reset it.
            object.meta_mut().managed_fields = None;
        });
        let mut events = Box::pin(stream);
        let kind = K::kind(&K::DynamicType::default()).into_owned();
        while let Some(event) = next(&mut events, &kind, &shutdown).await {
            let key = match &event {
                Event::Apply(o) | Event::InitApply(o) | Event::Delete(o) => o.labels().get(PROJECT_KEY).cloned(),
                Event::Init | Event::InitDone => None,
            };
            writer.apply_watcher_event(&event);
            if let Some(key) = key {
                self.notify(&key);
            }
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

/// The next event of a watch; failures are logged and waited out.
pub(crate) async fn next<K>(
    events: &mut (impl futures::Stream<Item = Result<Event<K>, watcher::Error>> + Unpin),
    kind: &str,
    shutdown: &CancellationToken,
) -> Option<Event<K>> {
    loop {
        let event = tokio::select! {
            event = events.next() => event?,
            () = shutdown.cancelled() => return None,
        };
        match event {
            Ok(event) => return Some(event),
            Err(error) => tracing::warn!(object.kind = kind, %error, "watch failed, trying again"),
        }
    }
}

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
