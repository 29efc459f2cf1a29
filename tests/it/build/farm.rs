//! A farm for one test: the routing API over projects in memory, whose daemons
//! are all the one real daemon, and a machine of a CI to call from.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bko_install::router::Timeouts;
use rcgen::ExtendedKeyUsagePurpose;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

use super::daemon::{DOMAIN, daemon, tools};
use crate::router::memory::Memory;
use crate::router::{Server, tokens};

/// What the routing API wants to see.
pub(crate) const TOKEN: &str = "s3cret";
pub(crate) const REPO: &str = "github.com/acme/shop";
pub(crate) const KEY: &str = "p41bd34a2227aca39";
/// Of the whole build.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Farm {
    pub(crate) memory: Arc<Memory>,
    pub(crate) server: Server,
    pub(crate) machine: TempDir,
    /// Where daemons are.
    pub(crate) gateway: SocketAddr,
}

impl Farm {
    pub(crate) async fn start() -> Self {
        Self::behind(daemon().address).await
    }

    /// With daemons at another address, behind which there is the real one.
    pub(crate) async fn behind(gateway: SocketAddr) -> Self {
        let farm = Self::at(gateway).await;
        farm.memory.let_pods_become_ready();
        farm
    }

    /// With daemons that do not wake by themselves.
    pub(crate) async fn asleep() -> Self {
        Self::at(daemon().address).await
    }

    async fn at(gateway: SocketAddr) -> Self {
        let memory = Memory::at("buildkit-builds", Some(DOMAIN.to_owned()), gateway.port());
        let memory = Arc::new(memory);
        let server = Server::start(tokens(), &memory, Timeouts::new(Duration::from_secs(180))).await;
        let farm = Self { memory, server, machine: tempfile::tempdir().unwrap(), gateway };
        farm.furnish();
        farm
    }

    /// The machine: certificates, tools, an own temporary folder, a context.
    fn furnish(&self) {
        let daemon = daemon();
        daemon.authority.client_folder(&daemon.authority, &self.path("certs"));
        for folder in ["tmp", "home", "docker/cli-plugins", "bin", "context"] {
            std::fs::create_dir_all(self.path(folder)).unwrap();
        }
        std::os::unix::fs::symlink(tools().join("buildx"), self.path("docker/cli-plugins/docker-buildx")).unwrap();
        self.docker();
        self.tool("buildctl", &tools().join("buildctl"));
        std::fs::copy(which("busybox"), self.path("context/busybox")).unwrap();
        self.dockerfile("RUN echo built > /result");
    }

    /// Docker's own command, or, where it is not installed, what it does with buildx.
    pub(crate) fn docker(&self) {
        match find("docker") {
            Some(docker) => self.tool("docker", &docker),
            None => {
                let plugin = self.path("docker/cli-plugins/docker-buildx");
                let script = format!("#!/bin/sh\n[ \"$1\" = buildx ] && shift && exec '{}' \"$@\"\n", plugin.display());
                std::fs::write(self.path("bin/docker"), script).unwrap();
                let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
                std::fs::set_permissions(self.path("bin/docker"), executable).unwrap();
            }
        }
    }

    /// Puts a program on the machine's path.
    pub(crate) fn tool(&self, name: &str, program: &Path) {
        std::os::unix::fs::symlink(program, self.path("bin").join(name)).unwrap();
    }

    pub(crate) fn remove_tool(&self, name: &str) {
        std::fs::remove_file(self.path("bin").join(name)).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.machine.path().join(name)
    }

    /// Steps with a shell, whose `/result` is the image.
    pub(crate) fn dockerfile(&self, steps: &str) {
        let shell = r#"SHELL ["/bin/busybox", "sh", "-c"]"#;
        let text = format!(
            "FROM scratch AS build\nCOPY busybox /bin/busybox\n{shell}\nENV PATH=/bin\nRUN /bin/busybox --install -s /bin\n\
             {steps}\nFROM scratch\nCOPY --from=build /result /result\n"
        );
        std::fs::write(self.path("context/Dockerfile"), text).unwrap();
    }

