//! Servers and gateways that end under a build.

use anyhow::{Context, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};

use super::{BEYOND_IDLE, SOON, daemon, goes_idle, same_pod};
use crate::installation::{Installation, OPERATOR};

pub(super) async fn servers_and_gateways_that_come_and_go(farm: &Installation<'_>) -> anyhow::Result<()> {
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
