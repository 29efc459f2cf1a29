//! What keeps a daemon that no entry stands for.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use axum::routing::get;
use axum::{Json, Router};
use bko_install::families::build_farm::api::Phase;
use bko_install::gateway::streams::{PATH, Summary};
use bko_install::runtime::internal::guarded;
use jiff::Timestamp;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::{ListParams, PostParams};
use serde_json::json;
use tokio::net::TcpListener;

use crate::farm::{self, KEY, REPO, Server};
use crate::harness::Cluster;
use crate::routes::{Farm, POD, SOON, farm, phase};

/// Longer than the idle time, a look, and the quiet that is waited for.
const HELD: Duration = Duration::from_secs(5);
const TOKEN: (&str, &str) = ("BUILDKIT_OPERATOR_INTERNAL_TOKEN", "between us");
const API_TOKEN: (&str, &str) = ("BUILDKIT_OPERATOR_AUTH_TOKEN", "for callers");

async fn used_and_released(server: &Server) -> anyhow::Result<()> {
    server.complete(&server.route(REPO).await?).await
}

async fn held(cluster: &Cluster, farm: &Farm, by: &str) -> anyhow::Result<()> {
    let pod = farm.play.wait_ready(POD, SOON).await?;
    tokio::time::sleep(HELD).await;
    ensure!(farm::replicas(cluster, &farm.namespace, KEY).await? == 1, "taken down in spite of {by}");
    ensure!(farm.play.ready(POD).as_ref() == Some(&pod), "restarted in spite of {by}");
    Ok(())
}

async fn goes_idle(cluster: &Cluster, farm: &Farm) -> anyhow::Result<()> {
    farm::until(cluster, &farm.namespace, KEY, "idle", |p| phase(p) == Some(Phase::Idle)).await?;
    ensure!(farm::replicas(cluster, &farm.namespace, KEY).await? == 0, "the daemon still runs");
    Ok(())
}

/// It dialled the daemon itself, or its entry was lost.
pub(crate) async fn a_build_that_nobody_registered_keeps_its_daemon(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "unregistered").await?;
    let server = Server::start(&cluster, &farm.flags(&["--idle-seconds=1"])).await?;
    farm.play.builds().set(&["a-build"]);
    used_and_released(&server).await?;
    farm::until(&cluster, &farm.namespace, KEY, "warm", |p| phase(p) == Some(Phase::Warm)).await?;
    let since = Timestamp::now();
    held(&cluster, &farm, "a build").await?;
    ensure!(server.metric("buildkit_operator_scale_down_deferrals_total{by=\"builds\"}").await? >= 1.0);
    let writes = cluster.audit().writes_by("bko-install", since).await?;
    let writes: Vec<_> = writes.iter().filter(|w| w.namespace == farm.namespace).collect();
    ensure!(writes.is_empty(), "to look again costs writes: {writes:?}");
    farm.play.builds().set(&[]);
    goes_idle(&cluster, &farm).await
}

/// A gateway as the controller sees it.
struct FakeGateway {
    summary: Arc<Mutex<Summary>>,
}

impl FakeGateway {
    /// Lists a gateway pod that nobody has started.
    async fn list(cluster: &Cluster, namespace: &str, address: &str) -> anyhow::Result<()> {
        let slice: EndpointSlice = serde_json::from_value(json!({
            "metadata": {"name": "gateway", "labels": {"kubernetes.io/service-name": "buildkit-operator-gateway"}},
            "addressType": "IPv4", "ports": [{"name": "sni", "port": 1234}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": true},
                           "targetRef": {"kind": "Pod", "name": "gateway-1"}}],
        }))?;
        Api::namespaced(cluster.client(), namespace).create(&PostParams::default(), &slice).await?;
        Ok(())
    }

    async fn start(address: &str) -> anyhow::Result<Self> {
        let summary = Arc::new(Mutex::new(Summary::default()));
        let listener = TcpListener::bind((address, 8081)).await?;
        let told = summary.clone();
        let tell = get(move || async move { Json(json!({format!("buildkitd-{KEY}"): *told.lock().unwrap()})) });
        let app = guarded(Some(TOKEN.1.parse()?), Router::new().route(PATH, tell));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { summary })
    }

    fn says(&self, open: usize) {
        *self.summary.lock().unwrap() = Summary { open, idle_ms: 0 };
    }
}

