//! The leader ends while it takes a daemon down.

use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, ResourceExt};
use serde_json::Value;

use crate::harness::fault_proxy::{At, FaultProxy};
use crate::harness::repetitions;
use crate::installation::{BUILDS, Installation};
use crate::server::Server;

const REPO: &str = "github.com/acme/decapitated";
const ROUNDS: usize = 20;

/// A farm of its own beside the installed one, on the same node: its servers
/// are processes, so that a proxy can stand between them and the API server.
struct Beside<'a> {
    farm: &'a Installation<'a>,
    builds: String,
    flags: Vec<String>,
}

impl<'a> Beside<'a> {
    async fn new(farm: &'a Installation<'a>) -> anyhow::Result<Self> {
        let client = farm.node.client();
        let namespaces = farm.node.namespaces("leader");
        namespaces.create(&client).await?;
        let from = Api::<Secret>::namespaced(client.clone(), BUILDS).get("buildkit-daemon-certs").await?;
        let named = |name: &str| ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
        let secret = Secret { metadata: named("buildkit-daemon-certs"), data: from.data, ..Secret::default() };
        Api::namespaced(client.clone(), &namespaces.builds).create(&PostParams::default(), &secret).await?;
        let data = [("buildkitd.toml".to_owned(), farm.node.buildkitd_toml())];
        let map = ConfigMap { metadata: named("buildkitd-config"), data: Some(data.into()), ..ConfigMap::default() };
        Api::namespaced(client, &namespaces.builds).create(&PostParams::default(), &map).await?;
        let image = farm.node.own_image().await?;
        let flags = [
            format!("--namespace={}", namespaces.builds),
            format!("--pod-namespace={}", namespaces.operator),
            format!("--companion-image={image}"),
            "--idle-seconds=1".to_owned(),
            "--cache-volume-gi=1".to_owned(),
            "--daemon-cpu-request=50m".to_owned(),
        ];
        Ok(Self { farm, builds: namespaces.builds, flags: flags.into() })
    }

    async fn server(&self, proxy: &FaultProxy) -> anyhow::Result<Server> {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        Server::through(proxy.kubeconfig(), &flags, &[]).await
    }

    async fn pod(&self, route: &Value) -> anyhow::Result<Pod> {
        let name = format!("buildkitd-{}-0", route["key"].as_str().context("no key")?);
        Ok(Api::<Pod>::namespaced(self.farm.node.client(), &self.builds).get(&name).await?)
    }

    /// A build on the daemon that a route was answered with.
    async fn builds_on(&self, route: &Value, name: &str) -> anyhow::Result<()> {
        let daemon = format!("buildkitd-{}", route["key"].as_str().context("no key")?);
        let before = self.pod(route).await?;
        let address = self.farm.direct(&self.builds, &daemon).await?;
        // The node follows a moment after the pod is ready, and buildctl does not try again.
        let dialled = async {
            while tokio::net::TcpStream::connect(address.trim_start_matches("tcp://")).await.is_err() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), dialled).await.context("it cannot be reached")?;
        self.farm.begin_direct(&address, name, 6).await?.succeeds("the end of the leader").await?;
        let after = self.pod(route).await?;
        ensure!(before.uid() == after.uid(), "it has another pod");
        Ok(())
    }
}

/// In the very moment, a build is routed by the server that is left.
pub(super) async fn the_leader_killed_in_mid_scale_down(farm: &Installation<'_>) -> anyhow::Result<()> {
    let beside = Beside::new(farm).await?;
    let proxies = [FaultProxy::start(farm.node.client()).await?, FaultProxy::start(farm.node.client()).await?];
    let mut servers = [beside.server(&proxies[0]).await?, beside.server(&proxies[1]).await?];
    let mut hits = [0, 0];
    for round in 0..repetitions(ROUNDS).max(At::ALL.len()) {
        let at = At::ALL[round % At::ALL.len()];
        let route = servers[0].route(REPO).await?;
        for (proxy, server) in proxies.iter().zip(&servers) {
            proxy.arm(|parts, body| scales_to_zero(&parts.method, parts.uri.path(), body), 0, at, server.killer()?);
        }
        servers[0].complete(&route).await?;
        let killed = tokio::select! {
            () = proxies[0].hit(hits[0] + 1) => 0,
            () = proxies[1].hit(hits[1] + 1) => 1,
            () = tokio::time::sleep(Duration::from_secs(60)) => anyhow::bail!("round {round}: nobody takes it down"),
        };
        hits[killed] += 1;
        proxies[1 - killed].disarm();
        let survivor = &servers[1 - killed];
        let route = survivor.route(REPO).await.with_context(|| format!("round {round}, {at:?}"))?;
        let built = beside.builds_on(&route, &format!("round-{round}")).await;
        built.with_context(|| format!("round {round}, {at:?}"))?;
        survivor.complete(&route).await?;
        servers[killed] = beside.server(&proxies[killed]).await?;
    }
    Ok(())
}

fn scales_to_zero(method: &http::Method, path: &str, body: &[u8]) -> bool {
    let asked = || serde_json::from_slice::<Value>(body).ok().map(|set| set["spec"]["replicas"] == 0);
    method == http::Method::PUT && path.contains("/statefulsets/") && asked() == Some(true)
}
