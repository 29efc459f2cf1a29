//! The harness itself: a test that relies on it is worth what it is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::conditions::is_deleted;
use kube::runtime::wait::await_condition;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use crate::harness::play::Play;
use crate::harness::{Cluster, control_plane, process};

const SOON: Duration = Duration::from_secs(10);

fn object<K: DeserializeOwned>(value: Value) -> anyhow::Result<K> {
    Ok(serde_json::from_value(value)?)
}

fn sleeper(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [{"name": "main", "image": "example.test/none:1"}]},
    })
}

pub(crate) async fn api_answers(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let version = cluster.client().apiserver_version().await?;
    assert_eq!((version.major.as_str(), version.minor.as_str()), ("1", "36"));
    let mut kubectl = cluster.tools().command("kubectl");
    kubectl.args(["get", "namespace", "default", "--output=name"]).arg("--kubeconfig").arg(cluster.kubeconfig());
    assert_eq!(process::output(kubectl).await?.trim(), "namespace/default");
    Ok(())
}

pub(crate) async fn played_pod_becomes_an_endpoint(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let (client, namespaces) = (cluster.client(), cluster.namespaces("endpoint"));
    namespaces.create(&client).await?;
    let play = Play::start(client.clone(), &namespaces.builds, Duration::ZERO);
    let set = object::<StatefulSet>(json!({
        "metadata": {"name": "db"},
        "spec": {
            "replicas": 1, "serviceName": "db", "selector": {"matchLabels": {"app": "db"}},
            "template": {"metadata": sleeper("db")["metadata"], "spec": sleeper("db")["spec"]},
        },
    }))?;
    let service = json!({"metadata": {"name": "db"}, "spec": {"selector": {"app": "db"}, "ports": [{"port": 1234}]}});
    let sets: Api<StatefulSet> = Api::namespaced(client.clone(), &namespaces.builds);
    sets.create(&PostParams::default(), &set).await?;
    let services: Api<Service> = Api::namespaced(client.clone(), &namespaces.builds);
    services.create(&PostParams::default(), &object(service)?).await?;

    let pod = play.wait_ready("db-0", SOON).await?;
    let address = endpoint(client.clone(), &namespaces.builds).await?;
    assert_eq!(address, pod.address);
    // Its address is ours to listen at.
    let listener = tokio::net::TcpListener::bind((address.as_str(), 1234)).await?;
    let accept = tokio::spawn(async move { listener.accept().await });
    let mut stream = tokio::net::TcpStream::connect((address.as_str(), 1234)).await?;
    drop(accept.await??);
    assert_eq!(stream.read(&mut [0; 1]).await?, 0);

    let scale = json!({"spec": {"replicas": 0}});
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespaces.builds);
    let uid = pods.get("db-0").await?.uid().unwrap_or_default();
    sets.patch("db", &PatchParams::default(), &Patch::Merge(scale)).await?;
    tokio::time::timeout(SOON, await_condition(pods, "db-0", is_deleted(&uid))).await??;
    Ok(())
}

/// The first ready address in any slice of the namespace.
async fn endpoint(client: Client, namespace: &str) -> anyhow::Result<String> {
    use futures::TryStreamExt;
    let slices: Api<EndpointSlice> = Api::namespaced(client, namespace);
    let mut slices = std::pin::pin!(watcher(slices, watcher::Config::default()).applied_objects());
    let wait = async {
        while let Some(slice) = slices.try_next().await? {
            let ready =
                slice.endpoints.iter().flatten().find(|endpoint| {
                    endpoint.conditions.as_ref().is_some_and(|conditions| conditions.ready == Some(true))
                });
            if let Some(address) = ready.and_then(|endpoint| endpoint.addresses.first()) {
                return Ok(address.clone());
            }
        }
        anyhow::bail!("the watch ended")
    };
    tokio::time::timeout(SOON, wait).await?
}

