//! The tier that has a node: pods run, services and names resolve, images are
//! pulled from a local registry.

use std::ffi::OsStr;
use std::io::Write as _;
use std::net::IpAddr;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::wait::await_condition;
use kube::runtime::wait::conditions::is_pod_running;
use tokio::sync::OnceCell;

use super::cluster::Cluster;
use super::container_runtime::ContainerRuntime;
use super::image::Archive;
use super::kubelet::{self, Kubelet};
use super::process::output;
use super::tools::Tools;
use super::{ADDRESS, ROOT, Tier, control_plane, executable, network, registry, volumes};

/// The name of the node.
pub(crate) const NAME: &str = "node1";

/// Unmodified upstream BuildKit, in its rootless flavour; already imported.
pub(crate) const BUILDKIT: &str = "docker.io/moby/buildkit:v0.34.2-rootless";

/// A cluster with one node.
pub(crate) struct Node {
    cluster: Cluster,
    runtime: ContainerRuntime,
    kubelet: Kubelet,
    /// The others, kept so that a test can look at them.
    _programs: Vec<super::process::Process>,
    own_image: OnceCell<String>,
}

impl Deref for Node {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl Tier for Node {
    const NAME: &'static str = "node";
    const PROGRAMS: &'static [&'static str] = &[
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kubectl",
        "kube-scheduler",
        "kubelet",
        "kube-proxy",
        "coredns",
        "containerd",
        "ctr",
        "runc",
        "docker-registry",
        "nft",
        "iptables",
        "conntrack",
        "buildctl",
        "buildx",
    ];

    async fn start(tools: Arc<Tools>) -> anyhow::Result<Self> {
        volumes::loosen_in_background()?;
        // What does not need the API server starts beside it.
        let (cluster, (runtime, registry)) = tokio::try_join!(
            Cluster::with_controllers(Arc::clone(&tools), "*,-node-ipam-controller,-cloud-node-lifecycle-controller"),
            async { tokio::try_join!(ContainerRuntime::start(&tools), registry::start(&tools)) }
        )?;
        let scheduler = control_plane::start_scheduler(&tools)?;
        let (kubelet, (proxy, dns)) =
            tokio::try_join!(kubelet::start(&tools, cluster.client()), network::start(&tools, cluster.client()))?;
        runtime.imported().await?;
        let programs = vec![registry, scheduler, proxy, dns];
        Ok(Self { cluster, runtime, kubelet, _programs: programs, own_image: OnceCell::new() })
    }
}

impl Node {
    /// Imports the images of an archive into the node, and returns their references.
    ///
    /// # Errors
    /// The archive cannot be read.
    pub(crate) async fn import(&self, archive: &Path) -> anyhow::Result<Vec<String>> {
        self.runtime.import(archive).await
    }

    /// The reference of the image of the executable under test, which it makes
    /// itself; imported when a test first asks.
    ///
    /// # Errors
    /// The executable is not built, or `bko-install image` fails.
    pub(crate) async fn own_image(&self) -> anyhow::Result<&str> {
        let import = async {
            let archive = PathBuf::from(ROOT).join("bko-install.tar");
            let mut image = std::process::Command::new(executable::executable()?);
            image.args(["image", "--output"]).arg(&archive);
            output(image).await?;
            let references = self.import(&archive).await?;
            references.into_iter().next().context("the image has no reference")
        };
        self.own_image.get_or_try_init(|| import).await.map(String::as_str)
    }

    /// An archive that `make tools` made: `busybox.tar`, `buildkit-rootless.tar`.
    ///
    /// # Errors
    /// It is not there.
    pub(crate) fn archive(&self, name: &str) -> anyhow::Result<Archive> {
        let path = self.tools().file(name);
        ensure!(path.is_file(), "\"{}\" does not exist\n\nhint: run `make tools`", path.display());
        Archive::open(path)
    }

    /// `address:port` of the local registry, the same from tests, node and
    /// pods. It speaks plain HTTP and needs no login.
    pub(crate) fn registry_address(&self) -> &'static str {
        registry::ADDRESS
    }

    /// What a `buildkitd.toml` must say for BuildKit to use that registry, as
    /// for any that has no TLS.
    pub(crate) fn buildkitd_toml(&self) -> String {
        format!("[registry.\"{}\"]\n  http = true\n", registry::ADDRESS)
    }

    /// Pushes the image of an archive as `<registry>/<name>`, and returns that reference.
    ///
    /// # Errors
    /// The registry refuses.
    pub(crate) async fn push(&self, archive: &Archive, name: &str) -> anyhow::Result<String> {
        let reference = format!("{}/{name}", registry::ADDRESS);
        self.runtime.push(archive, &reference).await?;
        Ok(reference)
    }

    /// Runs a command in a pod's first container and returns its standard output.
    ///
    /// # Errors
    /// The command fails; with its standard error.
    pub(crate) async fn exec(
        &self,
        namespace: &str,
        pod: &str,
        command: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> anyhow::Result<String> {
        let mut kubectl = self.tools().command("kubectl");
        kubectl.args(["--namespace", namespace, "exec", pod, "--"]).args(command);
        output(kubectl).await
    }

    /// Kills one container of a pod, as nothing that it runs can prevent.
    ///
    /// # Errors
    /// It does not run.
    pub(crate) async fn kill(&self, namespace: &str, pod: &str, container: &str) -> anyhow::Result<()> {
        let pod = Api::<Pod>::namespaced(self.client(), namespace).get(pod).await?;
        let statuses = pod.status.and_then(|status| status.container_statuses).unwrap_or_default();
        let id = statuses.into_iter().find(|status| status.name == container).and_then(|status| status.container_id);
        self.runtime.kill(&id.with_context(|| format!("container \"{container}\" does not run"))?).await
    }

    /// What a pod's first container printed.
    ///
    /// # Errors
    /// There is no such pod.
    pub(crate) async fn logs(&self, namespace: &str, pod: &str) -> anyhow::Result<String> {
        let mut kubectl = self.tools().command("kubectl");
        kubectl.args(["--namespace", namespace, "logs", pod]);
        output(kubectl).await
    }

    /// Waits until a pod runs and passes its probes.
    ///
    /// # Errors
    /// The watch ends.
    pub(crate) async fn wait_ready(&self, namespace: &str, pod: &str) -> anyhow::Result<Pod> {
        let pods: Api<Pod> = Api::namespaced(self.client(), namespace);
        let ready = |pod: Option<&Pod>| {
            let conditions = pod.and_then(|pod| pod.status.as_ref()).and_then(|status| status.conditions.as_ref());
            conditions.is_some_and(|all| all.iter().any(|c| c.type_ == "Ready" && c.status == "True"))
        };
        await_condition(pods.clone(), pod, is_pod_running()).await?;
        await_condition(pods, pod, ready).await?.with_context(|| format!("pod \"{pod}\" is gone"))
    }

    /// Gives an address names, for everything in the sandbox that is no pod:
    /// a test that plays an off-cluster client finds a gateway so.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn add_host(&self, address: IpAddr, names: &[&str]) -> anyhow::Result<()> {
        let mut hosts = std::fs::OpenOptions::new().append(true).open("/etc/hosts")?;
        hosts.write_all(format!("{address} {}\n", names.join(" ")).as_bytes())?;
        Ok(())
    }

    /// The address of the node.
    pub(crate) fn address(&self) -> &'static str {
        ADDRESS
    }

    /// The node's agent, to be killed and started again.
    pub(crate) fn kubelet(&self) -> &Kubelet {
        &self.kubelet
    }
}
