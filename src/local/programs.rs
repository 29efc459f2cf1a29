//! Where the programs that daemons are made of come from: the host's `PATH`,
//! or a folder or file that was named.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::configuration::Programs;

/// Why there is no BuildKit.
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// Nothing of that name can be run.
    #[error("there is no executable \"{name}\" on PATH or in \"{folder}\"", name = .0, folder = .1.display())]
    Missing(&'static str, PathBuf),
    /// What was named cannot be run.
    #[error("--buildkit: \"{}\" is no executable buildkitd, and no folder with one", .0.display())]
    NotBuildkit(PathBuf),
    /// An ordinary user needs more.
    #[error("an ordinary user runs buildkitd within a user namespace, and that needs {0}")]
    Rootless(String),
}

impl ProgramsError {
    /// How to mend it.
    pub fn hint(&self) -> String {
        match self {
            Self::Missing("rootlesskit", _) => {
                "install rootlesskit (https://github.com/rootless-containers/rootlesskit), or run this as root"
                    .to_owned()
            }
            Self::Missing(..) => "leave out --buildkit, which fetches the stock image, or install BuildKit \
                 (https://github.com/moby/buildkit/releases)"
                .to_owned(),
            Self::NotBuildkit(_) => "name the file buildkitd, or the folder that has it".to_owned(),
            Self::Rootless(_) => {
                "see https://rootlesscontaine.rs/getting-started/common, or run this as root".to_owned()
            }
        }
    }
}

/// Who runs the daemons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Numeric id.
    pub uid: u32,
    /// Name, for `/etc/subuid`.
    pub name: Option<String>,
}

/// Finds the programs. `named` is a file `buildkitd` or its folder; `own`, where
/// fetched ones are, comes after `PATH`.
///
/// # Errors
/// See [`ProgramsError`].
pub fn find(named: Option<&Path>, own: &Path, path: &OsStr, user: &User) -> Result<Programs, ProgramsError> {
    let mut folders: Vec<PathBuf> = std::env::split_paths(path).collect();
    folders.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.push(own.to_owned());
    let (buildkitd, beside) = match named {
        Some(named) => {
            let file = if named.is_dir() { named.join("buildkitd") } else { named.to_owned() };
            if !is_executable(&file) {
                return Err(ProgramsError::NotBuildkit(named.to_owned()));
            }
            let file = file.canonicalize().unwrap_or(file);
            let beside = file.parent().map(Path::to_owned);
            (file, beside)
        }
        None => {
            let file = search(&folders, "buildkitd");
            let file = file.ok_or_else(|| ProgramsError::Missing("buildkitd", own.to_owned()))?;
            let beside = file.parent().map(Path::to_owned);
            (file, beside)
        }
    };
    folders.splice(0..0, beside);
    let missing = |name| ProgramsError::Missing(name, own.to_owned());
    let runc = search(&folders, "buildkit-runc").or_else(|| search(&folders, "runc")).ok_or_else(|| missing("runc"))?;
    let rootlesskit = match user.uid {
        0 => None,
        _ => {
            may_map(&folders, user)?;
            Some(search(&folders, "rootlesskit").ok_or_else(|| missing("rootlesskit"))?)
        }
    };
    Ok(Programs { buildkitd, runc: Some(runc), rootlesskit })
}

/// Whether a user may have more than one id within its user namespace.
fn may_map(folders: &[PathBuf], user: &User) -> Result<(), ProgramsError> {
    for program in ["newuidmap", "newgidmap"] {
        if search(folders, program).is_none() {
            return Err(ProgramsError::Rootless(format!("the program {program} (Debian: uidmap)")));
        }
    }
    let who = user.name.clone().unwrap_or_else(|| user.uid.to_string());
    for file in ["/etc/subuid", "/etc/subgid"] {
        #[expect(clippy::disallowed_methods, reason = "shell: reads what the host allows")]
        let text = std::fs::read_to_string(file).unwrap_or_default();
        if !has_range(&text, user) {
            let line =
                format!("a line \"{who}:100000:65536\" in {file} (or: usermod --add-subuids 100000-165535 {who})");
            return Err(ProgramsError::Rootless(line));
        }
    }
    Ok(())
}

fn has_range(text: &str, user: &User) -> bool {
    let uid = user.uid.to_string();
    text.lines().any(|line| {
        let mut fields = line.trim().split(':');
        let owner = fields.next().unwrap_or_default();
        let count = fields.nth(1).and_then(|count| count.parse::<u64>().ok()).unwrap_or(0);
        (owner == uid || Some(owner) == user.name.as_deref()) && count > 0
    })
}

fn search(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    folders.iter().map(|folder| folder.join(name)).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests read and write files")]
mod tests {
    use super::*;

    fn program(folder: &Path, name: &str) -> PathBuf {
        let file = folder.join(name);
        std::fs::write(&file, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        file
    }

    #[test]
    fn what_was_named_goes_before_path_before_what_was_fetched() {
        let [named, own, path] = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let root = User { uid: 0, name: None };
        let find = |name: Option<&Path>| find(name, own.path(), path.path().as_os_str(), &root);
        let fetched = program(own.path(), "buildkitd");
        let buildkit_runc = program(own.path(), "buildkit-runc");
        let programs = Programs { buildkitd: fetched, runc: Some(buildkit_runc.clone()), rootlesskit: None };
        assert_eq!(find(None).unwrap(), programs);
        let in_path = program(path.path(), "buildkitd");
        assert_eq!(find(None).unwrap(), Programs { buildkitd: in_path, runc: Some(buildkit_runc), rootlesskit: None });
        assert!(matches!(find(Some(named.path())), Err(ProgramsError::NotBuildkit(_))));
        let file = program(named.path(), "buildkitd");
        assert_eq!(find(Some(named.path())).unwrap().buildkitd, file);
        assert_eq!(find(Some(&file)).unwrap().buildkitd, file);
    }

    #[test]
    fn a_user_without_a_range_of_ids_is_told_what_to_write_where() {
        let user = User { uid: 1000, name: Some("ci".into()) };
        assert!(has_range("root:1:1\nci:100000:65536\n", &user) && has_range("1000:100000:65536", &user));
        for text in ["", "ci", "ci:100000", "ci:100000:0", "cie:100000:65536", "10000:1:9"] {
            assert!(!has_range(text, &user), "{text:?}");
        }
    }
}