pub(crate) async fn play_waits_for_its_switch_and_delay(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let (client, namespaces) = (cluster.client(), cluster.namespaces("play"));
    namespaces.create(&client).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &namespaces.builds);
    let delay = Duration::from_millis(300);
    let play = Play::start(client.clone(), &namespaces.builds, delay);
    let created = Instant::now();
    pods.create(&PostParams::default(), &object(sleeper("slow"))?).await?;
    let ready = play.wait_ready("slow", SOON).await?;
    ensure!(ready.at >= created + delay, "ready after {:?}", ready.at - created);

    play.set_delay(Duration::ZERO);
    play.switch_off();
    pods.create(&PostParams::default(), &object(sleeper("held"))?).await?;
    ensure!(play.wait_ready("held", Duration::from_millis(500)).await.is_err(), "ready although switched off");
    play.switch_on();
    play.wait_ready("held", SOON).await?;

    play.make_unready("held").await?;
    assert_eq!(play.ready("held"), None);
    let conditions = pods.get_status("held").await?.status.and_then(|status| status.conditions).unwrap_or_default();
    assert!(conditions.iter().any(|c| c.type_ == "Ready" && c.status == "False"), "{conditions:?}");
    Ok(())
}

pub(crate) async fn audit_counts_writes_by_user_agent(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let (client, namespaces) = (cluster.client(), cluster.namespaces("audit"));
    namespaces.create(&client).await?;
    let since = Timestamp::now();
    let kubectl = async |arguments: &[&str]| {
        let mut kubectl = cluster.tools().command("kubectl");
        kubectl.arg("--namespace").arg(&namespaces.builds).args(arguments);
        process::output(kubectl).await
    };
    assert_eq!(cluster.audit().writes_by("kubectl/", since).await?, []);
    kubectl(&["create", "configmap", "dry", "--dry-run=server"]).await?;
    kubectl(&["auth", "can-i", "create", "configmaps"]).await?;
    kubectl(&["get", "configmaps"]).await?;
    assert_eq!(cluster.audit().writes_by("kubectl/", since).await?, []);
    kubectl(&["create", "configmap", "one"]).await?;
    kubectl(&["delete", "configmap", "one"]).await?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespaces.builds);
    let other = object(json!({"metadata": {"name": "other"}}))?;
    maps.create(&PostParams::default(), &other).await?;

    let writes = cluster.audit().writes_by("kubectl/", since).await?;
    let seen: Vec<_> =
        writes.iter().map(|w| (w.verb.as_str(), w.resource.as_str(), w.name.as_str(), w.status)).collect();
    assert_eq!(seen, [("create", "configmaps", "one", 201), ("delete", "configmaps", "one", 200)]);
    assert!(writes.iter().all(|write| write.namespace == namespaces.builds), "{writes:?}");
    assert_eq!(cluster.audit().writes_by("kubectl/", Timestamp::now()).await?, []);
    Ok(())
}

pub(crate) async fn claim_binds_to_a_volume(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let (client, namespaces) = (cluster.client(), cluster.namespaces("claim"));
    namespaces.create(&client).await?;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client.clone(), &namespaces.builds);
    let claim = json!({
        "metadata": {"name": "cache"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    });
    claims.create(&PostParams::default(), &object(claim)?).await?;
    let bound = |claim: Option<&PersistentVolumeClaim>| {
        claim.and_then(|claim| claim.status.as_ref()).is_some_and(|status| status.phase.as_deref() == Some("Bound"))
    };
    tokio::time::timeout(SOON, await_condition(claims.clone(), "cache", bound)).await??;
    claims.delete("cache", &DeleteParams::default()).await?;
    Ok(())
}

pub(crate) async fn api_server_comes_back_after_a_crash(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client(), "default");
    let map = object(json!({"metadata": {"name": "survivor"}}))?;
    maps.create(&PostParams::default(), &map).await?;
    let server = &cluster.control_plane().api_server;
    server.kill()?;
    assert!(maps.list(&ListParams::default()).await.is_err());
    server.start_again()?;
    let client = cluster.client();
    server.wait_until(Duration::from_secs(30), async || control_plane::is_ready(&client).await).await?;
    maps.delete("survivor", &DeleteParams::default()).await?;
    Ok(())
}
