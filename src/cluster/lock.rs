//! Only one installer at a time: Lease `bko-install` beside the record.
//!
//! A lease has expired when it was not renewed for its duration *as observed
//! here*: the clocks of two machines are never compared.

use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, DeleteParams, ObjectMeta, PostParams, Preconditions};
use kube::runtime::watcher;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Cluster;
use super::record::NAME;

/// How long a lease lives without renewal. Short, because a run after a crash
/// has to wait for it.
const DURATION: Duration = Duration::from_secs(10);
const RENEWAL: Duration = Duration::from_secs(3);

/// Why the lock was not had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else has it.
    #[error("another installer is at work: {holder}")]
    Held {
        /// Who.
        holder: String,
    },
    /// Somebody has it, or had it when it died, until after the deadline.
    #[error("cannot take the lock before the deadline: {holder} holds it{}", until.as_ref().map(|until| format!(" until about {until} unless it renews it")).unwrap_or_default())]
    Deadline {
        /// Who.
        holder: String,
        /// When it expires, by this machine's clock; `None` when that is not known.
        until: Option<String>,
    },
    /// Somebody took it away, because it could not be renewed in time.
    #[error("the lock was lost while the run was at work")]
    Lost,
    /// The request failed.
    #[error("cannot {what} lease \"{NAME}\" in namespace \"{namespace}\"")]
    Request {
        /// `take` or `watch`.
        what: &'static str,
        /// Where.
        namespace: String,
        /// Why.
        source: Box<kube::Error>,
    },
    /// The run was interrupted while it waited.
    #[error("interrupted")]
    Interrupted,
}

/// The lock, renewed in the background until it is released.
#[derive(Debug)]
pub struct Lock {
    leases: Api<Lease>,
    holder: String,
    stop: CancellationToken,
    lost: CancellationToken,
    renewal: JoinHandle<Option<Lease>>,
}

/// Takes the lock. A lease that nobody renews any more is taken over after its
/// duration; one that is renewed ends the run with its holder's name.
///
/// # Errors
/// When another installer is at work, or when the request fails.
pub async fn take(cluster: &Cluster, namespace: &str, holder: String) -> Result<Lock, LockError> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let failed = |source| LockError::Request { what: "take", namespace: namespace.into(), source: Box::new(source) };
    let lease = loop {
        match in_time(cluster, leases.create(&PostParams::default(), &new_lease(&holder))).await? {
            Ok(lease) => break lease,
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            Err(error) => return Err(failed(error)),
        }
        let Some(stale) = wait_for_expiry(cluster, &leases, namespace).await? else { continue };
        let mut ours = stale;
        ours.spec = new_lease(&holder).spec;
        match in_time(cluster, leases.replace(NAME, &PostParams::default(), &ours)).await? {
            Ok(lease) => break lease,
            // Somebody was faster: look again at who it is.
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {}
            Err(error) => return Err(failed(error)),
        }
    };
    let (stop, lost) = (CancellationToken::new(), CancellationToken::new());
    let renewal = tokio::spawn(renew(leases.clone(), lease, stop.clone(), lost.clone()));
    Ok(Lock { leases, holder, stop, lost, renewal })
}

/// A request of the lock's, which the run's deadline ends.
async fn in_time<T>(cluster: &Cluster, request: impl Future<Output = T>) -> Result<T, LockError> {
    let late = |_| LockError::Deadline { holder: "nobody known".into(), until: None };
    tokio::time::timeout_at(cluster.limits.deadline, request).await.map_err(late)
}

impl Lock {
    /// Resolves when the lock was lost to another installer.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// Gives the lock back. A lease that cannot be deleted expires by itself.
    pub async fn release(self) {
        self.stop.cancel();
        let Ok(Some(lease)) = self.renewal.await else { return };
        debug_assert!(is_held_by(&lease, &self.holder));
        let preconditions =
            Preconditions { uid: lease.metadata.uid, resource_version: lease.metadata.resource_version };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let _ = tokio::time::timeout(RENEWAL, self.leases.delete(NAME, &params)).await;
    }
}

