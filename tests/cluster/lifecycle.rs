//! What keeps a daemon, what rolls it, and what is told of both.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::{BuildProject, Phase};
use bko_install::names::CONTROLLER_MANAGER;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Event as CoreEvent, Pod, ResourceQuota};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, EvictParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Config, ResourceExt};
use serde_json::{Value, json};

use crate::farm::{self, KEY, REPO, Server};
use crate::harness::Cluster;
use crate::harness::play::NODE;
use crate::routes::{Farm, SOON, farm};

const DAEMON: &str = "buildkitd-p41bd34a2227aca39";
const POD: &str = "buildkitd-p41bd34a2227aca39-0";
const HELD: &str = "buildkit-operator.socialgouv.github.io/roll-held-since";

/// What BF-30 allows from the fault being seen to the answer.
const TOLD: Duration = Duration::from_secs(10);

fn body() -> Value {
    json!({"repo": REPO, "arch": "amd64"})
}

/// Waits for an object to look as wanted.
async fn until<K>(api: Api<K>, name: &str, what: &str, wanted: impl Fn(Option<&K>) -> bool + Send) -> anyhow::Result<()>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let wait = await_condition(api, name, |object: Option<&K>| wanted(object));
    tokio::time::timeout(Duration::from_secs(30), wait).await.with_context(|| format!("{name} is not {what}"))??;
    Ok(())
}

fn api<K>(cluster: &Cluster, farm: &Farm) -> Api<K>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(cluster.client(), &farm.namespace)
}

/// Says of a pod what a kubelet or scheduler would.
async fn play_status(cluster: &Cluster, farm: &Farm, status: &Value) -> anyhow::Result<()> {
    let pods = api::<Pod>(cluster, farm);
    until(pods.clone(), POD, "there", |pod: Option<&Pod>| pod.is_some()).await?;
    pods.patch_status(POD, &PatchParams::default(), &Patch::Strategic(json!({"status": status}))).await?;
    Ok(())
}

fn container(state: Value, last: Value, restarts: i32) -> Value {
    json!([{"name": "buildkitd", "image": "x", "imageID": "", "ready": false, "restartCount": restarts,
        "state": state, "lastState": last}])
}

/// `reason of a condition`, for example of `Degraded`; empty unless it holds.
fn reason(project: &BuildProject, condition: &str) -> String {
    let status = project.status_or_default();
    let found = status.conditions.into_iter().find(|c| c.type_ == condition && c.status == "True");
    found.map(|c| c.reason).unwrap_or_default()
}

/// Events about the project: how often each reason was told.
async fn told(cluster: &Cluster, farm: &Farm) -> anyhow::Result<BTreeMap<String, i32>> {
    let events = api::<Event>(cluster, farm).list(&ListParams::default()).await?;
    let about = events.items.into_iter().filter(|event| {
        event.regarding.as_ref().is_some_and(|r| r.kind.as_deref() == Some("BuildProject"))
            && event.reporting_controller.as_deref() == Some(CONTROLLER_MANAGER)
    });
    let count = |event: &Event| event.series.as_ref().map_or(1, |series| series.count);
    let mut told = BTreeMap::new();
    for event in about {
        *told.entry(event.reason.clone().unwrap_or_default()).or_default() += count(&event);
    }
    Ok(told)
}

