//! `bko-install certs issue`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::Args;

use super::{declarations, parse};
use crate::cli::cluster::session;
use crate::cli::exit::{Code, Failure};
use crate::cli::{Global, report};
use crate::install::secrets::{Ensured, How, ensure};
use crate::manifest::Declarations;
use crate::names::OPERATOR_NAMESPACE;

/// What to make, and where it is said.
#[derive(Debug, Args)]
pub struct IssueArgs {
    /// Certificate that gets a successor before its time: daemon, client, api; may be repeated
    #[arg(long, value_name = "NAME")]
    renew: Vec<String>,
    /// Namespace of the control plane, whose ConfigMap says what is made
    #[arg(long, value_name = "NAMESPACE", default_value = OPERATOR_NAMESPACE)]
    operator_namespace: String,
    /// File that says it instead: the first step of an export has it mounted
    #[arg(long, value_name = "FILE", hide = true)]
    declared: Option<PathBuf>,
    /// How long it may take
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

pub(super) async fn run(args: IssueArgs, global: &Global) -> Result<(), Failure> {
    let cluster = session::open(global, 16, args.timeout, report::warnings(global)).await?;
    let declared = match &args.declared {
        Some(path) => parse(&read(path)?, &format!("\"{}\"", path.display()))?,
        None => declarations(&cluster.client(), &args.operator_namespace).await?,
    };
    known(&declared, &args.renew)?;
    let how = How { renew: args.renew.into_iter().collect(), leaves_only: false };
    let ensured = ensure(&cluster, &declared, &how).await.map_err(session::failure)?;
    if global.quiet { Ok(()) } else { report::print(&lines(&ensured)) }
}

/// An authority is not renewed on request: `certs rotate` replaces it.
fn known(declared: &Declarations, renew: &[String]) -> Result<(), Failure> {
    let leaves: Vec<&str> =
        declared.certificates.iter().filter(|spec| !spec.is_authority()).map(|spec| spec.name.as_str()).collect();
    match renew.iter().find(|name| !leaves.contains(&name.as_str())) {
        None => Ok(()),
        Some(name) => {
            let error = anyhow!("--renew: \"{name}\" is none of {}", leaves.join(", "));
            Err(Failure::new(Code::Usage, error).hint("an authority is replaced by `bko-install certs rotate`"))
        }
    }
}

pub(super) fn lines(ensured: &[Ensured]) -> String {
    let line = |Ensured { secret, decision, written }: &Ensured| {
        let mark = if *written { "written" } else { "kept   " };
        format!("{mark}  {secret}  {decision}")
    };
    ensured.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[expect(clippy::disallowed_methods, reason = "reads the file that it is given")]
fn read(path: &PathBuf) -> Result<String, Failure> {
    Ok(std::fs::read_to_string(path).with_context(|| format!("cannot read \"{}\"", path.display()))?)
}
