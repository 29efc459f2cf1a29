//! `bko-install cluster init`.

use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::super::bundle::BundleArgs;
use super::super::exit::Failure;
use super::super::{Global, Output, report};
use super::options::{AllowArgs, ChoiceArgs, options};
use super::{LIVE, RunArgs, bundle, session, told};
use crate::cluster::{Event, Reporter};
use crate::install::{self, Installation, Options, StopPoint};
use crate::plan::{Counts, ReleaseValues};
use crate::preflight::{ask, dns};

/// Install or upgrade.
#[derive(Debug, Args)]
#[command(after_long_help = LIVE)]
pub struct InitArgs {
    /// Which bundle.
    #[command(flatten)]
    pub bundle: BundleArgs,
    /// How it is told, and what it may take.
    #[command(flatten)]
    pub run: RunArgs,
    /// What is allowed.
    #[command(flatten)]
    pub allow: AllowArgs,
    /// Which components.
    #[command(flatten)]
    pub choice: ChoiceArgs,
    /// Install although checks of the cluster fail; what they find is a warning then
    #[arg(long)]
    pub skip_checks: bool,
    /// Kill the process there: intent, apply:N or level:rcN
    #[arg(long, hide = true, value_name = "POINT")]
    pub stop_after: Option<StopPoint>,
}

/// The last event of a run that succeeded.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename = "installed", rename_all = "camelCase")]
struct Installed<'a> {
    profile: &'a str,
    image: &'a str,
    namespace: &'a str,
    route: &'a str,
    gateway: Option<&'a Gateway>,
    #[serde(flatten)]
    counts: Counts,
}

/// Where daemons are reached from outside.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Gateway {
    domains: Vec<String>,
    port: i64,
    /// The records to create; none as long as the Service has no address.
    records: Vec<String>,
}

pub(super) async fn run(args: InitArgs, global: &Global) -> Result<(), Failure> {
    let run = async |reporter| carry_out(&args, global, reporter).await;
    let (installation, installed) = told(&args.run, global, run).await?;
    match args.run.output.output {
        Output::Json => report::print_json(&installed.event(&installation))?,
        Output::Text if global.quiet => {}
        Output::Text => report::print(&next_steps(&installed.event(&installation)))?,
    }
    Ok(())
}

/// What was installed, as it is told of.
struct Told {
    namespace: String,
    route: String,
    gateway: Option<Gateway>,
    counts: Counts,
}

impl Told {
    fn event<'a>(&'a self, installation: &'a Installation) -> Installed<'a> {
        Installed {
            profile: &installation.settings.profile,
            image: &installation.settings.image,
            namespace: &self.namespace,
            route: &self.route,
            gateway: self.gateway.as_ref(),
            counts: self.counts,
        }
    }
}

async fn carry_out(args: &InitArgs, global: &Global, reporter: Reporter) -> Result<(Installation, Told), Failure> {
    let cluster = session::open(global, args.run.limits.concurrency, args.run.timeout, reporter).await?;
    let wanted = bundle::wanted_of(&cluster, &args.bundle, args.allow.adopt).await?;
    if let Some(message) = wanted.release.as_ref().and_then(ReleaseValues::warning) {
        cluster.report(Event::Warning { message });
    }
    for name in wanted.values.forgotten() {
        let message = format!("recorded value \"{name}\" is unknown to this version and left out");
        cluster.report(Event::Warning { message });
    }
    let text = |name: &str| wanted.values.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let domains = wanted.values.get("gateway.domains").and_then(Value::as_array).into_iter().flatten();
    let domains: Vec<String> = domains.filter_map(Value::as_str).map(str::to_owned).collect();
    let port = wanted.values.get("gateway.externalPort").and_then(Value::as_i64).unwrap_or_default();
    let namespace = wanted.rendered.operator_namespace.clone();
    let route = format!("http://buildkit-operator-buildd.{namespace}.svc.{}:8080/route", text("clusterDomain"));
    let (stop_after, skip_checks) = (args.stop_after, args.skip_checks);
    let options = Options { stop_after, skip_checks, ..options(args.allow, &args.choice, &wanted.rendered)? };
    let installation = Installation { rendered: wanted.rendered, settings: wanted.settings, options };
    let plan = install::init(&cluster, &installation).await.map_err(session::failure)?;
    let gateway = if domains.is_empty() {
        None
    } else {
        // What is not known yet, `cluster check` tells later.
        let addresses = ask::gateway(&cluster, &namespace).await.unwrap_or_default();
        let records = domains.iter().map(|domain| dns::records(domain, &addresses)).filter(|text| !text.is_empty());
        let records = records.collect();
        Some(Gateway { domains, port, records })
    };
    Ok((installation, Told { namespace, route, gateway, counts: plan.counts() }))
}

fn next_steps(installed: &Installed<'_>) -> String {
    let Installed { profile, namespace, route, gateway, .. } = installed;
    let mut lines = vec![
        String::new(),
        format!("installed profile {profile} in namespace {namespace}"),
        format!("  route    {route}"),
        "  clients  bko-install credentials".to_owned(),
    ];
    if let Some(Gateway { domains, port, records }) = gateway {
        if records.is_empty() {
            let names: Vec<_> = domains.iter().map(|domain| format!("*.{domain}")).collect();
            lines.push(format!(
                "  dns      point {} at the address of Service {namespace}/buildkit-operator-gateway, once it has one",
                names.join(", ")
            ));
        }
        lines.extend(records.iter().map(|record| format!("  dns      {record}")));
        lines.push(format!("  builds   tcp://<daemon>.{}:{port}", domains.first().map_or("", String::as_str)));
    }
    lines.push("  status   bko-install cluster status".to_owned());
    lines.join("\n")
}