async fn until_told(cluster: &Cluster, farm: &Farm, reason: &str) -> anyhow::Result<BTreeMap<String, i32>> {
    for _ in 0..100 {
        let told = told(cluster, farm).await?;
        if told.contains_key(reason) {
            return Ok(told);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("no Event {reason}: {:?}", told(cluster, farm).await?)
}

pub(crate) async fn an_eviction_is_refused_during_a_build_and_granted_after(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = farm(&cluster, "evict").await?;
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    let answer = server.route(REPO).await?;
    let budgets = api::<PodDisruptionBudget>(&cluster, &farm);
    until(budgets.clone(), DAEMON, "guarding the pod", |budget: Option<&PodDisruptionBudget>| {
        budget.and_then(|b| b.status.as_ref()).is_some_and(|s| s.current_healthy == Some(1))
    })
    .await?;
    // A refusal by a budget looks like throttling: the client would try again.
    let mut config =
        Config::from_custom_kubeconfig(Kubeconfig::read_from(cluster.kubeconfig())?, &KubeConfigOptions::default())
            .await?;
    config.default_retry = false;
    let pods = Api::<Pod>::namespaced(Client::try_from(config)?, &farm.namespace);
    let refused = pods.evict(POD, &EvictParams::default()).await.err().context("evicted under a build")?;
    ensure!(matches!(&refused, kube::Error::Api(status) if status.code == 429), "{refused}");
    server.complete(&answer).await?;
    until(budgets, DAEMON, "gone", |budget: Option<&PodDisruptionBudget>| budget.is_none()).await?;
    pods.evict(POD, &EvictParams::default()).await.context("an idle daemon was not evicted")?;
    Ok(())
}

pub(crate) async fn builds_in_a_row_share_one_budget(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "budget").await?;
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    let since = Timestamp::now();
    for _ in 0..8 {
        server.complete(&server.route(REPO).await?).await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let gone = |budget: Option<&PodDisruptionBudget>| budget.is_none();
    until(api(&cluster, &farm), DAEMON, "gone", gone).await?;
    let writes = cluster.audit().writes_by(CONTROLLER_MANAGER, since).await?;
    let writes: Vec<_> =
        writes.iter().filter(|w| w.namespace == farm.namespace && w.resource == "poddisruptionbudgets").collect();
    ensure!(writes.len() == 2, "{writes:?}");
    Ok(())
}

pub(crate) async fn a_quota_fails_the_route_with_its_reason(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "quota").await?;
    let quotas = api::<ResourceQuota>(&cluster, &farm);
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
    quotas.create(&PostParams::default(), &serde_json::from_value(quota)?).await?;
    until(quotas.clone(), "none", "in force", |q: Option<&ResourceQuota>| {
        q.and_then(|q| q.status.as_ref()).is_some_and(|s| s.hard.is_some())
    })
    .await?;
    let server = Server::start(&cluster, &farm.flags(&["--route-wait=60s"])).await?;
    let begun = Instant::now();
    let (status, text) = server.post("/route", &body()).await?;
    let took = begun.elapsed();
    ensure!(status == 503 && text.to_string().contains("exceeded quota") && took < TOLD, "{status} {text} {took:?}");
    let degraded = |p: &BuildProject| reason(p, "Degraded") == "QuotaExceeded";
    let project = farm::until(&cluster, &farm.namespace, KEY, "degraded", degraded).await?;
    ensure!(project.status_or_default().phase == Some(Phase::Failed));
    ensure!(project.status_or_default().inflight.is_empty(), "the failed route still holds the daemon");
    until_told(&cluster, &farm, "QuotaExceeded").await?;
    quotas.delete("none", &DeleteParams::default()).await?;
    farm::until(&cluster, &farm.namespace, KEY, "warm", |p| p.status_or_default().phase == Some(Phase::Warm)).await?;
    let told = until_told(&cluster, &farm, "DaemonReady").await?;
    ensure!(told.get("QuotaExceeded") == Some(&1), "{told:?}");
    server.route(REPO).await.map(|_| ())
}

pub(crate) async fn a_claim_that_cannot_be_bound_fails_the_route(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "claim").await?;
    farm.play.switch_off();
    let flags = farm.flags(&["--route-wait=60s", "--default-storage-class=absent"]);
    let server = Server::start(&cluster, &flags).await?;
    let begun = Instant::now();
    let (status, text) = server.post("/route", &body()).await?;
    let took = begun.elapsed();
    ensure!(status == 503 && text.to_string().contains("absent") && took < TOLD, "{status} {text} {took:?}");
    let degraded = |p: &BuildProject| reason(p, "Degraded") == "VolumeNotBound";
    farm::until(&cluster, &farm.namespace, KEY, "degraded", degraded).await.map(|_| ())
}

