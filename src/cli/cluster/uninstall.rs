//! `bko-install cluster uninstall`.

use clap::Args;

use super::super::exit::{Code, Failure};
use super::super::{Global, Output, report};
use super::{LIVE, RunArgs, WhereArgs, bundle, session, told};
use crate::cluster::{Cluster, Reporter};
use crate::install::{self, InstallError, Scope, StopPoint};

/// Remove everything, in reverse.
#[derive(Debug, Args)]
#[command(after_long_help = LIVE)]
pub struct UninstallArgs {
    /// Which installation.
    #[command(flatten)]
    pub place: WhereArgs,
    /// How it is told, and what it may take.
    #[command(flatten)]
    pub run: RunArgs,
    /// Delete the caches of all projects, too; they cannot be brought back
    #[arg(long)]
    pub delete_caches: bool,
    /// Go on although builds run, which end
    #[arg(long)]
    pub cut_builds: bool,
    /// Print what would go, and write nothing; exit code 3 when there is anything
    #[arg(long)]
    pub dry_run: bool,
    /// Kill the process there: intent or apply:N
    #[arg(long, hide = true, value_name = "POINT")]
    pub stop_after: Option<StopPoint>,
}

pub(super) async fn run(args: UninstallArgs, global: &Global) -> Result<(), Failure> {
    if args.dry_run {
        let result = rehearse(&args, global).await;
        report::failed(args.run.output.output, &result);
        return result;
    }
    let run = async |reporter| {
        let Some((cluster, namespace)) = found(&args, global, reporter).await? else { return Ok(None) };
        match install::uninstall(&cluster, &namespace, scope(&args), args.stop_after).await {
            Ok(removal) => Ok(Some(removal)),
            // Another run has ended what this one began.
            Err(InstallError::Nothing(_)) => Ok(None),
            Err(error) => Err(session::failure(error)),
        }
    };
    match told(&args.run, global, run).await? {
        None => report::message(global, NOTHING),
        Some(removal) if args.run.output.output == Output::Text && !global.quiet => {
            let kept = removal.kept.iter().map(|kept| format!("\nkept {}: {}", kept.id, kept.why));
            report::print(&format!("uninstalled{}", kept.collect::<String>()))?;
        }
        Some(_) => {}
    }
    Ok(())
}

/// What is said when there is nothing to remove.
const NOTHING: &str = "nothing is installed in this cluster";

async fn rehearse(args: &UninstallArgs, global: &Global) -> Result<(), Failure> {
    let Some((cluster, namespace)) = found(args, global, report::warnings(global)).await? else {
        report::message(global, NOTHING);
        return Ok(());
    };
    let removal = install::prepare_uninstall(&cluster, &namespace, scope(args)).await.map_err(session::failure)?;
    match args.run.output.output {
        Output::Json => report::print_json(&removal)?,
        Output::Text if global.quiet => {}
        Output::Text => report::print(&removal.to_string())?,
    }
    Err(Failure::silent(Code::ChangesPending))
}

/// The cluster, and the namespace of its installation, if there is one.
async fn found(
    args: &UninstallArgs,
    global: &Global,
    reporter: Reporter,
) -> Result<Option<(Cluster, String)>, Failure> {
    let cluster = session::open(global, args.run.limits.concurrency, args.run.timeout, reporter).await?;
    let namespace = bundle::namespace(&cluster, &args.place.bundle()).await?;
    Ok(namespace.map(|namespace| (cluster, namespace)))
}

fn scope(args: &UninstallArgs) -> Scope {
    Scope { delete_caches: args.delete_caches, cut_builds: args.cut_builds }
}
