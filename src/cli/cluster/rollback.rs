//! `bko-install cluster rollback`.

use clap::Args;

use super::super::exit::{Code, Failure};
use super::super::{Global, Output, report};
use super::options::{AllowArgs, ChoiceArgs, options};
use super::{LIVE, RunArgs, WhereArgs, bundle, session, told};
use crate::cluster::{Cluster, Reporter};
use crate::install::{self, Installation, Options, StopPoint};

/// Go back to what an earlier run had installed.
#[derive(Debug, Args)]
#[command(after_long_help = LIVE)]
pub struct RollbackArgs {
    /// Revision, as `history` numbers them [default: the last that succeeded before the present one]
    #[arg(value_name = "REVISION")]
    pub revision: Option<u32>,
    /// Which installation.
    #[command(flatten)]
    pub place: WhereArgs,
    /// How it is told, and what it may take.
    #[command(flatten)]
    pub run: RunArgs,
    /// What is allowed.
    #[command(flatten)]
    pub allow: AllowArgs,
    /// Print what would change, and write nothing; exit code 3 when there are changes
    #[arg(long)]
    pub dry_run: bool,
    /// Kill the process there: intent, apply:N or level:rcN
    #[arg(long, hide = true, value_name = "POINT")]
    pub stop_after: Option<StopPoint>,
}

pub(super) async fn run(args: RollbackArgs, global: &Global) -> Result<(), Failure> {
    if args.dry_run {
        let result = rehearse(&args, global).await;
        report::failed(args.run.output.output, &result);
        return result;
    }
    let run = async |reporter| {
        let (cluster, installation) = prepared(&args, global, reporter).await?;
        install::rollback(&cluster, &installation, args.revision).await.map_err(session::failure)
    };
    let plan = told(&args.run, global, run).await?;
    if args.run.output.output == Output::Text && !global.quiet {
        report::print(&format!("rolled back: {}", plan.counts()))?;
    }
    Ok(())
}

async fn rehearse(args: &RollbackArgs, global: &Global) -> Result<(), Failure> {
    let (cluster, installation) = prepared(args, global, report::warnings(global)).await?;
    let prepared = install::prepare_rollback(&cluster, &installation, args.revision).await;
    let (_, prepared, _) = prepared.map_err(session::failure)?;
    match args.run.output.output {
        Output::Json => report::print_json(&prepared.plan)?,
        Output::Text if global.quiet => {}
        Output::Text => report::print(&prepared.plan.to_string())?,
    }
    if prepared.plan.is_empty() { Ok(()) } else { Err(Failure::silent(Code::ChangesPending)) }
}

/// The cluster, and what the present executable would install.
async fn prepared(
    args: &RollbackArgs,
    global: &Global,
    reporter: Reporter,
) -> Result<(Cluster, Installation), Failure> {
    let cluster = session::open(global, args.run.limits.concurrency, args.run.timeout, reporter).await?;
    let Some(wanted) = bundle::installed(&cluster, &args.place.bundle()).await? else {
        let error = anyhow::anyhow!("nothing is installed in this cluster");
        return Err(Failure::new(Code::Failed, error).hint("`bko-install cluster init` installs it"));
    };
    let options = options(args.allow, &ChoiceArgs::default(), &wanted.rendered)?;
    let options = Options { stop_after: args.stop_after, ..options };
    Ok((cluster, Installation { rendered: wanted.rendered, settings: wanted.settings, options }))
}
