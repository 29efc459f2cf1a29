//! A real buildkitd and a real companion, as child processes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UnixStream};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

pub(super) const BINARY: &str = env!("CARGO_BIN_EXE_bko-install");

/// Waits until a condition holds, and says how long that took.
pub(super) async fn until(what: &str, within: Duration, mut holds: impl AsyncFnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < within, "not within {within:?}: {what}");
        sleep(Duration::from_millis(25)).await;
    }
    begun.elapsed()
}

fn tool(name: &str) -> PathBuf {
    let home = std::env::var("HOME").expect("HOME is set");
    let path = Path::new(&home).join(".cache/bko/bin").join(name);
    assert!(path.exists(), "{} is missing: this test needs a real BuildKit", path.display());
    path
}

/// A buildkitd in namespaces of its own, so that its builds end with it. Its
/// store is a small tmpfs.
pub(super) struct Buildkitd {
    pub(super) folder: TempDir,
    child: Option<Child>,
    tmpfs: Option<&'static str>,
}

impl Buildkitd {
    pub(super) async fn start() -> Self {
        Self::with_volume("size=400m").await
    }

    pub(super) async fn with_volume(tmpfs: &'static str) -> Self {
        Self::on(Some(tmpfs)).await
    }

    /// One whose store outlives it.
    pub(super) async fn on_disk() -> Self {
        Self::on(None).await
    }

    async fn on(tmpfs: Option<&'static str>) -> Self {
        let folder = tempfile::Builder::new().prefix("bko-").tempdir().unwrap();
        // Another user must get as far as the sockets, so that their modes are tested.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["root", "context", "control", "bin"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        fs::copy("/bin/busybox", folder.path().join("context/busybox"))
            .expect("this test needs a static busybox at /bin/busybox");
        let mut daemon = Self { folder, child: None, tmpfs };
        daemon.restart().await;
        daemon
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn address(&self) -> String {
        format!("unix://{}", self.path("buildkitd.sock").display())
    }

    pub(super) async fn restart(&mut self) {
        let script = format!(
            "{}exec {} --root {root} --addr {} --containerd-worker=false \
             --oci-worker-net=host --oci-worker-gc=false",
            self.tmpfs
                .map(|options| format!("mount -t tmpfs -o {options} tmpfs {} && ", self.path("root").display()))
                .unwrap_or_default(),
            tool("buildkitd").display(),
            self.address(),
            root = self.path("root").display(),
        );
        let log = fs::File::create(self.path("buildkitd.log")).unwrap();
        let child = Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", &script])
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        self.child = Some(child);
        let socket = self.path("buildkitd.sock");
        until("buildkitd serves", Duration::from_secs(20), async || UnixStream::connect(&socket).await.is_ok()).await;
    }

    /// The daemon's process, as seen from here.
    pub(super) fn pid(&self) -> Pid {
        let parent = self.child.as_ref().and_then(Child::id).unwrap();
        let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
        Pid::from_raw(children.trim().parse().unwrap()).unwrap()
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub(super) async fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.child.take().unwrap().wait().await.unwrap();
    }

    /// The store; a tmpfs is mounted in the daemon's namespace only.
    pub(super) fn store(&self) -> PathBuf {
        if self.tmpfs.is_none() {
            return self.path("root");
        }
        PathBuf::from(format!("/proc/{}/root{}", self.pid().as_raw_pid(), self.path("root").display()))
    }

    /// Starts a build with one step, and returns once the daemon works on it.
    pub(super) async fn build(&self, step: &[&str]) -> Build {
        self.start_build(step, &["--no-cache"]).await
    }

    /// The same, from the cache where that can answer.
    pub(super) async fn build_again(&self, step: &[&str]) -> Build {
        self.start_build(step, &[]).await
    }

    async fn start_build(&self, step: &[&str], flags: &[&str]) -> Build {
        let step = serde_json::to_string(&[&["/bin/busybox"], step].concat()).unwrap();
        let dockerfile = format!("FROM scratch\nCOPY busybox /bin/busybox\nRUN {step}\n");
        fs::write(self.path("context/Dockerfile"), dockerfile).unwrap();
        let context = self.path("context").display().to_string();
        let mut child = Command::new(tool("buildctl"))
            .args(["--addr", &self.address(), "build", "--progress", "plain"])
            .args(flags)
            .args(["--frontend", "dockerfile.v0"])
            .args(["--local", &format!("context={context}"), "--local", &format!("dockerfile={context}")])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut log = Vec::new();
        while let Some(line) = lines.next_line().await.unwrap() {
            log.push(line);
            if log.last().is_some_and(|line| line.starts_with("#1 ")) {
                break;
            }
        }
        let rest = tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                log.push(line);
            }
            log.join("\n")
        });
        Build { child, log: rest }
    }
}

