//! What a run could leave on a machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What the programs of a cluster make when nobody stops them.
const FILES: &[&str] = &[
    "/etc/cni",
    "/opt/cni",
    "/opt/containerd",
    "/run/bko",
    "/run/containerd",
    "/run/netns",
    "/run/runc",
    "/tmp/hostpath_pv",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/lib/kube-proxy",
    "/var/log/containers",
    "/var/log/pods",
];

/// Words in the mounts that they make.
const MOUNTS: &[&str] = &["/run/bko", "kubelet", "containerd", "hostpath_pv", "overlay"];

/// Beginnings of the names of the network devices that they make.
const DEVICES: &[&str] = &["eth0p", "cni", "veth"];

/// Mounts, cgroups, network devices and files, as they are at one moment.
#[derive(Debug)]
pub(crate) struct Traces(BTreeSet<String>);

impl Traces {
    /// Looks at the machine, from outside of any sandbox.
    pub(crate) fn of_machine() -> Self {
        let mut found: BTreeSet<String> =
            FILES.iter().filter(|file| Path::new(file).exists()).map(|file| (*file).to_owned()).collect();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let ours = |mount: &&str| MOUNTS.iter().any(|word| mount.contains(word));
        found.extend(mounts.lines().filter(ours).map(|mount| format!("mount {mount}")));
        let ours = |device: &String| DEVICES.iter().any(|name| device.starts_with(name));
        found.extend(names("/sys/class/net").filter(ours).map(|device| format!("device {device}")));
        let hierarchies = names("/sys/fs/cgroup").map(|name| format!("/sys/fs/cgroup/{name}"));
        for folder in hierarchies.chain(["/sys/fs/cgroup".to_owned()]) {
            found.extend(names(&folder).filter(|name| is_orphan(name)).map(|name| format!("cgroup {folder}/{name}")));
        }
        Self(found)
    }

    /// What was not there before.
    pub(crate) fn beyond(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }
}

/// A cgroup of a sandbox whose keeper is gone; others may be running.
fn is_orphan(cgroup: &str) -> bool {
    let keeper = cgroup.strip_prefix("bko-test-");
    keeper.is_some_and(|keeper| !Path::new("/proc").join(keeper).exists())
}

/// The processes that descend from one, nearest first, as their folders in `/proc`.
pub(crate) fn descendants(ancestor: u32) -> Vec<PathBuf> {
    let parents: Vec<(u32, u32)> = names("/proc")
        .filter_map(|name| {
            let pid = name.parse().ok()?;
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
            Some((pid, parent.trim().parse().ok()?))
        })
        .collect();
    let mut found = vec![ancestor];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found.into_iter().skip(1).map(|pid| PathBuf::from(format!("/proc/{pid}"))).collect()
}

fn names(folder: impl AsRef<Path>) -> impl Iterator<Item = String> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok())
}
