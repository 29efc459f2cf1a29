//! `bko-install build`.

mod args;
mod fail;
mod plan;

pub use args::BuildArgs;

use std::process::ExitCode;

use super::exit::{self, Failure};
use super::{Global, block_on, host, report};
use crate::client::{self, Narrator};

/// Runs the command; the exit code is the builder's.
pub fn run(args: BuildArgs, global: &Global) -> ExitCode {
    match block_on(build(args, global)) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => exit::finish(Err(failure)),
    }
}

async fn build(mut args: BuildArgs, global: &Global) -> Result<u8, Failure> {
    if args.access.buildd_url.clone().flatten().is_none()
        && let Some((_, info)) = host::running(&args.access.state).await?
    {
        args.access.use_host(&info)?;
    }
    if args.dry_run {
        report::print(&plan::rehearsal(&args, global).await?)?;
        return Ok(0);
    }
    let build = plan::plan(&args, global).await?;
    client::run(build, &Narrator::new(global.quiet)).await.map_err(fail::failure)
}
