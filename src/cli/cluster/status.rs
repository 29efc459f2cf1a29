//! `bko-install cluster status`.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;

use super::super::bundle::BundleArgs;
use super::super::exit::{Code, Failure};
use super::super::{Global, Output, OutputArgs, report};
use super::{LimitArgs, bundle, session};
use crate::install::{self, ComponentStatus, Installation, Status};
use crate::plan::Progress;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Print components, levels, readiness and drift.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// How to print the status.
    #[command(flatten)]
    pub output: OutputArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: LimitArgs,
}

pub(super) async fn run(args: StatusArgs, global: &Global) -> Result<(), Failure> {
    let cluster = session::open(global, args.limits.concurrency, TIMEOUT, report::warnings(global)).await?;
    let Some(wanted) = bundle::installed(&cluster, &BundleArgs::default()).await? else {
        let error = anyhow::anyhow!("nothing is installed in this cluster");
        return Err(Failure::new(Code::NotReady, error).hint("install it with `bko-install cluster init`"));
    };
    let Some(record) = wanted.record else { return Err(Failure::silent(Code::NotReady)) };
    let installation =
        Installation { rendered: wanted.rendered, settings: wanted.settings, force_conflicts: false, stop_after: None };
    let status = install::status(&cluster, &installation, &record).await.map_err(session::failure)?;
    match args.output.output {
        Output::Json => report::print_json(&status)?,
        Output::Text => report::print(&text(&status))?,
    }
    if status.is_ready() { Ok(()) } else { Err(Failure::silent(Code::NotReady)) }
}

fn text(status: &Status) -> String {
    let mut out = format!("profile {}, version {}, image {}\n", status.profile, status.version, status.image);
    let state = match status.state {
        Progress::Installed => "installed".to_owned(),
        Progress::Applying => "the last run was cut off, or is still at work".to_owned(),
        Progress::Failed => {
            let why = status.message.as_deref().unwrap_or("unknown reason");
            format!("the last run failed: {}", why.lines().next().unwrap_or_default())
        }
    };
    let _ = writeln!(out, "{state}, namespace {}", status.namespace);
    for level in &status.levels {
        for component in &level.components {
            let _ = writeln!(out, "{}  {:<20} {}", level.runlevel, component.name, readiness(component));
            for object in &component.pending {
                let _ = writeln!(out, "       {}: {}", object.object, object.why);
            }
        }
    }
    if !status.drift.is_empty() {
        let _ = writeln!(out, "drift: {} objects are not as they were installed", status.drift.len());
        status.drift.iter().for_each(|change| out.push_str(&change.to_string()));
    }
    out
}

fn readiness(component: &ComponentStatus) -> String {
    let waiting = component.pending.iter().filter(|object| !object.optional).count();
    match waiting {
        0 => format!("ready ({} objects)", component.objects),
        _ => format!("not ready ({waiting} of {} objects)", component.objects),
    }
}
