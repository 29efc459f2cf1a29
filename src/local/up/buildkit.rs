//! Which BuildKit daemons run: that of this host, or that of an image.
#![expect(clippy::disallowed_methods, reason = "shell: reads files that flags name")]

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use super::UpError;
use crate::families::build_farm::build::config::Base;
use crate::local::args::{Buildkit, UpArgs};
use crate::local::configuration::{Common, Programs};
use crate::local::fetch::{self, Progress, STOCK, Source};
use crate::local::layout::Layout;
use crate::local::programs::{self, ProgramsError, User};
use crate::printable::line;

pub(super) async fn common(
    args: &UpArgs,
    layout: &Layout,
    uid: u32,
    progress: Progress<'_>,
) -> Result<Common, UpError> {
    let base = match &args.daemons.buildkitd_config {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|error| UpError::ReadBase(path.clone(), error))?;
            Base::parse(&text, None).map_err(UpError::Base)?
        }
        None => Base::default(),
    };
    let user = User { uid, name: user_name(uid) };
    let programs = find_programs(args, layout, &user, progress).await?;
    let beside = programs.buildkitd.parent().map(Path::to_owned);
    let folders = beside.into_iter().chain(std::env::split_paths(&args.daemons.path));
    let folders = folders.chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let path = std::env::join_paths(folders).unwrap_or_else(|_| args.daemons.path.clone());
    Ok(Common { layout: layout.clone(), programs, base, port: args.daemons.daemon_port, path, user: user.name })
}

/// On this host, else out of an image.
async fn find_programs(
    args: &UpArgs,
    layout: &Layout,
    user: &User,
    progress: Progress<'_>,
) -> Result<Programs, UpError> {
    let (bin, path) = (layout.bin(), &args.daemons.path);
    let find = |named: Option<&Path>| programs::find(named, &bin, path, user);
    let image = match &args.daemons.buildkit {
        Buildkit::Path(path) => return Ok(find(Some(path))?),
        Buildkit::Auto => match find(None) {
            Err(error @ ProgramsError::Missing(name, _)) => {
                if name != "buildkitd" {
                    tracing::warn!("the buildkitd of PATH is not used, that of the stock image is: {error}");
                }
                STOCK.parse().ok()
            }
            found => return Ok(found?),
        },
        Buildkit::Image(image) => Some(image.clone()),
    };
    if let Some(image) = image {
        let config = args.daemons.docker_config.clone();
        let config = config.or_else(|| Some(args.state.home.as_ref()?.join(".docker")));
        let (mirror, docker_config) =
            (args.daemons.buildkit_mirror.clone(), config.map(|folder| folder.join("config.json")));
        let name = image.whole();
        let digest = fetch::fetch(&Source { image, mirror, docker_config }, &bin, progress).await?;
        tracing::info!(image.name = name, image.digest = digest, "using the BuildKit of an image");
    }
    Ok(find(Some(&bin))?)
}

/// As `/etc/subuid` names a user. The environment may be another's.
fn user_name(uid: u32) -> Option<String> {
    let text = std::fs::read_to_string("/etc/passwd").ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.to_string()).then(|| name.to_owned())
    })
}

pub(super) async fn version(buildkitd: &Path) -> Result<String, UpError> {
    let failed = |why: String| UpError::Buildkit(buildkitd.to_owned(), why);
    let output = Command::new(buildkitd).arg("--version").stdin(Stdio::null()).output().await;
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match said.split_whitespace().next() {
        Some("buildkitd") => Ok(said),
        _ => {
            let said = line(said.lines().next().unwrap_or_default(), 100);
            Err(UpError::NotBuildkitd { file: buildkitd.to_owned(), said })
        }
    }
}
