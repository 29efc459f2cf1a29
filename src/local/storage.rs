//! Caches on disk: made, copied and removed by what the file system can do
//! best. A cache appears whole or not at all. What can do it otherwise (`zfs`)
//! would be a further [`Kind`]: a probe, and its way to make, copy and remove.

mod probe;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use clap::ValueEnum;
use rustix::fs::statfs;
use tokio::process::Command;

use super::layout::Layout;
use super::mounts;

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
    /// What could not be removed, where it was, and why.
    left: Arc<Mutex<BTreeMap<PathBuf, Left>>>,
}

#[derive(Clone, Debug)]
struct Left {
    of: PathBuf,
    why: String,
}

/// How often the removal of what could not be removed is tried again.
pub const AGAIN: Duration = Duration::from_secs(60);

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
        let mut storage = Self { kind: Kind::Dir, layout, rootlesskit, left: Arc::default() };
        storage.sweep().await;
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
        let aside = unfinished(path);
        let renamed = || fs::rename(path, &aside).map_err(|error| StorageError::Folder(path.to_owned(), error));
        match detach(path).and_then(|()| renamed()) {
            Ok(()) => drop(self.lefts().remove(path)),
            Err(error) => {
                self.note(path, path, &error);
                return Err(error);
            }
        }
        self.discard(&aside, path).await
    }

    /// Why something of a cache is left that was removed; none when nothing is.
    pub fn left(&self, path: &Path) -> Option<String> {
        self.lefts().values().find(|left| left.of == path).map(|left| left.why.clone())
    }

    /// Tries again to remove what could not be removed.
    pub async fn again(&self) {
        let left = self.lefts().clone();
        // What is in its place still may be a cache again by now.
        for (path, Left { of, .. }) in left.into_iter().filter(|(path, _)| name(path).starts_with(UNFINISHED)) {
            if self.discard(&path, &of).await.is_ok() {
                tracing::info!(path = %path.display(), "what could not be removed is removed now");
            }
        }
    }

    /// Removes what is not finished; where that fails it is noted, to be tried again.
    async fn discard(&self, path: &Path, of: &Path) -> Result<(), StorageError> {
        let deleted = self.delete(path).await;
        match &deleted {
            Ok(()) => drop(self.lefts().remove(path)),
            Err(error) => self.note(path, of, error),
        }
        deleted
    }

    fn note(&self, path: &Path, of: &Path, error: &StorageError) {
        let cause = std::error::Error::source(error).map_or_else(String::new, |cause| format!(": {cause}"));
        self.lefts().insert(path.to_owned(), Left { of: of.to_owned(), why: format!("{error}{cause}") });
    }

    fn lefts(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn make(&self, target: &Path, seed: Option<&Path>) -> Result<(), StorageError> {
        if target.exists() {
            return Ok(());
        }
        let draft = unfinished(target);
        let drafted = self.draft(&draft, seed).await;
        let renamed = |()| fs::rename(&draft, target).map_err(|error| StorageError::Folder(target.to_owned(), error));
        let made = drafted.and_then(renamed);
        if made.is_err() {
            // What it says is why there is no cache; what is left of it is in nobody's way.
            let _ = self.discard(&draft, &draft).await;
        }
        made
    }

    async fn draft(&self, draft: &Path, seed: Option<&Path>) -> Result<(), StorageError> {
        match (self.kind, seed) {
            (Kind::Btrfs, Some(seed)) if is_subvolume(seed) => {
                self.run("btrfs", &["subvolume".as_ref(), "snapshot".as_ref(), seed.as_ref(), draft.as_ref()]).await
            }
            (kind, seed) => {
                if kind == Kind::Btrfs {
                    self.run("btrfs", &["subvolume".as_ref(), "create".as_ref(), draft.as_ref()]).await?;
                } else {
                    fs::create_dir(draft).map_err(|error| StorageError::Folder(draft.to_owned(), error))?;
                }
                let Some(seed) = seed else { return Ok(()) };
                let how = if kind == Kind::Dir { "--reflink=auto" } else { "--reflink=always" };
                let contents = seed.join(".");
                self.run("cp", &["--archive".as_ref(), how.as_ref(), contents.as_ref(), draft.as_ref()]).await
            }
        }
    }

    async fn delete(&self, path: &Path) -> Result<(), StorageError> {
        if !path.exists() {
            return Ok(());
        }
        detach(path)?;
        if is_subvolume(path)
            && self.run("btrfs", &["subvolume".as_ref(), "delete".as_ref(), path.as_ref()]).await.is_ok()
        {
            return Ok(());
        }
        self.run("rm", &["--recursive".as_ref(), "--force".as_ref(), "--one-file-system".as_ref(), path.as_ref()]).await
    }

    /// One that cannot be removed is in nobody's way.
    async fn sweep(&self) {
        let caches = self.layout.caches();
        let snapshots = self.layout.root().join("snapshots");
        let folders = names(&snapshots).into_iter().map(|key| snapshots.join(key)).chain([caches]);
        for folder in folders {
            for name in names(&folder).into_iter().filter(|name| name.starts_with(UNFINISHED)) {
                let path = folder.join(name);
                if let Err(error) = self.discard(&path, &path).await {
                    tracing::warn!(path = %path.display(), %error, "what is left cannot be removed, trying again later");
                }
            }
        }
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

/// A name that nothing has: what an earlier removal left keeps its own.
fn unfinished(path: &Path) -> PathBuf {
    let name = name(path);
    let first = path.with_file_name(format!("{UNFINISHED}{name}"));
    let others = (1..).map(|n: u32| path.with_file_name(format!("{UNFINISHED}{n}-{name}")));
    std::iter::once(first.clone()).chain(others).find(|path| path.symlink_metadata().is_err()).unwrap_or(first)
}

fn detach(path: &Path) -> Result<(), StorageError> {
    mounts::detach(path).map(drop).map_err(|error| StorageError::Folder(path.to_owned(), error))
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
mod tests;
