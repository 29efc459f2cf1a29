//! `bko-install export`.

use clap::Args;

use super::Global;
use super::exit::Failure;

/// Write the manifests for GitOps; needs no cluster.
#[derive(Debug, Args)]
pub struct ExportArgs {}

/// Runs the command.
pub fn run(_args: ExportArgs, _global: &Global) -> Result<(), Failure> {
    Err(anyhow::anyhow!("to be written").into())
}
