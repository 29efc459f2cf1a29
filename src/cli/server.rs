//! `bko-install server`.

use clap::Args;

use super::Global;
use super::exit::{Code, Failure};
use super::log::LogArgs;
use crate::cluster::client::connect_as;
use crate::names::CONTROLLER_MANAGER;
use crate::server::{self, ServerArgs};

/// Run the roles controller, route and gateway.
#[derive(Debug, Args)]
pub struct ServerCommand {
    /// How it logs.
    #[command(flatten)]
    pub log: LogArgs,
    /// Everything else.
    #[command(flatten)]
    pub server: ServerArgs,
}

/// Runs the command.
pub fn run(command: ServerCommand, global: &Global) -> Result<(), Failure> {
    command.log.start(global);
    let plan = server::Plan::try_from(command.server).map_err(|error| Failure::new(Code::Usage, error))?;
    super::block_on(async {
        let client = connect_as(CONTROLLER_MANAGER, global).await?;
        Ok(server::run(plan, client).await?)
    })
}
