//! `bko-install certs list`.
#![expect(clippy::disallowed_methods, reason = "the age of a certificate needs the time")]

use std::io::{self, Write};

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use super::{Namespaces, declared, fetch};
use crate::certificate::issue::{IssueError, LiveSecrets, Outcome, rehearse};
use crate::certificate::rotate::{self, Stage};
use crate::certificate::{CertificateSpec, Decision, LiveCertificate};
use crate::cli::exit::Failure;
use crate::cli::{Output, OutputArgs, report};

/// What to list, and how.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    namespaces: Namespaces,
    #[command(flatten)]
    output: OutputArgs,
}

/// One certificate.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    name: String,
    secret: String,
    verdict: &'static str,
    reason: String,
    /// Of an authority that is being replaced: how far that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    rotation: Option<String>,
    #[serde(flatten)]
    certificate: Option<Facts>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Facts {
    subject: String,
    issuer: String,
    names: Vec<String>,
    not_before: Timestamp,
    not_after: Timestamp,
    days_left: i64,
}

pub(super) async fn run(args: ListArgs, client: kube::Client) -> Result<(), Failure> {
    let specs = declared(&args.namespaces)?;
    let mut live = LiveSecrets::new();
    for spec in &specs {
        if let Some(secret) = fetch(&client, &spec.namespace, &spec.secret).await? {
            live.insert((spec.namespace.clone(), spec.secret.clone()), secret);
        }
    }
    let rows = rows(&specs, &live, Timestamp::now())?;
    Ok(print(&rows, args.output.output, &mut report::stdout())?)
}

fn rows(specs: &[CertificateSpec], live: &LiveSecrets, now: Timestamp) -> Result<Vec<Row>, IssueError> {
    let row = |outcome: &Outcome| {
        let spec = &outcome.spec;
        let secret = live.get(&(spec.namespace.clone(), spec.secret.clone()));
        let certificate = secret.map(|secret| match spec.is_authority() {
            true => LiveCertificate::read_authority(&secret.data),
            false => LiveCertificate::read_leaf(&secret.data),
        });
        let stage = secret.filter(|_| spec.is_authority()).map(|secret| rotate::stage(&secret.data));
        let rotation = stage.filter(|stage| *stage != Stage::Idle).map(|stage| stage.to_string());
        Row { rotation, ..row(spec, certificate.and_then(Result::ok).as_ref(), &outcome.decision, now) }
    };
    Ok(rehearse(specs, live, now)?.iter().map(row).collect())
}

fn row(spec: &CertificateSpec, live: Option<&LiveCertificate>, decision: &Decision, now: Timestamp) -> Row {
    let text = decision.to_string();
    Row {
        name: spec.name.clone(),
        secret: spec.secret_path(),
        verdict: decision.word(),
        rotation: None,
        reason: text.split_once(": ").map(|(_, reason)| reason.to_owned()).unwrap_or_default(),
        certificate: live.map(|live| Facts {
            subject: live.subject.clone(),
            issuer: live.issuer.clone(),
            names: live.dns_names.iter().cloned().chain(live.ip_addresses.iter().map(ToString::to_string)).collect(),
            not_before: live.not_before,
            not_after: live.not_after,
            days_left: live.days_left(now),
        }),
    }
}

