//! `bko-install certs rotate`.
#![expect(clippy::disallowed_methods, reason = "the stages of a rotation have an age")]

use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};

use super::{declarations, issue};
use crate::certificate::issue::{LiveSecrets, rehearse};
use crate::certificate::rotate::{self, Stage};
use crate::certificate::{CertificateSpec, Decision, Role, SecretData, Usage};
use crate::cli::cluster::session;
use crate::cli::exit::{Code, Failure};
use crate::cli::{Global, report};
use crate::cluster::Cluster;
use crate::cluster::client::plain;
use crate::install::secrets::{How, ensure, look, write_authority};
use crate::install::{InstallError, permissions};
use crate::manifest::Declarations;
use crate::names::OPERATOR_NAMESPACE;

/// How to go on.
#[derive(Debug, Args)]
pub struct RotateArgs {
    /// Begin the next stage, if one has begun
    #[arg(long = "continue")]
    go_on: bool,
    /// Begin the next stage if the present one is that old: for a schedule
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, conflicts_with = "go_on")]
    overlap: Option<Duration>,
    /// Give up, which is possible as long as the old authority signs
    #[arg(long, conflicts_with_all = ["go_on", "overlap"])]
    abort: bool,
    /// Go on although the stage has just begun, or daemons run that do not know of it
    #[arg(long)]
    force: bool,
    /// Namespace of the control plane
    #[arg(long, value_name = "NAMESPACE", default_value = OPERATOR_NAMESPACE)]
    operator_namespace: String,
    /// How long it may take
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = humantime::parse_duration)]
    timeout: Duration,
}

/// How long a node may take to show a changed Secret to new pods.
const SHOWN: SignedDuration = SignedDuration::from_secs(120);

pub(super) async fn run(args: RotateArgs, global: &Global) -> Result<(), Failure> {
    let cluster = session::open(global, 16, args.timeout, report::warnings(global)).await?;
    let declared = declarations(&cluster.client(), &args.operator_namespace).await?;
    let spec = declared.certificates.iter().find(|spec| spec.is_authority()).ok_or_else(|| {
        Failure::new(Code::Failed, anyhow!("no authority is declared: certificates are made by others"))
    })?;
    let allowed = permissions::to_rotate(&cluster, &declared, &args.operator_namespace).await;
    allowed.map_err(session::failure)?;
    let stage = step(&cluster, &declared, spec, &args).await?;
    let ensured = ensure(&cluster, &declared, &How::default()).await.map_err(session::failure)?;
    if !global.quiet {
        report::print(&issue::lines(&ensured))?;
    }
    let stage = if stage == Stage::Drop { finish(&cluster, spec).await? } else { stage };
    report::message(global, &advice(stage));
    Ok(())
}

/// The one write that begins a stage, if one is to begin; the stage that follows.
async fn step(
    cluster: &Cluster,
    declared: &Declarations,
    spec: &CertificateSpec,
    args: &RotateArgs,
) -> Result<Stage, Failure> {
    let live = look(cluster, &declared.certificates).await.map_err(session::failure)?;
    let data = authority(spec, &live)?;
    let (stage, now) = (rotate::stage(data), Timestamp::now());
    let outcomes = rehearse(&declared.certificates, &live, now);
    let outcomes = outcomes.map_err(|error| session::failure(InstallError::Certificates(error)))?;
    let cut_off = outcomes.iter().any(|outcome| !matches!(outcome.decision, Decision::Keep | Decision::Provided(_)));
    let due = |since: Timestamp| args.overlap.is_some_and(|overlap| now.duration_since(since) >= signed(overlap));
    let next = match stage {
        // A stage that was cut off is completed first: nobody can have acted upon it.
        Stage::Trust { .. } | Stage::Sign { .. } if cut_off && !args.abort => return Ok(stage),
        Stage::Drop => return Ok(stage),
        _ if args.abort => rotate::abort(data).map_err(refused)?,
        Stage::Idle if args.go_on => return Err(refused(rotate::StepError::Idle)),
        Stage::Idle => {
            rotate::begin(spec, data, now).map_err(|error| session::failure(InstallError::Certificates(error)))?
        }
        Stage::Trust { since } | Stage::Sign { since } if args.go_on || due(since) => {
            if !args.force {
                brake(&ignorant(cluster, declared, since).await?, since, now)?;
            }
            rotate::go_on(data, now).map_err(refused)?
        }
        stage => return Ok(stage),
    };
    write_authority(cluster, spec, &next, &live).await.map_err(session::failure)?;
    Ok(rotate::stage(&next))
}

