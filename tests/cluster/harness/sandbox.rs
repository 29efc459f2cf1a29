//! The private namespaces that a cluster lives in, and their end.
//!
//! One executable, four roles, each the parent of the next:
//!
//! | Role | Does |
//! |---|---|
//! | outer | what the user started: waits, and takes Ctrl-C |
//! | keeper | out of reach of Ctrl-C: waits for the namespaces to end, removes cgroups |
//! | init | pid 1 of the namespaces: furnishes them, reaps |
//! | runner | starts the cluster and runs the tests |
//!
//! The outer process holds the only writing end of a pipe that keeper and init
//! read: it closes when the outer process ends, be it by SIGKILL. Then init
//! exits, the kernel ends every process of its pid namespace, and with the last
//! one go its mounts and its network.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, WaitOptions, kill_process};
use tokio::signal::unix::{SignalKind, signal};

use super::{ROOT, cluster};

const ROLE: &str = "BKO_SANDBOX_ROLE";
const CGROUP: &str = "BKO_SANDBOX_CGROUP";
const CGROUP_PREFIX: &str = "bko-test-";
const CGROUPS: &str = "/sys/fs/cgroup";
const SCRIPT: &str = include_str!("sandbox.sh");

/// The cgroup below which the kubelet keeps its pods, so that two clusters on
/// one machine do not end each other's.
pub(crate) fn cgroup() -> String {
    std::env::var(CGROUP).unwrap_or_default()
}

/// Runs `body` in a sandbox and returns its exit code when nothing is left.
///
/// # Errors
/// The sandbox could not be made, or `body` failed.
pub(crate) fn run(
    tier: &str,
    environment: &[(&str, OsString)],
    body: impl FnOnce() -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    match std::env::var(ROLE).as_deref() {
        Err(_) => outer(environment),
        Ok("keeper") => keeper(),
        Ok("init") => init(tier),
        Ok(_) => body(),
    }
}

/// This executable again, with the same arguments, in another role.
fn again(role: &str) -> anyhow::Result<Command> {
    let executable = std::env::current_exe().context("finding this executable")?;
    let mut command = Command::new(executable);
    command.args(std::env::args_os().skip(1)).env(ROLE, role);
    Ok(command)
}

fn outer(environment: &[(&str, OsString)]) -> anyhow::Result<ExitCode> {
    sweep();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let mut command = tokio::process::Command::from(again("keeper")?);
        let mut keeper = command
            .envs(environment.iter().cloned())
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .context("starting")?;
        let pipe = keeper.stdin.take();
        let signalled = tokio::select! {
            status = keeper.wait() => {
                drop(pipe);
                let status = status?;
                if status.signal().is_some() {
                    sweep(); // the keeper was killed: its work is ours
                }
                return Ok(exit_code(status));
            }
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = terminate.recv() => SignalKind::terminate(),
            _ = hangup.recv() => SignalKind::hangup(),
        };
        drop(pipe);
        keeper.wait().await?;
        Ok(ExitCode::from(128u8.wrapping_add(u8::try_from(signalled.as_raw_value())?)))
    })
}

fn keeper() -> anyhow::Result<ExitCode> {
    let cgroup = format!("{CGROUP_PREFIX}{}", std::process::id());
    let inner = again("init")?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--"]);
    command.arg(inner.get_program()).args(inner.get_args()).env(ROLE, "init").env(CGROUP, &cgroup);
    let mut sandbox = command.spawn().context("starting \"unshare\"")?;
    end_when_orphaned(&sandbox)?;
    let status = sandbox.wait()?;
    remove_cgroup(&cgroup);
    Ok(exit_code(status))
}

/// Init ends by itself when the pipe closes; should it hang, its parent is killed and takes it along.
fn end_when_orphaned(sandbox: &Child) -> anyhow::Result<()> {
    let pid = i32::try_from(sandbox.id()).ok().and_then(Pid::from_raw).context("no process id")?;
    std::thread::spawn(move || {
        wait_for_end_of_pipe();
        std::thread::sleep(Duration::from_secs(10));
        let _ = kill_process(pid, Signal::KILL);
    });
    Ok(())
}

fn wait_for_end_of_pipe() {
    let mut nothing = [0; 1];
    while std::io::stdin().read(&mut nothing).is_ok_and(|n| n > 0) {}
}

fn init(tier: &str) -> anyhow::Result<ExitCode> {
    std::thread::spawn(|| {
        wait_for_end_of_pipe();
        std::process::exit(130);
    });
    let keep = logs_folder();
    std::fs::create_dir_all(&keep).with_context(|| format!("creating \"{}\"", keep.display()))?;
    let furnished =
        Command::new("sh").args(["-c", SCRIPT, "sandbox.sh", tier, &cgroup()]).arg(&keep).stdin(Stdio::null()).status();
    ensure!(furnished.is_ok_and(|status| status.success()), "furnishing the sandbox failed, see above");
    let mut runner = again("runner")?;
    runner.env("HOME", format!("{ROOT}/home")).env("KUBECONFIG", cluster::KUBECONFIG).stdin(Stdio::null());
    let runner = runner.spawn().context("starting the runner")?;
    let status = reap_until(i32::try_from(runner.id())?)?;
    if !status.success() {
        keep_logs(&keep);
    }
    Ok(exit_code(status))
}

/// Orphans of the whole namespace come to pid 1; the runner's end is its own.
fn reap_until(runner: i32) -> anyhow::Result<ExitStatus> {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid.as_raw_nonzero().get() == runner => {
                return Ok(ExitStatus::from_raw(status.as_raw()));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting for the runner"),
        }
    }
}

/// Where the logs of a failed run are kept: `target/tmp/<binary>`.
fn logs_folder() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(concat!(env!("CARGO_CRATE_NAME"), "-logs"))
}

fn keep_logs(named: &Path) {
    let copy = || -> std::io::Result<()> {
        for entry in std::fs::read_dir(format!("{ROOT}/logs"))? {
            let entry = entry?;
            std::fs::copy(entry.path(), Path::new(ROOT).join("keep").join(entry.file_name()))?;
        }
        Ok(())
    };
    match copy() {
        Ok(()) => eprintln!("logs of the cluster: {}", named.display()),
        Err(error) => eprintln!("the logs of the cluster could not be kept: {error}"),
    }
}

/// Removes what runs left behind whose keeper was killed.
fn sweep() {
    let hierarchies = hierarchies();
    for folder in hierarchies.iter().filter_map(|hierarchy| std::fs::read_dir(hierarchy).ok()) {
        for name in folder.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            let owner = name.strip_prefix(CGROUP_PREFIX);
            if owner.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
                remove_cgroup(&name);
            }
        }
    }
}

/// The mount of cgroup v2, or those of v1, one a controller.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from(CGROUPS);
    if root.join("cgroup.controllers").exists() {
        return vec![root];
    }
    std::fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn remove_cgroup(name: &str) {
    for folder in hierarchies().iter().map(|hierarchy| hierarchy.join(name)) {
        // The kernel frees the last processes a moment after their end is reported.
        for _ in 0..100 {
            remove_tree(&folder);
            if !folder.exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Folders only: the files of a cgroup go with it.
fn remove_tree(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    let _ = std::fs::remove_dir(folder);
}

fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
