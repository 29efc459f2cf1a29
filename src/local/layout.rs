//! What is where below the state folder. Pure.

use std::path::{Path, PathBuf};

/// The state folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    root: PathBuf,
}

/// Why a folder cannot hold the state.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum LayoutError {
    /// Its sockets would not fit.
    #[error(
        "the state folder \"{0}\" has a path of {1} bytes, and its sockets would be longer than a socket's path may \
         be; choose one of at most {ROOT_MAX} bytes"
    )]
    TooLong(String, usize),
    /// Daemons must find it from wherever they are.
    #[error("the state folder \"{0}\" is not an absolute path")]
    Relative(String),
    /// Their configuration is text.
    #[error("the state folder \"{0}\" is not UTF-8 without control characters, quotes or backslashes")]
    NotText(String),
}

/// 107 bytes of a socket's path, less `/run/`, the longest key that we make, and `.sock`.
const ROOT_MAX: usize = 107 - 5 - 33 - 5;

impl Layout {
    /// Below a folder that need not exist yet.
    ///
    /// # Errors
    /// See [`LayoutError`].
    pub fn new(root: PathBuf) -> Result<Self, LayoutError> {
        let shown = root.display().to_string();
        let plain = |text: &str| !text.chars().any(|c| c.is_control() || matches!(c, '"' | '\\'));
        if !root.is_absolute() {
            return Err(LayoutError::Relative(shown));
        }
        match root.to_str() {
            Some(text) if text.len() > ROOT_MAX => Err(LayoutError::TooLong(shown, text.len())),
            Some(text) if plain(text) => Ok(Self { root }),
            _ => Err(LayoutError::NotText(shown)),
        }
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Held while a farm runs here.
    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// The base of the store.
    pub fn store(&self) -> PathBuf {
        self.root.join("state.redb")
    }

    /// Changes since the base was written.
    pub fn journal(&self) -> PathBuf {
        self.root.join("journal")
    }

    /// Where `ps`, `stop` and others reach the farm.
    pub fn control(&self) -> PathBuf {
        self.root.join("control.sock")
    }

    /// The routing API's token.
    pub fn token(&self) -> PathBuf {
        self.root.join("token")
    }

    /// A certificate by its name.
    pub fn certificate(&self, name: &str) -> PathBuf {
        self.root.join("certs").join(name)
    }

    /// BuildKit, when it was fetched.
    pub fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// Sockets of the daemons.
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// The socket of one daemon.
    pub fn socket(&self, key: &str) -> PathBuf {
        self.run().join(format!("{key}.sock"))
    }

    /// Where one daemon takes traces of its steps.
    pub fn traces(&self, key: &str) -> PathBuf {
        self.run().join(format!("{key}.otel"))
    }

    /// Everything of one daemon but its cache.
    pub fn daemon(&self, key: &str) -> PathBuf {
        self.root.join("daemons").join(key)
    }

    /// The configuration of a daemon: what its process is found by.
    pub fn configuration(&self, key: &str) -> PathBuf {
        self.daemon(key).join("buildkitd.toml")
    }

    /// The output of a daemon.
    pub fn log(&self, key: &str) -> PathBuf {
        self.daemon(key).join("log")
    }

    /// Its older output.
    pub fn older_log(&self, key: &str) -> PathBuf {
        self.daemon(key).join("log.1")
    }

    /// The caches of all daemons.
    pub fn caches(&self) -> PathBuf {
        self.root.join("caches")
    }

    /// The cache of one daemon.
    pub fn cache(&self, key: &str) -> PathBuf {
        self.caches().join(key)
    }

    /// The snapshots of one cache.
    pub fn snapshots(&self, key: &str) -> PathBuf {
        self.root.join("snapshots").join(key)
    }

    /// The project whose daemon has this configuration; `None` when it is none of ours.
    pub fn owner(&self, configuration: &str) -> Option<String> {
        let key = Path::new(configuration).strip_prefix(self.root.join("daemons")).ok()?;
        let key = key.to_str()?.strip_suffix("/buildkitd.toml")?;
        (!key.is_empty() && !key.contains('/')).then(|| key.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_cannot_hold_sockets_are_refused() {
        assert!(Layout::new("/var/lib/bko".into()).is_ok());
        assert_eq!(Layout::new("state".into()), Err(LayoutError::Relative("state".into())));
        let long = format!("/{}", "x".repeat(64));
        assert!(matches!(Layout::new(long.into()), Err(LayoutError::TooLong(_, 65))));
        for odd in ["/a\"b", "/a\\b", "/a\nb"] {
            assert!(matches!(Layout::new(odd.into()), Err(LayoutError::NotText(_))), "{odd:?}");
        }
        let longest = Layout::new(format!("/{}", "x".repeat(63)).into()).unwrap();
        let key = "fork4294967295-p41bd34a2227aca39";
        assert!(longest.socket(key).as_os_str().len() <= 107);
    }

    #[test]
    fn a_daemon_is_found_by_its_configuration() {
        let layout = Layout::new("/var/lib/bko".into()).unwrap();
        let path = layout.configuration("p1");
        assert_eq!(layout.owner(path.to_str().unwrap()), Some("p1".to_owned()));
        for other in [
            "/var/lib/bko/daemons/buildkitd.toml",
            "/var/lib/bko2/daemons/p1/buildkitd.toml",
            "/var/lib/bko/daemons/a/b/buildkitd.toml",
            "/etc/buildkit/buildkitd.toml",
        ] {
            assert_eq!(layout.owner(other), None, "{other}");
        }
    }
}
