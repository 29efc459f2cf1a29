//! `bko-install ps`: what runs where, from the routing API or from the cluster.
#![expect(clippy::disallowed_methods, reason = "shell: ages are told at the time of asking")]

pub(super) mod changes;
mod source;
pub(super) mod table;

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use tokio::time::{MissedTickBehavior, interval};

use super::access::ApiArgs;
use super::exit::Failure;
use super::{Global, report};
use crate::local::args::StateArgs;
use crate::names::{BUILDS_NAMESPACE, dns_label};
use crate::printable;
use crate::provisioner::project::{Phase, Summary};
use changes::Changes;
use source::Source;
use table::Look;

/// How often a farm that is watched is asked.
const EVERY: Duration = Duration::from_secs(2);

/// Columns of a page that nobody looks at in a terminal.
const UNSEEN: u16 = 120;

/// Show what runs where: daemons, their builds, what the cache answered, and when they go to zero
#[derive(Debug, Args)]
#[command(
    after_long_help = "Asks the routing API when its address is given, else the farm that runs on this host, else \
    the cluster of the kubeconfig. The cluster knows which builds were routed and which ended; which run, and at which step, only the routing API tells."
)]
pub struct PsArgs {
    /// Go on: redraw on a terminal, else print what changes; Ctrl-C ends it
    #[arg(long, short)]
    watch: bool,
    /// How to print
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Show projects at zero, too
    #[arg(long, short)]
    all: bool,
    #[command(flatten)]
    access: ApiArgs,
    /// A farm on this host.
    #[command(flatten)]
    state: StateArgs,
    /// Namespace of the daemons, when the cluster is asked
    #[arg(long, value_name = "NAMESPACE", default_value = BUILDS_NAMESPACE, value_parser = dns_label, help_heading = "Access")]
    namespace: String,
    /// Never use colour, whatever its value (see <https://no-color.org>)
    #[arg(long, env = "NO_COLOR", hide = true, default_value = "")]
    no_color_by_environment: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Table,
    /// One JSON document; with --watch one line for each change
    Json,
}

/// Runs the command.
///
/// # Errors
/// The farm cannot be asked.
pub fn run(args: PsArgs, global: &Global) -> Result<(), Failure> {
    super::block_on(async {
        let source = Source::new(&args, global).await?;
        let screen = std::io::stdout().is_terminal();
        let plain = global.no_color || !args.no_color_by_environment.is_empty();
        match (args.watch, args.format) {
            (false, _) => once(&args, &source, screen && !plain).await,
            (true, Format::Table) if screen => {
                let watched = tokio::select! {
                    watched = redraw(&args, &source, !plain) => watched,
                    _ = tokio::signal::ctrl_c() => Ok(()),
                };
                // The cursor was hidden.
                let _ = write!(report::stdout(), "\x1b[?25h").and_then(|()| report::stdout().flush());
                watched
            }
            (true, _) => tokio::select! {
                watched = follow(&args, &source) => watched,
                _ = tokio::signal::ctrl_c() => Ok(()),
            },
        }
    })
}

impl PsArgs {
    fn shows(&self, project: &Summary) -> bool {
        self.all || project.phase != Phase::Idle
    }

    fn page(&self, projects: &[Summary], look: Look) -> String {
        match self.all && projects.is_empty() {
            true => "there is no project yet\n".to_owned(),
            false => table::table(projects, Timestamp::now(), look),
        }
    }
}

async fn shown(args: &PsArgs, source: &Source) -> Result<Vec<Summary>, Failure> {
    let mut projects = source.projects().await?;
    projects.retain(|project| args.shows(project));
    Ok(projects)
}

async fn once(args: &PsArgs, source: &Source, colour: bool) -> Result<(), Failure> {
    let projects = shown(args, source).await?;
    match args.format {
        Format::Json => report::print(&printable::json(&serde_json::to_string_pretty(&projects)?)),
        Format::Table => {
            let (width, _) = size();
            report::print(&args.page(&projects, Look { width, colour }))
        }
    }
}

/// Draws over what was drawn before, line by line and in one write, so that
/// nothing flickers.
async fn redraw(args: &PsArgs, source: &Source, colour: bool) -> Result<(), Failure> {
    let mut ticks = ticks();
    // The last page that was known stays above why there is no other.
    let mut kept = String::new();
    let mut first = true;
    loop {
        ticks.tick().await;
        let (width, height) = size();
        let text = match shown(args, source).await {
            Ok(projects) => {
                kept = args.page(&projects, Look { width, colour });
                kept.clone()
            }
            // A farm that cannot be asked at all is an error; one that could, is waited for.
            Err(failure) if first => return Err(failure),
            Err(failure) => {
                let why = table::wrapped(&printable::line(&format!("trying again: {}", why(failure)), 1000), width);
                format!("{}\n{why}", kept.trim_end())
            }
        };
        let mut out = report::stdout();
        write!(out, "{}", table::frame(&text, height, first))?;
        out.flush()?;
        first = false;
    }
}

async fn follow(args: &PsArgs, source: &Source) -> Result<(), Failure> {
    let (mut ticks, mut changes, mut failing) = (ticks(), Changes::default(), false);
    let mut first = true;
    loop {
        ticks.tick().await;
        match source.projects().await {
            Ok(mut projects) => {
                // Who saw it warm shall hear that it is at zero.
                projects.retain(|project| args.shows(project) || changes.knows(&project.key));
                let now = Timestamp::now();
                let lines: Vec<String> = match args.format {
                    Format::Table => {
                        changes.lines(projects, now).iter().map(|line| printable::line(line, 1000)).collect()
                    }
                    Format::Json => changes.documents(projects)?.iter().map(|line| printable::json(line)).collect(),
                };
                let mut out = report::stdout();
                lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
                out.flush()?;
                failing = false;
            }
            Err(failure) if first => return Err(failure),
            Err(failure) if !failing => {
                report::complain(&format!("trying again: {}", why(failure)));
                failing = true;
            }
            Err(_) => {}
        }
        first = false;
    }
}

fn why(failure: Failure) -> String {
    failure.error.map_or_else(String::new, |error| format!("{error:#}"))
}

fn ticks() -> tokio::time::Interval {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Columns and rows of the terminal.
fn size() -> (u16, u16) {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_col > 0 => (size.ws_col, size.ws_row.max(2)),
        _ => (UNSEEN, u16::MAX),
    }
}
