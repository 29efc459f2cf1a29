//! A farm on this machine, run by root or by an ordinary user.

use std::ffi::OsString;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bko_install::local::procfs;
use bko_install::provisioner::project::{Detail, Page};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::executable::executable;
use crate::harness::sandbox;
use crate::harness::tools::Tools;

/// Where overlays can be made, which the sandbox's own folders are.
const ROOM: &str = "/tmp/hostpath_pv";

/// The ordinary user.
pub(crate) const USER: u32 = 4242;

/// Programs that the ordinary user can reach.
const PROGRAMS: &str = "/tmp/hostpath_pv/bin";

/// Makes the ordinary user, and what builds need.
pub(crate) fn furnish(tools: &Tools) -> anyhow::Result<()> {
    let append = |file: &str, line: &str| -> anyhow::Result<()> {
        let mut text = std::fs::read_to_string(file).unwrap_or_default();
        text.push_str(line);
        Ok(std::fs::write(file, text)?)
    };
    append("/etc/passwd", "builder:x:4242:4242::/tmp/hostpath_pv/home:/bin/sh\n")?;
    append("/etc/group", "builder:x:4242:\n")?;
    append("/etc/subuid", "builder:200000:65536\n")?;
    append("/etc/subgid", "builder:200000:65536\n")?;
    std::fs::create_dir_all(PROGRAMS)?;
    for name in ["buildkitd", "buildctl", "rootlesskit"] {
        std::fs::copy(tools.file(name), Path::new(PROGRAMS).join(name))?;
    }
    std::fs::copy(executable()?, Path::new(PROGRAMS).join("bko-install"))?;
    let context = Path::new(ROOM).join("context");
    std::fs::create_dir_all(&context)?;
    std::fs::copy("/usr/bin/busybox", context.join("busybox")).context("copying busybox")?;
    Ok(())
}

/// Becomes the rest of the command line where cgroups are as on a machine that has v2 alone.
const ONLY_V2: &str = "umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec \"$@\"";

/// Who runs the farm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Root,
    Ordinary,
}

/// A farm, and where it is.
pub(crate) struct Farm {
    pub(crate) state: PathBuf,
    pub(crate) ports: Ports,
    who: Who,
    flags: Vec<OsString>,
    child: Option<Child>,
    buildctl: PathBuf,
    buildx: PathBuf,
    /// Below the mount points, where its cgroups are; and whether `up` itself begins there.
    cgroup: String,
    within: bool,
    only_v2: bool,
    program: PathBuf,
    env: Vec<(&'static str, PathBuf)>,
}

/// Each farm has its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    pub(crate) gateway: u16,
    pub(crate) api: u16,
    pub(crate) admin: u16,
    pub(crate) daemon: u16,
}

/// What `/route` answers.
#[derive(Clone, Debug)]
pub(crate) struct Routed {
    pub(crate) key: String,
    pub(crate) build: String,
    pub(crate) endpoint: String,
}

static NEXT: AtomicU16 = AtomicU16::new(0);

impl Farm {
    /// A farm that does not run yet.
    pub(crate) fn new(tools: &Tools, who: Who, flags: &[&str]) -> anyhow::Result<Self> {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let state = Path::new(ROOM).join(format!("s{n}"));
        Self::at(tools, who, flags, state)
    }

    /// A farm whose state is there.
    pub(crate) fn at(tools: &Tools, who: Who, flags: &[&str], state: PathBuf) -> anyhow::Result<Self> {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let base = 21_000 + 10 * n;
        let ports = Ports { gateway: base, api: base + 1, admin: base + 2, daemon: base + 3 };
        std::fs::create_dir_all(&state)?;
        if who == Who::Ordinary {
            chown(&state, Some(USER), Some(USER))?;
        }
        let flags = flags.iter().map(OsString::from).collect();
        let (buildctl, buildx) = (tools.file("buildctl"), tools.file("buildx"));
        let cgroup = format!("{}/s{n}", sandbox::cgroup());
        let program = Path::new(PROGRAMS).join("bko-install");
        let (within, only_v2, env) = (false, false, vec![]);
        Ok(Self { state, ports, who, flags, child: None, buildctl, buildx, cgroup, within, only_v2, program, env })
    }

    /// A farm that is up.
    pub(crate) async fn up(tools: &Tools, who: Who, flags: &[&str]) -> anyhow::Result<Self> {
        let mut farm = Self::new(tools, who, flags)?;
        farm.start().await?;
        Ok(farm)
    }

