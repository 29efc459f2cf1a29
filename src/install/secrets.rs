//! The Secrets that are in no manifest, made or renewed by themselves: by the
//! first step of an export, by `certs issue`, and by the server while it runs.
//!
//! What `init` does about them, and nothing else: the same declarations, the
//! same decisions, the same field manager, one write for each that changes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{InstallError, desired};
use crate::certificate::issue::{LiveSecrets, Outcome, materialise, rehearse};
use crate::certificate::{CertificateSpec, Decision, LiveSecret, Role, SecretData, secret_object};
use crate::cluster::apply::Mode;
use crate::cluster::{Cluster, Event, RequestError, Verb};
use crate::manifest::{Declarations, Object};
use crate::names::INSTALLER_MANAGER;

/// What may be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// Names of certificates that get a successor before their time.
    pub renew: BTreeSet<String>,
    /// Only Secrets that are there, and no authority: what a running server may do.
    pub leaves_only: bool,
}

/// What became of one Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ensured {
    /// `namespace/name`.
    pub secret: String,
    /// What was decided, and why.
    pub decision: String,
    /// Whether it was written.
    pub written: bool,
}

/// How often it is looked again when somebody else was faster.
const ROUNDS: usize = 5;

/// Makes what has to be made, and keeps all else byte for byte.
///
/// # Errors
/// See [`InstallError`].
pub async fn ensure(cluster: &Cluster, declared: &Declarations, how: &How) -> Result<Vec<Ensured>, InstallError> {
    let mut all: BTreeMap<String, Ensured> = BTreeMap::new();
    let mut renew = how.renew.clone();
    // What may not be written need not be read either.
    let certificates_only = Declarations { generated: Vec::new(), ..declared.clone() };
    let declared = if how.leaves_only { &certificates_only } else { declared };
    for round in 1.. {
        let live = desired::live_secrets(cluster, declared.places().collect()).await?;
        let mut raced = false;
        for step in steps(cluster, declared, how.leaves_only, &renew, &live)? {
            let secret = step.path();
            match write(cluster, &step, &live).await {
                Ok(written) => {
                    if written {
                        renew.remove(&step.name);
                    }
                    let known = all.get(&secret).is_some_and(|ensured| ensured.written);
                    if written || !known {
                        all.insert(secret.clone(), Ensured { secret, decision: step.decision, written });
                    }
                }
                Err(error) if round < ROUNDS && is_race(&error) => {
                    raced = true;
                    break;
                }
                Err(error) => return Err(InstallError::Apply(error)),
            }
        }
        if !raced {
            break;
        }
    }
    Ok(all.into_values().collect())
}

/// One Secret, as it shall be.
struct Step {
    /// Of the certificate; that of the Secret for random values.
    name: String,
    decision: String,
    object: Object,
}

impl Step {
    fn path(&self) -> String {
        format!("{}/{}", self.object.id.namespace.as_deref().unwrap_or_default(), self.object.id.name)
    }
}

fn steps(
    cluster: &Cluster,
    declared: &Declarations,
    leaves_only: bool,
    renew: &BTreeSet<String>,
    live: &LiveSecrets,
) -> Result<Vec<Step>, InstallError> {
    let now = super::now();
    let specs: Vec<CertificateSpec> = declared.certificates.iter().map(|spec| asked(spec, renew)).collect();
    let outcomes = match leaves_only {
        true => renewals(rehearse(&specs, live, now).map_err(InstallError::Certificates)?, live),
        false => materialise(&specs, live, now).map_err(InstallError::Certificates)?,
    };
    let mut steps = Vec::new();
    for outcome in outcomes {
        for message in outcome.warnings {
            cluster.report(Event::Warning { message });
        }
        if let Some(data) = &outcome.data {
            steps.push(Step {
                name: outcome.spec.name.clone(),
                decision: outcome.decision.to_string(),
                object: secret_object(&outcome.spec, data),
            });
        }
    }
    for object in desired::generated(&declared.generated, live)? {
        let there = live.contains_key(&(object.id.namespace.clone().unwrap_or_default(), object.id.name.clone()));
        let decision = if there { "keep" } else { "make: there is no such Secret" };
        steps.push(Step { name: object.id.name.clone(), decision: decision.to_owned(), object });
    }
    Ok(steps)
}

