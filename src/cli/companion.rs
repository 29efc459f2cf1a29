//! `bko-install companion`.

use clap::{Args, Subcommand};

use super::Global;
use super::exit::{Code, Failure};
use crate::companion::hook::{self, WaitIdleArgs};
use crate::companion::{self, CompanionArgs};
use crate::telemetry::{self, LogFormat};

/// Run the sidecar of a daemon.
#[derive(Debug, Args)]
pub struct CompanionCommand {
    /// Something else than to run.
    #[command(subcommand)]
    pub command: Option<Hook>,
    /// How log lines are written
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "BKO_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// Log directives, for example info,bko_install::companion=debug
    #[arg(long, value_name = "DIRECTIVES", env = "RUST_LOG", hide_env_values = true)]
    pub log: Option<String>,
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
    let level = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (_, 0) => "info",
        (_, 1) => "info,bko_install=debug",
        (_, _) => "debug",
    };
    telemetry::start(command.log.as_deref().unwrap_or(level), command.log_format);
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
