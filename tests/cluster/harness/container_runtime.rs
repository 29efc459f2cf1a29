//! containerd, with a pod network of one bridge.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use super::image::{Archive, references};
use super::process::{Process, output};
use super::tools::Tools;
use super::{ROOT, registry};

/// Where containerd listens.
pub(crate) const SOCKET: &str = "/run/bko/containerd/containerd.sock";

const CONFIG: &str = r#"
version = 2
root = "/run/bko/containerd/root"
state = "/run/bko/containerd/state"
[grpc]
  address = "/run/bko/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "/run/bko/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  # Raising the score of others is forbidden in most containers that tests run in.
  restrict_oom_score_adj = true
  sandbox_image = "registry.k8s.io/pause:3.10"
  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "/run/bko/containerd/registries"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/run/bko/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"#;

/// A running containerd.
pub(crate) struct ContainerRuntime {
    process: Process,
    control: PathBuf,
    /// The images of every run, imported while the rest starts.
    importing: Mutex<Option<JoinHandle<anyhow::Result<()>>>>,
}

impl ContainerRuntime {
    /// Starts it, with the pause image; [`imported`](Self::imported) waits for the others.
    ///
    /// # Errors
    /// It does not listen; with the end of its log.
    pub(crate) async fn start(tools: &Tools) -> anyhow::Result<Self> {
        configure()?;
        let mut command = tools.command("containerd");
        command.args(["--config", "/run/bko/containerd/config.toml"]);
        let process = Process::spawn("containerd", command)?;
        let listens = async || UnixStream::connect(SOCKET).await.is_ok();
        process.wait_until(Duration::from_secs(20), listens).await?;
        let control = PathBuf::from(tools.command("ctr").get_program());
        let runtime = Self { process, control, importing: Mutex::default() };
        runtime.import(&tools.file("pause.tar")).await?;
        let rest = ["busybox.tar", "buildkit-rootless.tar"].map(|name| runtime.import_command(&tools.file(name)));
        let importing = tokio::spawn(async {
            for command in rest {
                output(command).await?;
            }
            Ok(())
        });
        *runtime.importing.lock().unwrap() = Some(importing);
        Ok(runtime)
    }

    /// Waits until the images of every run are there.
    ///
    /// # Errors
    /// One could not be imported.
    pub(crate) async fn imported(&self) -> anyhow::Result<()> {
        let importing = self.importing.lock().unwrap().take();
        if let Some(importing) = importing {
            importing.await?.context("importing images")?;
        }
        Ok(())
    }

    /// Imports the images of an archive, and returns their references.
    ///
    /// # Errors
    /// The archive cannot be read.
    pub(crate) async fn import(&self, archive: &Path) -> anyhow::Result<Vec<String>> {
        output(self.import_command(archive)).await?;
        references(archive)
    }

    /// Pushes the image of an archive to the local registry.
    ///
    /// # Errors
    /// The registry refuses.
    pub(crate) async fn push(&self, archive: &Archive, reference: &str) -> anyhow::Result<()> {
        self.import(archive.path()).await?;
        let mut push = self.control();
        push.args(["images", "push", "--plain-http", reference, archive.reference()]);
        output(push).await?;
        Ok(())
    }

    /// Ends a container's processes by SIGKILL, as its name in a pod's status says.
    ///
    /// # Errors
    /// There is no such container.
    pub(crate) async fn kill(&self, container_id: &str) -> anyhow::Result<()> {
        let mut kill = self.control();
        kill.args(["tasks", "kill", "--signal=SIGKILL", container_id.trim_start_matches("containerd://")]);
        output(kill).await?;
        Ok(())
    }

    fn import_command(&self, archive: &Path) -> Command {
        let mut command = self.control();
        command.args(["images", "import"]).arg(archive);
        command
    }

    fn control(&self) -> Command {
        let mut command = Command::new(&self.control);
        command.args(["--address", SOCKET, "--namespace", "k8s.io"]);
        command
    }
}

fn configure() -> anyhow::Result<()> {
    let hosts = format!("{ROOT}/containerd/registries/{}", registry::ADDRESS);
    std::fs::create_dir_all(&hosts)?;
    let plain_http = format!("[host.\"http://{}\"]\ncapabilities = [\"pull\", \"resolve\"]\n", registry::ADDRESS);
    std::fs::write(format!("{hosts}/hosts.toml"), plain_http)?;
    std::fs::write(format!("{ROOT}/containerd/config.toml"), CONFIG)?;
    let bridge = json!({
        "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
        "ipam": {
            "type": "host-local", "dataDir": format!("{ROOT}/ipam"),
            "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}],
        },
    });
    let ports = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    let network = json!({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]});
    std::fs::create_dir_all(format!("{ROOT}/cni"))?;
    std::fs::write(format!("{ROOT}/cni/10-pods.conflist"), network.to_string())?;
    Ok(())
}
