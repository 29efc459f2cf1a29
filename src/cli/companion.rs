//! `bko-install companion`.

use clap::{Args, Subcommand};

use super::Global;
use super::exit::{Code, Failure};
use super::log::LogArgs;
use crate::companion::hook::{self, WaitIdleArgs};
use crate::companion::{self, CompanionArgs};

/// Run the sidecar of a daemon.
#[derive(Debug, Args)]
pub struct CompanionCommand {
    /// Something else than to run.
    #[command(subcommand)]
    pub command: Option<Hook>,
    /// How it logs.
    #[command(flatten)]
    pub log: LogArgs,
    /// Everything else.
    #[command(flatten)]
    pub companion: CompanionArgs,
}

/// What the daemon's container runs.
#[derive(Debug, Subcommand)]
pub enum Hook {
    /// Wait until the daemon builds nothing; for its preStop hook
    WaitIdle(WaitIdleArgs),
}

/// Runs the command.
pub fn run(command: CompanionCommand, global: &Global) -> Result<(), Failure> {
    command.log.start(global);
    match command.command {
        None => super::block_on(async { Ok(companion::run(command.companion).await?) }),
        Some(Hook::WaitIdle(args)) => super::block_on(async {
            if hook::wait_idle(&args).await {
                let error = anyhow::anyhow!("builds may still be running after {} s", args.drain_seconds);
                return Err(Failure::new(Code::NotReady, error));
            }
            Ok(())
        }),
    }
}
