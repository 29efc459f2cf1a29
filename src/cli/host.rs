//! `bko-install logs`, `stop`, `rm` and `prune`: what is done to the daemons of
//! a farm on this host, over its control socket.
#![expect(clippy::disallowed_methods, reason = "shell: follows a file, tells ages")]

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use http::{Method, StatusCode};
use jiff::Timestamp;

use super::exit::{Code, Failure};
use super::{Global, report};
use crate::key::ProjectKey;
use crate::local::args::StateArgs;
use crate::local::client::{AskError, ask};
use crate::local::control::{Info, Pruned};
use crate::local::layout::Layout;
use crate::provisioner::project::{Page, Summary};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a cache may take to be pruned.
const PRUNE: Duration = Duration::from_secs(660);

/// Pause between two looks at a file that is followed.
const LOOK: Duration = Duration::from_millis(200);

/// Print what the daemon of a project has said.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Key of the project
    key: ProjectKey,
    /// Go on with what it says from now on
    #[arg(long, short)]
    follow: bool,
    /// Where the farm is.
    #[command(flatten)]
    state: StateArgs,
}

/// Send the daemon of a project to zero before its time; its cache stays.
#[derive(Debug, Args)]
pub struct StopArgs {
    /// Key of the project
    key: ProjectKey,
    /// End its builds, too
    #[arg(long)]
    cut_builds: bool,
    /// Where the farm is.
    #[command(flatten)]
    state: StateArgs,
}

/// Remove a project with its cache and snapshots.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Key of the project; may be repeated
    #[arg(required = true)]
    keys: Vec<ProjectKey>,
    /// End its builds, too
    #[arg(long)]
    cut_builds: bool,
    /// How long to wait until its cache has gone; what takes longer goes on, and is an error here
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    wait: Duration,
    /// Where the farm is.
    #[command(flatten)]
    state: StateArgs,
}

/// Empty the caches of projects that nobody has used for long.
#[derive(Debug, Args)]
pub struct PruneArgs {
    /// Keys of projects, whenever they were used [default: all that were not used for --unused-for]
    keys: Vec<ProjectKey>,
    /// How long a project must not have been used
    #[arg(long, value_name = "DURATION", default_value = "30d", value_parser = humantime::parse_duration)]
    unused_for: Duration,
    /// Where the farm is.
    #[command(flatten)]
    state: StateArgs,
}

/// The state folder of these flags.
///
/// # Errors
/// It cannot be one.
pub fn layout(state: &StateArgs) -> Result<Layout, Failure> {
    let folder = state.folder(rustix::process::geteuid().as_raw());
    Layout::new(folder).map_err(|error| Failure::new(Code::Usage, error))
}

/// The farm that runs on this host, in the folder that is named, or in the usual one if one does.
///
/// # Errors
/// None runs in the folder that is named, or it cannot be asked.
pub async fn running(state: &StateArgs) -> Result<Option<(Layout, Info)>, Failure> {
    let named = state.state_dir.is_some();
    let layout = match layout(state) {
        Ok(layout) => layout,
        Err(failure) if named => return Err(failure),
        // A folder that nobody named need not be one.
        Err(_) => return Ok(None),
    };
    match ask(&layout.control(), Method::GET, "/info", PATIENCE).await {
        Ok(info) => Ok(Some((layout, info))),
        Err(error) if named => Err(refused(error)),
        Err(_) => Ok(None),
    }
}

