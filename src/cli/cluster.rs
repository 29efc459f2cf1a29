//! `bko-install cluster`.

mod bundle;
mod check;
mod history;
mod init;
mod options;
mod plan;
mod rollback;
pub(in crate::cli) mod session;
mod status;
mod unadopt;
mod uninstall;
mod view;

use std::time::Duration;

use clap::{Args, Subcommand};

use super::bundle::BundleArgs;
use super::exit::Failure;
use super::screen::TerminalArgs;
use super::{Global, OutputArgs, block_on, report};
use crate::cluster::Reporter;
use view::Live;

/// Install, plan, check and inspect the farm in a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Install or upgrade; safe to run again, after a crash too
    Init(Box<init::InitArgs>),
    /// Print what `init` would do, and write nothing; exit code 3 when there are changes
    Plan(plan::PlanArgs),
    /// Check whether the cluster is fit for the farm, and what is installed; exit code 1 when something fails
    Check(Box<check::CheckArgs>),
    /// Print components, levels, readiness and drift; exit code 4 when not ready
    Status(status::StatusArgs),
    /// Print the runs that wrote, the latest last
    History(history::HistoryArgs),
    /// Go back to what an earlier run had installed
    Rollback(rollback::RollbackArgs),
    /// Remove everything, in reverse; caches stay unless --delete-caches
    Uninstall(uninstall::UninstallArgs),
    /// Let Helm know its release again that `init --adopt` made it forget
    Unadopt(unadopt::UnadoptArgs),
}

/// How much of the API server's time a command may take.
#[derive(Clone, Copy, Debug, Args)]
pub struct LimitArgs {
    /// How many requests are in flight at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub concurrency: u16,
}

/// How a run that writes is told, and what it may take.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// How to print events.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// What it is shown on.
    #[command(flatten)]
    pub terminal: TerminalArgs,
    /// How long the whole run may take
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
}

/// What is looked at, and how it is told.
#[derive(Clone, Debug, Args)]
pub struct LookArgs {
    /// Which bundle.
    #[command(flatten)]
    pub bundle: BundleArgs,
    /// How to print it.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// How long the API server may take
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    pub timeout: Duration,
}

/// How a run that writes is told, in words.
const LIVE: &str = "On a terminal its last lines show what is done, with what each part waits for and why; elsewhere, \
    and where TERM is dumb, a line tells of everything that happens. With --output json each is a line of JSON, and so \
    is a failure. Ctrl-C stops after the requests in flight, once more at once; the same command goes on from there.";

/// Carries a run out, with a view where there is a terminal for it. In JSON,
/// its failure is its last event.
async fn told<T>(
    args: &RunArgs,
    global: &Global,
    run: impl AsyncFnOnce(Reporter) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let output = args.output.output;
    let live = Live::start(&args.terminal, global, output);
    let result = run(live.as_ref().map_or_else(|| report::reporter(global, output), Live::reporter)).await;
    if let Some(live) = live {
        live.end(result.is_ok()).await;
    }
    report::failed(output, &result);
    result
}

/// Which installation.
#[derive(Clone, Debug, Default, Args)]
pub struct WhereArgs {
    /// Namespace of the installation's record [default: wherever it is found]
    #[arg(long, value_name = "NAME")]
    pub namespace: Option<String>,
}

impl WhereArgs {
    /// The same as options of a bundle.
    fn bundle(&self) -> BundleArgs {
        let set = self.namespace.iter().map(|name| format!("namespaces.operator={name}")).collect();
        BundleArgs { set, ..BundleArgs::default() }
    }
}

/// Runs the command.
pub fn run(command: ClusterCommand, global: &Global) -> Result<(), Failure> {
    match command {
        ClusterCommand::Init(args) => block_on(init::run(*args, global)),
        ClusterCommand::Plan(args) => block_on(plan::run(args, global)),
        ClusterCommand::Check(args) => block_on(check::run(*args, global)),
        ClusterCommand::Status(args) => block_on(status::run(args, global)),
        ClusterCommand::History(args) => block_on(history::run(args, global)),
        ClusterCommand::Rollback(args) => block_on(rollback::run(args, global)),
        ClusterCommand::Uninstall(args) => block_on(uninstall::run(args, global)),
        ClusterCommand::Unadopt(args) => block_on(unadopt::run(args, global)),
    }
}
