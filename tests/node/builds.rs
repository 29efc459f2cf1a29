//! Nothing takes a daemon away from a running build: real builds, with a step
//! that takes its time, while everything that can happen to a daemon happens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::{BuildProject, Phase};
use futures::StreamExt;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::watcher::watch_object;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::harness::Node;
use crate::installation::{BUILDS, Installation, OPERATOR, Route};

const SOON: Duration = Duration::from_secs(60);

/// Beyond the idle time of 8 s and several looks.
const BEYOND_IDLE: u32 = 24;

pub(crate) async fn nothing_takes_a_daemon_from_a_running_build(node: Arc<Node>) -> anyhow::Result<()> {
    let farm = Installation::install(&node).await?;
    // Each has a project, and so a daemon, of its own. Only what kills servers
    // runs by itself: all else wants to hear from them.
    tokio::try_join!(
        told("its entry deleted by hand", an_entry_that_is_deleted_by_hand(&farm)),
        told("unregistered through the gateway", an_unregistered_build_through_the_gateway(&farm)),
        told("unregistered past the gateway", an_unregistered_build_past_the_gateway(&farm)),
        told("SIGTERM", the_end_of_its_pod(&farm)),
        told("its project deleted", the_deletion_of_its_project(&farm)),
        told("kill -9 of buildkitd", a_killed_daemon_comes_back_warm(&farm)),
    )?;
    told("servers killed and rolled", servers_and_gateways_that_come_and_go(&farm)).await
}

async fn told(what: &str, story: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let begun = Instant::now();
    story.await.with_context(|| what.to_owned())?;
    eprintln!("kept: {what} ({:.0?})", begun.elapsed());
    Ok(())
}

/// A project, and the uid of the pod that serves it.
async fn daemon(farm: &Installation<'_>, repo: &str) -> anyhow::Result<(Route, String)> {
    let route = farm.route(&json!({"repo": format!("github.com/acme/{repo}"), "arch": "amd64"})).await?;
    let uid = pod(farm, &route).await?.uid().context("no uid")?;
    Ok((route, uid))
}

async fn pod(farm: &Installation<'_>, route: &Route) -> anyhow::Result<Pod> {
    Ok(pods(farm).get(&pod_name(route)).await?)
}

fn pods(farm: &Installation<'_>) -> Api<Pod> {
    Api::namespaced(farm.node.client(), BUILDS)
}

fn pod_name(route: &Route) -> String {
    format!("buildkitd-{}-0", route.key)
}

fn projects(farm: &Installation<'_>) -> Api<BuildProject> {
    Api::namespaced(farm.node.client(), BUILDS)
}

async fn same_pod(farm: &Installation<'_>, route: &Route, uid: &str) -> anyhow::Result<()> {
    let now = pod(farm, route).await?;
    ensure!(now.uid().as_deref() == Some(uid), "it has another pod");
    let restarts = now.status.and_then(|status| status.container_statuses).unwrap_or_default();
    ensure!(restarts.iter().all(|container| container.restart_count == 0), "its container was restarted");
    Ok(())
}

fn phase(project: &BuildProject) -> Option<Phase> {
    project.status.as_ref().and_then(|status| status.phase)
}

async fn goes_idle(farm: &Installation<'_>, route: &Route) -> anyhow::Result<()> {
    farm.until(&route.key, "idle", SOON, |p| phase(p) == Some(Phase::Idle)).await
}

/// Also: the idle timeout is reached meanwhile.
async fn an_entry_that_is_deleted_by_hand(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "forgotten").await?;
    let build = farm.begin(&route.endpoint, "forgotten", BEYOND_IDLE).await?;
    let nothing = Patch::Merge(json!({"status": {"inflight": [], "inflightBuilds": 0}}));
    projects(farm).patch_status(&route.key, &PatchParams::default(), &nothing).await?;
    build.succeeds("an entry deleted by hand, and the idle timeout").await?;
    same_pod(farm, &route, &uid).await?;
    goes_idle(farm, &route).await
}

async fn an_unregistered_build_through_the_gateway(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "through").await?;
    farm.complete(&route).await?;
    let build = farm.begin(&route.endpoint, "through", BEYOND_IDLE).await?;
    build.succeeds("the idle timeout, unregistered").await?;
    same_pod(farm, &route, &uid).await?;
    goes_idle(farm, &route).await
}

/// No gateway sees this one.
async fn an_unregistered_build_past_the_gateway(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "past").await?;
    farm.complete(&route).await?;
    let name = format!("buildkitd-{}", route.key);
    let build = farm.begin(&farm.direct(&name).await?, &format!("direct-{name}"), BEYOND_IDLE).await?;
    build.succeeds("the idle timeout, unregistered, past the gateway").await?;
    same_pod(farm, &route, &uid).await?;
    goes_idle(farm, &route).await
}