fn print(rows: &[Row], output: Output, out: &mut dyn Write) -> io::Result<()> {
    if output == Output::Json {
        serde_json::to_writer_pretty(&mut *out, rows)?;
        return writeln!(out);
    }
    for (i, row) in rows.iter().enumerate() {
        if i > 0 {
            writeln!(out)?;
        }
        let reason = if row.reason.is_empty() { String::new() } else { format!(": {}", row.reason) };
        writeln!(out, "{}  {}  {}{reason}", row.name, row.secret, row.verdict)?;
        if let Some(rotation) = &row.rotation {
            writeln!(out, "  rotation {rotation}")?;
        }
        let Some(facts) = &row.certificate else { continue };
        writeln!(out, "  subject  {}", facts.subject)?;
        writeln!(out, "  issuer   {}", facts.issuer)?;
        if !facts.names.is_empty() {
            writeln!(out, "  names    {}", facts.names.join(", "))?;
        }
        writeln!(out, "  valid    {} to {}, {} days left", facts.not_before, facts.not_after, facts.days_left)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::LiveSecret;
    use crate::certificate::issue::materialise;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn table(gone: &[&str], now: &str) -> String {
        let namespaces = Namespaces { namespace: "builds".to_owned(), operator_namespace: "operator".to_owned() };
        let mut specs = declared(&namespaces).unwrap_or_else(|_| panic!("declarations are sound"));
        // As long as the two that are always there.
        specs.retain(|spec| spec.name != "api");
        let mut named = specs.clone();
        named.last_mut().unwrap().dns_names.push("*.builds.svc".to_owned());
        let made = materialise(&named, &LiveSecrets::new(), at("2030-01-01T00:00:00Z")).unwrap();
        let live = made.into_iter().filter(|one| !gone.contains(&one.spec.name.as_str())).map(|one| {
            let secret = LiveSecret { data: one.data.unwrap(), ..LiveSecret::default() };
            ((one.spec.namespace, one.spec.secret), secret)
        });
        let mut out = Vec::new();
        let rows = rows(&specs, &live.collect(), at(now)).unwrap();
        print(&rows, Output::Text, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_authority_comes_first_and_every_certificate_has_its_verdict() {
        insta::assert_snapshot!(table(&[], "2030-12-15T00:00:00Z"), @r#"
    ca  operator/buildkit-operator-ca  keep
      subject  CN=buildkit-operator CA
      issuer   CN=buildkit-operator CA
      valid    2029-12-31T23:55:00Z to 2039-12-30T00:00:00Z, 3302 days left

    client  builds/buildkit-client-certs  renew: it expires at 2031-01-01T00:00:00Z
      subject  CN=client
      issuer   CN=buildkit-operator CA
      valid    2029-12-31T23:55:00Z to 2031-01-01T00:00:00Z, 17 days left

    daemon  builds/buildkit-daemon-certs  renew: it expires at 2031-01-01T00:00:00Z
      subject  CN=buildkitd
      issuer   CN=buildkit-operator CA
      names    *.builds.svc
      valid    2029-12-31T23:55:00Z to 2031-01-01T00:00:00Z, 17 days left
    "#);
        insta::assert_snapshot!(table(&["ca", "client"], "2030-01-02T00:00:00Z"), @r#"
    ca  operator/buildkit-operator-ca  provided

    client  builds/buildkit-client-certs  blocked: there is no such Secret

    daemon  builds/buildkit-daemon-certs  provided
      subject  CN=buildkitd
      issuer   CN=buildkit-operator CA
      names    *.builds.svc
      valid    2029-12-31T23:55:00Z to 2031-01-01T00:00:00Z, 364 days left
    "#);
        insta::assert_snapshot!(table(&["ca", "client", "daemon"], "2030-01-02T00:00:00Z"), @r#"
    ca  operator/buildkit-operator-ca  issue: there is no such Secret

    client  builds/buildkit-client-certs  issue: there is no such Secret

    daemon  builds/buildkit-daemon-certs  issue: there is no such Secret
    "#);
    }

    #[test]
    fn json_has_one_flat_object_a_certificate() {
        let row = Row {
            name: "ca".to_owned(),
            secret: "a/b".to_owned(),
            verdict: "issue",
            reason: "there is no such Secret".to_owned(),
            rotation: None,
            certificate: None,
        };
        let mut out = Vec::new();
        print(&[row], Output::Json, &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value[0]["verdict"], "issue");
        assert_eq!(value[0].get("subject"), None);
    }
}
