//! `bko-install key`.

use clap::Args;

use super::Global;
use super::exit::Failure;

/// Print the project key of a repository; needs no cluster.
#[derive(Debug, Args)]
pub struct KeyArgs {}

/// Runs the command.
pub fn run(_args: KeyArgs, _global: &Global) -> Result<(), Failure> {
    Err(anyhow::anyhow!("to be written").into())
}