pub(super) struct Build {
    child: Child,
    log: tokio::task::JoinHandle<String>,
}

impl Build {
    pub(super) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(super) async fn succeeds(mut self) {
        let status = self.child.wait().await.unwrap();
        assert!(status.success(), "the build failed: {}", self.log.await.unwrap());
    }

    pub(super) async fn fails(mut self) {
        assert!(!self.child.wait().await.unwrap().success());
    }
}

/// A companion of a daemon.
pub(super) struct Companion {
    pub(super) child: Child,
    address: String,
    socket: PathBuf,
}

impl Companion {
    pub(super) async fn start(daemon: &Buildkitd, flags: &[&str]) -> Self {
        let socket = daemon.path("control/control.sock");
        let mut child = Command::new(BINARY)
            .args(["companion", "--log-format", "json", "--listen", "127.0.0.1:0"])
            .args(["--buildkit-addr", &daemon.address()])
            .arg("--cache-dir")
            .arg(daemon.store())
            .arg("--control-socket")
            .arg(&socket)
            .arg("--install-to")
            .arg(daemon.path("bin"))
            .args(flags)
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut seen = String::new();
        let address = loop {
            let line = lines.next_line().await.unwrap().unwrap_or_else(|| panic!("no companion: {seen}"));
            let event: Value = serde_json::from_str(&line).unwrap_or_default();
            if let Some(address) = event["http.address"].as_str() {
                break address.to_owned();
            }
            seen += &line;
        };
        // Read on, or the companion would block when the pipe is full.
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                println!("{line}");
            }
        });
        Self { child, address, socket }
    }

    pub(super) async fn ready(daemon: &Buildkitd, flags: &[&str]) -> Self {
        let companion = Self::start(daemon, flags).await;
        companion.until("/readyz", 200).await;
        companion
    }

    pub(super) async fn get(&self, path: &str) -> (u16, String) {
        let stream = TcpStream::connect(&self.address).await.unwrap();
        request(stream, "GET", path).await
    }

    pub(super) async fn json(&self, path: &str) -> Value {
        let (status, body) = self.get(path).await;
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    /// `/usage`; a companion that got no processor for a while does not know it.
    pub(super) async fn usage(&self) -> Value {
        self.until("/usage", 200).await;
        self.json("/usage").await
    }

    pub(super) async fn active(&self) -> usize {
        self.json("/builds").await["active"].as_array().unwrap().len()
    }

    pub(super) async fn metric(&self, name: &str) -> Option<f64> {
        let (_, text) = self.get("/metrics").await;
        let line = text.lines().find(|line| line.split(' ').next() == Some(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    pub(super) async fn control(&self, method: &str, path: &str) -> (u16, String) {
        let stream = UnixStream::connect(&self.socket).await.unwrap();
        request(stream, method, path).await
    }

    pub(super) async fn until(&self, path: &str, status: u16) -> Duration {
        let what = format!("{path} answers {status}");
        until(&what, Duration::from_secs(15), async || self.get(path).await.0 == status).await
    }

    pub(super) fn terminate(&self) {
        let pid = i32::try_from(self.child.id().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    }

    /// The exit code, and the time that it took.
    pub(super) async fn ended(mut self, within: Duration) -> (ExitStatus, Duration) {
        let begun = Instant::now();
        let status = timeout(within, self.child.wait()).await.expect("the companion ends in time").unwrap();
        (status, begun.elapsed())
    }
}

/// The `preStop` hook, run from where the companion leaves it.
pub(super) fn hook(daemon: &Buildkitd, program: &Path, seconds: u64) -> Command {
    let mut command = Command::new(program);
    command
        .args(["companion", "wait-idle", "--drain-seconds", &seconds.to_string()])
        .args(["--buildkit-addr", &daemon.address()])
        .arg("--control-socket")
        .arg(daemon.path("control/control.sock"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// Runs a hook to its end, which must come.
pub(super) async fn output(mut command: Command) -> Output {
    timeout(Duration::from_secs(30), command.output()).await.expect("the hook ends").unwrap()
}

/// One request; every answer of ours must come in time.
async fn request(stream: impl AsyncRead + AsyncWrite + Unpin, method: &str, path: &str) -> (u16, String) {
    let mut stream = stream;
    let answer = async {
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let answer = timeout(Duration::from_secs(15), answer).await.unwrap_or_else(|_| panic!("{path} hangs"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}
