//! Caches on disk: made, copied and removed by what the file system can do
//! best. A cache appears whole or not at all. What can do it otherwise (`zfs`)
//! would be a further [`Kind`]: a probe, and its way to make, copy and remove.

mod probe;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use clap::ValueEnum;
use rustix::fs::statfs;
use tokio::process::Command;

use super::layout::Layout;

/// How caches are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// The best that the file system of the state folder can do.
    Auto,
    /// A subvolume each; copies share what is the same, and are made at any time.
    Btrfs,
    /// A folder each; copies share what is the same (XFS, btrfs).
    Reflink,
    /// A folder each; copies are whole.
    Dir,
}

/// Why caches cannot be kept.
#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    /// The file system cannot do what was asked for.
    #[error("--storage {kind}: {why}")]
    Unusable {
        /// What was asked for.
        kind: &'static str,
        /// What is missing.
        why: String,
    },
    /// A folder cannot be used.
    #[error("cache folder \"{}\"", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    /// A program that works on caches failed.
    #[error("\"{command}\" failed: {said}")]
    Program {
        /// What was run.
        command: String,
        /// What it said.
        said: String,
    },
}

/// The caches of one farm.
#[derive(Clone, Debug)]
pub struct Storage {
    kind: Kind,
    layout: Layout,
    /// An ordinary user reaches the files of its own containers only within its user namespace.
    rootlesskit: Option<PathBuf>,
}

/// `BTRFS_SUPER_MAGIC`.
const BTRFS: i64 = 0x9123_683e;

/// What is not finished, and so may be removed at any time.
const UNFINISHED: &str = ".unfinished-";

