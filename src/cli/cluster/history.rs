//! `bko-install cluster history`.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;

use super::super::exit::{Code, Failure};
use super::super::{Global, Output, OutputArgs, report};
use super::{WhereArgs, bundle, session};
use crate::plan::{Progress, Revision};

const TIMEOUT: Duration = Duration::from_secs(60);

/// So many lines of a failure are printed.
const LINES: usize = 5;

/// Print the runs that wrote.
#[derive(Debug, Args)]
pub struct HistoryArgs {
    /// Which installation.
    #[command(flatten)]
    pub place: WhereArgs,
    /// How to print it.
    #[command(flatten)]
    pub output: OutputArgs,
}

pub(super) async fn run(args: HistoryArgs, global: &Global) -> Result<(), Failure> {
    let cluster = session::open(global, 16, TIMEOUT, report::warnings(global)).await?;
    let wanted = bundle::wanted(&cluster, &args.place.bundle()).await?;
    let Some(record) = wanted.record else {
        let error = anyhow::anyhow!("nothing is installed in this cluster");
        return Err(Failure::new(Code::NotReady, error).hint("install it with `bko-install cluster init`"));
    };
    match args.output.output {
        Output::Json => report::print_json(&record.history),
        Output::Text => report::print(&text(&record.history)),
    }
}

fn text(history: &[Revision]) -> String {
    let mut text = format!(
        "{:<9} {:<20} {:<9} {:<10} {:<14} {:<10} {}\n",
        "REVISION", "STARTED", "TOOK", "STATE", "RUN", "PROFILE", "CHANGES"
    );
    for revision in history {
        let started = revision.run.started.strftime("%Y-%m-%d %H:%M:%S").to_string();
        let took = revision.run.finished.map_or_else(
            || "-".to_owned(),
            |end| format!("{:.1} s", (end - revision.run.started).total(jiff::Unit::Second).unwrap_or_default()),
        );
        let state = match revision.run.state {
            Progress::Applying => "cut off",
            Progress::Installed => "installed",
            Progress::Failed => "failed",
            Progress::Uninstalling => "removing",
        };
        let run = revision.origin.to_string();
        let profile = &revision.run.settings.profile;
        let _ = writeln!(
            text,
            "{:<9} {started:<20} {took:<9} {state:<10} {run:<14} {profile:<10} {}",
            revision.revision, revision.counts
        );
        let mut lines = revision.run.message.as_deref().unwrap_or_default().lines();
        for line in lines.by_ref().take(LINES) {
            let _ = writeln!(text, "          {line}");
        }
        match lines.count() {
            0 => {}
            more => drop(writeln!(text, "          and {more} more lines: --output json has them")),
        }
    }
    text
}
