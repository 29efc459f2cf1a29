//! The kubelet.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use serde_json::json;

use super::process::Process;
use super::tools::Tools;
use super::{ADDRESS, ROOT, container_runtime, node, sandbox};

/// A running kubelet.
pub(crate) type Kubelet = Process;

/// Starts the kubelet, and returns when the node is Ready.
///
/// # Errors
/// It is not in time; with the end of its log.
pub(crate) async fn start(tools: &Tools, client: Client) -> anyhow::Result<Kubelet> {
    let config = format!("{ROOT}/kubelet.yaml");
    std::fs::write(&config, configuration().to_string())?;
    let mut command = tools.command("kubelet");
    command.args([
        &format!("--config={config}"),
        &format!("--kubeconfig={ROOT}/kubelet.kubeconfig"),
        &format!("--root-dir={ROOT}/kubelet"),
        &format!("--node-ip={ADDRESS}"),
        &format!("--hostname-override={}", node::NAME),
    ]);
    let kubelet = Process::spawn("kubelet", command)?;
    let nodes: Api<Node> = Api::all(client);
    kubelet.wait_until(Duration::from_secs(60), async || is_ready(&nodes).await).await?;
    Ok(kubelet)
}

async fn is_ready(nodes: &Api<Node>) -> bool {
    let node = nodes.get_status(node::NAME).await.ok();
    let conditions = node.and_then(|node| node.status).and_then(|status| status.conditions).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn configuration() -> serde_json::Value {
    let pki = format!("{ROOT}/pki");
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": ADDRESS,
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": format!("{pki}/ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": format!("{pki}/kubelet.crt"),
        "tlsPrivateKeyFile": format!("{pki}/kubelet.key"),
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "resolvConf": "",
        "containerRuntimeEndpoint": format!("unix://{}", container_runtime::SOCKET),
        "volumePluginDir": format!("{ROOT}/volume-plugins"),
        "podLogsDir": format!("{ROOT}/pod-logs"),
        // Two kubelets below one cgroup end each other's pods as orphans.
        "cgroupRoot": format!("/{}", sandbox::cgroup()),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": false,
        "enforceNodeAllocatable": [],
        "failSwapOn": false,
        // The machine's disk is not the cluster's to guard.
        "evictionHard": {
            "memory.available": "1Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.available": "0%",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        // Imported images would have to be pulled as soon as one with the same
        // content was pulled under another name.
        "imagePullCredentialsVerificationPolicy": "NeverVerify",
        "makeIPTablesUtilChains": false,
        "nodeStatusUpdateFrequency": "2s",
        // Else the node is written every two seconds.
        "nodeStatusReportFrequency": "5m",
        // Tests kill containers; minutes of back-off would follow.
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
    })
}