pub(crate) async fn a_pod_that_no_node_takes_fails_the_route_unless_a_node_is_coming(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = farm(&cluster, "nodes").await?;
    farm.play.switch_off();
    let server = Server::start(&cluster, &farm.flags(&["--route-wait=60s"])).await?;
    let refused = json!({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient memory."}]});
    let request = body();
    let first = async {
        let answer = server.post("/route", &request).await?;
        anyhow::Ok((answer, Instant::now()))
    };
    let scheduler = async {
        play_status(&cluster, &farm, &refused).await?;
        anyhow::Ok(Instant::now())
    };
    let (answer, seen) = tokio::join!(first, scheduler);
    let (((status, text), answered), seen) = (answer?, seen?);
    ensure!(status == 503 && text.to_string().contains("Insufficient memory"), "{status} {text}");
    ensure!(answered.duration_since(seen) < TOLD, "{:?}", answered.duration_since(seen));

    let event = json!({"metadata": {"name": "scale-up", "namespace": farm.namespace}, "reason": "TriggeredScaleUp",
        "message": "pod triggered scale-up", "type": "Normal", "lastTimestamp": Timestamp::now().to_string(),
        "involvedObject": {"kind": "Pod", "name": POD, "namespace": farm.namespace}});
    let events = api::<CoreEvent>(&cluster, &farm);
    events.create(&PostParams::default(), &serde_json::from_value(event)?).await?;
    let troubled = |p: &BuildProject| reason(p, "Progressing") == "Unschedulable";
    farm::until(&cluster, &farm.namespace, KEY, "waiting for a node", troubled).await?;
    let waiting = server.route(REPO);
    let node = async {
        tokio::time::sleep(TOLD).await;
        farm.play.switch_on();
    };
    let (answer, ()) = tokio::join!(waiting, node);
    answer.map(|_| ())
}

/// B28: after the loss of a node its volumes are free only minutes later.
pub(crate) async fn a_volume_that_another_node_holds_fails_the_route_until_it_is_free(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = farm(&cluster, "detach").await?;
    farm.play.switch_off();
    let server = Server::start(&cluster, &farm.flags(&["--route-wait=60s"])).await?;
    let request = body();
    let route = async {
        let answer = server.post("/route", &request).await?;
        anyhow::Ok((answer, Instant::now()))
    };
    let controllers = async {
        play_status(&cluster, &farm, &json!({"phase": "Pending"})).await?;
        let node = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": POD},
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE}});
        let bind = axum::http::Request::post(format!("/api/v1/namespaces/{}/pods/{POD}/binding", farm.namespace))
            .header("content-type", "application/json")
            .body(node.to_string().into_bytes())?;
        cluster.client().request_text(bind).await?;
        let event = json!({"metadata": {"name": "attach", "namespace": farm.namespace}, "reason": "FailedAttachVolume",
            "message": "Multi-Attach error for volume \"pvc-1\" Volume is already exclusively attached to one node",
            "type": "Warning", "lastTimestamp": Timestamp::now().to_string(),
            "involvedObject": {"kind": "Pod", "name": POD, "namespace": farm.namespace}});
        let events = api::<CoreEvent>(&cluster, &farm);
        events.create(&PostParams::default(), &serde_json::from_value(event)?).await?;
        anyhow::Ok(Instant::now())
    };
    let (answer, seen) = tokio::join!(route, controllers);
    let (((status, text), answered), seen) = (answer?, seen?);
    ensure!(status == 503 && text.to_string().contains("WaitingForDetach: Multi-Attach"), "{status} {text}");
    ensure!(answered.duration_since(seen) < TOLD, "{:?}", answered.duration_since(seen));
    let degraded = |p: &BuildProject| reason(p, "Degraded") == "WaitingForDetach";
    farm::until(&cluster, &farm.namespace, KEY, "waiting for the detach", degraded).await?;
    // It is free: the pod starts, and what was answered before does not matter.
    farm.play.switch_on();
    let warm = |p: &BuildProject| p.status_or_default().phase == Some(Phase::Warm);
    farm::until(&cluster, &farm.namespace, KEY, "warm", warm).await?;
    server.route(REPO).await.map(|_| ())
}