/// When nobody has the old authority any more, nobody needs to be told so.
async fn finish(cluster: &Cluster, spec: &CertificateSpec) -> Result<Stage, Failure> {
    let live = look(cluster, std::slice::from_ref(spec)).await.map_err(session::failure)?;
    let next = rotate::go_on(authority(spec, &live)?, Timestamp::now()).map_err(refused)?;
    write_authority(cluster, spec, &next, &live).await.map_err(session::failure)?;
    Ok(rotate::stage(&next))
}

fn authority<'l>(spec: &CertificateSpec, live: &'l LiveSecrets) -> Result<&'l SecretData, Failure> {
    let secret = live.get(&(spec.namespace.clone(), spec.secret.clone()));
    secret.map(|secret| &secret.data).ok_or_else(|| {
        let error = anyhow!("there is no Secret \"{}\": the authority's key is not held here", spec.secret_path());
        Failure::new(Code::Failed, error)
            .hint(format!("hand the authority over first:\n  {}", crate::certificate::hand_over_command(spec)))
    })
}

/// Daemons that were started before they could know what this stage is about.
async fn ignorant(cluster: &Cluster, declared: &Declarations, since: Timestamp) -> Result<Vec<String>, Failure> {
    let serves = |spec: &&CertificateSpec| {
        spec.name == "daemon" && matches!(&spec.role, Role::Leaf { usages, .. } if usages.contains(&Usage::ServerAuth))
    };
    let Some(spec) = declared.certificates.iter().find(serves) else { return Ok(Vec::new()) };
    let pods: Api<Pod> = Api::namespaced(cluster.client(), &spec.namespace);
    let of_daemons = ListParams::default().labels("app.kubernetes.io/component=buildkitd");
    let known = since.saturating_add(SHOWN).unwrap_or(since);
    let old = |pod: &Pod| pod.creation_timestamp().is_none_or(|created| created.0 < known);
    let all = pods.list(&of_daemons).await.map_err(|error| plain(&error))?;
    Ok(all.items.iter().filter(|pod| old(pod)).map(|pod| format!("{}/{}", spec.namespace, pod.name_any())).collect())
}

fn brake(daemons: &[String], since: Timestamp, now: Timestamp) -> Result<(), Failure> {
    let known = since.saturating_add(SHOWN).unwrap_or(since);
    if now < known {
        let error = anyhow!("this stage began at {since}, and nodes show its Secrets from {known} on");
        return Err(Failure::new(Code::Refused, error).hint("hand ca.pem out to every client first, then go on"));
    }
    if daemons.is_empty() {
        return Ok(());
    }
    let error = anyhow!(
        "{} started before {known} and trust what was trusted then: {}",
        if daemons.len() == 1 { "1 daemon was".to_owned() } else { format!("{} daemons were", daemons.len()) },
        daemons.join(", ")
    );
    Err(Failure::new(Code::Refused, error).hint(
        "wait until they have gone to zero, or delete their pods when nobody builds; builds on them would fail with \
         --force",
    ))
}

fn refused(error: rotate::StepError) -> Failure {
    let failure = Failure::new(Code::Refused, error.clone());
    match error {
        rotate::StepError::Idle => failure.hint("`bko-install certs rotate` begins one"),
        rotate::StepError::TooLate => failure.hint("`bko-install certs rotate --continue` goes on"),
    }
}

fn advice(stage: Stage) -> String {
    let next = "bko-install certs rotate --continue";
    match stage {
        Stage::Idle | Stage::Drop => "no rotation is under way".to_owned(),
        Stage::Trust { .. } => format!(
            "{stage}\nhand ca.pem out to every client:  bko-install certs export --dir DIR\n\
             then let the new one sign:         {next}\nor give up:                        bko-install certs rotate --abort"
        ),
        Stage::Sign { .. } => format!(
            "{stage}\nhand the new certificate out to every client:  bko-install certs export --dir DIR\n\
             then end the old authority:                    {next}"
        ),
    }
}

fn signed(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}
