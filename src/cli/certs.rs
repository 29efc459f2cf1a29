//! `bko-install certs`.

use clap::Subcommand;

use super::Global;
use super::exit::Failure;

/// List and export certificates.
#[derive(Debug, Subcommand)]
pub enum CertsCommand {}

/// Runs the command.
pub fn run(command: CertsCommand, _global: &Global) -> Result<(), Failure> {
    match command {}
}
