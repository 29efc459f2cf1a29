//! One object and, for workloads, its pods, followed by watches.

use std::collections::BTreeMap;

use futures::StreamExt as _;
use futures::stream::{BoxStream, select_all};
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, Selector};
use kube::runtime::{WatchStreamExt as _, watcher};
use serde_json::Value;

use super::super::apply::Applied;
use super::super::{Cluster, Event};
use super::WaitError;
use crate::manifest::ObjectId;
use crate::readiness::{self, Around, Culprit, Declared, Pin, State};

/// What is known of one object.
pub(super) struct Follow<'a> {
    cluster: &'a Cluster,
    id: ObjectId,
    pin: Pin,
    declared: Option<Declared>,
    changes: BoxStream<'static, Seen>,
    object: Option<Value>,
    pods: BTreeMap<String, Value>,
    sets: BTreeMap<String, Value>,
    follows_pods: bool,
    failures: Failures,
}

/// Whether a controller's failures to make pods are counted, and what came of it.
enum Failures {
    Uncounted,
    Counted { first: Option<i64>, more: bool },
}

enum Seen {
    Object(Result<Option<Value>, watcher::Error>),
    Part(Part, watcher::Event<Value>),
    /// How often its controller is known to have failed to make a pod.
    Failures(i64),
}

#[derive(Clone, Copy)]
enum Part {
    Pod,
    Set,
}

impl<'a> Follow<'a> {
    pub(super) async fn new(
        cluster: &'a Cluster,
        applied: &Applied,
        declared: Option<Declared>,
    ) -> Result<Self, WaitError> {
        let id = applied.id.clone();
        let resource = cluster.resource(&id).await?;
        let api = api(cluster.client.clone(), &id, &resource);
        let changes = watcher::watch_object(api, &id.name)
            .default_backoff()
            .map(move |change| Seen::Object(change.map(|object| object.map(|object| to_value(object, &resource)))));
        Ok(Self {
            cluster,
            id,
            pin: applied.pin.clone(),
            declared,
            changes: changes.boxed(),
            object: None,
            pods: BTreeMap::new(),
            sets: BTreeMap::new(),
            follows_pods: false,
            failures: Failures::Uncounted,
        })
    }

    /// What is known after the next change.
    pub(super) async fn next(&mut self) -> Result<(State, Option<Culprit>), WaitError> {
        loop {
            match self.changes.next().await {
                Some(Seen::Object(Ok(object))) => {
                    self.object = object;
                    let last = self.last();
                    // What is ready needs no explanation.
                    if last.0 == State::Ready {
                        return Ok(last);
                    }
                    self.follow_pods();
                }
                Some(Seen::Part(part, event)) => self.note(part, event),
                Some(Seen::Failures(now)) => {
                    if let Failures::Counted { first, more } = &mut self.failures {
                        *more |= now > *first.get_or_insert(now);
                    }
                }
                Some(Seen::Object(Err(error))) => {
                    self.tolerate(error)?;
                    continue;
                }
                None => return Err(WaitError::Interrupted),
            }
            self.count_failures();
            return Ok(self.last());
        }
    }

    /// Looks whether the controller fails again, once it is of account.
    fn count_failures(&mut self) {
        let (Failures::Uncounted, Some(_), Some(namespace)) =
            (&self.failures, &self.pin.failing_since, &self.id.namespace)
        else {
            return;
        };
        let failures = failures(self.cluster.clone(), namespace.clone(), format!("{}-", self.id.name));
        let changes = std::mem::replace(&mut self.changes, futures::stream::empty().boxed());
        self.changes = select_all([changes, failures]).boxed();
        self.failures = Failures::Counted { first: None, more: false };
    }

    /// What is known now.
    pub(super) fn last(&self) -> (State, Option<Culprit>) {
        let sets: Vec<&Value> = self.sets.values().collect();
        let failed_again = matches!(self.failures, Failures::Counted { more: true, .. });
        let around = Around { sets: &sets, failed_again };
        let state = readiness::assess_among(self.object.as_ref(), &self.pin, self.declared.as_ref(), around);
        if state == State::Ready || !self.is_seen() {
            return (state, None);
        }
        let culprit = self.object.as_ref().and_then(|o| readiness::culprit(o, &sets, self.pods.values()));
        (state, culprit)
    }

    /// Whether the workload's controller has seen what was applied: before, its
    /// pods are those of an older revision.
    fn is_seen(&self) -> bool {
        let field = |pointer| self.object.as_ref().and_then(|o: &Value| o.pointer(pointer)).and_then(Value::as_i64);
        match field("/status/observedGeneration") {
            Some(observed) => Some(observed) >= field("/metadata/generation") && Some(observed) >= self.pin.generation,
            None => self.id.kind == "Job",
        }
    }

