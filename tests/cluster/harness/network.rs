//! Services: kube-proxy and cluster DNS.

use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;

use super::process::{Process, answers};
use super::tools::Tools;
use super::{ADDRESS, ROOT, node};

const LIMIT: Duration = Duration::from_secs(30);

/// Starts kube-proxy and CoreDNS, and returns when both serve.
///
/// # Errors
/// One is not ready in time; with the end of its log.
pub(crate) async fn start(tools: &Tools, client: Client) -> anyhow::Result<(Process, Process)> {
    create_dns_service(client).await?;
    let (proxy, dns) = (start_proxy(tools)?, start_dns(tools)?);
    proxy.wait_until(LIMIT, async || answers("http://127.0.0.1:10256/healthz").await).await?;
    dns.wait_until(LIMIT, async || answers("http://127.0.0.1:8181/ready").await).await?;
    Ok((proxy, dns))
}

fn start_proxy(tools: &Tools) -> anyhow::Result<Process> {
    let config = format!("{ROOT}/proxy.yaml");
    let configuration = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": "10.244.0.0/16",
        "clientConnection": {"kubeconfig": format!("{ROOT}/proxy.kubeconfig")},
        "hostnameOverride": node::NAME,
        // Else a Ready pod's service lags by up to a second.
        "nftables": {"minSyncPeriod": "50ms"},
        // Limits of the machine, not of the sandbox: hands off.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    });
    std::fs::write(&config, configuration.to_string())?;
    let mut command = tools.command("kube-proxy");
    command.arg(format!("--config={config}"));
    Process::spawn("kube-proxy", command)
}

fn start_dns(tools: &Tools) -> anyhow::Result<Process> {
    let corefile = format!("{ROOT}/Corefile");
    // A short time to live: tests wait for names that come and go.
    let configuration = format!(
        ".:53 {{\n  bind {ADDRESS}\n  ready 127.0.0.1:8181\n  kubernetes cluster.local {{\n    \
         kubeconfig {ROOT}/admin.kubeconfig test\n    ttl 1\n  }}\n}}\n"
    );
    std::fs::write(&corefile, configuration)?;
    let mut command = tools.command("coredns");
    command.args(["-conf", &corefile]);
    Process::spawn("coredns", command)
}

/// CoreDNS is no pod: its service points to the node.
async fn create_dns_service(client: Client) -> anyhow::Result<()> {
    let ports =
        json!([{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]);
    let service: Service = serde_json::from_value(json!({
        "metadata": {"name": "kube-dns", "labels": {"k8s-app": "kube-dns"}},
        "spec": {"clusterIP": "10.96.0.10", "ports": ports},
    }))?;
    let slice: EndpointSlice = serde_json::from_value(json!({
        "metadata": {"name": "kube-dns-node", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": true}}],
        "ports": ports,
    }))?;
    let create = PostParams::default();
    Api::namespaced(client.clone(), "kube-system").create(&create, &service).await?;
    Api::namespaced(client, "kube-system").create(&create, &slice).await?;
    Ok(())
}
