//! The shared bearer tokens: one from the flags, and those of a folder, which
//! is read again and again, so that a rotation needs no restart.
#![expect(clippy::disallowed_methods, reason = "shell: reads a mounted Secret")]

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::Secret;

/// From one look at the folder to the next.
const INTERVAL: Duration = Duration::from_secs(2);

/// The files that hold a token. The second is that of before a rotation.
const FILES: [&str; 2] = ["token", "previous"];

/// A token is no book.
const MAX_FILE: u64 = 4096;

/// A folder with a file `token`, and perhaps one `previous`: a mounted Secret.
/// Cheap to clone; all clones see the same tokens.
#[derive(Clone, Debug)]
pub struct TokenDir {
    path: PathBuf,
    tokens: Arc<RwLock<Vec<Secret>>>,
}

/// Why a folder gives no token.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TokenDirError {
    /// A file cannot be read.
    #[error("--auth-token-dir: read {path:?}: {why}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A file is too large.
    #[error("--auth-token-dir: {path:?} has more than 4096 bytes, which no token has")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
}

impl TokenDir {
    /// Reads the folder for the first time.
    ///
    /// # Errors
    /// [`TokenDirError`], also when there is no file `token`.
    pub fn open(path: PathBuf) -> Result<Self, TokenDirError> {
        let tokens = Arc::new(RwLock::new(read(&path)?));
        Ok(Self { path, tokens })
    }

    pub(super) fn matches(&self, presented: &[u8]) -> bool {
        let tokens = self.tokens.read().unwrap_or_else(PoisonError::into_inner);
        // All of them, whichever fits: how long it takes tells nothing.
        tokens.iter().fold(false, |found, token| found | token.matches(presented))
    }

    /// Reads the folder again and again. What cannot be read leaves the tokens
    /// as they are: half a change must not lock everybody out.
    pub(super) async fn follow(self, shutdown: CancellationToken) {
        let mut failing = false;
        loop {
            if shutdown.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_none() {
                return;
            }
            match read(&self.path) {
                Ok(tokens) => {
                    failing = false;
                    let mut current = self.tokens.write().unwrap_or_else(PoisonError::into_inner);
                    if *current != tokens {
                        info!(tokens = tokens.len(), "bearer tokens changed");
                        *current = tokens;
                    }
                }
                Err(error) if !failing => {
                    warn!(%error, "cannot read the bearer tokens again, keeping those known");
                    failing = true;
                }
                Err(_) => {}
            }
        }
    }
}

/// The tokens of a folder, in the order of their files; blank ones are none.
fn read(folder: &Path) -> Result<Vec<Secret>, TokenDirError> {
    let mut tokens = Vec::new();
    for (index, name) in FILES.iter().enumerate() {
        let path = folder.join(name);
        let read = std::fs::metadata(&path).and_then(|about| match about.len() {
            0..=MAX_FILE => std::fs::read_to_string(&path).map(Some),
            _ => Ok(None),
        });
        match read {
            Ok(Some(text)) => tokens.extend(Some(Secret::new(&text)).filter(|token| !token.is_blank())),
            Ok(None) => return Err(TokenDirError::TooLarge { path }),
            Err(error) if index > 0 && error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(TokenDirError::Read { path, why: error.to_string() }),
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder as the kubelet mounts a Secret: every change swaps one link.
    struct Mounted(tempfile::TempDir);

    impl Mounted {
        fn new(files: &[(&str, &str)]) -> Self {
            let mounted = Self(tempfile::tempdir().unwrap());
            mounted.swap("..1", files);
            for name in FILES {
                symlink(format!("..data/{name}"), mounted.0.path().join(name)).unwrap();
            }
            mounted
        }

        fn swap(&self, version: &str, files: &[(&str, &str)]) {
            let root = self.0.path();
            std::fs::create_dir(root.join(version)).unwrap();
            for (name, text) in files {
                std::fs::write(root.join(version).join(name), text).unwrap();
            }
            symlink(version, root.join("..data_tmp")).unwrap();
            std::fs::rename(root.join("..data_tmp"), root.join("..data")).unwrap();
        }
    }

    fn accepted(folder: &TokenDir) -> Vec<&'static str> {
        ["one", "two", "three", ""].into_iter().filter(|token| folder.matches(token.as_bytes())).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_rotation_needs_no_restart_and_half_a_change_changes_nothing() {
        let mounted = Mounted::new(&[("token", "one\n")]);
        let folder = TokenDir::open(mounted.0.path().to_owned()).unwrap();
        assert_eq!(accepted(&folder), ["one"]);
        let shutdown = CancellationToken::new();
        let following = tokio::spawn(folder.clone().follow(shutdown.clone()));
        let a_moment = || tokio::time::sleep(INTERVAL + Duration::from_millis(1));

        mounted.swap("..2", &[("token", "two"), ("previous", "one")]);
        a_moment().await;
        assert_eq!(accepted(&folder), ["one", "two"]);

        std::fs::remove_file(mounted.0.path().join("..data")).unwrap();
        a_moment().await;
        assert_eq!(accepted(&folder), ["one", "two"], "what cannot be read changes nothing");

        mounted.swap("..3", &[("token", "three"), ("previous", " \n")]);
        a_moment().await;
        assert_eq!(accepted(&folder), ["three"]);
        shutdown.cancel();
        following.await.unwrap();
    }

    #[test]
    fn a_folder_without_a_token_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let missing = TokenDir::open(path.clone()).unwrap_err().to_string();
        assert!(missing.starts_with("--auth-token-dir: read ") && missing.contains("/token\""), "{missing}");
        std::fs::write(path.join("token"), "x".repeat(5000)).unwrap();
        assert!(matches!(TokenDir::open(path.clone()).unwrap_err(), TokenDirError::TooLarge { .. }));
        std::fs::write(path.join("token"), "s3cret").unwrap();
        assert!(!format!("{:?}", TokenDir::open(path).unwrap()).contains("s3cret"));
    }
}