/// Renews until stopped, and returns the lease as it was last written; nothing
/// when it was lost.
async fn renew(
    leases: Api<Lease>,
    mut lease: Lease,
    stop: CancellationToken,
    lost: CancellationToken,
) -> Option<Lease> {
    let mut failures = Duration::ZERO;
    loop {
        tokio::select! {
            () = stop.cancelled() => return Some(lease),
            () = tokio::time::sleep(RENEWAL) => {}
        }
        if let Some(spec) = &mut lease.spec {
            spec.renew_time = Some(now());
        }
        match tokio::time::timeout(RENEWAL, leases.replace(NAME, &PostParams::default(), &lease)).await {
            Ok(Ok(renewed)) => (lease, failures) = (renewed, Duration::ZERO),
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => break,
            // A lost answer leaves us with an old version, so that the next
            // renewal would be a conflict with ourselves.
            _ => {
                failures += RENEWAL;
                match leases.get(NAME).await {
                    Ok(live) if is_same_holder(&live, &lease) => lease = live,
                    Ok(_) => break,
                    Err(_) if failures >= DURATION => break,
                    Err(_) => {}
                }
            }
        }
    }
    lost.cancel();
    None
}

/// Watches another's lease: an error as soon as it is renewed, the lease when it
/// was not renewed for its duration, nothing when it is gone.
async fn wait_for_expiry(cluster: &Cluster, leases: &Api<Lease>, namespace: &str) -> Result<Option<Lease>, LockError> {
    let mut changes = std::pin::pin!(watcher::watch_object(leases.clone(), NAME));
    let mut first: Option<Lease> = None;
    let expiry = tokio::time::sleep(DURATION);
    tokio::pin!(expiry);
    loop {
        let change = tokio::select! {
            () = &mut expiry => return Ok(first),
            () = tokio::time::sleep_until(cluster.limits.deadline) => return Err(late(first.as_ref(), expiry.deadline())),
            () = cluster.interrupt.cancelled() => return Err(LockError::Interrupted),
            change = changes.next() => change,
        };
        match change {
            Some(Ok(Some(lease))) => match &first {
                None => {
                    let holder = holder(&lease);
                    let message =
                        format!("another installer holds the lock: {holder}; waiting until it renews or expires");
                    cluster.report(super::Event::Warning { message });
                    let duration = lease.spec.as_ref().and_then(|spec| spec.lease_duration_seconds).unwrap_or(10);
                    let duration = Duration::from_secs(u64::try_from(duration).unwrap_or(10)).min(DURATION * 6);
                    expiry.as_mut().reset(super::request::now() + duration);
                    first = Some(lease);
                }
                Some(seen) if seen.spec == lease.spec => first = Some(lease),
                Some(_) => return Err(LockError::Held { holder: holder(&lease) }),
            },
            Some(Ok(None)) => return Ok(None),
            Some(Err(watcher::Error::InitialListFailed(source) | watcher::Error::WatchStartFailed(source))) => {
                let namespace = namespace.to_owned();
                return Err(LockError::Request { what: "watch", namespace, source: Box::new(source) });
            }
            Some(Err(_)) => {}
            None => return Ok(first),
        }
    }
}

fn late(lease: Option<&Lease>, expiry: tokio::time::Instant) -> LockError {
    let left = expiry.saturating_duration_since(super::request::now());
    let until = lease.and_then(|_| now().0.checked_add(left).ok()).map(|at| at.strftime("%H:%M:%S UTC").to_string());
    LockError::Deadline { holder: lease.map_or_else(|| "another installer".into(), holder), until }
}

fn holder(lease: &Lease) -> String {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_else(|| "unknown".into())
}

fn is_held_by(lease: &Lease, holder: &str) -> bool {
    lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()) == Some(holder)
}

fn is_same_holder(a: &Lease, b: &Lease) -> bool {
    a.metadata.uid == b.metadata.uid && holder(a) == holder(b)
}

fn new_lease(holder: &str) -> Lease {
    Lease {
        metadata: ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() },
        spec: Some(LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(i32::try_from(DURATION.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: Some(now()),
            renew_time: Some(now()),
            ..LeaseSpec::default()
        }),
    }
}

#[expect(clippy::disallowed_methods, reason = "a lease carries the time of its renewal, for people to read")]
fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}
