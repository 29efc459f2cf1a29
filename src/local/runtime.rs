//! How daemons are run: the one place that knows. `process` is all there is;
//! containers (`incus`, `docker`) would be further variants of [`Runtime`], and
//! what they must answer is what is asked here: may untrusted builds run beside
//! others, what is a daemon started with, and which one is it after a restart.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use clap::ValueEnum;

use super::cgroup::Cgroups;
use super::layout::Layout;
use super::mounts;
use super::process::{Invocation, Process};
use super::record::ProcessId;

/// How daemons are run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// As processes of this host.
    #[default]
    Process,
}

/// What daemons are started and found by.
#[derive(Clone, Debug)]
pub enum Runtime {
    /// Processes of this host, each in a cgroup of its own where there may be some.
    Process {
        /// Where these are.
        cgroups: Option<Cgroups>,
    },
}

impl Runtime {
    /// Finds out what this host allows. `cgroup` is where cgroups shall be; none when it is empty.
    pub fn open(kind: Kind, cgroup: Option<&str>, layout: &Layout) -> Self {
        let Kind::Process = kind;
        let cgroups = Cgroups::open(cgroup, layout).inspect_err(|why| {
            tracing::info!(reason = why, "daemons have no cgroups of their own");
        });
        Self::Process { cgroups: cgroups.ok() }
    }

    /// Whether builds of one daemon are kept from another's.
    pub fn isolates(&self) -> bool {
        match self {
            Self::Process { .. } => false,
        }
    }

    /// The cgroup below which a daemon puts its steps; its own choice where there is none.
    pub fn steps(&self, key: &str) -> Option<String> {
        let Self::Process { cgroups } = self;
        cgroups.as_ref().map(|cgroups| cgroups.parent(key))
    }

    /// Starts a daemon whose output is appended to `log`.
    ///
    /// # Errors
    /// The operating system's.
    pub fn start(&self, key: &str, invocation: &Invocation, log: &Path) -> io::Result<Process> {
        let Self::Process { cgroups } = self;
        let group = cgroups.as_ref().and_then(|cgroups| match cgroups.make(key) {
            Ok(group) => Some(group),
            Err(error) => {
                tracing::warn!(project.key = key, %error, "a daemon runs without a cgroup of its own");
                None
            }
        });
        Process::start(invocation, log, group)
    }

    /// Takes over a daemon of an earlier run; `None` when it has ended.
    pub fn adopt(&self, key: &str, id: ProcessId) -> Option<Process> {
        let Self::Process { cgroups } = self;
        Process::adopt(id, cgroups.as_ref().and_then(|cgroups| cgroups.find(key, id.pid)))
    }

    /// Ends what a daemon left behind that runs no more and whose cache is `cache`, and unmounts it: the kernel does
    /// neither for one that was killed.
    pub async fn clear(&self, key: &str, cache: &Path) {
        let Self::Process { cgroups } = self;
        if let Some(cgroups) = cgroups {
            cgroups.clear(key).await;
        }
        let mounted = mounts::detach(cache).inspect_err(|error| {
            tracing::warn!(project.key = key, %error, "what a daemon left mounted cannot be unmounted");
        });
        // Looking at every process is worth it only where some may be left.
        if cgroups.is_none() || mounted.unwrap_or(1) > 0 {
            for mut stray in mounts::strays(cache).into_iter().filter_map(|id| Process::adopt(id, None)) {
                tracing::info!(project.key = key, process.pid = stray.id().pid, "ending a step of a dead daemon");
                stray.kill().await;
            }
        }
    }

    /// Ends what daemons left behind that ended while nobody watched; those of `kept` run.
    pub async fn sweep(&self, kept: &HashSet<String>) {
        let Self::Process { cgroups } = self;
        if let Some(cgroups) = cgroups {
            cgroups.sweep(kept).await;
        }
    }

    /// Removes what is left when the farm ends.
    pub fn close(&self) {
        let Self::Process { cgroups } = self;
        if let Some(cgroups) = cgroups {
            cgroups.close();
        }
    }
}
