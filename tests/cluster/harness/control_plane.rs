//! etcd, the API server and the controller manager.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use http::Request;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

use super::pki::{Authority, service_account_keys};
use super::process::Process;
use super::tools::Tools;
use super::{ADDRESS, ROOT, cluster};

const ETCD: &str = "http://127.0.0.1:2379";
const ETCD_PEER: &str = "http://127.0.0.1:2380";

/// The programs that a control plane needs.
pub(crate) const PROGRAMS: &[&str] = &["etcd", "kube-apiserver", "kube-controller-manager", "kubectl"];

/// What is recorded of every request: who did what to which object, no bodies.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived, ResponseStarted]\n\
                            rules: [{level: Metadata}]\n";

/// A control plane that answers.
#[derive(Debug)]
pub(crate) struct ControlPlane {
    /// The store.
    pub(crate) etcd: Process,
    /// The API server.
    pub(crate) api_server: Process,
    /// The built-in controllers.
    pub(crate) controller_manager: Process,
}

/// Starts a control plane, and returns when its controllers work too.
///
/// # Errors
/// A program does not start; with the end of its log.
pub(crate) async fn start(tools: &Tools, controllers: &str) -> anyhow::Result<(ControlPlane, Client)> {
    let etcd = Process::spawn("etcd", etcd(tools))?;
    certificates()?;
    let client = client(Path::new(cluster::KUBECONFIG)).await?;
    etcd.wait_until(Duration::from_secs(20), async || super::process::answers(&format!("{ETCD}/health")).await).await?;
    std::fs::write(format!("{ROOT}/audit.yaml"), AUDIT_POLICY)?;
    let api_server = Process::spawn("kube-apiserver", api_server(tools))?;
    api_server.wait_until(Duration::from_secs(60), async || is_ready(&client).await).await?;
    let controller_manager = Process::spawn("kube-controller-manager", controller_manager(tools, controllers))?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    controller_manager.wait_until(Duration::from_secs(30), async || accounts.get("default").await.is_ok()).await?;
    Ok((ControlPlane { etcd, api_server, controller_manager }, client))
}

/// Starts the scheduler; pods wait until it is up.
///
/// # Errors
/// It cannot be executed.
pub(crate) fn start_scheduler(tools: &Tools) -> anyhow::Result<Process> {
    let kubeconfig = format!("{ROOT}/scheduler.kubeconfig");
    let mut command = tools.command("kube-scheduler");
    command.args([
        &format!("--kubeconfig={kubeconfig}"),
        &format!("--authentication-kubeconfig={kubeconfig}"),
        &format!("--authorization-kubeconfig={kubeconfig}"),
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
    ]);
    Process::spawn("kube-scheduler", command)
}

/// A client of the cluster, as the given kubeconfig says.
///
/// # Errors
/// The kubeconfig cannot be read.
pub(crate) async fn client(kubeconfig: &Path) -> anyhow::Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).context("reading the kubeconfig")?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Whether the API server says that it is ready.
pub(crate) async fn is_ready(client: &Client) -> bool {
    let Ok(request) = Request::get("/readyz").body(Vec::new()) else { return false };
    client.request_text(request).await.is_ok()
}

fn certificates() -> anyhow::Result<()> {
    let folder = Path::new(ROOT).join("pki");
    let ca = Authority::new(&folder, "ca")?;
    let kubernetes = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"];
    let mut hosts = vec!["localhost", "kubernetes.default.svc.cluster.local", "127.0.0.1", "10.96.0.1", ADDRESS];
    hosts.extend(kubernetes);
    ca.sign("apiserver", ("", "kube-apiserver"), &hosts)?;
    for (user, subject) in [
        ("admin", ("system:masters", "admin")),
        ("controller-manager", ("", "system:kube-controller-manager")),
        ("scheduler", ("", "system:kube-scheduler")),
        ("proxy", ("", "system:kube-proxy")),
        ("kubelet", ("system:nodes", "system:node:node1")),
    ] {
        let leaf = ca.sign(user, subject, &["node1", "127.0.0.1", ADDRESS])?;
        ca.kubeconfig(user, &leaf)?;
    }
    Authority::new(&folder, "front-proxy-ca")?.sign("front-proxy-client", ("", "front-proxy-client"), &[])?;
    service_account_keys(&folder)
}

fn etcd(tools: &Tools) -> Command {
    let mut command = tools.command("etcd");
    command.args([
        &format!("--data-dir={ROOT}/etcd"),
        &format!("--listen-client-urls={ETCD}"),
        &format!("--advertise-client-urls={ETCD}"),
        &format!("--listen-peer-urls={ETCD_PEER}"),
        &format!("--initial-advertise-peer-urls={ETCD_PEER}"),
        &format!("--initial-cluster=default={ETCD_PEER}"),
        "--unsafe-no-fsync",
    ]);
    command
}

fn api_server(tools: &Tools) -> Command {
    let pki = format!("{ROOT}/pki");
    let mut command = tools.command("kube-apiserver");
    command.args([
        &format!("--etcd-servers={ETCD}"),
        &format!("--bind-address={ADDRESS}"),
        &format!("--advertise-address={ADDRESS}"),
        "--secure-port=6443",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        &format!("--client-ca-file={pki}/ca.crt"),
        &format!("--tls-cert-file={pki}/apiserver.crt"),
        &format!("--tls-private-key-file={pki}/apiserver.key"),
        "--service-account-issuer=https://kubernetes.default.svc",
        &format!("--service-account-key-file={pki}/sa.pub"),
        &format!("--service-account-signing-key-file={pki}/sa.key"),
        &format!("--kubelet-client-certificate={pki}/admin.crt"),
        &format!("--kubelet-client-key={pki}/admin.key"),
        &format!("--requestheader-client-ca-file={pki}/front-proxy-ca.crt"),
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        &format!("--proxy-client-cert-file={pki}/front-proxy-client.crt"),
        &format!("--proxy-client-key-file={pki}/front-proxy-client.key"),
        &format!("--audit-policy-file={ROOT}/audit.yaml"),
        &format!("--audit-log-path={}", super::audit::LOG),
    ]);
    command
}

fn controller_manager(tools: &Tools, controllers: &str) -> Command {
    let pki = format!("{ROOT}/pki");
    let kubeconfig = format!("{ROOT}/controller-manager.kubeconfig");
    let mut command = tools.command("kube-controller-manager");
    command.args([
        &format!("--kubeconfig={kubeconfig}"),
        &format!("--authentication-kubeconfig={kubeconfig}"),
        &format!("--authorization-kubeconfig={kubeconfig}"),
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        &format!("--service-account-private-key-file={pki}/sa.key"),
        &format!("--root-ca-file={pki}/ca.crt"),
        &format!("--cluster-signing-cert-file={pki}/ca.crt"),
        &format!("--cluster-signing-key-file={pki}/ca.key"),
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=false",
        // Tests wait for controllers: let those not wait for their own rate limit.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--enable-hostpath-provisioner=true",
        &format!("--controllers={controllers}"),
    ]);
    command
}