/// A node that is drained, a pod deleted by hand: SIGTERM, and the grace runs.
async fn the_end_of_its_pod(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "ending").await?;
    let build = farm.begin(&route.endpoint, "ending", 90).await?;
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

async fn the_deletion_of_its_project(farm: &Installation<'_>) -> anyhow::Result<()> {
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

/// This one does cut the build. What matters is how soon everybody knows.
async fn a_killed_daemon_comes_back_warm(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "killed").await?;
    farm.begin(&route.endpoint, "first", 0).await?.succeeds("nothing").await?;
    let build = farm.begin(&route.endpoint, "second", 120).await?;
    let mut phases = watch_object(projects(farm), &route.key)
        .filter_map(|seen| std::future::ready(seen.ok().flatten().as_ref().and_then(phase)))
        .boxed();
    let warm = phases.next().await;
    ensure!(warm == Some(Phase::Warm), "{warm:?}");
    let story = tokio::spawn(async move {
        let mut told = Vec::new();
        while let Some(phase) = phases.next().await {
            if told.last().unwrap_or(&Phase::Warm) != &phase {
                told.push(phase);
            }
            if told.last() == Some(&Phase::Warm) {
                break;
            }
        }
        told
    });
    let killed = Instant::now();
    let kill = ["sh", "-c", "kill -9 $(pidof buildkitd)"];
    farm.node.exec(BUILDS, &pod_name(&route), kill).await?;
    let (code, printed) = build.ends().await?;
    let took = killed.elapsed();
    ensure!(
        code != Some(0) && took < Duration::from_secs(5),
        "the client ended with {code:?} after {took:?}:\n{printed}"
    );
    let told = tokio::time::timeout(SOON, story).await.context("the status does not tell of it")??;
    eprintln!("the client knew after {took:.1?}, the daemon was back after {:.1?}: {told:?}", killed.elapsed());
    let now = pod(farm, &route).await?;
    ensure!(now.uid().as_deref() == Some(uid.as_str()), "another pod");
    let (code, printed) = farm.build(&route.endpoint, "first", 0)?.ends().await?;
    ensure!(code == Some(0) && printed.contains("CACHED"), "the cache was lost, exit code {code:?}:\n{printed}");
    farm.complete(&route).await
}

async fn servers_and_gateways_that_come_and_go(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "rolled").await?;
    let build = farm.begin(&route.endpoint, "killed-servers", BEYOND_IDLE).await?;
    for server in own_pods(farm, "buildd").await? {
        farm.node.kill(OPERATOR, &server, "buildd").await?;
    }
    build.succeeds("kill -9 of every server").await?;
    same_pod(farm, &route, &uid).await?;

    let build = farm.begin(&route.endpoint, "rolled", BEYOND_IDLE).await?;
    let gateways = own_pods(farm, "gateway").await?;
    for deployment in ["buildkit-operator-buildd", "buildkit-operator-gateway"] {
        restart(farm, deployment).await?;
    }
    build.succeeds("a rolling restart of server and gateway").await?;
    same_pod(farm, &route, &uid).await?;
    ensure!(own_pods(farm, "gateway").await?.iter().all(|pod| !gateways.contains(pod)), "the gateway was not rolled");
    // Gateways that were seen to end do not keep the daemon any longer.
    farm.complete(&route).await?;
    goes_idle(farm, &route).await
}

/// Names of our own pods that are not about to end.
pub(crate) async fn own_pods(farm: &Installation<'_>, component: &str) -> anyhow::Result<Vec<String>> {
    let selector = ListParams::default().labels(&format!("app.kubernetes.io/component={component}"));
    let pods = Api::<Pod>::namespaced(farm.node.client(), OPERATOR).list(&selector).await?;
    Ok(pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).map(ResourceExt::name_any).collect())
}

pub(crate) async fn restart(farm: &Installation<'_>, name: &str) -> anyhow::Result<()> {
    let api = Api::<Deployment>::namespaced(farm.node.client(), OPERATOR);
    let generation = api.restart(name).await?.metadata.generation;
    let rolled = |deployment: Option<&Deployment>| {
        let status = deployment.and_then(|deployment| deployment.status.as_ref());
        status.is_some_and(|status| {
            status.observed_generation >= generation
                && status.updated_replicas == status.replicas
                && status.available_replicas == status.replicas
        })
    };
    tokio::time::timeout(SOON, await_condition(api, name, rolled)).await.context("not rolled")??;
    Ok(())
}
