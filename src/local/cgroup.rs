//! A cgroup for each daemon, where this process may make some: all that it
//! starts is ended with it, and accounted to it. v1 and v2.
#![expect(clippy::disallowed_methods, reason = "shell: reads and makes what is below /sys/fs/cgroup")]

pub mod place;

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::{Instant, sleep};

use super::layout::Layout;
use place::{DAEMON, Place};

/// The cgroups of a farm.
#[derive(Clone, Debug)]
pub struct Cgroups {
    place: Place,
    layout: Layout,
}

/// The cgroup of one daemon, in each hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    folders: Vec<PathBuf>,
    /// Of its steps alone.
    others: Vec<PathBuf>,
}

/// How long the end of processes that were killed is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// A cgroup that is made to find out whether one can be.
const PROBE: &str = ".probe";

/// Pause between two looks at those.
const LOOK: Duration = Duration::from_millis(5);

/// Enters the first arguments, as many as the very first says, then becomes the
/// rest. The shell itself enters, so nothing is ever started outside.
const ENTER: &str =
    r#"n=$1; shift; while [ "$n" -gt 0 ]; do { echo 0 >"$1"; } 2>/dev/null || :; shift; n=$((n - 1)); done; exec "$@""#;

impl Cgroups {
    /// Finds out where this process may make cgroups, if anywhere. `asked` is
    /// below the mount points; empty, there shall be none.
    ///
    /// # Errors
    /// Why there are none.
    pub fn open(asked: Option<&str>, layout: &Layout) -> Result<Self, String> {
        if asked == Some("") {
            return Err("none are asked for".to_owned());
        }
        let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("\"{path}\": {error}"));
        let place = place::find(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?, asked, layout);
        let mut place = place.ok_or("no cgroup file system is mounted")?;
        let mut why = String::new();
        place.mounts.retain(|mount| {
            let folder = below(mount, &place.path);
            let made = fs::create_dir_all(&folder).and_then(|()| enterable(&folder));
            made.map_err(|error| why = format!("\"{}\": {error}", folder.display())).is_ok()
        });
        if place.mounts.is_empty() { Err(why) } else { Ok(Self { place, layout: layout.clone() }) }
    }

    /// Below the mount points, for steps of a daemon's builds.
    pub fn parent(&self, key: &str) -> String {
        format!("{}/{key}", self.place.path)
    }

    /// Makes the cgroup of a daemon.
    ///
    /// # Errors
    /// The operating system's, where no hierarchy has it.
    pub fn make(&self, key: &str) -> io::Result<Group> {
        let mut failed = None;
        let folders = self.place.mounts.iter().map(|mount| below(mount, &self.parent(key)));
        let made = |folder: &PathBuf| match fs::create_dir_all(folder.join(DAEMON)) {
            Ok(()) => true,
            Err(error) => {
                failed = Some(error);
                false
            }
        };
        let folders: Vec<_> = folders.filter(made).collect();
        match failed {
            Some(error) if folders.is_empty() => Err(error),
            _ => Ok(Group { folders, others: self.others(&self.parent(key)) }),
        }
    }

    /// Ends what a daemon left behind that runs no more.
    pub async fn clear(&self, key: &str) {
        let folders = self.place.mounts.iter().map(|mount| below(mount, &self.parent(key)));
        let folders = folders.filter(|folder| folder.exists()).collect();
        Group { folders, others: self.others(&self.parent(key)) }.end().await;
    }

    /// The cgroup that a daemon of an earlier run is in.
    pub fn find(&self, key: &str, pid: u32) -> Option<Group> {
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let path = place::of_daemon(&own, &self.layout, key)?;
        let folders = self.place.mounts.iter().map(|mount| below(mount, &path)).filter(|folder| folder.exists());
        Some(Group { folders: folders.collect(), others: self.others(&path) })
    }

    /// Ends what daemons left behind that ended unseen; those of `kept` run.
    pub async fn sweep(&self, kept: &HashSet<String>) {
        let mut left: HashMap<String, Group> = HashMap::new();
        for mount in &self.place.mounts {
            for folder in children(&below(mount, &self.place.path)) {
                let key = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if !kept.contains(&key) {
                    left.entry(key)
                        .or_insert_with_key(|key| Group { folders: vec![], others: self.others(&self.parent(key)) })
                        .folders
                        .push(folder);
                }
            }
        }
        futures::future::join_all(left.values().map(Group::end)).await;
    }

    /// Removes what is left when the farm ends.
    pub fn close(&self) {
        let mounts = self.place.mounts.iter().chain(&self.place.others);
        mounts.for_each(|mount| drop(remove(&below(mount, &self.place.path))));
    }

    fn others(&self, path: &str) -> Vec<PathBuf> {
        self.place.others.iter().map(|mount| below(mount, path)).collect()
    }
}

impl Group {
    /// A command line that is the given one, within the cgroup from its first moment.
    pub fn enter(&self, words: &[OsString]) -> Vec<OsString> {
        let files = self.folders.iter().map(|folder| folder.join(DAEMON).join("cgroup.procs").into_os_string());
        let head = ["/bin/sh", "-c", ENTER, "sh", &self.folders.len().to_string()].map(OsString::from);
        head.into_iter().chain(files).chain(words.iter().cloned()).collect()
    }

    /// Ends everything within, waits for that, and removes it.
    pub async fn end(&self) {
        let deadline = Instant::now() + PATIENCE;
        for folder in &self.folders {
            while !members(folder).is_empty() {
                // All at once, on Linux 5.14 and later.
                if fs::write(folder.join("cgroup.kill"), "1").is_err() {
                    members(folder).into_iter().for_each(|pid| kill(folder, pid));
                }
                if Instant::now() > deadline {
                    tracing::warn!(cgroup = %folder.display(), "what was killed has not ended");
                    break;
                }
                sleep(LOOK).await;
            }
            // The kernel frees the last of them a moment after their end.
            while remove(folder).is_err() && Instant::now() < deadline {
                sleep(LOOK).await;
            }
        }
        self.others.iter().for_each(|folder| drop(remove(folder)));
    }
}

/// Whether a process that this one starts may go there: one does.
fn enterable(folder: &Path) -> io::Result<()> {
    let probe = folder.join(PROBE);
    fs::create_dir(&probe).or_else(|error| if probe.exists() { Ok(()) } else { Err(error) })?;
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "echo 0 >\"$1\"", "sh"]).arg(probe.join("cgroup.procs"));
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    // Not before the kernel has freed who was there: swept later.
    let _ = fs::remove_dir(&probe);
    if status?.success() { Ok(()) } else { Err(io::Error::other("no process may be moved there")) }
}

fn below(mount: &Path, path: &str) -> PathBuf {
    mount.join(path.trim_start_matches('/'))
}

/// Processes of a cgroup and of those below.
fn members(folder: &Path) -> Vec<i32> {
    let own = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    // Those of other namespaces are told as 0.
    let mut pids: Vec<_> = own.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect();
    children(folder).iter().for_each(|child| pids.extend(members(child)));
    pids
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

/// Kills one process, if it is still a member: its number may be another's by now.
fn kill(folder: &Path, pid: i32) {
    let Some(handle) = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else { return };
    if members(folder).contains(&pid) {
        let _ = pidfd_send_signal(handle, Signal::KILL);
    }
}

/// Removes a cgroup with those below; one that is not there is no error.
fn remove(folder: &Path) -> io::Result<()> {
    children(folder).iter().for_each(|child| drop(remove(child)));
    match fs::remove_dir(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
