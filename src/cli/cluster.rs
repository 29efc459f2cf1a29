//! `bko-install cluster`.

mod bundle;
mod check;
mod init;
mod plan;
pub(in crate::cli) mod session;
mod status;
mod view;

use clap::{Args, Subcommand};

use super::exit::Failure;
use super::{Global, block_on};

/// Install, plan, check and inspect the farm in a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Install or upgrade; safe to run again, after a crash too
    Init(init::InitArgs),
    /// Print what `init` would do, and write nothing; exit code 3 when there are changes
    Plan(plan::PlanArgs),
    /// Check whether the cluster is fit for the farm, and what is installed; exit code 1 when something fails
    Check(Box<check::CheckArgs>),
    /// Print components, levels, readiness and drift; exit code 4 when not ready
    Status(status::StatusArgs),
}

/// How much of the API server's time a command may take.
#[derive(Clone, Copy, Debug, Args)]
pub struct LimitArgs {
    /// How many requests are in flight at once
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub concurrency: u16,
}

/// Runs the command.
pub fn run(command: ClusterCommand, global: &Global) -> Result<(), Failure> {
    match command {
        ClusterCommand::Init(args) => block_on(init::run(args, global)),
        ClusterCommand::Plan(args) => block_on(plan::run(args, global)),
        ClusterCommand::Check(args) => block_on(check::run(*args, global)),
        ClusterCommand::Status(args) => block_on(status::run(args, global)),
    }
}
