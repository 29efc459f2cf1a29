//! `bko-install cluster check`.

use std::str::FromStr;

use clap::Args;

use super::super::exit::{Code, Failure};
use super::super::{Global, Output, report};
use super::bundle::Wanted;
use super::{LookArgs, bundle, session};
use crate::cluster::Cluster;
use crate::install::{self, Installation, Status};
use crate::names::{INSTALLER_MANAGER, OPERATOR_NAMESPACE};
use crate::plan::Progress;
use crate::preflight::access::Purpose;
use crate::preflight::role::{self, ServiceAccount};
use crate::preflight::{Check, Finding, Report, Verdict, ask};

/// [`Purpose::USUAL`] as the command line has it.
const USUAL: [&str; 4] = ["init", "rollback", "uninstall", "rotate"];

/// Check the cluster, and what is installed.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// What is looked at.
    #[command(flatten)]
    pub look: LookArgs,
    /// Print the least roles that suffice for these commands, as manifests for `kubectl apply --server-side`, and
    /// check nothing; without names, for all that take nothing but what is installed: init, rollback, uninstall, rotate
    #[arg(long, value_name = "COMMAND", num_args = 0.., require_equals = true, value_delimiter = ',', default_missing_values = USUAL)]
    pub print_rbac: Option<Vec<Purpose>>,
    /// Who is to have these roles
    #[arg(long, value_name = "NAMESPACE/NAME", requires = "print_rbac", default_value_t = Default::default())]
    pub service_account: Subject,
}

/// A service account as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject(ServiceAccount);

impl Default for Subject {
    fn default() -> Self {
        Self(ServiceAccount { namespace: OPERATOR_NAMESPACE.to_owned(), name: INSTALLER_MANAGER.to_owned() })
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.0.namespace, self.0.name)
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (namespace, name) = text.split_once('/').ok_or("must be NAMESPACE/NAME")?;
        let namespace = crate::names::dns_label(namespace).map_err(|error| error.to_string())?;
        let name = crate::names::object_name(name).map_err(|error| error.to_string())?;
        Ok(Self(ServiceAccount { namespace, name }))
    }
}

pub(super) async fn run(args: CheckArgs, global: &Global) -> Result<(), Failure> {
    let cluster =
        session::open(global, args.look.limits.concurrency, args.look.timeout, report::warnings(global)).await?;
    let wanted = match args.print_rbac {
        Some(_) => bundle::wanted(&cluster, &args.look.bundle).await?,
        None => bundle::wanted_unless_forbidden(&cluster, &args.look.bundle).await?,
    };
    let asked = |error| session::failure(install::InstallError::Observe(vec![error]));
    if let Some(purposes) = &args.print_rbac {
        let needs = install::permissions::needs(&cluster, &wanted.rendered, wanted.record.as_ref(), purposes).await;
        let needs = needs.map_err(session::failure)?;
        return report::print(&role::yaml(&needs, &args.service_account.0));
    }
    let besides = install::permissions::besides(&cluster, &wanted.rendered, wanted.record.as_ref()).await;
    let besides = besides.map_err(asked)?;
    let mut findings = ask::before(&cluster, &wanted.rendered, &besides).await.map_err(asked)?.findings;
    if let Some(installed) = installation(&cluster, &args, &wanted).await? {
        findings.push(installed);
        findings.extend(ask::after(&cluster, &wanted.rendered).await.map_err(asked)?.findings);
    }
    let checks = Report::new(findings);
    match args.look.output.output {
        Output::Json => report::print_json(&checks)?,
        Output::Text => report::print(&text(&checks, global))?,
    }
    if checks.verdict() == Verdict::Fail { Err(Failure::silent(Code::Failed)) } else { Ok(()) }
}

/// What is found of the installation; nothing when there is none.
async fn installation(cluster: &Cluster, args: &CheckArgs, wanted: &Wanted) -> Result<Option<Finding>, Failure> {
    if wanted.record.is_none() {
        return Ok(None);
    }
    let Some(installed) = bundle::installed(cluster, &args.look.bundle).await? else { return Ok(None) };
    let Some(record) = installed.record else { return Ok(None) };
    let installation = Installation::of(installed.rendered, installed.settings);
    Ok(Some(match install::status(cluster, &installation, &record).await {
        Ok(status) => readiness(&status),
        Err(error) => {
            Check::Installation.fail(error.to_string(), "`bko-install cluster plan` shows what stands in the way")
        }
    }))
}

fn readiness(status: &Status) -> Finding {
    let components = || status.levels.iter().flat_map(|level| &level.components);
    let objects: usize = components().map(|component| component.objects).sum();
    let pending: Vec<String> = components()
        .flat_map(|component| &component.pending)
        .filter(|object| !object.optional)
        .map(|object| format!("{}: {}", object.object, object.why))
        .collect();
    let look = "`bko-install cluster status` shows all of it";
    match (status.state, pending.as_slice()) {
        (Progress::Installed, []) if status.drift.is_empty() => {
            Check::Installation.ok(format!("all {objects} objects are ready and as they were installed"))
        }
        (Progress::Installed, []) => Check::Installation.warn(
            format!("all {objects} objects are ready; {} are not as they were installed", status.drift.len()),
            "`bko-install cluster plan` shows the difference, `cluster init` mends it",
        ),
        (Progress::Installed, pending) => Check::Installation.fail(pending.join("\n"), look),
        (Progress::Applying, _) => Check::Installation
            .warn("the last run was cut off, or is still at work", "run `bko-install cluster init` again"),
        (Progress::Uninstalling, _) => Check::Installation.warn(
            "it is being uninstalled, or that was cut off",
            "run `bko-install cluster uninstall` again, or `cluster init` to keep it",
        ),
        (Progress::Failed, pending) => {
            let why = status.message.as_deref().and_then(|why| why.lines().next()).unwrap_or("unknown reason");
            let lines: Vec<String> =
                std::iter::once(format!("the last run failed: {why}")).chain(pending.to_vec()).collect();
            Check::Installation.fail(lines.join("\n"), look)
        }
    }
}

/// Every finding and a last line; with `--quiet`, what needs somebody only.
fn text(checks: &Report, global: &Global) -> String {
    let count = |verdict| checks.with(verdict).count();
    let shown = checks.findings.iter().filter(|finding| !global.quiet || finding.verdict != Verdict::Ok);
    let mut lines: Vec<String> = shown.map(ToString::to_string).collect();
    lines.push(format!(
        "{} ok, {} to know of, {} failed",
        count(Verdict::Ok),
        count(Verdict::Warn),
        count(Verdict::Fail)
    ));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_purposes_are_called_as_they_are() {
        use clap::ValueEnum as _;
        assert_eq!(USUAL.map(|name| Purpose::from_str(name, false).unwrap()), Purpose::USUAL);
        for purpose in Purpose::value_variants() {
            assert_eq!(Purpose::from_str(&purpose.to_string(), false).as_ref(), Ok(purpose));
        }
        assert_eq!(Purpose::printed_by(&[Purpose::Uninstall]), "--print-rbac");
        assert_eq!(
            Purpose::printed_by(&[Purpose::DeleteCaches]),
            "--print-rbac=init,rollback,uninstall,rotate,delete-caches"
        );
    }

    #[test]
    fn a_service_account_is_named_with_its_namespace() {
        assert_eq!("ci/installer".parse::<Subject>().unwrap().to_string(), "ci/installer");
        for wrong in ["installer", "/x", "ci/", "CI/x", "a/b/c"] {
            assert!(wrong.parse::<Subject>().is_err(), "{wrong}");
        }
    }
}
