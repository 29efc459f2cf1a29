//! A daemon's process: started by us, or by an `up` before us and found again.
//! It lives in a process group of its own, with its output in a file, so that
//! it notices neither the end of this process nor Ctrl-C in its terminal.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::cgroup::Group;
use super::procfs;
use super::record::ProcessId;

/// A program with its arguments; the same for every start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invocation {
    /// The executable, then its arguments.
    pub words: Vec<OsString>,
    /// Set beside what this process was given.
    pub environment: Vec<(String, OsString)>,
}

/// A running process.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    handle: AsyncFd<OwnedFd>,
    /// Only of those that we started: whose end we must hear of.
    child: Option<Child>,
    /// Where it is, with all that it starts; none where cgroups cannot be made.
    group: Option<Group>,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit(Option<ExitStatus>);

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use std::os::unix::process::ExitStatusExt as _;
        match self.0 {
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => write!(f, "ended with exit code {code}"),
                (None, Some(signal)) => write!(f, "was ended by signal {signal}"),
                (None, None) => f.write_str("ended"),
            },
            None => f.write_str("ended"),
        }
    }
}

impl Process {
    /// Starts a program whose output is appended to `log`, within a cgroup if there is one.
    ///
    /// # Errors
    /// The operating system's.
    pub fn start(invocation: &Invocation, log: &Path, group: Option<Group>) -> io::Result<Self> {
        let log = open_log(log)?;
        let entering = group.as_ref().map(|group| group.enter(&invocation.words));
        let words = entering.as_ref().unwrap_or(&invocation.words);
        let (program, arguments) = words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let mut command = Command::new(program);
        command.args(arguments).envs(invocation.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let mut child = command.spawn()?;
        let attach = || {
            let pid = child.id().ok_or(io::ErrorKind::NotFound)?;
            let started = procfs::one(pid).ok_or(io::ErrorKind::NotFound)?.id.started;
            Ok::<_, io::Error>((ProcessId { pid, started }, handle(pid)?))
        };
        match attach() {
            Ok((id, handle)) => Ok(Self { id, handle, child: Some(child), group }),
            Err(error) => {
                let _ = child.start_kill();
                Err(error)
            }
        }
    }

    /// Takes over a process that somebody else started; `None` when it has ended.
    pub fn adopt(id: ProcessId, group: Option<Group>) -> Option<Self> {
        // In this order: the handle is then of the process that is looked at.
        let handle = handle(id.pid).ok()?;
        let seen = procfs::one(id.pid)?;
        (seen.id == id && !seen.ended).then_some(Self { id, handle, child: None, group })
    }

    /// Which one it is.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Returns when it has ended. May be dropped and called again.
    pub async fn ended(&mut self) -> Exit {
        if let Some(child) = &mut self.child {
            return Exit(child.wait().await.ok());
        }
        let _ = self.handle.ready(Interest::READABLE).await;
        Exit(None)
    }

    /// Asks it to end, and after `patience` ends it with all that it has started.
    /// Returns once it has ended.
    pub async fn stop(&mut self, patience: Duration) -> Exit {
        let _ = pidfd_send_signal(self.handle.get_ref(), Signal::TERM);
        if let Ok(exit) = timeout(patience, self.ended()).await {
            self.clear().await;
            return exit;
        }
        tracing::warn!(process.pid = self.id.pid, "a daemon did not end when asked to");
        self.kill().await
    }

    /// Ends it at once, with all that it has started.
    pub async fn kill(&mut self) -> Exit {
        let family = procfs::descendants(self.id.pid, &procfs::all());
        // Handles first: they are of the processes that are meant, whatever comes.
        let family: Vec<_> = family.into_iter().filter_map(|id| Self::adopt(id, None)).collect();
        if let Some(group) = pid(self.id.pid) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = pidfd_send_signal(self.handle.get_ref(), Signal::KILL);
        let exit = self.ended().await;
        for mut member in family {
            let _ = pidfd_send_signal(member.handle.get_ref(), Signal::KILL);
            // Whoever uses the cache next must find it alone.
            let _ = timeout(FAMILY, member.ended()).await;
        }
        self.clear().await;
        exit
    }

    /// Ends what it left behind, wherever in the tree of processes that is.
    async fn clear(&mut self) {
        if let Some(group) = self.group.take() {
            group.end().await;
        }
    }
}

/// How long the end of a process that was killed is waited for: one that waits for a disk may take its time.
const FAMILY: Duration = Duration::from_secs(5);

fn pid(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}

#[expect(deprecated, reason = "sound for an owned descriptor, and its replacement is unsafe")]
fn handle(number: u32) -> io::Result<AsyncFd<OwnedFd>> {
    let pid = pid(number).ok_or(io::ErrorKind::NotFound)?;
    AsyncFd::with_interest(pidfd_open(pid, PidfdFlags::empty())?, Interest::READABLE)
}

fn open_log(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests read and write files")]
mod tests {
    use super::*;

    fn shell(script: &str) -> Invocation {
        Invocation { words: ["sh", "-c", script].map(OsString::from).to_vec(), environment: vec![] }
    }

    fn log() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        (folder, log)
    }

    #[tokio::test]
    async fn output_goes_to_the_log_and_the_end_is_told() {
        let (_folder, log) = log();
        let mut process = Process::start(&shell("echo out; echo err >&2; exit 3"), &log, None).unwrap();
        assert_eq!(process.ended().await.to_string(), "ended with exit code 3");
        assert_eq!(std::fs::read_to_string(log).unwrap(), "out\nerr\n");
    }

    #[tokio::test]
    async fn an_adopted_process_is_heard_to_end_and_is_never_taken_for_another() {
        let (_folder, log) = log();
        let mut started = Process::start(&shell("sleep 60"), &log, None).unwrap();
        let id = started.id();
        assert!(Process::adopt(ProcessId { started: id.started + 1, ..id }, None).is_none());
        let mut adopted = Process::adopt(id, None).unwrap();
        let (first, second) = tokio::join!(adopted.stop(Duration::from_secs(5)), started.ended());
        assert_eq!((first.to_string().as_str(), second.to_string().as_str()), ("ended", "was ended by signal 15"));
        assert!(Process::adopt(id, None).is_none());
    }

    #[tokio::test]
    async fn what_does_not_end_is_killed_with_all_that_it_started() {
        let (folder, log) = log();
        let pids = folder.path().join("pids");
        // The grandchild is in a session of its own, as containers are.
        let script =
            format!("trap '' TERM; setsid sleep 60 & echo $! > {0}.tmp; mv {0}.tmp {0}; wait; wait", pids.display());
        let mut process = Process::start(&shell(&script), &log, None).unwrap();
        let grandchild = loop {
            match std::fs::read_to_string(&pids) {
                Ok(pid) => break pid.trim().parse().unwrap(),
                Err(_) => tokio::task::yield_now().await,
            }
        };
        assert!(procfs::one(grandchild).is_some());
        assert_eq!(process.stop(Duration::from_millis(50)).await.to_string(), "was ended by signal 9");
        assert!(procfs::one(grandchild).is_none_or(|seen| seen.ended), "{grandchild}");
    }
}
