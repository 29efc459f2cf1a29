//! `bko-install server`.

use clap::Args;

use super::Global;
use super::exit::{Code, Failure};
use crate::cluster::client::connect_as;
use crate::names::CONTROLLER_MANAGER;
use crate::server::{self, ServerArgs};
use crate::telemetry::{self, LogFormat};

/// Run the roles controller, route and gateway.
#[derive(Debug, Args)]
pub struct ServerCommand {
    /// How log lines are written
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "BKO_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// Log directives, for example info,bko_install::gateway=debug
    #[arg(long, value_name = "DIRECTIVES", env = "RUST_LOG", hide_env_values = true)]
    pub log: Option<String>,
    /// Everything else.
    #[command(flatten)]
    pub server: ServerArgs,
}

/// Runs the command.
pub fn run(command: ServerCommand, global: &Global) -> Result<(), Failure> {
    let level = match (global.quiet, global.verbose) {
        (true, _) => "error",
        (_, 0) => "info",
        (_, 1) => "info,bko_install=debug",
        (_, _) => "debug",
    };
    telemetry::start(command.log.as_deref().unwrap_or(level), command.log_format);
    let plan = server::Plan::try_from(command.server).map_err(|error| Failure::new(Code::Usage, error))?;
    super::block_on(async {
        let client = connect_as(CONTROLLER_MANAGER, global).await?;
        Ok(server::run(plan, client).await?)
    })
}
