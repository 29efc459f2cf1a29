//! `bko-install server`.

use clap::Args;

use super::Global;
use super::exit::Failure;

/// Run the roles controller, route and gateway.
#[derive(Debug, Args)]
pub struct ServerArgs {}

/// Runs the command.
pub fn run(_args: ServerArgs, _global: &Global) -> Result<(), Failure> {
    Err(anyhow::anyhow!("to be written").into())
}
