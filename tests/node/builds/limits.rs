//! Daemons that have little: CPU, room, bandwidth.

use std::time::Duration;

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use super::{daemon, lasting, pod, pod_name, pods, projects, same_pod};
use crate::harness::{process, repetitions};
use crate::installation::{BUILDS, Installation, OPERATOR, Route};

/// Until a daemon that is short of everything serves again.
const LATER: Duration = Duration::from_secs(120);

/// Changes a project whose daemon nobody uses, and routes again when its pod has gone.
async fn changed(farm: &Installation<'_>, repo: &str, spec: Value) -> anyhow::Result<(Route, String)> {
    let (route, uid) = daemon(farm, repo).await?;
    farm.complete(&route).await?;
    projects(farm).patch(&route.key, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await?;
    let other = |pod: Option<&Pod>| pod.is_none_or(|pod| pod.uid().as_deref() != Some(uid.as_str()));
    tokio::time::timeout(LATER, await_condition(pods(farm), &pod_name(&route), other))
        .await
        .context("the old pod stays")??;
    daemon(farm, repo).await
}

/// A busy daemon answers late; that is no reason to restart it.
pub(super) async fn a_twentieth_of_a_cpu(farm: &Installation<'_>) -> anyhow::Result<()> {
    let spec = json!({"resources": {"requests": {"cpu": "50m"}, "limits": {"cpu": "50m"}}});
    let (route, uid) = changed(farm, "starved", spec).await?;
    let limit =
        pod(farm, &route).await?.spec.and_then(|spec| spec.containers.into_iter().find(|c| c.name == "buildkitd"));
    let limit = limit.and_then(|container| container.resources?.limits?.remove("cpu"));
    ensure!(limit.as_ref().is_some_and(|limit| limit.0 == "50m"), "{limit:?}");
    let work = format!("end=$(($(date +%s) + {})); while [ $(date +%s) -lt $end ]; do :; done", lasting(180, 70));
    let (code, printed) = farm.step(&route.endpoint, None, "starved", &work)?.ends().await?;
    ensure!(code == Some(0) && printed.contains("ended starved"), "exit code {code:?}:\n{printed}");
    same_pod(farm, &route, &uid).await?;
    farm.complete(&route).await
}

/// Half as much again as the volume holds is built; BuildKit keeps the cache
/// below the ceiling that is derived from the volume's size.
pub(super) async fn a_cache_that_is_filled(farm: &Installation<'_>) -> anyhow::Result<()> {
    let gib = u64::try_from(repetitions(5))?;
    let (route, _) = if gib > 1 {
        changed(farm, "filled", json!({"cacheVolumeGi": gib})).await?
    } else {
        daemon(farm, "filled").await?
    };
    let ceiling = (gib << 10) * 85 / 100;
    for layer in 0..gib * 6 {
        // Random, so that nothing on the way makes it smaller.
        let work = "dd if=/dev/urandom of=/layer bs=1M count=256 2>/dev/null";
        let (code, printed) = farm.step(&route.endpoint, None, &format!("layer-{layer}"), work)?.ends().await?;
        ensure!(code == Some(0), "layer {layer}, exit code {code:?}:\n{printed}");
    }
    // It is trimmed a minute after the last build at the latest.
    let trimmed = async {
        loop {
            let used = cache_mib(farm, &route).await?;
            if used <= ceiling {
                return anyhow::Ok(used);
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    };
    let used = match tokio::time::timeout(LATER, trimmed).await {
        Ok(used) => used?,
        Err(_) => anyhow::bail!("{} MiB are more than {ceiling}", cache_mib(farm, &route).await?),
    };
    ensure!(used >= ceiling / 3, "{used} MiB: more was lost than had to be");
    eprintln!("a cache of {gib} GiB is kept at {used} MiB, below {ceiling}");
    farm.complete(&route).await
}

async fn cache_mib(farm: &Installation<'_>, route: &Route) -> anyhow::Result<u64> {
    // Empty folders of overlayfs are closed to it.
    let du = ["sh", "-c", "du -sm /home/user/.local/share/buildkit 2>/dev/null; true"];
    let printed = farm.node.exec(BUILDS, &pod_name(route), du).await?;
    printed.split_whitespace().next().context("no size")?.parse().map_err(Into::into)
}

/// 32 sessions over 1 Mbit/s to the gateway: none is lost.
pub(super) async fn many_builds_over_a_slow_link(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "slow-link").await?;
    let selector = ListParams::default().labels("app.kubernetes.io/component=gateway");
    let gateways = Api::<Pod>::namespaced(farm.node.client(), OPERATOR).list(&selector).await?;
    let mut links = Vec::new();
    for gateway in gateways {
        let address = gateway.status.and_then(|status| status.pod_ip).context("a gateway without an address")?;
        links.push(SlowLink::to(&address).await?);
    }
    let builds = (0..32).map(async |i| {
        let name = format!("narrow-{i}");
        farm.step(&route.endpoint, None, &name, "sleep 1")?.succeeds("a slow link").await
    });
    try_join_all(builds).await?;
    for link in links {
        link.restore().await?;
    }
    same_pod(farm, &route, &uid).await?;
    farm.complete(&route).await
}

/// The host's end of a pod's link, slowed down.
struct SlowLink(String);

impl SlowLink {
    async fn to(address: &str) -> anyhow::Result<Self> {
        // Which port of the bridge it is behind, by its hardware address.
        let neighbour = process::output(command("ip", &["neighbour", "show", address, "dev", "cni0"])).await?;
        let hardware = neighbour.split_whitespace().skip_while(|word| *word != "lladdr").nth(1);
        let hardware = hardware.with_context(|| format!("no hardware address of {address}: {neighbour}"))?;
        let table = process::output(command("bridge", &["fdb", "show", "br", "cni0"])).await?;
        let line = table.lines().find(|line| line.starts_with(hardware) && !line.contains("permanent"));
        let link = line.and_then(|line| line.split_whitespace().nth(2)).with_context(|| format!("not in {table}"))?;
        let shape = ["qdisc", "add", "dev", link, "root", "tbf", "rate", "1mbit", "burst", "16kb", "latency", "2s"];
        process::output(command("tc", &shape)).await?;
        Ok(Self(link.to_owned()))
    }

    async fn restore(self) -> anyhow::Result<()> {
        process::output(command("tc", &["qdisc", "del", "dev", &self.0, "root"])).await.map(|_| ())
    }
}

fn command(program: &str, arguments: &[&str]) -> std::process::Command {
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    command
}