    /// Below the mount points, where its cgroups are.
    pub(crate) fn cgroup(&self) -> &str {
        &self.cgroup
    }

    /// `up` begins within a cgroup, and makes those of its daemons there.
    pub(crate) fn begin_in(&mut self, cgroup: &str) {
        (self.cgroup, self.within) = (cgroup.to_owned(), true);
    }

    /// `up` sees no cgroups but those of v2, whatever else this machine has.
    pub(crate) fn see_only_v2(&mut self) {
        self.only_v2 = true;
    }

    /// Other flags, from its next start on.
    pub(crate) fn set_flags(&mut self, flags: &[&str]) {
        self.flags = flags.iter().map(OsString::from).collect();
    }

    fn command(&self, verb: &str) -> Command {
        let program = &self.program;
        let enter = format!(
            "for f in /sys/fs/cgroup/*/{0}/cgroup.procs /sys/fs/cgroup/{0}/cgroup.procs; do \
            [ ! -f $f ] || echo 0 >$f; done; exec \"$@\"",
            self.cgroup
        );
        let mut command = match self.who {
            Who::Ordinary if self.within && verb == "up" => {
                let mut command = Command::new("sh");
                let id = USER.to_string();
                command.args(["-c", &enter, "sh", "setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--"]);
                command.arg(program);
                command
            }
            Who::Root if self.only_v2 && verb == "up" => {
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-c", ONLY_V2, "sh"]).arg(program);
                command
            }
            Who::Root => Command::new(program),
            Who::Ordinary => {
                let mut command = Command::new("setpriv");
                let id = USER.to_string();
                command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
                command
            }
        };
        furnished(&mut command).envs(self.env.iter().cloned());
        command.arg(verb).arg("--state-dir").arg(&self.state);
        command
    }

