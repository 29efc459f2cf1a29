//! What is still mounted below a cache whose daemon did not end by itself: the
//! roots of its steps. Reading is pure; [`detach`] and [`strays`] act.
#![expect(clippy::disallowed_methods, reason = "shell: reads /proc")]

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{UnmountFlags, unmount};

use super::procfs;
use super::record::ProcessId;

/// Mount points below a folder, deepest first, each as often as something is
/// mounted there. The folder itself is none of them: a disk may be mounted there for good.
fn below(mountinfo: &str, folder: &Path) -> Vec<PathBuf> {
    let points = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescaped);
    let mut points: Vec<_> = points.filter(|point| point != folder && point.starts_with(folder)).collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    points
}

/// Whether the root of whoever reads this is an overlay over layers below a folder.
fn rooted(mountinfo: &str, folder: &Path) -> bool {
    let root = mountinfo.lines().filter(|line| line.split(' ').nth(4) == Some("/"));
    root.filter_map(|line| line.split_once(" - overlay ")).any(|(_, rest)| {
        let options = rest.split(' ').next_back().unwrap_or_default();
        let values = options.split(',').filter_map(|option| option.split_once('='));
        values.flat_map(|(_, value)| value.split(':')).any(|path| unescaped(path).starts_with(folder))
    })
}

/// The kernel writes a space, tab, line feed and backslash as `\` and three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Unmounts everything below a folder, whoever still uses it. Returns how many were mounted.
///
/// What lies in the user namespace of an ordinary user's daemon has gone with it, and is not seen here.
///
/// # Errors
/// What the first that stays says, with its path.
pub fn detach(folder: &Path) -> io::Result<usize> {
    // The kernel knows no symbolic links.
    let folder = match folder.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        folder => folder?,
    };
    let points = below(&std::fs::read_to_string("/proc/self/mountinfo")?, &folder);
    let mut failed = None;
    for point in &points {
        match unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            // Gone with the one that it was mounted on.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
            Err(error) => failed = failed.or_else(|| Some(with_path(point, error.into()))),
        }
    }
    failed.map_or(Ok(points.len()), Err)
}

/// Processes whose root is made of layers below a folder: steps that outlived their daemon.
pub fn strays(folder: &Path) -> Vec<ProcessId> {
    let Ok(folder) = folder.canonicalize() else { return vec![] };
    let roots = |seen: &procfs::Seen| {
        // Those of others cannot be read, and are none of ours.
        std::fs::read_to_string(format!("/proc/{}/mountinfo", seen.id.pid)).is_ok_and(|text| rooted(&text, &folder))
    };
    procfs::all().into_iter().filter(|seen| !seen.ended && roots(seen)).map(|seen| seen.id).collect()
}

fn with_path(point: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot unmount \"{}\": {error}", point.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        23 22 0:5 / /s/caches rw - xfs /dev/sdb rw\n\
        24 23 0:6 / /s/caches/p1 rw - tmpfs tmpfs rw\n\
        25 24 0:7 / /s/caches/p1/executor/a/rootfs rw shared:7 - overlay overlay rw,upperdir=/s/caches/p1/3/fs\n\
        26 25 0:8 / /s/caches/p1/executor/a/rootfs/proc rw - proc proc rw\n\
        27 24 0:7 / /s/caches/p1/executor/a/rootfs rw - tmpfs tmpfs rw\n\
        28 24 0:9 / /s/caches/p1/cache\\040mounts/b rw - ext4 /dev/sda1 rw\n\
        29 23 0:9 / /s/caches/p10/executor/a/rootfs rw - overlay overlay rw\n";

    #[test]
    fn the_deepest_comes_first_and_neighbours_stay() {
        let rootfs = PathBuf::from("/s/caches/p1/executor/a/rootfs");
        let found = below(HOST, Path::new("/s/caches/p1"));
        assert_eq!(found, [rootfs.join("proc"), rootfs.clone(), rootfs, "/s/caches/p1/cache mounts/b".into()]);
        assert!(below(HOST, Path::new("/s/snapshots/p1")).is_empty());
        assert!(below("", Path::new("/s")).is_empty() && below("25 24", Path::new("/s")).is_empty());
    }

    #[test]
    fn a_step_is_known_by_the_layers_of_its_root() {
        let step = |options: &str| format!("1 0 0:7 / / rw,relatime - overlay overlay rw,{options}\n");
        let cache = Path::new("/s/caches/p1");
        assert!(rooted(&step("lowerdir=/x:/s/caches/p1/1/fs,upperdir=/y"), cache));
        assert!(rooted(&step("lowerdir=/x,upperdir=/s/caches/p1/3/fs,workdir=/w"), cache));
        assert!(!rooted(&step("lowerdir=/x,upperdir=/s/caches/p10/3/fs"), cache));
        assert!(!rooted(&step("index=off"), cache));
        assert!(!rooted(HOST, cache), "the daemon itself, and everything else of the host");
    }

    #[test]
    fn what_is_not_there_has_no_mounts() {
        assert_eq!(detach(Path::new("/nowhere/at/all")).unwrap(), 0);
        assert!(strays(Path::new("/nowhere/at/all")).is_empty());
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(detach(folder.path()).unwrap(), 0);
    }
}
