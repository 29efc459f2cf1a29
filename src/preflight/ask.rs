//! Asks the cluster what the checks need. Shell; nothing is written.

mod installed;
mod permissions;
mod trial;

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::access::{self, Besides, Purpose};
use super::storage::{self, Caches};
use super::{Check, Finding, Report, daemon, facilities, namespaces, schema};
use crate::cluster::{Answer, Cluster, RequestError};
use crate::families::build_farm::settings::Settings;
use crate::manifest::Rendered;

pub use installed::{after, gateway};
pub use permissions::{known_plurals, needs, permissions, served_plurals};

/// A cluster asked by many at once, within the run's concurrency.
struct Asker<'a> {
    cluster: &'a Cluster,
    rendered: &'a Rendered,
    /// Namespaces as they are; absent from the map when they do not exist.
    live: BTreeMap<String, Value>,
    permits: Semaphore,
}

/// A list that may be kept from us.
enum Listed {
    Items(Vec<Value>),
    /// We may not look.
    Forbidden,
    /// The kind is not served.
    Unserved,
}

/// The proxied name of the routing API's Service.
pub(super) fn route_service() -> String {
    "http:buildkit-operator-buildd:http".to_owned()
}

/// Checks a cluster before an installation of these objects. `besides` is what
/// the run does beside applying them.
///
/// # Errors
/// When the API server does not answer. What it refuses is a finding.
pub async fn before(cluster: &Cluster, rendered: &Rendered, besides: &Besides) -> Result<Report, RequestError> {
    let asker = Asker::new(cluster, rendered).await?;
    let settings = daemon::settings(rendered);
    let settings = settings.as_ref();
    let (version, permissions, storage, facilities, rooms, pods, secrets) = tokio::try_join!(
        asker.version(),
        asker.permissions(besides),
        asker.storage(settings),
        asker.facilities(settings),
        asker.rooms(),
        asker.pods(settings),
        installed::provided(cluster, rendered),
    )?;
    let mut findings = vec![version];
    for more in [permissions, storage, facilities, rooms, pods, secrets, schema::custom_resources(rendered)] {
        findings.extend(more);
    }
    findings.extend(asker.live.iter().filter_map(|(name, live)| namespaces::terminating(name, live)));
    if let Some(settings) = settings.filter(|settings| !asker.is_terminating(&settings.namespace)) {
        let live = asker.live.get(&settings.namespace);
        findings.push(namespaces::pod_security(rendered, &settings.namespace, live));
    }
    Ok(Report::new(findings))
}

impl<'a> Asker<'a> {
    async fn new(cluster: &'a Cluster, rendered: &'a Rendered) -> Result<Self, RequestError> {
        let permits = Semaphore::new(cluster.concurrency());
        let mut asker = Self { cluster, rendered, live: BTreeMap::new(), permits };
        let names: BTreeSet<String> = asker.namespaces();
        let found: Vec<Option<(String, Value)>> = stream::iter(names)
            .map(|name| async {
                Ok(match asker.get(&format!("/api/v1/namespaces/{name}")).await? {
                    Answer::Yes(live) => Some((name, live)),
                    Answer::No { code: 404, .. } => None,
                    // It may well exist: its objects are tried there.
                    Answer::No { .. } => Some((name, Value::Null)),
                })
            })
            .buffer_unordered(cluster.concurrency())
            .try_collect()
            .await?;
        asker.live = found.into_iter().flatten().collect();
        Ok(asker)
    }

    /// Whether nothing can be made in a namespace, which is told already.
    fn is_terminating(&self, namespace: &str) -> bool {
        self.live.get(namespace).is_some_and(namespaces::is_terminating)
    }

    /// Every namespace that objects or pods are in, and our own.
    fn namespaces(&self) -> BTreeSet<String> {
        let of_objects = self.rendered.objects.iter().filter_map(|object| match object.id.kind.as_str() {
            "Namespace" => Some(object.id.name.clone()),
            _ => object.id.namespace.clone(),
        });
        of_objects.chain(access::pod_namespaces(self.rendered)).collect()
    }

    fn missing(&self) -> BTreeSet<String> {
        self.namespaces().into_iter().filter(|name| !self.live.contains_key(name)).collect()
    }

    async fn get(&self, path: &str) -> Result<Answer, RequestError> {
        let _permit = self.permits.acquire().await;
        self.cluster.ask(path).await
    }

    async fn post(&self, what: &str, path: &str, body: &Value) -> Result<Answer, RequestError> {
        let _permit = self.permits.acquire().await;
        self.cluster.ask_with(what, path, body).await
    }

    async fn list(&self, path: &str) -> Result<Listed, RequestError> {
        Ok(match self.get(&format!("{path}?limit=500")).await? {
            Answer::Yes(mut list) => match list["items"].take() {
                Value::Array(items) => Listed::Items(items),
                _ => Listed::Items(Vec::new()),
            },
            Answer::No { code: 404, .. } => Listed::Unserved,
            Answer::No { .. } => Listed::Forbidden,
        })
    }

