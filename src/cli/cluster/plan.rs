//! `bko-install cluster plan`.

use clap::Args;
use serde_json::Value;

use super::super::exit::{Code, Failure};
use super::super::{Global, Output, report};
use super::options::{AllowArgs, ChoiceArgs, options};
use super::{LookArgs, bundle, session};
use crate::install::{self, InstallError, Installation, Refusal, Reviewed};
use crate::plan::{Action, Plan};
use crate::preflight::Verdict;

/// Print what `init` would do.
#[derive(Debug, Args)]
#[command(
    after_long_help = "With --quiet, only the exit code tells whether there are changes. With --output json, a plan that \
    cannot be made is a line of JSON, as the last event of `init` is."
)]
pub struct PlanArgs {
    /// What is looked at.
    #[command(flatten)]
    pub look: LookArgs,
    /// What is allowed.
    #[command(flatten)]
    pub allow: AllowArgs,
    /// Which components.
    #[command(flatten)]
    pub choice: ChoiceArgs,
}

pub(super) async fn run(args: PlanArgs, global: &Global) -> Result<(), Failure> {
    let output = args.look.output.output;
    let result = look(args, global).await;
    report::failed(output, &result);
    result
}

async fn look(args: PlanArgs, global: &Global) -> Result<(), Failure> {
    let cluster =
        session::open(global, args.look.limits.concurrency, args.look.timeout, report::warnings(global)).await?;
    let wanted = bundle::wanted_of(&cluster, &args.look.bundle, args.allow.adopt).await?;
    let options = options(args.allow, &args.choice, &wanted.rendered)?;
    let installation = Installation { rendered: wanted.rendered, settings: wanted.settings, options };
    let prepared = install::prepare(&cluster, &installation).await.map(|prepared| (prepared.plan, prepared.installed));
    let Reviewed { mut plan, report: checks } =
        install::review(&cluster, &installation, prepared).await.map_err(session::failure)?;
    plan.values = wanted.release;
    match args.look.output.output {
        Output::Json => report::print_json(&plan)?,
        // The exit code says it all.
        Output::Text if global.quiet => {}
        Output::Text => report::print(&text(&plan, global.verbose)?)?,
    }
    checks.with(Verdict::Warn).for_each(|finding| report::message(global, &finding.to_string()));
    match (Refusal::of(&checks), plan.is_empty()) {
        (Some(refusal), _) => Err(session::failure(InstallError::Preflight(Box::new(refusal)))),
        (None, true) => Ok(()),
        (None, false) => Err(Failure::silent(Code::ChangesPending)),
    }
}

/// The plan; with `-v`, whole manifests of what will be created.
fn text(plan: &Plan, verbose: u8) -> Result<String, Failure> {
    let mut text = plan.to_string();
    if verbose > 0 {
        for change in plan.changes().filter(|change| change.action == Action::Create) {
            let body: Value = change.body.masked();
            text.push_str(&format!("---\n# {}\n{}", change.id, serde_yaml::to_string(&body)?));
        }
    }
    Ok(text)
}
