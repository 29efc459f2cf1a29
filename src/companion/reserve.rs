//! Room that is kept for making room. BuildKit writes its databases even to
//! prune, so a volume that ran full would stay full: a file that holds nothing
//! is given back then.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};

use super::prune::Volume;

const NAME: &str = ".bko-reserve";
/// Enough for a database that grows by 16 MiB at a time, on volumes of a usual size.
const MOST: u64 = 64 << 20;
const LEAST: u64 = 4 << 20;
/// The file is made while so many times its size is free.
const PLENTY: u64 = 4;

/// The file on the cache's volume.
#[derive(Debug)]
pub struct Reserve {
    path: PathBuf,
}

impl Reserve {
    /// Of the volume that `cache_dir` is on.
    pub fn new(cache_dir: &Path) -> Self {
        Self { path: cache_dir.join(NAME) }
    }

    /// Makes the file, unless it is there or there is too little room for it.
    ///
    /// # Errors
    /// The volume cannot be written.
    pub fn keep(&self, volume: &Volume) -> io::Result<()> {
        let bytes = (volume.bytes_total / 100).clamp(LEAST, MOST);
        if volume.bytes_available < bytes * PLENTY || self.path.exists() {
            return Ok(());
        }
        let file = OpenOptions::new().write(true).create_new(true).open(&self.path)?;
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => Ok(()),
            Err(error) => {
                // A file without blocks would only look like a reserve.
                std::fs::remove_file(&self.path)?;
                Err(error.into())
            }
        }
    }

    /// Gives the room back. False when there was none.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn give(&self) -> io::Result<bool> {
        match std::fs::remove_file(&self.path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}
