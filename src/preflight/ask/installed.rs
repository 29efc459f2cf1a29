//! Checks of what is installed: certificates, the routing API, names.
#![expect(clippy::disallowed_methods, reason = "the age of a certificate needs the time, and names are resolved")]

use std::collections::BTreeSet;
use std::net::IpAddr;

use jiff::Timestamp;
use serde_json::Value;

use super::super::dns::{self, Addresses};
use super::super::{Check, Finding, Report, secrets};
use super::route_service;
use crate::certificate::issue::{LiveSecrets, rehearse};
use crate::certificate::{CertificateSpec, Decision, LiveCertificate, LiveSecret};
use crate::cluster::{Answer, Cluster, RequestError};
use crate::manifest::Rendered;

/// Days before its end from which a certificate that nobody here renews is told.
const SOON: i64 = 14;

/// Checks an installation of these objects.
///
/// # Errors
/// When the API server does not answer.
pub async fn after(cluster: &Cluster, rendered: &Rendered) -> Result<Report, RequestError> {
    let (certificates, route, dns) =
        tokio::try_join!(certificates(cluster, rendered), route(cluster, rendered), names(cluster, rendered))?;
    Ok(Report::new(certificates.into_iter().chain(route).chain(dns).collect()))
}

/// The Secrets that others make.
pub(super) async fn provided(cluster: &Cluster, rendered: &Rendered) -> Result<Vec<Finding>, RequestError> {
    match secrets(cluster, secrets::places(rendered)).await? {
        Ok(live) => Ok(secrets::findings(rendered, &secrets::gaps(rendered, &live, Timestamp::now()))),
        Err(path) => Ok(vec![Check::Secrets.unseen(&format!("get secret {path}"))]),
    }
}

/// Live Secrets; the path of one that may not be looked at.
async fn secrets(
    cluster: &Cluster,
    places: Vec<(String, String)>,
) -> Result<Result<LiveSecrets, String>, RequestError> {
    let mut live = LiveSecrets::new();
    for (namespace, name) in places {
        match cluster.ask(&format!("/api/v1/namespaces/{namespace}/secrets/{name}")).await? {
            Answer::Yes(secret) => {
                if let Ok(secret) = LiveSecret::from_manifest(&secret) {
                    live.insert((namespace, name), secret);
                }
            }
            Answer::No { forbidden: true, .. } => return Ok(Err(format!("{namespace}/{name}"))),
            Answer::No { .. } => {}
        }
    }
    Ok(Ok(live))
}

async fn certificates(cluster: &Cluster, rendered: &Rendered) -> Result<Vec<Finding>, RequestError> {
    let specs = rendered.declarations().certificates;
    let places = specs.iter().map(|spec| (spec.namespace.clone(), spec.secret.clone())).collect();
    let live = match secrets(cluster, places).await? {
        Ok(live) => live,
        Err(path) => return Ok(vec![Check::Certificates.unseen(&format!("get secret {path}"))]),
    };
    let now = Timestamp::now();
    let outcomes = match rehearse(&specs, &live, now) {
        Ok(outcomes) => outcomes,
        Err(error) => {
            let hint = error.hint().unwrap_or_else(|| "`bko-install certs list` shows them".into());
            return Ok(vec![Check::Certificates.fail(error.to_string(), hint)]);
        }
    };
    Ok(outcomes.iter().map(|outcome| certificate(&outcome.spec, &outcome.decision, &live, now)).collect())
}

