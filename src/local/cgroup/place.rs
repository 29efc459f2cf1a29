//! Where a farm's cgroups are: what `/proc/self/mountinfo` and
//! `/proc/self/cgroup` say, read. Pure.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::local::layout::Layout;

/// Where the cgroups of one farm are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Mount points of the hierarchies: one of v2, or those of v1.
    pub mounts: Vec<PathBuf>,
    /// Those of v1 that daemons do not enter; runc puts their steps there all the same.
    pub others: Vec<PathBuf>,
    /// Below each of them; begins with a slash.
    pub path: String,
}

/// Reads where this process may make cgroups. `asked` is below the mount points.
///
/// With v2 alone that is below its own cgroup, which is what systemd delegates;
/// with v1, where the hierarchies of one process differ, at the top of each.
pub fn find(mountinfo: &str, own: &str, asked: Option<&str>, layout: &Layout) -> Option<Place> {
    let mounts: Vec<_> = mountinfo.lines().filter_map(mount).collect();
    let old = mounts.iter().any(|mount| !mount.unified);
    let parent = match asked {
        Some(asked) => format!("/{}", asked.trim_matches('/')),
        None if old => "/".to_owned(),
        None => {
            let own = own.lines().find_map(|line| line.strip_prefix("0::"))?;
            let root = mounts.first()?.root.trim_end_matches('/');
            own.strip_prefix(root).filter(|rest| rest.is_empty() || rest.starts_with('/')).unwrap_or(own).to_owned()
        }
    };
    let path = format!("{}/{}", parent.trim_end_matches('/'), name(layout));
    let (entered, others): (Vec<_>, Vec<_>) = mounts.into_iter().partition(|mount| mount.entered);
    let points = |mounts: Vec<Mount>| mounts.into_iter().map(|mount| mount.point).collect::<Vec<_>>();
    let (mounts, others) = (points(entered), points(others));
    (!mounts.is_empty()).then_some(Place { mounts, others, path })
}

/// The cgroup of all daemons of one farm, by its state folder.
pub fn name(layout: &Layout) -> String {
    let hash = Sha256::digest(layout.root().as_os_str().as_encoded_bytes());
    format!("bko-{}", hex::encode(&hash[..6]))
}

/// The cgroups that a process is in, of those that are a farm's daemon's: the
/// path of the whole, below a mount point. `own` is its `/proc/<pid>/cgroup`.
pub fn of_daemon(own: &str, layout: &Layout, key: &str) -> Option<String> {
    let end = format!("/{}/{key}/{DAEMON}", name(layout));
    let paths = own.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let whole = paths.filter(|path| path.ends_with(&end)).map(|path| path.trim_end_matches(&format!("/{DAEMON}")));
    whole.map(str::to_owned).next()
}

/// Below a daemon's cgroup, where its own processes are; its steps are beside.
pub const DAEMON: &str = "daemon";

struct Mount {
    root: String,
    point: PathBuf,
    unified: bool,
    entered: bool,
}

/// One line: `36 35 98:0 /root /point options … - type source options`.
fn mount(line: &str) -> Option<Mount> {
    let (fields, kind) = line.split_once(" - ")?;
    let fields: Vec<_> = fields.split(' ').collect();
    let (kind, options) = (kind.split(' ').next()?, kind.split(' ').nth(2).unwrap_or_default());
    let (root, point) = (fields.get(3)?, Path::new(fields.get(4)?));
    // systemd's own tree is none of ours, and cpusets must be filled before anything enters.
    let entered = !options.split(',').any(|option| option.starts_with("name=") || option == "cpuset");
    let unified = kind == "cgroup2";
    (unified || kind == "cgroup").then(|| Mount {
        root: (*root).to_owned(),
        point: point.to_owned(),
        unified,
        entered: unified || entered,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str =
        "24 1 0:22 / /proc rw - proc proc rw\n30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID: &str = "30 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
        31 24 0:27 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
        32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        33 24 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        34 24 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";

    fn layout() -> Layout {
        Layout::new("/var/lib/bko".into()).unwrap()
    }

    #[test]
    fn with_v2_it_is_below_the_own_cgroup() {
        let place = |own: &str, asked| find(V2, own, asked, &layout()).unwrap();
        let name = name(&layout());
        let service = place("0::/system.slice/bko.service\n", None);
        assert_eq!(service.path, format!("/system.slice/bko.service/{name}"));
        assert_eq!(service.mounts, [PathBuf::from("/sys/fs/cgroup")]);
        assert_eq!(place("0::/\n", None).path, format!("/{name}"));
        assert_eq!(place("0::/x\n", Some("/own/")).path, format!("/own/{name}"));
        let contained = V2.replace(" / /sys/fs", " /docker/1 /sys/fs");
        assert_eq!(find(&contained, "0::/docker/1/a\n", None, &layout()).unwrap().path, format!("/a/{name}"));
    }

    #[test]
    fn with_v1_it_is_at_the_top_of_every_hierarchy() {
        let place = find(HYBRID, "4:memory:/deep\n0::/other\n", None, &layout()).unwrap();
        let mounts = ["unified", "memory", "cpu,cpuacct"].map(|name| Path::new("/sys/fs/cgroup").join(name));
        let others = ["systemd", "cpuset"].map(|name| Path::new("/sys/fs/cgroup").join(name)).to_vec();
        assert_eq!(place, Place { mounts: mounts.to_vec(), others, path: format!("/{}", name(&layout())) });
        assert_eq!(find("24 1 0:22 / /proc rw - proc proc rw\n", "", None, &layout()), None);
    }

    #[test]
    fn the_cgroup_of_a_daemon_is_known_again() {
        let name = name(&layout());
        let own = format!("4:memory:/else\n3:cpu,cpuacct:/t/{name}/p1/daemon\n0::/t/{name}/p1/daemon\n");
        assert_eq!(of_daemon(&own, &layout(), "p1"), Some(format!("/t/{name}/p1")));
        assert_eq!(of_daemon(&own, &layout(), "p2"), None);
        assert_eq!(of_daemon("0::/user.slice\n", &layout(), "p1"), None);
    }
}