pub(crate) async fn who_does_not_answer_keeps_the_daemon(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    const GATEWAY: &str = "10.244.250.1";
    let farm = farm(&cluster, "silent").await?;
    FakeGateway::list(&cluster, &farm.operator, GATEWAY).await?;
    let server = Server::with(&cluster, &farm.flags(&["--idle-seconds=1"]), &[TOKEN, API_TOKEN]).await?;
    used_and_released(&server).await?;
    held(&cluster, &farm, "a gateway that does not answer").await?;
    ensure!(server.metric("buildkit_operator_scale_down_deferrals_total{by=\"silence\"}").await? >= 1.0);

    let gateway = FakeGateway::start(GATEWAY).await?;
    gateway.says(1);
    // Until the next look, and beyond it.
    tokio::time::sleep(Duration::from_secs(10)).await;
    held(&cluster, &farm, "a stream").await?;
    ensure!(server.metric("buildkit_operator_scale_down_deferrals_total{by=\"stream\"}").await? >= 1.0);
    gateway.says(0);
    goes_idle(&cluster, &farm).await?;

    used_and_released(&server).await?;
    farm.play.wait_ready(POD, SOON).await?;
    farm.play.silence(POD);
    held(&cluster, &farm, "a companion that does not answer").await
}

/// No route waits while it is asked whether a daemon is quiet.
pub(crate) async fn a_route_ends_the_asking_at_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "asking").await?;
    let flags = farm.flags(&["--idle-seconds=0", "--gateway-host=builds.example.test"]);
    let server = Server::start(&cluster, &flags).await?;
    used_and_released(&server).await?;
    let mut took = Vec::new();
    for round in 1..=5 {
        farm::until(&cluster, &farm.namespace, KEY, "asked", |p| p.status_or_default().gate.closed).await?;
        let pod = farm.play.wait_ready(POD, SOON).await?;
        // In the middle of the two seconds that it must be quiet for.
        tokio::time::sleep(Duration::from_millis(200 * round)).await;
        let begun = Instant::now();
        let answer = server.route(REPO).await?;
        took.push(begun.elapsed());
        ensure!(farm.play.ready(POD).as_ref() == Some(&pod), "round {round}: another pod");
        let gate = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?.gate;
        ensure!(!gate.closed, "round {round}: {gate:?}");
        server.complete(&answer).await?;
    }
    eprintln!("routes while a daemon is asked: {took:?}");
    ensure!(took.iter().all(|took| *took < Duration::from_millis(500)), "{took:?}");
    Ok(())
}

/// How many addresses its Service leads to.
async fn endpoints(cluster: &Cluster, farm: &Farm) -> anyhow::Result<usize> {
    let service = ListParams::default().labels(&format!("kubernetes.io/service-name=buildkitd-{KEY}"));
    let slices = Api::<EndpointSlice>::namespaced(cluster.client(), &farm.namespace).list(&service).await?;
    Ok(slices.iter().flat_map(|slice| slice.endpoints.iter().flatten()).map(|endpoint| endpoint.addresses.len()).sum())
}

async fn until_endpoints(cluster: &Cluster, farm: &Farm, wanted: usize) -> anyhow::Result<()> {
    let reached = async {
        while endpoints(cluster, farm).await? != wanted {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(10), reached).await.with_context(|| format!("not {wanted} endpoints"))?
}

/// Before it is asked for the last time whether anything runs there, nobody can
/// reach the daemon by its name any more; when it is kept, or comes back, one can.
pub(crate) async fn nobody_is_let_in_while_the_gate_is_closed(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "shut").await?;
    let server = Server::start(&cluster, &farm.flags(&["--idle-seconds=0"])).await?;
    used_and_released(&server).await?;
    let pod = farm.play.wait_ready(POD, SOON).await?;
    farm::until(&cluster, &farm.namespace, KEY, "asked", |p| p.status_or_default().gate.closed).await?;
    until_endpoints(&cluster, &farm, 0).await?;
    ensure!(farm::replicas(&cluster, &farm.namespace, KEY).await? == 1, "taken down before its endpoint had gone");
    ensure!(farm.play.ready(POD).as_ref() == Some(&pod), "its pod ended before its endpoint had gone");

    let answer = server.route(REPO).await?;
    ensure!(farm.play.ready(POD).as_ref() == Some(&pod), "another pod");
    until_endpoints(&cluster, &farm, 1).await?;
    server.complete(&answer).await?;
    goes_idle(&cluster, &farm).await?;
    until_endpoints(&cluster, &farm, 0).await?;
    server.route(REPO).await?;
    until_endpoints(&cluster, &farm, 1).await
}

pub(crate) async fn an_entry_that_nobody_uses_expires_early(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "unused").await?;
    let flags = ["--idle-seconds=1", "--unused-entry-seconds=3"];
    let server = Server::start(&cluster, &farm.flags(&flags)).await?;
    farm.play.builds().set(&["a-build"]);
    server.route(REPO).await?;
    tokio::time::sleep(HELD).await;
    let entries = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?.inflight;
    ensure!(entries.len() == 1, "released under a build");

    farm.play.builds().set(&[]);
    let other = server.route("acme/other").await?;
    let key = other["key"].as_str().context("no key")?;
    farm::until(&cluster, &farm.namespace, key, "released", |p| p.status_or_default().inflight.is_empty()).await?;
    farm::until(&cluster, &farm.namespace, key, "idle", |p| phase(p) == Some(Phase::Idle)).await.map(|_| ())
}