fn certificate(spec: &CertificateSpec, decision: &Decision, live: &LiveSecrets, now: Timestamp) -> Finding {
    let secret = live.get(&(spec.namespace.clone(), spec.secret.clone()));
    let days = secret.and_then(|secret| {
        let read = if spec.is_authority() { LiveCertificate::read_authority } else { LiveCertificate::read_leaf };
        read(&secret.data).ok().map(|certificate| certificate.days_left(now))
    });
    let name = format!("\"{}\" in Secret {}", spec.name, spec.secret_path());
    match (decision, days) {
        (_, Some(days)) if days < 0 => {
            Check::Certificates.fail(format!("{name} has expired: {decision}"), "renew it: `bko-install cluster init`")
        }
        (Decision::Keep, Some(days)) => Check::Certificates.ok(format!("{name} is valid for {days} days")),
        (Decision::Provided(faults), Some(days)) if faults.is_empty() && days > SOON => {
            Check::Certificates.ok(format!("{name} is yours, and valid for {days} days"))
        }
        (Decision::Blocked(_), None) if spec.optional => {
            Check::Certificates.ok(format!("{name} is left out: its authority's key is elsewhere"))
        }
        (Decision::Issue(_), None) => {
            Check::Certificates.fail(format!("{name}: {decision}"), "make it: `bko-install cluster init`")
        }
        _ => Check::Certificates.warn(
            format!("{name}: {decision}"),
            "`bko-install certs list` shows more; `bko-install cluster init` mends what is its own",
        ),
    }
}

/// Asks the routing API by way of the API server.
async fn route(cluster: &Cluster, rendered: &Rendered) -> Result<Vec<Finding>, RequestError> {
    let namespace = &rendered.operator_namespace;
    let service = route_service();
    let path = format!("/api/v1/namespaces/{namespace}/services/{service}/proxy/healthz");
    let hint = format!("`bko-install cluster status`, and `kubectl -n {namespace} get endpointslices,pods`");
    Ok(vec![match cluster.ask_through(&path).await {
        Ok(_) => Check::Route.ok("the routing API answers"),
        Err(why) if why.contains("cannot get resource \"services/proxy\"") => {
            Check::Route.unseen(&format!("get services/proxy \"{service}\" in namespace \"{namespace}\""))
        }
        Err(why) if why.contains("no endpoints available") => Check::Route.fail("no pod serves the routing API", hint),
        Err(why) => Check::Route.warn(format!("the API server gets no answer of the routing API: {why}"), hint),
    }])
}

/// Where the gateway of an installation is reached from outside.
///
/// # Errors
/// When the API server does not answer.
pub async fn gateway(cluster: &Cluster, namespace: &str) -> Result<Addresses, RequestError> {
    let path = format!("/api/v1/namespaces/{namespace}/services/buildkit-operator-gateway");
    Ok(match cluster.ask(&path).await? {
        Answer::Yes(service) => Addresses::of(&service),
        Answer::No { .. } => Addresses::default(),
    })
}

async fn names(cluster: &Cluster, rendered: &Rendered) -> Result<Vec<Finding>, RequestError> {
    let domains = domains(rendered);
    if domains.is_empty() {
        return Ok(Vec::new());
    }
    let addresses = gateway(cluster, &rendered.operator_namespace).await?;
    let mut expected = addresses.ips.clone();
    for host in &addresses.hosts {
        expected.extend(resolve(host).await.unwrap_or_default());
    }
    let mut findings = Vec::new();
    for domain in &domains {
        let resolved = resolve(&format!("{}.{domain}", random_label())).await;
        findings.push(dns::domain(domain, resolved.as_ref().map_err(String::as_str), &addresses, &expected));
    }
    Ok(findings)
}

/// The gateway's domains, as its own configuration names them.
fn domains(rendered: &Rendered) -> Vec<String> {
    let text = rendered.objects.iter().filter(|object| object.id.kind == "ConfigMap").find_map(|object| {
        let text = object.body["data"]["config.yaml"].as_str()?;
        object.id.name.ends_with("-gateway").then_some(text)
    });
    let file: Value = text.and_then(|text| serde_yaml::from_str(text).ok()).unwrap_or_default();
    let domains = file["domains"].as_array().into_iter().flatten();
    domains.filter_map(Value::as_str).map(str::to_owned).collect()
}

async fn resolve(host: &str) -> Result<BTreeSet<IpAddr>, String> {
    match tokio::net::lookup_host((host, 0)).await {
        Ok(found) => Ok(found.map(|address| address.ip()).collect()),
        Err(error) => Err(error.to_string()),
    }
}

/// A name that nobody has made a record of: only a wildcard answers for it.
fn random_label() -> String {
    let mut random = [0; 6];
    // A label that can be guessed asks as well.
    let _ = getrandom::fill(&mut random);
    format!("bko-check-{}", hex::encode(random))
}