/// A farm's refusal as an exit code.
pub fn refused(error: AskError) -> Failure {
    let (code, hint) = match &error {
        AskError::NotRunning(_) => {
            (Code::Failed, Some("start one with `bko-install up`, or name its folder with --state-dir"))
        }
        AskError::Refused(StatusCode::CONFLICT, _) => (Code::Refused, None),
        _ => (Code::Failed, None),
    };
    let failure = Failure::new(code, error);
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// All projects of the farm on this host.
///
/// # Errors
/// It cannot be asked.
pub async fn projects(layout: &Layout) -> Result<Vec<Summary>, AskError> {
    let mut projects = Vec::new();
    let mut path = "/projects".to_owned();
    loop {
        let page: Page = ask(&layout.control(), Method::GET, &path, PATIENCE).await?;
        projects.extend(page.projects);
        match page.next {
            Some(next) => path = format!("/projects?continue={next}"),
            None => return Ok(projects),
        }
    }
}

/// Runs `logs`.
///
/// # Errors
/// The daemon has never run here, or its output cannot be read.
pub fn logs(args: &LogsArgs) -> Result<(), Failure> {
    let layout = layout(&args.state)?;
    let (older, newer) = (layout.older_log(args.key.as_str()), layout.log(args.key.as_str()));
    let mut out = report::stdout();
    if older.exists() {
        io::copy(&mut open(&older)?, &mut out)?;
    }
    let mut file = open(&newer).map_err(|failure| failure.hint("`bko-install ps --all` lists the projects"))?;
    io::copy(&mut file, &mut out)?;
    if !args.follow {
        return Ok(out.flush()?);
    }
    loop {
        out.flush()?;
        std::thread::sleep(LOOK);
        // The file is emptied when it has grown large.
        if file.stream_position()? > file.metadata()?.len() {
            file.seek(SeekFrom::Start(0))?;
        }
        let mut more = Vec::new();
        file.read_to_end(&mut more)?;
        out.write_all(&more)?;
    }
}

fn open(path: &Path) -> Result<File, Failure> {
    Ok(File::open(path).with_context(|| format!("cannot read \"{}\"", path.display()))?)
}

/// Runs `stop`.
///
/// # Errors
/// The farm refuses.
pub fn stop(args: &StopArgs, global: &Global) -> Result<(), Failure> {
    let socket = layout(&args.state)?.control();
    let path = format!("/projects/{}/stop?cut={}", args.key, args.cut_builds);
    super::block_on(async {
        ask::<()>(&socket, Method::POST, &path, PATIENCE).await.map_err(refused)?;
        let how = if args.cut_builds { "is stopped" } else { "goes to zero" };
        report::message(global, &format!("{} {how}", args.key));
        Ok(())
    })
}

/// Runs `rm`.
///
/// # Errors
/// The farm refuses; what came before is removed.
pub fn rm(args: &RmArgs, global: &Global) -> Result<(), Failure> {
    let socket = layout(&args.state)?.control();
    super::block_on(async {
        for key in &args.keys {
            let path = format!("/projects/{key}?cut={}&within={}", args.cut_builds, args.wait.as_secs());
            // The farm answers before.
            ask::<()>(&socket, Method::DELETE, &path, args.wait + PATIENCE).await.map_err(refused)?;
            report::message(global, &format!("removed {key}"));
        }
        Ok(())
    })
}

/// Runs `prune`.
///
/// # Errors
/// The farm refuses; what came before is pruned.
pub fn prune(args: &PruneArgs, global: &Global) -> Result<(), Failure> {
    let layout = layout(&args.state)?;
    super::block_on(async {
        let keys = if args.keys.is_empty() {
            let now = Timestamp::now();
            let projects = projects(&layout).await.map_err(refused)?;
            projects.into_iter().filter(|project| unused(project, args.unused_for, now)).map(|p| p.key).collect()
        } else {
            args.keys.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        if keys.is_empty() {
            report::message(global, "nothing to prune");
        }
        for key in keys {
            let path = format!("/projects/{key}/prune");
            let pruned: Pruned = ask(&layout.control(), Method::POST, &path, PRUNE).await.map_err(refused)?;
            let what = match pruned.bytes {
                Some(bytes) => format!("freed {} MiB", bytes >> 20),
                None => "removed its cache".to_owned(),
            };
            report::message(global, &format!("{key}: {what}"));
        }
        Ok(())
    })
}

fn unused(project: &Summary, span: Duration, now: Timestamp) -> bool {
    let busy = project.in_flight.count > 0 || project.active_builds.as_ref().is_some_and(|active| !active.is_empty());
    let used = project
        .last_used
        .map_or(Duration::MAX, |last| Duration::try_from(now.duration_since(last)).unwrap_or_default());
    !busy && used >= span
}