pub(crate) async fn an_image_that_is_missing_fails_the_route_and_a_slow_registry_does_not(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = farm(&cluster, "image").await?;
    farm.play.switch_off();
    let server = Server::start(&cluster, &farm.flags(&["--route-wait=60s"])).await?;
    let pull = |reason: &str, message: &str| {
        let state = json!({"waiting": {"reason": reason, "message": message}});
        json!({"phase": "Pending", "containerStatuses": container(state, json!({}), 0)})
    };
    let slow = pull("ErrImagePull", "dial tcp 192.0.2.1:443: i/o timeout");
    let missing = pull("ImagePullBackOff", "Back-off pulling image \"x\": ErrImagePull: x: not found");
    let request = body();
    let route = async {
        let answer = server.post("/route", &request).await?;
        anyhow::Ok((answer, Instant::now()))
    };
    let kubelet = async {
        play_status(&cluster, &farm, &slow).await?;
        tokio::time::sleep(TOLD).await;
        let seen = Instant::now();
        play_status(&cluster, &farm, &missing).await?;
        anyhow::Ok(seen)
    };
    let (answer, seen) = tokio::join!(route, kubelet);
    let (((status, text), answered), seen) = (answer?, seen?);
    ensure!(status == 503 && text.to_string().contains("not found"), "{status} {text}");
    let told = answered.checked_duration_since(seen).context("answered while the registry was slow")?;
    ensure!(told < TOLD, "{told:?}");
    Ok(())
}

fn image(set: Option<&StatefulSet>) -> Option<String> {
    set?.spec.as_ref()?.template.spec.as_ref()?.containers.first()?.image.clone()
}

pub(crate) async fn a_changed_template_waits_for_the_builds_in_flight(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "roll").await?;
    let old = Server::start(&cluster, &farm.flags(&["--idle-seconds=2", "--shutdown-delay-seconds=0"])).await?;
    let build = old.route(REPO).await?;
    let pod = farm.play.wait_ready(POD, SOON).await?;
    old.terminate().await?;
    let new = Server::start(&cluster, &farm.flags(&["--idle-seconds=2", "--buildkit-image=example.org/new:1"])).await?;
    let sets = api::<StatefulSet>(&cluster, &farm);
    until(sets.clone(), DAEMON, "held", |set: Option<&StatefulSet>| {
        set.is_some_and(|set| set.annotations().contains_key(HELD))
    })
    .await?;
    let held = |p: &BuildProject| reason(p, "Progressing") == "RollHeld" && reason(p, "Ready") == "DaemonReady";
    farm::until(&cluster, &farm.namespace, KEY, "held and ready", held).await?;
    ensure!(new.metric("buildkit_operator_daemon_rolls_held").await? >= 1.0);
    tokio::time::sleep(Duration::from_secs(3)).await;
    ensure!(image(Some(&sets.get(DAEMON).await?)).is_some_and(|image| image.contains("moby")), "rolled under a build");
    ensure!(farm.play.ready(POD).as_ref() == Some(&pod), "the pod was replaced under a build");
    new.complete(&build).await?;
    until(sets, DAEMON, "new, with nothing held", |set: Option<&StatefulSet>| {
        image(set).as_deref() == Some("example.org/new:1")
            && set.is_some_and(|set| !set.annotations().contains_key(HELD))
    })
    .await?;
    let told = until_told(&cluster, &farm, "ScaledToZero").await?;
    ensure!(told.get("RollHeld") == Some(&1), "{told:?}");
    ensure!(new.metric("buildkit_operator_daemon_rolls_held").await? < 1.0);
    new.route(REPO).await.map(|_| ())
}

