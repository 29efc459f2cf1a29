//! `bko-install profile`.

use clap::Subcommand;

use super::Global;
use super::exit::Failure;

/// List and show profiles.
#[derive(Debug, Subcommand)]
pub enum ProfileCommand {}

/// Runs the command.
pub fn run(command: ProfileCommand, _global: &Global) -> Result<(), Failure> {
    match command {}
}