    /// `bko-install build` on the machine, which knows nothing but its variables.
    pub(crate) fn build(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bko-install"));
        command.arg("build").args(args).current_dir(self.path("context"));
        self.environment(&mut command);
        command.env("BUILDKIT_OPERATOR_CLIENT_CERTS", self.path("certs"));
        command
    }

    pub(crate) fn environment(&self, command: &mut Command) {
        command
            .env_clear()
            .env("PATH", self.path("bin"))
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.path("tmp"))
            .env("DOCKER_CONFIG", self.path("docker"))
            .env("BUILDKIT_OPERATOR_BUILDD_URL", format!("http://{}", self.server.address))
            .env("BUILDKIT_OPERATOR_TOKEN", TOKEN)
            .env("BUILDKIT_OPERATOR_REPO", REPO)
            .env("BUILDKIT_OPERATOR_ARCH", "amd64")
            .env("BUILDKIT_OPERATOR_GATEWAY_IP", self.gateway.ip().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
    }

    /// Certificates as variables instead of a folder.
    pub(crate) fn certificates_in_variables(&self, command: &mut Command) {
        command.env_remove("BUILDKIT_OPERATOR_CLIENT_CERTS");
        for (name, file) in [("CA", "ca.pem"), ("CERT", "cert.pem"), ("KEY", "key.pem")] {
            let text = std::fs::read_to_string(self.path("certs").join(file)).unwrap();
            command.env(format!("BUILDKIT_OPERATOR_{name}"), text);
        }
    }

    /// Builds of the project that are registered.
    pub(crate) fn inflight(&self) -> usize {
        self.memory.inflight(KEY).unwrap_or(0)
    }

    /// Everything was released, and nothing is left on the machine.
    pub(crate) fn is_clean(&self) {
        let seen = self.memory.seen();
        for (key, daemon) in &seen.projects {
            assert!(daemon.inflight.is_empty(), "{key} has builds that nobody released");
        }
        let left: Vec<_> = self.path("tmp").read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    /// Names of the builders that buildx knows on the machine.
    pub(crate) fn builders(&self) -> Vec<String> {
        let Ok(entries) = self.path("docker/buildx/instances").read_dir() else { return Vec::new() };
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// A server certificate of the farm.
    pub(crate) fn issue(&self, names: &[&str]) -> (String, String) {
        daemon().authority.issue(names, ExtendedKeyUsagePurpose::ServerAuth)
    }
}

pub(crate) fn which(program: &str) -> PathBuf {
    find(program).unwrap_or_else(|| panic!("{program} is not installed: run `make tools`"))
}

fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap();
    let mut folders = path.split(':').chain(["/usr/sbin", "/sbin"]).map(|folder| Path::new(folder).join(program));
    folders.find(|path| path.exists())
}

/// Runs to the end.
pub(crate) async fn ends(mut command: Command) -> Output {
    tokio::time::timeout(PATIENCE, command.output()).await.expect("it does not end").unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs to the end, which must have this exit code.
pub(crate) async fn ends_with(code: i32, command: Command) -> String {
    let output = ends(command).await;
    let printed = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{printed}");
    printed
}

/// A build that runs.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: tokio::io::Lines<BufReader<tokio::process::ChildStderr>>,
    pub(crate) printed: String,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, lines, printed: String::new() }
    }

    /// Returns once this was printed.
    pub(crate) async fn until(&mut self, marker: &str) {
        let found = async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                self.printed += &format!("{line}\n");
                if line.contains(marker) {
                    return;
                }
            }
            panic!("it ended without \"{marker}\":\n{}", self.printed);
        };
        tokio::time::timeout(PATIENCE, found).await.expect("it prints nothing of the kind");
    }

    /// By its number, as anybody may.
    pub(crate) fn signal(&self, name: &str) {
        let status =
            std::process::Command::new("kill").args(["-s", name, &self.child.id().unwrap().to_string()]).status();
        assert!(status.unwrap().success());
    }

    /// The exit code.
    pub(crate) async fn ends(mut self) -> (Option<i32>, String) {
        let rest = async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                self.printed += &format!("{line}\n");
            }
            self.child.wait().await.unwrap().code()
        };
        let code = tokio::time::timeout(PATIENCE, rest).await.expect("it does not end");
        (code, self.printed)
    }
}