    async fn version(&self) -> Result<Finding, RequestError> {
        Ok(match self.get("/version").await? {
            Answer::Yes(version) => facilities::version(&version),
            Answer::No { message, .. } => {
                Check::ServerVersion.warn(format!("not known: {message}"), "ask for it by hand")
            }
        })
    }

    async fn permissions(&self, besides: &Besides) -> Result<Vec<Finding>, RequestError> {
        let needs = access::install(self.rendered, &self.known(besides).await?, besides);
        let purposes: &[Purpose] =
            if besides.releases.is_empty() { &[Purpose::Init] } else { &[Purpose::Init, Purpose::Adopt] };
        permissions::reviewed(self.cluster, &self.permits, &needs, purposes).await
    }

    async fn storage(&self, settings: Option<&Settings>) -> Result<Vec<Finding>, RequestError> {
        let Some(settings) = settings else { return Ok(Vec::new()) };
        let caches = Caches::of(settings);
        if caches == Caches::Ephemeral {
            return Ok(storage::classes(caches, &[]));
        }
        let mut findings = match self.list("/apis/storage.k8s.io/v1/storageclasses").await? {
            Listed::Items(mut classes) => {
                classes.extend(self.ours("StorageClass"));
                storage::classes(caches, &classes)
            }
            Listed::Forbidden | Listed::Unserved => {
                vec![Check::StorageClass.unseen("list storageclasses.storage.k8s.io")]
            }
        };
        let snapshots = match self.list("/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses").await? {
            Listed::Items(mut classes) => {
                classes.extend(self.ours("VolumeSnapshotClass"));
                storage::snapshots(caches, Some(&classes))
            }
            Listed::Unserved => storage::snapshots(caches, None),
            Listed::Forbidden => Some(Check::Snapshots.unseen("list volumesnapshotclasses.snapshot.storage.k8s.io")),
        };
        findings.extend(snapshots);
        Ok(findings)
    }

    /// Objects of a kind that come with the installation.
    fn ours(&self, kind: &str) -> impl Iterator<Item = Value> {
        self.rendered
            .objects
            .iter()
            .filter(move |object| object.id.kind == kind)
            .map(|object| Value::clone(&object.body))
    }

    async fn facilities(&self, settings: Option<&Settings>) -> Result<Vec<Finding>, RequestError> {
        let mut findings = Vec::new();
        if let Some(sandbox) = settings.and_then(|settings| settings.sandbox.as_ref()) {
            findings.push(match self.list("/apis/node.k8s.io/v1/runtimeclasses").await? {
                Listed::Items(classes) => facilities::runtime_class(&sandbox.runtime_class, self.rendered, &classes),
                Listed::Forbidden | Listed::Unserved => Check::RuntimeClass.unseen("list runtimeclasses.node.k8s.io"),
            });
        }
        let nodes = match self.list("/api/v1/nodes").await? {
            Listed::Items(nodes) => {
                findings.extend(facilities::nodes(self.rendered, &nodes));
                nodes
            }
            Listed::Forbidden | Listed::Unserved => {
                findings.push(Check::Nodes.unseen("list nodes"));
                Vec::new()
            }
        };
        // Who may not see Services of others sees fewer signs.
        let services = match facilities::load_balancer(self.rendered, &nodes, &[]) {
            None => Vec::new(),
            Some(_) => match self.list("/api/v1/services").await? {
                Listed::Items(services) => services,
                Listed::Forbidden | Listed::Unserved => Vec::new(),
            },
        };
        findings.extend(facilities::load_balancer(self.rendered, &nodes, &services));
        Ok(findings)
    }

    /// Quotas of the namespaces that exist, for the workloads that do not.
    async fn rooms(&self) -> Result<Vec<Finding>, RequestError> {
        let mut findings = Vec::new();
        let usable = |name: &&String| self.live.contains_key(*name) && !self.is_terminating(name);
        for namespace in access::pod_namespaces(self.rendered).iter().filter(usable) {
            match self.list(&format!("/api/v1/namespaces/{namespace}/resourcequotas")).await? {
                Listed::Items(quotas) if quotas.is_empty() => {}
                Listed::Items(quotas) => {
                    let demand = self.demand(namespace).await?;
                    let found = namespaces::quotas(namespace, &quotas, &demand);
                    if found.is_empty() {
                        let message = format!("namespace \"{namespace}\" has room for what is to come");
                        findings.push(Check::Quota.ok(message));
                    }
                    findings.extend(found);
                }
                Listed::Forbidden | Listed::Unserved => {
                    findings.push(Check::Quota.unseen(&format!("list resourcequotas in namespace \"{namespace}\"")));
                }
            }
        }
        Ok(findings)
    }

    async fn demand(&self, namespace: &str) -> Result<BTreeMap<String, f64>, RequestError> {
        let mut new = Vec::new();
        for object in &self.rendered.objects {
            let here = object.id.namespace.as_deref() == Some(namespace);
            if here && object.id.kind == "Deployment" {
                let path = format!("/apis/apps/v1/namespaces/{namespace}/deployments/{}", object.id.name);
                // Pods of one that exists are counted as used.
                if matches!(self.get(&path).await?, Answer::No { .. }) {
                    new.push(&*object.body);
                }
            }
        }
        Ok(namespaces::demand(new.into_iter()))
    }
}
