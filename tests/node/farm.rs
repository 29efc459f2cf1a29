//! The main job on a real node: installed by itself, routed, built, warm.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::{BuildProject, Phase};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Namespace, PersistentVolumeClaim, Pod};
use kube::api::{ListParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::harness::{Node, process};
use crate::installation::{BUILDS, FLAGS, Installation, OPERATOR, Route, bko};

const REPO: &str = "github.com/acme/cart";
const SOON: Duration = Duration::from_secs(60);

fn project(repo: &str) -> Value {
    json!({"repo": repo, "arch": "amd64"})
}

/// One long story, since each chapter needs what the last one left.
pub(crate) async fn the_main_job(node: Arc<Node>) -> anyhow::Result<()> {
    let farm = Installation::install(&node).await?;
    own_pods_run_confined(&farm).await?;
    a_second_init_writes_nothing(&farm).await?;
    every_check_passes(&farm).await?;
    let route = builds_are_warm_the_second_time(&farm).await?;
    spellings_share_a_daemon_and_targets_do_not(&farm, &route).await?;
    a_fork_has_its_own(&farm, &route).await?;
    idle_goes_to_zero_and_comes_back_warm(&farm, route).await?;
    the_fork_is_reaped(&farm).await?;
    status_is_ready(&farm).await
}

async fn own_pods_run_confined(farm: &Installation<'_>) -> anyhow::Result<()> {
    let client = farm.node.client();
    let namespace = Api::<Namespace>::all(client.clone()).get(OPERATOR).await?;
    let level = namespace.labels().get("pod-security.kubernetes.io/enforce").cloned();
    ensure!(level.as_deref() == Some("restricted"), "{level:?}");
    let pods = Api::<Pod>::namespaced(client, OPERATOR).list(&ListParams::default()).await?;
    let components: BTreeSet<_> = pods.iter().filter_map(|p| p.labels().get("app.kubernetes.io/component")).collect();
    ensure!(components.into_iter().eq(["buildd", "gateway"]), "server and gateway are different pods");
    let own = farm.node.own_image().await?;
    for pod in pods {
        let name = pod.name_any();
        let images: Vec<_> = pod.spec.iter().flat_map(|s| &s.containers).filter_map(|c| c.image.clone()).collect();
        ensure!(images == [own], "{name} runs {images:?}");
        let status = pod.status.context("no status")?;
        let ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        ensure!(ready, "{name} is not ready");
    }
    Ok(())
}

async fn a_second_init_writes_nothing(farm: &Installation<'_>) -> anyhow::Result<()> {
    let since = Timestamp::now();
    let mut init = bko(farm.node, &["cluster", "init"])?;
    init.args(FLAGS);
    process::combined_output(init).await?;
    let writes = farm.node.audit().writes_by("bko-install", since).await?;
    ensure!(writes.is_empty(), "{writes:?}");
    let mut plan = bko(farm.node, &["cluster", "plan"])?;
    plan.args(&FLAGS[..FLAGS.len() - 1]);
    process::combined_output(plan).await.map(|_| ())
}

async fn every_check_passes(farm: &Installation<'_>) -> anyhow::Result<()> {
    let check = process::output(bko(farm.node, &["cluster", "check", "--output=json"])?).await?;
    let report: Value = serde_json::from_str(&check)?;
    let findings = report["findings"].as_array().context("no findings")?;
    let of = |name: &str| findings.iter().filter(|finding| finding["check"] == name).collect::<Vec<_>>();
    for name in ["permissions", "pods", "daemon-pods", "pod-security", "nodes", "installation", "certificates", "route"]
    {
        let found = of(name);
        ensure!(!found.is_empty() && found.iter().all(|finding| finding["verdict"] == "ok"), "{name}: {found:#?}");
    }
    Ok(())
}

async fn builds_are_warm_the_second_time(farm: &Installation<'_>) -> anyhow::Result<Route> {
    let image = format!("{}/hello:1", farm.node.registry_address());
    let before = farm.gateway_metric("buildkit_operator_gateway_routed_total").await?;
    let route = farm.route(&project(REPO)).await?;
    let first = farm.buildx(&route, &image).await?;
    ensure!(first.printed.contains("Built in step 1 of this cache"), "{}", first.printed);
    let second = farm.buildx(&route, &image).await?;
    ensure!(second.cached(), "{}", second.printed);
    let third = farm.buildctl(&route, &image).await?;
    ensure!(third.cached(), "{}", third.printed);
    let routed = farm.gateway_metric("buildkit_operator_gateway_routed_total").await? - before;
    ensure!(routed >= 3.0, "the gateway routed {routed} connections");
    eprintln!("cold route {:?}, cold build {:?}, warm build {:?}", route.took, first.took, second.took);

    let container = json!({"name": "main", "image": image, "imagePullPolicy": "Always"});
    let pod = json!({"metadata": {"name": "hello"}, "spec": {"restartPolicy": "Never", "containers": [container]}});
    let pods = Api::<Pod>::namespaced(farm.node.client(), "default");
    pods.create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    let ended = |pod: Option<&Pod>| {
        pod.and_then(|p| p.status.as_ref()).is_some_and(|s| s.phase.as_deref() == Some("Succeeded"))
    };
    tokio::time::timeout(SOON, await_condition(pods, "hello", ended)).await.context("the image does not run")??;
    let printed = farm.node.logs("default", "hello").await?;
    ensure!(printed.starts_with("Hello from a build farm"), "{printed}");
    Ok(route)
}

async fn spellings_share_a_daemon_and_targets_do_not(farm: &Installation<'_>, route: &Route) -> anyhow::Result<()> {
    let other = farm.route(&project("git@GitHub.com:Acme/Cart.git")).await?;
    ensure!(other.endpoint == route.endpoint && other.build != route.build, "{}", other.endpoint);
    farm.complete(&other).await?;
    let target = farm.route(&json!({"repo": REPO, "arch": "amd64", "target": "tests"})).await?;
    ensure!(target.endpoint != route.endpoint, "{}", target.endpoint);
    farm.complete(&target).await
}

async fn a_fork_has_its_own(farm: &Installation<'_>, route: &Route) -> anyhow::Result<()> {
    let fork = farm.route(&json!({"repo": REPO, "arch": "amd64", "untrusted": true})).await?;
    ensure!(fork.key == format!("fork{}", route.key), "{}", fork.key);
    let image = format!("{}/hello:fork", farm.node.registry_address());
    let built = farm.buildctl(&fork, &image).await?;
    ensure!(built.printed.contains("Built in step 1 of this cache"), "it shares a cache:\n{}", built.printed);
    // Cache mounts, too: two builds of the project share one, the fork has its own.
    for (at, name, work) in [
        (route, "writes", "echo kept > /shared/mark"),
        (route, "reads", "grep kept /shared/mark"),
        (&fork, "apart", "test ! -e /shared/mark"),
    ] {
        farm.step(&at.endpoint, None, name, work)?.succeeds("a cache mount").await?;
    }
    farm.complete(&fork).await
}

async fn idle_goes_to_zero_and_comes_back_warm(farm: &Installation<'_>, route: Route) -> anyhow::Result<()> {
    let client = farm.node.client();
    let (key, daemon) = (route.key.as_str(), format!("buildkitd-{}", route.key));
    farm.complete(&route).await?;
    farm.until(key, "idle", SOON, |p| phase(p) == Some(Phase::Idle)).await?;
    let sets = Api::<StatefulSet>::namespaced(client.clone(), BUILDS);
    let at_zero = |set: Option<&StatefulSet>| {
        set.is_some_and(|s| s.status.as_ref().is_some_and(|s| s.replicas == 0))
            && set.is_some_and(|s| s.spec.as_ref().and_then(|s| s.replicas) == Some(0))
    };
    tokio::time::timeout(SOON, await_condition(sets, &daemon, at_zero)).await.context("not at zero")??;
    Api::<PersistentVolumeClaim>::namespaced(client, BUILDS).get(&format!("cache-{daemon}-0")).await?;

    let woken = farm.route(&project(REPO)).await?;
    let image = format!("{}/hello:2", farm.node.registry_address());
    let again = farm.buildx(&woken, &image).await?;
    ensure!(again.cached(), "the cache was lost at zero:\n{}", again.printed);
    farm.complete(&woken).await
}

async fn the_fork_is_reaped(farm: &Installation<'_>) -> anyhow::Result<()> {
    let client = farm.node.client();
    let gone = async {
        let is_fork = |name: &str| name.contains("fork");
        let projects = Api::<BuildProject>::namespaced(client.clone(), BUILDS);
        let claims = Api::<PersistentVolumeClaim>::namespaced(client, BUILDS);
        loop {
            let left = projects.list(&ListParams::default()).await?.iter().any(|p| is_fork(&p.name_any()));
            let kept = claims.list(&ListParams::default()).await?.iter().any(|c| is_fork(&c.name_any()));
            if !left && !kept {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), gone).await.context("the fork or its cache is still there")?
}

async fn status_is_ready(farm: &Installation<'_>) -> anyhow::Result<()> {
    let printed = process::combined_output(bko(farm.node, &["cluster", "status"])?).await?;
    ensure!(printed.contains("server") && printed.contains("gateway"), "{printed}");
    Ok(())
}

fn phase(project: &BuildProject) -> Option<Phase> {
    project.status.as_ref().and_then(|status| status.phase)
}
