//! A connected run: limits, interruption, and errors turned into exit codes.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::super::Global;
use super::super::exit::{Code, Failure};
use crate::cluster::lock::LockError;
use crate::cluster::record::{NAME, RecordError};
use crate::cluster::wait::WaitError;
use crate::cluster::{Cluster, Event, Limits, Reporter, RequestError, client};
use crate::install::{AdoptError, InstallError};
use crate::plan::Loss;

/// Connects, and makes Ctrl-C end the run after the requests in flight; the
/// second Ctrl-C ends it at once.
pub(in crate::cli) async fn open(
    global: &Global,
    concurrency: u16,
    timeout: Duration,
    reporter: Reporter,
) -> Result<Cluster, Failure> {
    let deadline = now() + timeout;
    let client = client::connect_until(global, deadline).await?;
    let interrupt = CancellationToken::new();
    tokio::spawn(watch_signals(interrupt.clone(), reporter.clone()));
    let limits = Limits { concurrency: concurrency.into(), deadline };
    Ok(Cluster::new(client, limits, interrupt, reporter))
}

async fn watch_signals(interrupt: CancellationToken, report: Reporter) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut int), Ok(mut term)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else {
        return;
    };
    for round in 0.. {
        tokio::select! {
            _ = int.recv() => {}
            _ = term.recv() => {}
        }
        if round > 0 {
            std::process::exit(Code::Interrupted as i32);
        }
        // First: the run may end at once.
        report(Event::Stopping);
        interrupt.cancel();
    }
}

#[expect(clippy::disallowed_methods, reason = "the run's deadline is set here, once")]
fn now() -> tokio::time::Instant {
    tokio::time::Instant::now()
}

/// An installation's error, with its exit code and how to mend it.
pub(in crate::cli) fn failure(error: InstallError) -> Failure {
    match error {
        InstallError::Apply(error) => request(error),
        InstallError::Observe(mut errors) if errors.len() == 1 => match errors.pop() {
            Some(error) => request(error),
            None => Failure::silent(Code::Failed),
        },
        InstallError::Observe(errors) => {
            let late = |error: &RequestError| matches!(error, RequestError::Deadline { .. });
            let first = errors.first().map_or(Code::Failed, code);
            let code = if errors.iter().all(|error| code(error) == first) { first } else { Code::Failed };
            // More time helps only when nothing else stands in the way.
            let mut hints: Vec<String> = Vec::new();
            for hint in errors.iter().filter(|error| !late(error)).filter_map(hint) {
                if !hints.contains(&hint) {
                    hints.push(hint);
                }
            }
            let hint = if hints.is_empty() { errors.iter().find_map(hint) } else { Some(hints.join("\n      ")) };
            with_hint(Failure::new(code, InstallError::Observe(errors)), hint)
        }
        InstallError::Certificates(error) => {
            let hint = error.hint();
            with_hint(Failure::new(Code::Failed, error), hint)
        }
        InstallError::Preflight(mut refusal) => {
            refusal.advise(|error| match error {
                InstallError::Observe(errors) => errors.first().and_then(hint),
                _ => None,
            });
            let hint = refusal.hint();
            Failure::new(Code::Failed, *refusal).hint(hint)
        }
        InstallError::Record(error) => record(error),
        InstallError::Lock(error) => lock(error),
        InstallError::Wait(error) => wait(error),
        error @ InstallError::Braked(_) => Failure::new(Code::Refused, error)
            .hint("look at `bko-install cluster plan`, and run again with --confirm-prune if that is meant"),
        error @ InstallError::Builds(_) => {
            Failure::new(Code::Refused, error).hint("wait until they have ended, or cut them with --cut-builds")
        }
        error @ InstallError::Undeleted(_) => Failure::new(Code::Failed, error)
            .hint("mend what keeps them, and run the same command again: it goes on from there"),
        error @ InstallError::LostSecret(_) => {
            Failure::new(Code::Failed, error).hint("`bko-install cluster init` makes it again; go back after that")
        }
        InstallError::Adopt(AdoptError::Request(error)) => request(error),
        error => Failure::new(Code::Failed, error),
    }
}

/// An error of the record.
pub(super) fn record(error: RecordError) -> Failure {
    let hint = error.hint();
    match error {
        RecordError::Request { source: source @ RequestError::Interrupted, .. } => request(source),
        RecordError::Request { source, what } => {
            let (code, hint) = (code(&source), self::hint(&source));
            with_hint(Failure::new(code, RecordError::Request { what, source }), hint)
        }
        error => with_hint(Failure::new(Code::Failed, error), hint),
    }
}