    /// Watching goes on by itself; only what will never work ends it.
    fn tolerate(&self, error: watcher::Error) -> Result<(), WaitError> {
        let refused = match &error {
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => matches!(status.code, 401 | 403 | 404),
            _ => false,
        };
        if refused {
            return Err(WaitError::Watch { object: Box::new(self.id.clone()), source: Box::new(error) });
        }
        let request = format!("watch {}", self.id);
        self.cluster.report(Event::Retrying { request, why: error.to_string(), delay_ms: 0 });
        Ok(())
    }

    fn note(&mut self, part: Part, event: watcher::Event<Value>) {
        let known = match part {
            Part::Pod => &mut self.pods,
            Part::Set => &mut self.sets,
        };
        let name = |o: &Value| o.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default().to_owned();
        match event {
            watcher::Event::Init => known.clear(),
            watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
                known.insert(name(&object), object);
            }
            watcher::Event::Delete(object) => {
                known.remove(&name(&object));
            }
            watcher::Event::InitDone => {}
        }
    }

    /// Adds watches on the pods of a workload, once its selector is known.
    fn follow_pods(&mut self) {
        if self.follows_pods {
            return;
        }
        let (Some(object), Some(namespace)) = (&self.object, &self.id.namespace) else { return };
        let Some(selector) = object.pointer("/spec/selector").filter(|s| s.is_object() && self.id.kind != "Service")
        else {
            return;
        };
        let Some(selector) = serde_json::from_value::<LabelSelector>(selector.clone())
            .ok()
            .and_then(|selector| Selector::try_from(selector).ok())
        else {
            return;
        };
        let client = &self.cluster.client;
        let config = watcher::Config::default().labels_from(&selector);
        let mut streams = vec![std::mem::replace(&mut self.changes, futures::stream::empty().boxed())];
        streams.push(parts(Api::<Pod>::namespaced(client.clone(), namespace), config.clone(), Part::Pod));
        if self.id.kind == "Deployment" {
            streams.push(parts(Api::<ReplicaSet>::namespaced(client.clone(), namespace), config, Part::Set));
        }
        self.changes = select_all(streams).boxed();
        self.follows_pods = true;
    }
}

/// How often a Deployment's ReplicaSets have failed to make a pod, every other
/// second. Who may not list Events is told when the deadline passes.
fn failures(cluster: Cluster, namespace: String, prefix: String) -> BoxStream<'static, Seen> {
    let look = async |(cluster, namespace, prefix): (Cluster, String, String)| {
        tokio::time::sleep(LOOK).await;
        let count = cluster.failed_creations(&namespace, &prefix).await;
        Some((count.map(Seen::Failures), (cluster, namespace, prefix)))
    };
    futures::stream::unfold((cluster, namespace, prefix), look).filter_map(std::future::ready).boxed()
}

/// Between two looks at Events.
const LOOK: std::time::Duration = std::time::Duration::from_secs(2);

/// Changes of a workload's parts. Who may not see them loses the explanation,
/// not the answer.
fn parts<K>(api: Api<K>, config: watcher::Config, part: Part) -> BoxStream<'static, Seen>
where
    K: kube::Resource + serde::Serialize + serde::de::DeserializeOwned + Clone + std::fmt::Debug + Send + 'static,
{
    let value = |object: K| serde_json::to_value(object).unwrap_or_default();
    watcher(api, config)
        .default_backoff()
        .filter_map(move |event| {
            let event = event.ok().map(|event| match event {
                watcher::Event::Apply(object) => watcher::Event::Apply(value(object)),
                watcher::Event::InitApply(object) => watcher::Event::InitApply(value(object)),
                watcher::Event::Delete(object) => watcher::Event::Delete(value(object)),
                watcher::Event::Init => watcher::Event::Init,
                watcher::Event::InitDone => watcher::Event::InitDone,
            });
            std::future::ready(event.map(|event| Seen::Part(part, event)))
        })
        .boxed()
}

pub(super) fn api(client: kube::Client, id: &ObjectId, resource: &ApiResource) -> Api<DynamicObject> {
    match &id.namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, resource),
        None => Api::all_with(client, resource),
    }
}

/// Items of a list carry neither `apiVersion` nor `kind`.
pub(super) fn to_value(mut object: DynamicObject, resource: &ApiResource) -> Value {
    object.types =
        Some(kube::core::TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() });
    serde_json::to_value(object).unwrap_or_default()
}
