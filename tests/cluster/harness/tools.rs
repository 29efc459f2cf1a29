//! Where the programs are that a cluster is made of.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

/// The programs of a tier, found.
#[derive(Debug)]
pub(crate) struct Tools {
    cache: PathBuf,
    programs: BTreeMap<&'static str, PathBuf>,
}

/// What the sandbox itself needs, whatever runs in it.
const SANDBOX: &[&str] = &["unshare", "mount", "ip", "sh"];

impl Tools {
    /// Finds the programs: in `$KUBEBUILDER_ASSETS`, then in the cache that
    /// `make tools` fills, then in the search path.
    ///
    /// # Errors
    /// Names everything that is missing, and how to get it.
    pub(crate) fn locate(wanted: &[&'static str]) -> anyhow::Result<Self> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "a cluster needs namespaces, mounts and cgroups: run as root (`make test` does it with sudo)"
        );
        let cache = cache()?;
        let folders = folders(&cache);
        let mut programs = BTreeMap::new();
        let mut missing = Vec::new();
        for name in wanted.iter().chain(SANDBOX).copied() {
            match folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()) {
                Some(path) => drop(programs.insert(name, path)),
                None => missing.push(name),
            }
        }
        if !missing.is_empty() {
            bail!("not installed: {}\n\nhint: run `make tools`, which installs or builds them", missing.join(", "));
        }
        Ok(Self { cache, programs })
    }

    /// A command that runs one of them.
    pub(crate) fn command(&self, name: &str) -> Command {
        Command::new(self.programs.get(name).map_or(Path::new(name), PathBuf::as_path))
    }

    /// A file that `make tools` made, such as an image archive.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.cache.join("bin").join(name)
    }

    /// The environment of everything inside the sandbox, which has another home.
    pub(crate) fn environment(&self) -> [(&'static str, OsString); 2] {
        let path = std::env::join_paths(folders(&self.cache)).unwrap_or_default();
        [("PATH", path), ("BKO_CACHE", self.cache.clone().into_os_string())]
    }
}

fn cache() -> anyhow::Result<PathBuf> {
    if let Some(cache) = std::env::var_os("BKO_CACHE") {
        return Ok(cache.into());
    }
    let home = std::env::home_dir().context("no home folder: set BKO_CACHE to the folder that holds the tools")?;
    Ok(home.join(".cache/bko"))
}

fn folders(cache: &Path) -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
    let mut folders: Vec<_> = assets.into_iter().chain([cache.join("bin")]).collect();
    folders.extend(std::env::split_paths(&path));
    folders.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders
}
