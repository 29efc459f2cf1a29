//! Many objects of one kind, followed by one watch: most of them are ready at
//! once, or together. Who is not is then followed by itself, with its pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use kube::runtime::{watcher, watcher::Event};
use serde_json::Value;

use super::super::apply::Applied;
use super::super::{Cluster, bulk};
use super::follow::{api, to_value};
use crate::manifest::ObjectId;
use crate::readiness::{self, Declared, State};

/// Fewer are followed one by one.
const FEW: usize = 4;

/// How long none of them may become ready before each is followed by itself,
/// which tells causes.
const PATIENCE: Duration = Duration::from_secs(2);

/// An object, and what its component declares of its readiness.
pub(super) type Waiting<'a> = (&'a Applied, Option<&'a Declared>);

/// Waits a moment for many objects, and returns those that are not ready, or
/// of which it cannot be told in this way.
pub(super) async fn together<'a>(cluster: &Cluster, all: impl Iterator<Item = Waiting<'a>>) -> Vec<Waiting<'a>> {
    let mut groups: BTreeMap<_, BTreeMap<&str, Waiting<'a>>> = BTreeMap::new();
    for waiting in all {
        let ObjectId { group, version, kind, namespace, name } = &waiting.0.id;
        groups.entry((group, version, kind, namespace)).or_default().insert(name, waiting);
    }
    let groups = stream::iter(groups.into_values()).map(|mut group| async move {
        if group.len() >= FEW {
            tokio::select! {
                () = follow(cluster, &mut group) => {}
                () = cluster.interrupt.cancelled() => {}
            }
        }
        group.into_values()
    });
    groups.buffer_unordered(cluster.limits.concurrency).flat_map(stream::iter).collect().await
}

/// Takes out what is ready, until nothing is left to be waited for together.
async fn follow(cluster: &Cluster, group: &mut BTreeMap<&str, Waiting<'_>>) {
    let Some(id) = group.values().next().map(|(applied, _)| applied.id.clone()) else { return };
    let Ok(resource) = cluster.resource(&id).await else { return };
    let config = watcher::Config::default().labels(&bulk::selector());
    let mut events = std::pin::pin!(watcher(api(cluster.client.clone(), &id, &resource), config));
    // Those that have to be followed by themselves.
    let mut hopeless = BTreeSet::new();
    let mut listed = BTreeSet::new();
    let mut until = super::super::request::now() + PATIENCE;
    // Who may not list and watch all of a kind, asks for each.
    while let Ok(Some(Ok(event))) = tokio::time::timeout_at(until.min(cluster.limits.deadline), events.next()).await {
        match event {
            Event::InitApply(object) | Event::Apply(object) => {
                let object = to_value(object, &resource);
                let name = object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
                let Some((&name, (applied, declared))) = group.get_key_value(name) else { continue };
                listed.insert(name);
                match readiness::assess_declared(Some(&object), &applied.pin, *declared) {
                    State::Ready => {
                        group.remove(name);
                        until = super::super::request::now() + PATIENCE;
                    }
                    State::Failed(_) => drop(hopeless.insert(name)),
                    State::Pending(_) => {}
                }
            }
            Event::InitDone => hopeless.extend(group.keys().filter(|name| !listed.contains(*name))),
            Event::Delete(_) | Event::Init => {}
        }
        if group.keys().all(|name| hopeless.contains(name)) {
            return;
        }
    }
}