impl Storage {
    /// Finds out what the file system can do, and removes what an earlier run left unfinished.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub async fn open(asked: Kind, layout: Layout, rootlesskit: Option<PathBuf>) -> Result<Self, StorageError> {
        let folder = layout.caches();
        fs::create_dir_all(&folder).map_err(|error| StorageError::Folder(folder.clone(), error))?;
        let mut storage = Self { kind: Kind::Dir, layout, rootlesskit };
        storage.sweep().await?;
        storage.kind = match asked {
            Kind::Dir => Kind::Dir,
            Kind::Btrfs => storage.probe_btrfs().await.map(|()| Kind::Btrfs)?,
            Kind::Reflink => storage.probe_reflink().map(|()| Kind::Reflink)?,
            Kind::Auto if storage.probe_btrfs().await.is_ok() => Kind::Btrfs,
            Kind::Auto if storage.probe_reflink().is_ok() => Kind::Reflink,
            Kind::Auto => Kind::Dir,
        };
        Ok(storage)
    }

    /// What it came to.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether a cache can be copied while its daemon runs.
    pub fn copies_running(&self) -> bool {
        self.kind == Kind::Btrfs
    }

    /// Makes the cache of a project, unless it is there: empty, or a copy.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub async fn prepare(&self, key: &str, seed: Option<&Path>) -> Result<(), StorageError> {
        self.make(&self.layout.cache(key), seed).await
    }

    /// Copies the cache of a project to a snapshot.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub async fn snapshot(&self, key: &str, name: &str) -> Result<(), StorageError> {
        let folder = self.layout.snapshots(key);
        fs::create_dir_all(&folder).map_err(|error| StorageError::Folder(folder.clone(), error))?;
        self.make(&folder.join(name), Some(&self.layout.cache(key))).await
    }

    /// Names of a project's snapshots, oldest first.
    pub fn snapshots(&self, key: &str) -> Vec<String> {
        let mut names = names(&self.layout.snapshots(key));
        names.retain(|name| !name.starts_with(UNFINISHED));
        names.sort_unstable();
        names
    }

    /// Removes a cache or a snapshot. What is not there is no error.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub async fn remove(&self, path: &Path) -> Result<(), StorageError> {
        if !path.exists() {
            return Ok(());
        }
        // First out of the way: half a cache must never be taken for one.
        let unfinished = unfinished(path);
        if !name(path).starts_with(UNFINISHED) {
            fs::rename(path, &unfinished).map_err(|error| StorageError::Folder(path.to_owned(), error))?;
        }
        self.delete(if name(path).starts_with(UNFINISHED) { path } else { &unfinished }).await
    }

    async fn make(&self, target: &Path, seed: Option<&Path>) -> Result<(), StorageError> {
        if target.exists() {
            return Ok(());
        }
        let folder = |error| StorageError::Folder(target.to_owned(), error);
        let draft = unfinished(target);
        self.delete(&draft).await?;
        match (self.kind, seed) {
            (Kind::Btrfs, Some(seed)) if is_subvolume(seed) => {
                self.run("btrfs", &["subvolume".as_ref(), "snapshot".as_ref(), seed.as_ref(), draft.as_ref()]).await?;
            }
            (kind, seed) => {
                if kind == Kind::Btrfs {
                    self.run("btrfs", &["subvolume".as_ref(), "create".as_ref(), draft.as_ref()]).await?;
                } else {
                    fs::create_dir(&draft).map_err(folder)?;
                }
                if let Some(seed) = seed {
                    let how = if kind == Kind::Dir { "--reflink=auto" } else { "--reflink=always" };
                    let contents = seed.join(".");
                    self.run("cp", &["--archive".as_ref(), how.as_ref(), contents.as_ref(), draft.as_ref()]).await?;
                }
            }
        }
        fs::rename(&draft, target).map_err(folder)
    }

    async fn delete(&self, path: &Path) -> Result<(), StorageError> {
        if !path.exists() {
            return Ok(());
        }
        if is_subvolume(path)
            && self.run("btrfs", &["subvolume".as_ref(), "delete".as_ref(), path.as_ref()]).await.is_ok()
        {
            return Ok(());
        }
        self.run("rm", &["--recursive".as_ref(), "--force".as_ref(), "--one-file-system".as_ref(), path.as_ref()]).await
    }

    async fn sweep(&self) -> Result<(), StorageError> {
        let caches = self.layout.caches();
        let snapshots = self.layout.root().join("snapshots");
        let folders = names(&snapshots).into_iter().map(|key| snapshots.join(key)).chain([caches]);
        for folder in folders {
            for name in names(&folder).into_iter().filter(|name| name.starts_with(UNFINISHED)) {
                self.delete(&folder.join(name)).await?;
            }
        }
        Ok(())
    }

    async fn run(&self, program: &str, arguments: &[&OsStr]) -> Result<(), StorageError> {
        let mut command = match &self.rootlesskit {
            Some(rootlesskit) => {
                let mut command = Command::new(rootlesskit);
                command.arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
        let shown = || {
            let words = arguments.iter().map(|word| word.to_string_lossy());
            std::iter::once(program.into()).chain(words).collect::<Vec<_>>().join(" ")
        };
        let failed = |said: String| StorageError::Program { command: shown(), said };
        let output = command.output().await.map_err(|error| failed(error.to_string()))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(failed(said.lines().last().unwrap_or("it said nothing").to_owned()))
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn unfinished(path: &Path) -> PathBuf {
    path.with_file_name(format!("{UNFINISHED}{}", name(path)))
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The root of a btrfs subvolume has inode number 256.
fn is_subvolume(path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let on_btrfs = statfs(path).is_ok_and(|fs| fs.f_type == BTRFS);
    on_btrfs && fs::metadata(path).is_ok_and(|metadata| metadata.ino() == 256)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests read and write files")]
mod tests {
    use super::*;

    async fn open(folder: &tempfile::TempDir, kind: Kind) -> Result<Storage, StorageError> {
        Storage::open(kind, Layout::new(folder.path().to_owned()).unwrap(), None).await
    }

    #[tokio::test]
    async fn a_cache_is_made_copied_kept_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let storage = open(&folder, Kind::Dir).await.unwrap();
        storage.prepare("p1", None).await.unwrap();
        let cache = storage.layout.cache("p1");
        fs::write(cache.join("a"), "x").unwrap();
        storage.prepare("p1", None).await.unwrap();
        assert_eq!(fs::read_to_string(cache.join("a")).unwrap(), "x", "what is there stays");
        storage.snapshot("p1", "100").await.unwrap();
        storage.snapshot("p1", "101").await.unwrap();
        assert_eq!(storage.snapshots("p1"), ["100", "101"]);
        storage.prepare("forkp1", Some(&storage.layout.snapshots("p1").join("100"))).await.unwrap();
        assert_eq!(fs::read_to_string(storage.layout.cache("forkp1").join("a")).unwrap(), "x");
        storage.remove(&cache).await.unwrap();
        storage.remove(&cache).await.unwrap();
        assert_eq!(names(&storage.layout.caches()), ["forkp1"]);
    }

    #[tokio::test]
    async fn what_was_cut_half_way_is_swept_and_never_taken_for_a_cache() {
        let folder = tempfile::tempdir().unwrap();
        let storage = open(&folder, Kind::Dir).await.unwrap();
        let half = unfinished(&storage.layout.cache("p1"));
        fs::create_dir(&half).unwrap();
        fs::write(half.join("half"), "").unwrap();
        let storage = open(&folder, Kind::Auto).await.unwrap();
        storage.prepare("p1", None).await.unwrap();
        assert!(names(&storage.layout.cache("p1")).is_empty());
        let missing = storage.prepare("p2", Some(Path::new("/nowhere"))).await.unwrap_err().to_string();
        assert!(missing.contains("/nowhere"), "{missing}");
        assert!(!storage.layout.cache("p2").exists());
    }

    #[tokio::test]
    async fn what_the_file_system_cannot_do_is_said() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let error = open(&folder, Kind::Btrfs).await.unwrap_err().to_string();
        assert!(error.starts_with("--storage btrfs: ") && error.ends_with("is not on btrfs"), "{error}");
        let error = open(&folder, Kind::Reflink).await.unwrap_err().to_string();
        assert!(error.contains("cannot share blocks"), "{error}");
        assert_eq!(open(&folder, Kind::Auto).await.unwrap().kind(), Kind::Dir);
    }
}
