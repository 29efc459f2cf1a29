//! Which repository a context is of.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::cli::exit::{Code, Failure};
use crate::client::builder::is_remote;

/// Why that is not known.
#[derive(Debug, thiserror::Error)]
enum OriginError {
    #[error("no repository: git is not installed, and so nobody knows where the context is from")]
    NoGit,
    #[error("no repository: \"{}\" is in no git repository", .0.display())]
    NoRepository(PathBuf),
    #[error("no repository: git does not look into \"{}\", since it belongs to somebody else", .0.display())]
    Ownership(PathBuf),
    #[error("no repository: the context has no git remote \"origin\"")]
    NoOrigin,
    #[error("no repository: git fails in \"{}\": {said}", folder.display())]
    Git { folder: PathBuf, said: String },
    #[error("no repository: cannot run git")]
    Run(#[source] io::Error),
    #[error("no repository: \"{0}\" is an archive")]
    Archive(String),
    #[error("\"{0}\" is a place on this machine, and no repository that others know")]
    Local(String),
}

impl OriginError {
    fn hint(&self) -> String {
        let first = match self {
            Self::NoGit => "install git, or ".to_owned(),
            Self::Ownership(folder) => format!("git config --global --add safe.directory '{}', or ", folder.display()),
            _ => String::new(),
        };
        format!("{first}pass --repo, such as github.com/acme/shop: builds of one repository share a cache")
    }
}

/// The repository that was named, or else that of the context: its URL, or the
/// remote "origin" of where it lies.
pub(super) async fn repository(named: Option<&str>, context: &str) -> Result<String, Failure> {
    let found = match named {
        Some(repo) if is_path(repo) => Err(OriginError::Local(repo.to_owned())),
        Some(repo) => Ok(repo.to_owned()),
        None if is_remote(context) => of_url(context),
        None => origin(if context == "-" { "." } else { context }).await,
    };
    found.map_err(|error| {
        let hint = error.hint();
        Failure::new(Code::Usage, error).hint(hint)
    })
}

/// Not what could be a name after a host.
fn is_path(repo: &str) -> bool {
    repo.starts_with("file://") || matches!(repo.split('/').next(), Some("." | ".." | "~"))
}

fn of_url(context: &str) -> Result<String, OriginError> {
    let url = context.split(['#', '?']).next().unwrap_or_default();
    let fetched = url.starts_with("http://") || url.starts_with("https://");
    if fetched && !url.ends_with(".git") {
        return Err(OriginError::Archive(url.to_owned()));
    }
    Ok(url.to_owned())
}

async fn origin(context: &str) -> Result<String, OriginError> {
    let folder = std::path::absolute(context).unwrap_or_else(|_| Path::new(context).to_owned());
    let mut git = tokio::process::Command::new("git");
    git.current_dir(&folder).args(["remote", "get-url", "origin"]).env("LC_ALL", "C");
    let output = git.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output = output.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => OriginError::NoGit,
        _ => OriginError::Run(error),
    })?;
    if output.status.success() {
        let url = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        // A clone of a folder says nothing of where that came from.
        let local = is_path(&url) || url.starts_with('/');
        return if local { Err(OriginError::Local(url)) } else { Ok(url) };
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(if said.contains("dubious ownership") || said.contains("unsafe repository") {
        OriginError::Ownership(folder)
    } else if said.contains("not a git repository") {
        OriginError::NoRepository(folder)
    } else if said.contains("No such remote") {
        OriginError::NoOrigin
    } else {
        OriginError::Git { folder, said: crate::printable::line(&said, 300) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_its_own_repository_unless_it_is_an_archive() {
        for (context, want) in [
            ("https://github.com/acme/shop.git#main:web", Some("https://github.com/acme/shop.git")),
            ("git@github.com:acme/shop.git#main", Some("git@github.com:acme/shop.git")),
            ("https://example.org/shop.tar.gz", None),
        ] {
            assert_eq!(of_url(context).ok().as_deref(), want);
        }
    }

    #[test]
    fn paths_are_no_repositories() {
        for path in ["..", "../y", "./y", ".", "~/y", "file:///srv/y"] {
            assert!(is_path(path), "{path}");
        }
        for repo in ["github.com/acme/shop", "git@github.com:acme/shop", "shop", ".github", "..."] {
            assert!(!is_path(repo), "{repo}");
        }
    }
}
