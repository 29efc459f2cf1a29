//! `bko-install build`.

mod args;
mod check;
mod fail;
mod origin;
mod plan;
mod secrets;

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
    let narrator = Narrator::new(global.quiet);
    let mut local = None;
    if args.access.api.base()?.is_none() {
        local = host::running(&args.access.state).await?.map(|(_, info)| info);
    }
    if let Some(info) = &local {
        let given = args.access.cert.is_some();
        args.access.api.use_host(info, given)?;
    }
    if args.dry_run {
        report::print(&plan::rehearsal(&args, global, &narrator).await?)?;
        return Ok(0);
    }
    let build = plan::plan(&args, global, &narrator).await?;
    let shown = build.api.token.shown();
    client::run(build, &narrator).await.map_err(|error| fail::failure(error, shown, local.as_ref()))
}
