//! One farm per state folder.
#![expect(clippy::disallowed_methods, reason = "shell: reads who holds the lock")]

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Held until it is dropped, or the process ends, however it ends.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Why it cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else has it.
    #[error("another `bko-install up` runs on \"{}\" (process {holder})", .folder.display())]
    Held {
        /// The state folder.
        folder: PathBuf,
        /// Its process id, as far as it is known.
        holder: String,
    },
    /// The file cannot be used.
    #[error("lock \"{}\"", .0.display())]
    Io(PathBuf, #[source] io::Error),
}

impl Lock {
    /// Takes the lock, without waiting.
    ///
    /// # Errors
    /// See [`LockError`].
    pub fn take(path: &Path) -> Result<Self, LockError> {
        let io = |error| LockError::Io(path.to_owned(), error);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
                let holder = if holder.is_empty() { "unknown".to_owned() } else { holder };
                return Err(LockError::Held { folder: path.parent().unwrap_or(path).to_owned(), holder });
            }
            Err(TryLockError::Error(error)) => return Err(io(error)),
        }
        file.set_len(0).and_then(|()| file.rewind()).map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(Self { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = Lock::take(&path).unwrap();
        let error = Lock::take(&path).unwrap_err().to_string();
        assert!(error.ends_with(&format!("(process {})", std::process::id())), "{error}");
        drop(first);
        Lock::take(&path).unwrap();
    }
}
