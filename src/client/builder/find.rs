//! Which builder is there and works.

use std::io;
use std::process::Stdio;

use super::{Builder, words};
use crate::printable::line;

/// Which builder is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Wanted {
    /// The first that is there: docker buildx, buildx, buildctl.
    #[default]
    Auto,
    /// docker buildx, or buildx by itself.
    Buildx,
    /// buildctl.
    Buildctl,
}

/// Why there is no builder: what was tried, and what came of it.
#[derive(Debug, thiserror::Error)]
#[error("no builder works: {}", .0.join("; "))]
pub struct FindError(Vec<String>);

/// The builder that is wanted, if it can be run.
///
/// # Errors
/// Names what was tried.
pub async fn find(wanted: Wanted) -> Result<Builder, FindError> {
    let buildx: &[&[&str]] = &[&["docker", "buildx"], &["buildx"]];
    let programs = if wanted == Wanted::Buildctl { &[] } else { buildx };
    let mut tried = Vec::new();
    for program in programs {
        match runs(program, "version").await {
            Ok(()) => return Ok(Builder::Buildx(words(program))),
            Err(why) => tried.push(why),
        }
    }
    if wanted != Wanted::Buildx {
        match runs(&["buildctl"], "--version").await {
            Ok(()) => return Ok(Builder::Buildctl("buildctl".into())),
            Err(why) => tried.push(why),
        }
    }
    Err(FindError(tried))
}

async fn runs(program: &[&str], version: &str) -> Result<(), String> {
    let shown = format!("`{}`", program.join(" "));
    let [name, arguments @ ..] = program else { return Err(shown) };
    let mut command = tokio::process::Command::new(name);
    command.args(arguments).arg(version).stdin(Stdio::null()).kill_on_drop(true);
    match command.output().await {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let said = said.lines().find(|line| !line.trim().is_empty()).unwrap_or("without a word");
            Err(format!("{shown} fails ({}): {}", output.status, line(said, 200)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(format!("{shown} is not on the PATH")),
        Err(error) => Err(format!("{shown} cannot be run: {error}")),
    }
}
