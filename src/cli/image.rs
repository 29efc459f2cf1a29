//! `bko-install image`.

use clap::Args;

use super::Global;
use super::exit::Failure;

/// Write this executable as an OCI image; needs no Docker.
#[derive(Debug, Args)]
pub struct ImageArgs {}

/// Runs the command.
pub fn run(_args: ImageArgs, _global: &Global) -> Result<(), Failure> {
    Err(anyhow::anyhow!("to be written").into())
}
