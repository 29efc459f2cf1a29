//! `bko-install cluster uninstall`.

use clap::Args;

use super::super::exit::{Code, Failure};
use super::super::{Global, Output, report};
use super::{RunArgs, WhereArgs, bundle, session};
use crate::install::{self, InstallError, Scope, StopPoint};

/// Remove everything, in reverse.
#[derive(Debug, Args)]
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
    let output = args.run.output.output;
    let result = remove(args, global).await;
    report::failed(output, &result);
    result
}

async fn remove(args: UninstallArgs, global: &Global) -> Result<(), Failure> {
    let reporter =
        if args.dry_run { report::warnings(global) } else { report::reporter(global, args.run.output.output) };
    let cluster = session::open(global, args.run.limits.concurrency, args.run.timeout, reporter).await?;
    let Some(namespace) = bundle::namespace(&cluster, &args.place.bundle()).await? else {
        report::message(global, "nothing is installed in this cluster");
        return Ok(());
    };
    let scope = Scope { delete_caches: args.delete_caches, cut_builds: args.cut_builds };
    if args.dry_run {
        let removal = install::prepare_uninstall(&cluster, &namespace, scope).await.map_err(session::failure)?;
        match args.run.output.output {
            Output::Json => report::print_json(&removal)?,
            Output::Text if global.quiet => {}
            Output::Text => report::print(&removal.to_string())?,
        }
        return Err(Failure::silent(Code::ChangesPending));
    }
    match install::uninstall(&cluster, &namespace, scope, args.stop_after).await {
        Ok(removal) => {
            if args.run.output.output == Output::Text && !global.quiet {
                let kept = removal.kept.iter().map(|kept| format!("\nkept {}: {}", kept.id, kept.why));
                report::print(&format!("uninstalled{}", kept.collect::<String>()))?;
            }
            Ok(())
        }
        // Another run has ended what this one began.
        Err(InstallError::Nothing(message)) => {
            report::message(global, &message);
            Ok(())
        }
        Err(error) => Err(session::failure(error)),
    }
}