/// Within its renewal window, whatever its age, if somebody asked for a successor.
fn asked(spec: &CertificateSpec, renew: &BTreeSet<String>) -> CertificateSpec {
    let mut spec = spec.clone();
    if renew.contains(&spec.name) {
        spec.renew_before = Duration::MAX;
    }
    spec
}

fn place(spec: &CertificateSpec) -> (String, String) {
    (spec.namespace.clone(), spec.secret.clone())
}

/// What a server may write: leaves that are there, signed by an authority that stays as it is.
fn renewals(outcomes: Vec<Outcome>, live: &LiveSecrets) -> Vec<Outcome> {
    let settled: BTreeSet<String> = outcomes
        .iter()
        .filter(|outcome| outcome.spec.is_authority() && outcome.decision == Decision::Keep)
        .map(|outcome| outcome.spec.name.clone())
        .collect();
    let may = |outcome: &Outcome| match &outcome.spec.role {
        Role::Authority => false,
        Role::Leaf { issuer, .. } => settled.contains(issuer) && live.contains_key(&place(&outcome.spec)),
    };
    outcomes.into_iter().filter(may).collect()
}

/// Writes one Secret unless it is as it shall be; refused by the API server if
/// it is not the one that was looked at.
async fn write(cluster: &Cluster, step: &Step, live: &LiveSecrets) -> Result<bool, RequestError> {
    let id = &step.object.id;
    let seen = live.get(&(id.namespace.clone().unwrap_or_default(), id.name.clone()));
    if seen.is_some_and(|seen| holds(seen, &step.object)) {
        return Ok(false);
    }
    let mut body = serde_json::Value::clone(&step.object.body);
    if let Some(version) = seen.and_then(|seen| seen.version.as_deref()) {
        body["metadata"]["resourceVersion"] = version.into();
    }
    match cluster.apply(id, &body, Mode::Write { force: false }).await {
        // What an update under our own name owns is ours.
        Err(RequestError::Conflict { conflicts, .. })
            if !conflicts.is_empty() && conflicts.iter().all(|conflict| conflict.manager == INSTALLER_MANAGER) =>
        {
            cluster.apply(id, &body, Mode::Write { force: true }).await?;
        }
        Err(error) => return Err(error),
        Ok(_) => {}
    }
    let verb = if seen.is_some() { Verb::Configured } else { Verb::Created };
    cluster.report(Event::Applied { object: id.clone(), verb });
    Ok(true)
}

/// Whether the live Secret has everything that the object would give it, and,
/// of a certificate's, nothing else of ours.
fn holds(live: &LiveSecret, object: &Object) -> bool {
    let Ok(wanted) = LiveSecret::from_manifest(&object.body) else { return false };
    let rotation = |data: &SecretData| data.keys().filter(|key| is_of_rotation(key)).count();
    wanted.data.keys().all(|key| live.data.get(key) == wanted.data.get(key))
        && rotation(&live.data) == rotation(&wanted.data)
}

fn is_of_rotation(key: &str) -> bool {
    key.starts_with("next-") || key.starts_with("retired-") || key.starts_with("rotation-")
}

/// Writes the Secret of an authority, unless it is not the one that was looked at.
///
/// # Errors
/// The API server's refusal.
pub async fn write_authority(
    cluster: &Cluster,
    spec: &CertificateSpec,
    data: &SecretData,
    live: &LiveSecrets,
) -> Result<bool, InstallError> {
    let step = Step { name: spec.name.clone(), decision: String::new(), object: secret_object(spec, data) };
    write(cluster, &step, live).await.map_err(InstallError::Apply)
}

/// The live Secrets of certificates.
///
/// # Errors
/// They cannot be read.
pub async fn look(cluster: &Cluster, certificates: &[CertificateSpec]) -> Result<LiveSecrets, InstallError> {
    desired::live_secrets(cluster, certificates.iter().map(place).collect()).await
}

fn is_race(error: &RequestError) -> bool {
    match error {
        RequestError::Refused { code, .. } => *code == 409,
        RequestError::Conflict { conflicts, .. } => conflicts.is_empty(),
        _ => false,
    }
}