    /// A command of somebody who does not know where the state is.
    pub(crate) fn elsewhere(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.program);
        furnished(&mut command).arg(verb);
        command
    }

    /// Another executable, from its next start on.
    pub(crate) fn use_program(&mut self, program: &Path) {
        program.clone_into(&mut self.program);
    }

    /// Variables of its environment.
    pub(crate) fn set_env(&mut self, env: &[(&'static str, &Path)]) {
        self.env = env.iter().map(|(name, value)| (*name, value.to_path_buf())).collect();
    }

    /// `up`, with flags of this farm and others.
    pub(crate) fn up_command(&self) -> Command {
        let mut command = self.command("up");
        let Ports { gateway, api, admin, daemon } = self.ports;
        command.arg(format!("--listen=lo:{gateway}")).arg(format!("--api-listen=127.0.0.1:{api}"));
        command.arg(format!("--metrics-addr=127.0.0.1:{admin}")).arg(format!("--daemon-port={daemon}"));
        // The keeper of the sandbox removes what is below.
        if !self.flags.iter().any(|flag| flag.to_string_lossy().starts_with("--cgroup=")) {
            command.arg(format!("--cgroup=/{}", self.cgroup));
        }
        command.args(&self.flags);
        command
    }

    /// Another command about this farm, to be run.
    pub(crate) fn prepared(&self, verb: &str, arguments: &[&str]) -> Command {
        let mut command = self.command(verb);
        command.args(arguments);
        command
    }

    /// Another command about this farm.
    pub(crate) fn run(&self, verb: &str, arguments: &[&str]) -> anyhow::Result<Output> {
        self.prepared(verb, arguments).output().context("running bko-install")
    }

    /// Starts it, and returns when the routing API answers.
    pub(crate) async fn start(&mut self) -> anyhow::Result<()> {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.log())?;
        let mut command = self.up_command();
        command.stdout(log.try_clone()?).stderr(log);
        self.child = Some(command.spawn()?);
        let begun = Instant::now();
        while self.post("/healthz", &json!({})).is_err() {
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                bail!("up ended with {status}: {}", self.said());
            }
            ensure!(begun.elapsed() < Duration::from_secs(30), "up does not serve: {}", self.said());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    fn log(&self) -> PathBuf {
        self.state.with_extension("log")
    }

    /// The process of `up`.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// What `up` has said so far.
    pub(crate) fn said(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Sends a signal to `up`.
    pub(crate) fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = self.pid().context("it does not run")?;
        let pid = Pid::from_raw(i32::try_from(pid)?).context("no process id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Kills `up` at once, and nothing else.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::KILL)?;
        self.child.take().context("it does not run")?.wait()?;
        Ok(())
    }

    /// Whether `up` has ended; how.
    pub(crate) fn ended(&mut self) -> anyhow::Result<Option<std::process::ExitStatus>> {
        Ok(self.child.as_mut().context("it does not run")?.try_wait()?)
    }

    /// Ends it as Ctrl-C does, and returns when it has ended.
    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::INT)?;
        self.until("up ends", Duration::from_secs(40), |farm| Ok(farm.ended()?.is_some())).await?;
        self.child = None;
        Ok(())
    }

    /// Returns when something holds.
    pub(crate) async fn until(
        &mut self,
        what: &str,
        within: Duration,
        mut holds: impl FnMut(&mut Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let begun = Instant::now();
        while !holds(self)? {
            ensure!(begun.elapsed() < within, "not within {within:?}: {what}\n{}", self.said());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// One request; status and body.
    pub(crate) fn post(&self, path: &str, body: &Value) -> anyhow::Result<(u16, String)> {
        self.request("POST", path, &body.to_string())
    }

    fn request(&self, method: &str, path: &str, body: &str) -> anyhow::Result<(u16, String)> {
        let token = std::fs::read_to_string(self.state.join("token")).unwrap_or_default();
        self.request_as(&token, method, path, body)
    }

    /// One request with a token; status and body.
    pub(crate) fn request_as(
        &self,
        token: &str,
        method: &str,
        path: &str,
        body: &str,
    ) -> anyhow::Result<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.ports.api))?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n{body}",
            token.trim(),
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let status = answer.split_whitespace().nth(1).context("no status")?.parse()?;
        let body = answer.split_once("\r\n\r\n").context("no body")?.1.to_owned();
        Ok((status, body))
    }

    /// A route that is answered.
    pub(crate) fn route(&self, repo: &str) -> anyhow::Result<Routed> {
        self.route_as(repo, false)
    }

    /// A route that is answered, of an untrusted build or not.
    pub(crate) fn route_as(&self, repo: &str, untrusted: bool) -> anyhow::Result<Routed> {
        let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let (status, body) = self.post("/route", &json!({"repo": repo, "arch": arch, "untrusted": untrusted}))?;
        ensure!(status == 200, "/route answers {status}: {body}\n{}", self.said());
        let body: Value = serde_json::from_str(&body)?;
        let text = |name: &str| body[name].as_str().map(str::to_owned).with_context(|| format!("no {name}: {body}"));
        Ok(Routed { key: text("key")?, build: text("buildId")?, endpoint: text("endpoint")? })
    }

    /// Releases a build.
    pub(crate) fn complete(&self, routed: &Routed) -> anyhow::Result<()> {
        let (status, body) = self.post("/complete", &json!({"key": routed.key, "buildId": routed.build}))?;
        ensure!(status == 204, "/complete answers {status}: {body}");
        Ok(())
    }

    /// Releases a build with a token that nobody accepts: that is allowed only
    /// to who knows the id of a build that is really registered.
    pub(crate) fn is_registered(&self, routed: &Routed) -> anyhow::Result<bool> {
        let body = json!({"key": routed.key, "buildId": routed.build}).to_string();
        match self.request_as("another", "POST", "/complete", &body)? {
            (204, _) => Ok(true),
            (401, _) => Ok(false),
            (status, body) => bail!("/complete answers {status}: {body}"),
        }
    }

    /// All projects.
    pub(crate) fn projects(&self) -> anyhow::Result<Page> {
        let (status, body) = self.request("GET", "/projects?limit=500", "")?;
        ensure!(status == 200, "/projects answers {status}: {body}");
        Ok(serde_json::from_str(&body)?)
    }

    /// One project.
    pub(crate) fn project(&self, key: &str) -> anyhow::Result<Detail> {
        let (status, body) = self.request("GET", &format!("/projects/{key}"), "")?;
        ensure!(status == 200, "/projects/{key} answers {status}: {body}");
        Ok(serde_json::from_str(&body)?)
    }

    /// `buildctl build` of a context of its own whose step runs for `seconds`.
    pub(crate) fn buildctl(&self, endpoint: &str, name: &str, seconds: f32) -> anyhow::Result<Command> {
        let context = context(name, seconds)?;
        let certificates = self.state.join("certs/client");
        let mut command = Command::new(&self.buildctl);
        command.env_clear().env("HOME", ROOM).args(["--addr", endpoint]);
        for (flag, file) in [("--tlscacert", "ca.pem"), ("--tlscert", "cert.pem"), ("--tlskey", "key.pem")] {
            command.arg(flag).arg(certificates.join(file));
        }
        command.args(["build", "--progress=plain", "--frontend=dockerfile.v0"]);
        for part in ["context", "dockerfile"] {
            command.arg(format!("--local={part}={}", context.display()));
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    /// A build that succeeds; what it printed.
    pub(crate) async fn build(&self, endpoint: &str, name: &str) -> anyhow::Result<String> {
        let mut command = tokio::process::Command::from(self.buildctl(endpoint, name, 0.1)?);
        printed(command.output().await?).with_context(|| format!("buildctl\n{}", self.said()))
    }

    /// The same by `docker buildx`.
    pub(crate) async fn buildx(&self, endpoint: &str, name: &str) -> anyhow::Result<String> {
        let (context, certificates) = (context(name, 0.1)?, self.state.join("certs/client"));
        let config = self.state.with_extension("buildx");
        let run = async |arguments: &[String]| {
            let mut command = tokio::process::Command::new(&self.buildx);
            command.env_clear().env("HOME", &config).env("BUILDX_CONFIG", &config).args(arguments);
            printed(command.output().await?)
        };
        let file = |name: &str, file: &str| format!("{name}={}", certificates.join(file).display());
        let options = [file("cacert", "ca.pem"), file("cert", "cert.pem"), file("key", "key.pem")].join(",");
        let words = |line: &[&str]| line.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        run(&words(&["create", "--name", "b", "--driver", "remote", "--driver-opt", &options, endpoint])).await?;
        run(&words(&["build", "--builder", "b", "--progress", "plain", &context.display().to_string()])).await
    }

    /// Processes of daemons of this farm: those that were started by us.
    pub(crate) fn daemons(&self) -> Vec<(u32, String)> {
        let prefix = self.state.join("daemons").display().to_string();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let words: Vec<_> = line.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
            let is_daemon = words.first().is_some_and(|word| word.ends_with("/buildkitd"));
            let config = words.iter().position(|word| word == "--config").and_then(|at| words.get(at + 1));
            if let Some(key) = config.filter(|_| is_daemon).and_then(|c| c.strip_prefix(&prefix)) {
                found.push((pid, key.trim_start_matches('/').split('/').next().unwrap_or_default().to_owned()));
            }
        }
        // A child that has not become another program yet looks like its daemon.
        let pids: Vec<_> = found.iter().map(|(pid, _)| *pid).collect();
        found.retain(|(pid, _)| procfs::one(*pid).is_some_and(|seen| !pids.contains(&seen.parent)));
        found.sort();
        found
    }
}

impl Drop for Farm {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        for (pid, _) in self.daemons() {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

fn furnished(command: &mut Command) -> &mut Command {
    let path = format!("{PROGRAMS}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin");
    command.env_clear().env("PATH", path).env("HOME", "/tmp/hostpath_pv/home").stdin(Stdio::null())
}

/// A folder to build: `name` makes its step one of its own.
fn context(name: &str, seconds: f32) -> anyhow::Result<PathBuf> {
    let folder = Path::new(ROOM).join(format!("contexts/{name}"));
    std::fs::create_dir_all(&folder)?;
    let busybox = folder.join("busybox");
    if !busybox.exists() {
        std::fs::copy(Path::new(ROOM).join("context/busybox"), &busybox)?;
        std::fs::set_permissions(&busybox, std::fs::Permissions::from_mode(0o755))?;
    }
    let step = format!("RUN [\"/bin/busybox\", \"sh\", \"-c\", \"echo {name}; /bin/busybox sleep {seconds}\"]");
    std::fs::write(folder.join("Dockerfile"), format!("FROM scratch\nCOPY busybox /bin/busybox\n{step}\n"))?;
    Ok(folder)
}

/// What a program printed that succeeded.
pub(crate) fn printed(output: Output) -> anyhow::Result<String> {
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "it ended with {}:\n{text}", output.status);
    Ok(text)
}

/// Whether the step of a build came from the cache.
pub(crate) fn cached(printed: &str) -> bool {
    let step = printed.lines().find(|line| line.contains("[2/2] RUN")).and_then(|line| line.split(' ').next());
    step.is_some_and(|step| printed.contains(&format!("{step} CACHED")))
}
