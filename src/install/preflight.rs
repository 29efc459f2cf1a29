//! Checks of the cluster between the plan and the first write. What keeps a
//! plan from being made is explained by them too.

use std::fmt;

use super::{AdoptError, InstallError, Installation, permissions};
use crate::certificate::issue::IssueError;
use crate::cluster::record::{self, RecordError};
use crate::cluster::{Cluster, Event, RequestError};
use crate::plan::{Cause, Plan, Record};
use crate::preflight::access::Besides;
use crate::preflight::{Check, Finding, Report, Verdict, ask};

/// A plan, and what the checks say of the cluster; nothing when there is
/// nothing to write.
#[derive(Debug)]
pub struct Reviewed {
    /// The plan.
    pub plan: Plan,
    /// The findings.
    pub report: Report,
}

/// Everything that stands in the way of the first write.
#[derive(Debug)]
pub struct Refusal {
    /// The checks that fail, at least one.
    findings: Vec<Finding>,
    /// What else kept the plan from being made, and how to mend it.
    others: Vec<(InstallError, Option<String>)>,
}

impl Refusal {
    /// The refusal of a report, if a check of it fails.
    pub fn of(report: &Report) -> Option<Self> {
        let findings: Vec<Finding> = report.with(Verdict::Fail).cloned().collect();
        (!findings.is_empty()).then_some(Self { findings, others: Vec::new() })
    }

    /// Adds how to mend what no check explains.
    pub fn advise(&mut self, hint: impl Fn(&InstallError) -> Option<String>) {
        self.others.iter_mut().for_each(|(error, known)| *known = hint(error));
    }

    /// How to mend the first, and how to see them all.
    pub fn hint(&self) -> String {
        let first = self.findings.first().and_then(|finding| finding.hint.as_deref()).unwrap_or_default();
        match self.findings.as_slice() {
            [only] if self.others.is_empty() => format!("{first} ({})", only.check.documentation()),
            _ => "each has its hint; `bko-install cluster check` shows them again".to_owned(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.findings.len() + self.others.len();
        if let ([only], []) = (self.findings.as_slice(), self.others.as_slice()) {
            return write!(f, "{}: {}; nothing was written", only.check.name(), only.message);
        }
        write!(f, "{count} things stand in the way; nothing was written")?;
        self.findings.iter().try_for_each(|finding| write!(f, "\n{finding}"))?;
        for (error, hint) in &self.others {
            write!(f, "\nfail  plan: {}", error.to_string().replace('\n', "\n      "))?;
            hint.iter().try_for_each(|hint| write!(f, "\n      {hint}"))?;
        }
        Ok(())
    }
}

impl std::error::Error for Refusal {}

type Prepared = Result<(Plan, Option<Record>), InstallError>;

/// The plan, once the cluster is found fit for it. Warnings are reported.
///
/// # Errors
/// The plan's own, or [`InstallError::Preflight`].
pub(super) async fn checked(
    cluster: &Cluster,
    wanted: &Installation,
    prepared: Prepared,
) -> Result<Plan, InstallError> {
    let Reviewed { plan, report } = review(cluster, wanted, prepared).await?;
    match Refusal::of(&report) {
        Some(refusal) if !wanted.options.skip_checks => return Err(InstallError::Preflight(Box::new(refusal))),
        _ => {}
    }
    for finding in report.findings.iter().filter(|finding| finding.verdict != Verdict::Ok) {
        cluster.report(Event::Warning { message: told(finding) });
    }
    Ok(plan)
}

fn told(finding: &Finding) -> String {
    let hint = finding.hint.as_ref().map(|hint| format!(" ({hint})")).unwrap_or_default();
    format!("{}: {}{hint}", finding.check.name(), finding.message)
}

/// Checks the cluster, if the plan writes anything. When there is no plan
/// because the API server refuses, the checks say why where they can.
///
/// # Errors
/// What kept the plan from being made; [`InstallError::Preflight`] where checks
/// explain it.
pub async fn review(cluster: &Cluster, wanted: &Installation, prepared: Prepared) -> Result<Reviewed, InstallError> {
    let plan = match prepared {
        Ok((plan, _)) => plan,
        Err(error) if is_refusal(&error) => return Err(explained(cluster, wanted, error).await),
        Err(error) => return Err(error),
    };
    if plan.is_empty() {
        return Ok(Reviewed { plan, report: Report::default() });
    }
    let mut besides = Besides::from(&plan);
    if wanted.options.adopt {
        besides.releases.insert(wanted.rendered.operator_namespace.clone());
    }
    let report = ask::before(cluster, &wanted.rendered, &besides).await;
    let report = report.map_err(|error| InstallError::Observe(vec![error]))?;
    Ok(Reviewed { plan, report })
}

/// Whether the API server has answered, and said no.
fn is_refusal(error: &InstallError) -> bool {
    let refused = |error: &RequestError| {
        matches!(
            error,
            RequestError::Forbidden { .. }
                | RequestError::Refused { .. }
                | RequestError::Malformed { .. }
                | RequestError::Conflict { .. }
                | RequestError::NotServed { .. }
        )
    };
    match error {
        InstallError::Observe(errors) => errors.iter().any(refused),
        InstallError::Record(RecordError::Request { source, .. })
        | InstallError::Adopt(AdoptError::Request(source)) => refused(source),
        _ => false,
    }
}

/// The error with the findings that fail; as it was when none does.
async fn explained(cluster: &Cluster, wanted: &Installation, error: InstallError) -> InstallError {
    let rendered = &wanted.rendered;
    let record = record::load(cluster, &rendered.operator_namespace).await.ok().flatten();
    let mut besides = permissions::besides(cluster, rendered, record.as_ref()).await.unwrap_or_default();
    if wanted.options.adopt {
        besides.releases.insert(rendered.operator_namespace.clone());
    }
    let Ok(report) = ask::before(cluster, rendered, &besides).await else { return error };
    let Some(mut refusal) = Refusal::of(&report) else { return error };
    refusal.others = beyond(error, &refusal.findings).into_iter().map(|error| (error, None)).collect();
    InstallError::Preflight(Box::new(refusal))
}

/// What keeps a plan from being made, one by one, without what failed checks
/// tell of already: lacking permissions, namespaces that are being deleted,
/// Secrets that others make.
pub fn beyond(error: InstallError, findings: &[Finding]) -> Vec<InstallError> {
    let fails = |check: Check| findings.iter().any(|f| f.check == check && f.verdict == Verdict::Fail);
    let ends = |causes: &[Cause]| causes.iter().any(|cause| cause.reason == "NamespaceTerminating");
    let is_told = |error: &RequestError| match error {
        RequestError::Forbidden { .. } => fails(Check::Permissions),
        RequestError::Refused { causes, .. } => fails(Check::Namespaces) && ends(causes),
        _ => false,
    };
    match error {
        InstallError::Observe(errors) => {
            errors.into_iter().filter(|error| !is_told(error)).map(|error| InstallError::Observe(vec![error])).collect()
        }
        InstallError::Record(RecordError::Request { source, .. })
        | InstallError::Adopt(AdoptError::Request(source))
            if is_told(&source) =>
        {
            Vec::new()
        }
        InstallError::Certificates(IssueError::NotProvided(_)) if fails(Check::Secrets) => Vec::new(),
        other => vec![other],
    }
}
