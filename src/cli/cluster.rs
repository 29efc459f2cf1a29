//! `bko-install cluster`.

use clap::Subcommand;

use super::Global;
use super::exit::Failure;

/// Install, plan and inspect the farm in a cluster.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {}

/// Runs the command.
pub fn run(command: ClusterCommand, _global: &Global) -> Result<(), Failure> {
    match command {}
}
