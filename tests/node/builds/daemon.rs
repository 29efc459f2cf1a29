//! What happens to the daemon, its pod and its project.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::build::ROLL_HELD_SINCE;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;

use super::{BEYOND_IDLE, SOON, daemon, goes_idle, lasting, pod, pod_name, pods, projects, same_pod};
use crate::installation::{BUILDS, Installation};

/// Also: the idle timeout is reached meanwhile.
pub(super) async fn an_entry_that_is_deleted_by_hand(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "forgotten").await?;
    let build = farm.begin(&route.endpoint, "forgotten", BEYOND_IDLE).await?;
    let nothing = Patch::Merge(json!({"status": {"inflight": [], "inflightBuilds": 0}}));
    projects(farm).patch_status(&route.key, &PatchParams::default(), &nothing).await?;
    build.succeeds("an entry deleted by hand, and the idle timeout").await?;
    same_pod(farm, &route, &uid).await?;
    goes_idle(farm, &route).await
}

pub(super) async fn an_unregistered_build_through_the_gateway(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "through").await?;
    farm.complete(&route).await?;
    let build = farm.begin(&route.endpoint, "through", BEYOND_IDLE).await?;
    build.succeeds("the idle timeout, unregistered").await?;
    same_pod(farm, &route, &uid).await?;
    goes_idle(farm, &route).await
}

/// No gateway sees this one.
pub(super) async fn an_unregistered_build_past_the_gateway(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "past").await?;
    farm.complete(&route).await?;
    let name = format!("buildkitd-{}", route.key);
    let build = farm.begin_direct(&farm.direct(BUILDS, &name).await?, "past", BEYOND_IDLE).await?;
    build.succeeds("the idle timeout, unregistered, past the gateway").await?;
    same_pod(farm, &route, &uid).await?;
    goes_idle(farm, &route).await
}

/// A node that is drained, a pod deleted by hand: SIGTERM, and the grace runs.
/// Longer than the grace of 120 s that the reference gives, when run in full.
pub(super) async fn the_end_of_its_pod(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "ending").await?;
    let build = farm.begin(&route.endpoint, "ending", lasting(150, 90)).await?;
    pods(farm).delete(&pod_name(&route), &DeleteParams::default()).await?;
    build.succeeds("the deletion of its pod").await?;
    let ended = Instant::now();
    let successor = |pod: Option<&Pod>| pod.is_some_and(|pod| pod.uid().as_deref() != Some(uid.as_str()));
    tokio::time::timeout(SOON, await_condition(pods(farm), &pod_name(&route), successor))
        .await
        .context("it stays")??;
    eprintln!("its pod had ended {:.1?} after the build", ended.elapsed());
    farm.complete(&route).await
}

pub(super) async fn the_deletion_of_its_project(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "deleted").await?;
    let build = farm.begin(&route.endpoint, "deleted", 20).await?;
    projects(farm).delete(&route.key, &DeleteParams::default()).await?;
    build.succeeds("the deletion of its project").await?;
    let gone = conditions::is_deleted(&uid);
    tokio::time::timeout(SOON, await_condition(pods(farm), &pod_name(&route), gone)).await.context("it stays")??;
    ensure!(projects(farm).get_opt(&route.key).await?.is_none(), "the project is still there");
    let claim = format!("cache-{}", pod_name(&route));
    Api::<PersistentVolumeClaim>::namespaced(farm.node.client(), BUILDS).get(&claim).await.context("its cache")?;
    Ok(())
}

/// Refused while it builds, so that a drain waits; granted after.
pub(super) async fn an_eviction_of_its_pod(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "evicted").await?;
    let build = farm.begin(&route.endpoint, "evicted", 15).await?;
    // A refusal by a budget looks like throttling: the client would try again.
    let kubeconfig = Kubeconfig::read_from(farm.node.kubeconfig())?;
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    let pods = Api::<Pod>::namespaced(Client::try_from(config)?, BUILDS);
    let name = pod_name(&route);
    for _ in 0..5 {
        let refused = pods.evict(&name, &EvictParams::default()).await.err().context("evicted under a build")?;
        ensure!(matches!(&refused, kube::Error::Api(status) if status.code == 429), "{refused}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    build.succeeds("an eviction").await?;
    same_pod(farm, &route, &uid).await?;
    farm.complete(&route).await?;
    let budget = Api::<PodDisruptionBudget>::namespaced(farm.node.client(), BUILDS);
    let gone = |budget: Option<&PodDisruptionBudget>| budget.is_none();
    let name_of_budget = format!("buildkitd-{}", route.key);
    let gone = await_condition(budget, &name_of_budget, gone);
    tokio::time::timeout(SOON, gone).await.context("the budget stays")??;
    pods.evict(&name, &EvictParams::default()).await.context("an idle daemon was not evicted")?;
    Ok(())
}

/// What is asked for now is not what runs: that waits for the build.
pub(super) async fn a_changed_template(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "changed").await?;
    let build = farm.begin(&route.endpoint, "changed", 20).await?;
    let change = Patch::Merge(json!({"spec": {"resources": {"requests": {"cpu": "40m"}}}}));
    projects(farm).patch(&route.key, &PatchParams::default(), &change).await?;
    let sets = Api::<StatefulSet>::namespaced(farm.node.client(), BUILDS);
    let held = |set: Option<&StatefulSet>| set.is_some_and(|set| set.annotations().contains_key(ROLL_HELD_SINCE));
    let set = format!("buildkitd-{}", route.key);
    let held = await_condition(sets, &set, held);
    tokio::time::timeout(SOON, held).await.context("the roll is not held")??;
    build.succeeds("a changed template").await?;
    same_pod(farm, &route, &uid).await?;
    farm.complete(&route).await?;
    // Its idle time is over, too: it is the next one that has the new template.
    let other = |pod: Option<&Pod>| pod.is_none_or(|pod| pod.uid().as_deref() != Some(uid.as_str()));
    tokio::time::timeout(SOON, await_condition(pods(farm), &pod_name(&route), other)).await.context("it stays")??;
    let (route, _) = daemon(farm, "changed").await?;
    let now = pod(farm, &route).await?;
    ensure!(requested_cpu(&now) == Some("40m"), "{:?}", requested_cpu(&now));
    farm.complete(&route).await
}

fn requested_cpu(pod: &Pod) -> Option<&str> {
    let container = pod.spec.as_ref()?.containers.iter().find(|container| container.name == "buildkitd")?;
    Some(container.resources.as_ref()?.requests.as_ref()?.get("cpu")?.0.as_str())
}