fn lock(error: LockError) -> Failure {
    match error {
        LockError::Interrupted => Failure::new(Code::Interrupted, error),
        LockError::Held { .. } => {
            let hint = format!("wait until it has ended; lease \"{NAME}\" in the operator namespace says who it is");
            Failure::new(Code::Refused, error).hint(hint)
        }
        LockError::Deadline { .. } => {
            let hint = "allow more time with --timeout: a lock that nobody renews is taken over when it has expired";
            Failure::new(Code::NotReady, error).hint(hint)
        }
        LockError::Lost => Failure::new(Code::Failed, error).hint("run the same command again: it goes on from there"),
        error => Failure::new(Code::Failed, error),
    }
}

fn wait(error: WaitError) -> Failure {
    match error {
        WaitError::Interrupted => request(RequestError::Interrupted),
        WaitError::Request(error) => request(error),
        WaitError::NotReady(ref why) => {
            let hint = why.missing_image().map_or_else(
                || format!("look closer with `{}`", why.next_command()),
                |image| {
                    format!(
                        "the nodes cannot get image \"{image}\": push it to a registry that they reach and pass \
                     `--image REF`, or write it with `bko-install image --output bko-install.tar` and import it \
                     on every node with `ctr -n k8s.io images import bko-install.tar`"
                    )
                },
            );
            Failure::new(Code::NotReady, error).hint(hint)
        }
        error => Failure::new(Code::Failed, error),
    }
}

/// An error of one request.
fn request(error: RequestError) -> Failure {
    let (code, hint) = (code(&error), hint(&error));
    with_hint(Failure::new(code, error), hint)
}

fn code(error: &RequestError) -> Code {
    match error {
        RequestError::Interrupted => Code::Interrupted,
        RequestError::Deadline { .. } | RequestError::Webhook { .. } => Code::NotReady,
        RequestError::Tracked { .. } | RequestError::Inherited { .. } | RequestError::Immutable { .. } => Code::Refused,
        _ => Code::Failed,
    }
}

fn hint(error: &RequestError) -> Option<String> {
    Some(match error {
        RequestError::Interrupted => "run the same command again: it goes on from there".into(),
        RequestError::Forbidden { user, permission } => {
            format!(
                "let {user} {permission} by a role and a binding (`bko-install cluster check --print-rbac` prints all \
                 that are needed), or use credentials that may"
            )
        }
        RequestError::Unauthorized { .. } => "log in again, or choose other credentials with --context".into(),
        RequestError::Contested { fields, .. } if fields.iter().all(|field| field.adoptable) => {
            "take over what was installed by other means with --adopt".into()
        }
        RequestError::Conflict { .. } | RequestError::Contested { .. } => {
            "take the fields over with --force-conflicts, or make their owner give them up".into()
        }
        RequestError::Inherited { .. } => {
            "take the installation over with --adopt; `bko-install cluster plan --adopt` shows what that changes".into()
        }
        RequestError::Tracked { .. } => {
            "change it in its repository (`bko-install export` writes what belongs there), or take it out of that \
             tool's hands first"
                .into()
        }
        RequestError::Immutable { loss, .. } => match loss {
            Loss::Data => "delete it by hand when its data may go, or choose another name or value".into(),
            _ => "delete it by hand, and run again: it is made anew".into(),
        },
        RequestError::NotServed { object } if object.group == "snapshot.storage.k8s.io" => {
            "install the definitions of snapshot.storage.k8s.io (those of the CSI external-snapshotter), or do without \
             snapshots of caches with `--set storage.snapshotClass.create=false`"
                .into()
        }
        RequestError::NotServed { .. } => "install what defines this kind first, or choose a profile without it".into(),
        RequestError::Malformed { .. } => {
            "this version of the API server does not know the field: upgrade the cluster, or correct the profile or \
             value that it comes from (`bko-install profile show`)"
                .into()
        }
        RequestError::Webhook { .. } => {
            "start what it calls (its clientConfig names the Service), let its namespaceSelector leave our namespaces \
             out, or set its failurePolicy to Ignore; when it only starts late, allow more time with --timeout"
                .into()
        }
        RequestError::Deadline { .. } => "allow more time with --timeout".into(),
        _ => return None,
    })
}

fn with_hint(failure: Failure, hint: Option<String>) -> Failure {
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}