pub(crate) async fn a_broken_daemon_on_an_old_template_is_rolled_at_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "broken").await?;
    let old = Server::start(&cluster, &farm.flags(&["--shutdown-delay-seconds=0"])).await?;
    old.route(REPO).await?;
    let before = farm.play.wait_ready(POD, SOON).await?;
    farm.play.make_unready(POD).await?;
    let last = json!({"terminated": {"exitCode": 1, "reason": "Error", "containerID": "containerd://a",
        "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z"}});
    let state = json!({"waiting": {"reason": "CrashLoopBackOff"}, "running": null});
    play_status(&cluster, &farm, &json!({"containerStatuses": container(state, last, 3)})).await?;
    let degraded = |p: &BuildProject| reason(p, "Degraded") == "CrashLooping";
    farm::until(&cluster, &farm.namespace, KEY, "degraded", degraded).await?;
    let (status, text) = old.post("/route", &body()).await?;
    ensure!(status == 503 && text.to_string().contains("CrashLooping"), "{status} {text}");
    old.terminate().await?;
    let _new = Server::start(&cluster, &farm.flags(&["--buildkit-image=example.org/new:1"])).await?;
    let warm = |p: &BuildProject| p.status_or_default().phase == Some(Phase::Warm);
    let project = farm::until(&cluster, &farm.namespace, KEY, "warm again", warm).await?;
    ensure!(reason(&project, "Degraded").is_empty());
    ensure!(farm.play.wait_ready(POD, SOON).await? != before, "still the broken pod");
    let set = api::<StatefulSet>(&cluster, &farm).get(DAEMON).await?;
    ensure!(image(Some(&set)).as_deref() == Some("example.org/new:1"));
    let told = until_told(&cluster, &farm, "Rolled").await?;
    ensure!(told.get("CrashLooping") == Some(&1), "{told:?}");
    Ok(())
}

pub(crate) async fn the_steps_of_a_daemons_life_are_told_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "events").await?;
    let server = Server::start(&cluster, &farm.flags(&["--idle-seconds=2"])).await?;
    for _ in 0..5 {
        server.complete(&server.route(REPO).await?).await?;
    }
    let warm = |p: &BuildProject| reason(p, "Ready") == "DaemonReady";
    let project = farm::until(&cluster, &farm.namespace, KEY, "warm", warm).await?;
    let conditions = project.status_or_default().conditions;
    let types: Vec<&str> = conditions.iter().map(|c| c.type_.as_str()).collect();
    ensure!(types == ["Ready", "Progressing", "Degraded"], "{types:?}");
    ensure!(conditions.iter().all(|c| c.observed_generation == project.metadata.generation && !c.message.is_empty()));
    let mut told = until_told(&cluster, &farm, "ScaledToZero").await?;
    // A daemon may be made at zero, when it is made before the build is registered.
    let first = told.remove("ScaledUp").unwrap_or(0);
    let expected = ["DaemonCreated", "DaemonReady", "ScaledToZero"].map(|reason| (reason.to_owned(), 1));
    ensure!(told == BTreeMap::from(expected) && first < 2, "{told:?} {first}");
    server.route(REPO).await?;
    let again = |told: &BTreeMap<String, i32>| told.get("ScaledUp") == Some(&(first + 1)) && told["DaemonReady"] == 2;
    for _ in 0..50 {
        let told = self::told(&cluster, &farm).await?;
        if again(&told) {
            ensure!(told["DaemonCreated"] == 1, "{told:?}");
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("{:?}", self::told(&cluster, &farm).await?)
}

pub(crate) async fn an_oom_kill_is_told_and_no_wedge(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "oom").await?;
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    server.route(REPO).await?;
    let (now, later) = (Timestamp::now(), Timestamp::now() + Duration::from_secs(2));
    let last = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled", "containerID": "containerd://a",
        "startedAt": now.to_string(), "finishedAt": later.to_string()}});
    let mut containers = container(json!({"running": {"startedAt": later.to_string()}}), last, 1);
    containers[0]["ready"] = true.into();
    for _ in 0..3 {
        play_status(&cluster, &farm, &json!({"containerStatuses": containers})).await?;
    }
    let told = until_told(&cluster, &farm, "OutOfMemory").await?;
    ensure!(told.get("OutOfMemory") == Some(&1), "{told:?}");
    ensure!(server.metric("buildkit_operator_daemon_oom_kills_total").await? >= 1.0);
    let project = api::<BuildProject>(&cluster, &farm).get(KEY).await?;
    ensure!(reason(&project, "Ready") == "DaemonReady" && reason(&project, "Degraded").is_empty());
    server.route(REPO).await.map(|_| ())
}
