//! Memory of the daemon and its builds, where this process can see it: on one
//! host, or in a pod that shares its process namespace. Elsewhere it is unknown.
#![expect(clippy::disallowed_methods, reason = "shell: reads /proc and the cgroup file system")]

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Memory of a daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Resident bytes of the daemon's process alone.
    pub resident: Option<u64>,
    /// Most bytes that its cgroup, builds included, has used.
    pub peak: Option<u64>,
    /// Processes of its cgroup that the kernel killed for memory.
    pub oom_kills: Option<u64>,
    /// How often its cgroup has been slowed down because it reached `memory.high`.
    pub throttled: Option<u64>,
    /// Share of the last ten seconds in which something in it waited for memory.
    pub pressure: Option<f64>,
}

/// Reads the memory of a process and its cgroup.
pub fn read(pid: i32) -> Memory {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let status = read_to_string(proc.join("status")).unwrap_or_default();
    let cgroup = read_to_string(proc.join("cgroup")).unwrap_or_default();
    let directory = cgroup_directory(&cgroup);
    let file = |name: &str| directory.as_ref().and_then(|dir| read_to_string(Path::new(dir).join(name)).ok());
    let number = |text: String| text.trim().parse().ok();
    Memory {
        resident: field(&status, "VmRSS:").map(|kibibytes| kibibytes * 1024),
        peak: file("memory.peak").or_else(|| file("memory.max_usage_in_bytes")).and_then(number),
        oom_kills: file("memory.events").or_else(|| file("memory.oom_control")).and_then(|f| field(&f, "oom_kill")),
        throttled: file("memory.events").and_then(|f| field(&f, "high")),
        pressure: file("memory.pressure").and_then(|f| waited(&f)),
    }
}

/// Where the memory of a cgroup is accounted, from `/proc/PID/cgroup`. A path
/// that leads out of the mounted tree belongs to another container.
fn cgroup_directory(cgroup: &str) -> Option<String> {
    let mut lines = cgroup.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        Some((parts.next()?, parts.next()?))
    });
    let v1 = lines.clone().find(|(controllers, _)| controllers.split(',').any(|c| c == "memory"));
    let (root, path) = match v1 {
        Some((_, path)) => ("/sys/fs/cgroup/memory", path),
        None => ("/sys/fs/cgroup", lines.find(|(controllers, _)| controllers.is_empty())?.1),
    };
    (!path.split('/').any(|part| part == "..")).then(|| format!("{root}{path}"))
}

/// The number after a name at the begin of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| (words.next()? == name).then(|| words.next()?.parse().ok())?)
}

/// The kernel's `some avg10`, in per cent there.
fn waited(pressure: &str) -> Option<f64> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent: f64 = some.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()?;
    Some(percent / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_is_found_in_both_versions() {
        let v1 = "4:memory:/pod/a\n2:cpu,cpuacct:/other\n";
        assert_eq!(cgroup_directory(v1).as_deref(), Some("/sys/fs/cgroup/memory/pod/a"));
        assert_eq!(cgroup_directory("0::/pod/b\n").as_deref(), Some("/sys/fs/cgroup/pod/b"));
        assert_eq!(cgroup_directory("0::/../pod/b\n"), None);
        assert_eq!(cgroup_directory(""), None);
    }

    #[test]
    fn kills_are_told_from_ooms() {
        assert_eq!(field("oom 3\noom_kill 2\noom_group_kill 0\n", "oom_kill"), Some(2));
        assert_eq!(field("VmHWM:\t 9 kB\nVmRSS:\t   8 kB\n", "VmRSS:"), Some(8));
        assert_eq!(field("", "oom_kill"), None);
    }

    #[test]
    fn pressure_is_a_share() {
        let text = "some avg10=12.50 avg60=3.00 avg300=0.00 total=99\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=9\n";
        assert_eq!((waited(text), waited(""), waited("some avg10=x")), (Some(0.125), None, None));
        assert_eq!(field("low 0\nhigh 7\nmax 0\noom 0\n", "high"), Some(7));
    }

    #[test]
    fn our_own_memory_is_readable() {
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(read(pid).resident.is_some_and(|bytes| bytes > 1 << 20));
    }
}
