//! The watches that keep the caches.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Event as ClusterEvent};
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher::{self, Event, watch_object, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::super::api::BuildProject;
use super::super::build::config::Base;
use super::super::build::{DAEMON_SELECTOR, PROJECT_KEY};
use super::super::signs::{self, Sign};
use super::View;

impl View {
    pub(super) async fn follow_base(
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

    pub(super) async fn follow_projects(self: Arc<Self>, client: Client, shutdown: CancellationToken) {
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
    pub(super) async fn follow_events(self: Arc<Self>, client: Client, shutdown: CancellationToken) {
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

    pub(super) async fn follow<K>(self: Arc<Self>, client: Client, mut writer: Writer<K>, shutdown: CancellationToken)
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

/// The next event of a watch; failures are logged and waited out.
pub(crate) async fn next<K>(
    events: &mut (impl futures::Stream<Item = Result<Event<K>, watcher::Error>> + Unpin),
    kind: &str,
    shutdown: &CancellationToken,
) -> Option<Event<K>> {
    loop {
        let event = tokio::select! {
            biased;
            () = shutdown.cancelled() => return None,
            event = events.next() => event?,
        };
        match event {
            Ok(event) => return Some(event),
            Err(error) => tracing::warn!(object.kind = kind, %error, "watch failed, trying again"),
        }
    }
}
