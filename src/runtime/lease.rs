//! Leader election by a Lease.
//!
//! Whether another holder is alive is judged by what this process observes on
//! its own monotonic clock: a lease that has not changed for its whole duration
//! has expired. The holder's timestamps are never compared with the local
//! clock, so skew between nodes cannot make two leaders.
#![expect(clippy::disallowed_methods, reason = "shell: leases run on the monotonic clock")]

use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::clock::Clock;

/// Which lease, and who asks for it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease.
    pub name: String,
    /// This process: host name and something random.
    pub identity: String,
    /// The clock that dates renewals, for people to read.
    pub clock: Clock,
}

/// How long a lease is honoured after its last change.
const DURATION: Duration = Duration::from_secs(15);
/// How often the holder renews it.
const RENEW: Duration = Duration::from_secs(4);
/// A holder that could not renew for this long steps down, well before others
/// may take over.
const DEADLINE: Duration = Duration::from_secs(10);
/// Pause after a failed request.
const PAUSE: Duration = Duration::from_secs(1);

/// Takes part in the election until `shutdown`, and tells `leading` how it
/// stands. Gives the lease back at the end, so that a successor need not wait.
pub async fn run(client: Client, config: Config, leading: watch::Sender<bool>, shutdown: CancellationToken) {
    let api = Api::<Lease>::namespaced(client, &config.namespace);
    while !shutdown.is_cancelled() {
        let (held, deadline) = tokio::select! {
            held = acquire(&api, &config) => held,
            () = shutdown.cancelled() => return,
        };
        // An answer that took this long may be about a lease that others have by now.
        if Instant::now() >= deadline {
            continue;
        }
        tracing::info!(lease.holder = config.identity, "leading");
        let _ = leading.send(true);
        let last = hold(&api, &config, held, deadline, &shutdown).await;
        let _ = leading.send(false);
        if shutdown.is_cancelled() {
            release(&api, &config, last).await;
        } else {
            tracing::warn!(lease.holder = config.identity, "lost the lease");
        }
    }
}

/// Waits until the lease is free, and takes it. Returns with it until when it
/// is good: others count from when it was written, hence we from before that.
async fn acquire(api: &Api<Lease>, config: &Config) -> (Lease, Instant) {
    let mut changes = Box::pin(watch_object(api.clone(), &config.name).default_backoff());
    let mut observed: Option<Lease> = None;
    let mut expires = None;
    loop {
        let next = tokio::select! {
            next = changes.next() => next,
            () = sleep_until(expires.unwrap_or_else(Instant::now)), if expires.is_some() => {
                tracing::info!("the lease has not been renewed, taking over");
                let begun = Instant::now();
                match take(api, config, observed.as_ref()).await {
                    Some(held) => return (held, begun + DEADLINE),
                    None => { expires = Some(Instant::now() + PAUSE); continue }
                }
            }
        };
        match next {
            Some(Ok(lease)) => {
                let free = lease.as_ref().is_none_or(|l| holder(l).is_none_or(|h| h == config.identity));
                let begun = Instant::now();
                if free && let Some(held) = take(api, config, lease.as_ref()).await {
                    return (held, begun + DEADLINE);
                }
                let duration = lease.as_ref().and_then(|l| l.spec.as_ref()?.lease_duration_seconds);
                let duration = duration.and_then(|s| u64::try_from(s).ok()).map_or(DURATION, Duration::from_secs);
                expires = Some(Instant::now() + if free { PAUSE } else { duration });
                observed = lease;
            }
            Some(Err(error)) => tracing::debug!(%error, "watch of the lease failed, trying again"),
            None => sleep(PAUSE).await,
        }
    }
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

/// Writes this process into the lease; `None` when somebody else was faster or
/// the API server did not answer.
async fn take(api: &Api<Lease>, config: &Config, lease: Option<&Lease>) -> Option<Lease> {
    let now = MicroTime(config.clock.now());
    let result = match lease {
        None => {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(config.name.clone()), ..ObjectMeta::default() },
                spec: Some(claim(config, None, now)),
            };
            api.create(&PostParams::default(), &lease).await
        }
        Some(lease) => {
            let mut lease = lease.clone();
            lease.spec = Some(claim(config, lease.spec.as_ref(), now));
            api.replace(&config.name, &PostParams::default(), &lease).await
        }
    };
    result.inspect_err(|error| tracing::debug!(%error, "did not get the lease")).ok()
}

fn claim(config: &Config, old: Option<&LeaseSpec>, now: MicroTime) -> LeaseSpec {
    let same = old.and_then(|o| o.holder_identity.as_deref()) == Some(config.identity.as_str());
    let transitions = old.and_then(|o| o.lease_transitions).unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(config.identity.clone()),
        lease_duration_seconds: Some(i32::try_from(DURATION.as_secs()).unwrap_or(i32::MAX)),
        acquire_time: old.filter(|_| same).and_then(|o| o.acquire_time.clone()).or_else(|| Some(now.clone())),
        renew_time: Some(now),
        lease_transitions: Some(if same { transitions } else { transitions + i32::from(old.is_some()) }),
        ..LeaseSpec::default()
    }
}

/// Renews until the lease is lost or `shutdown`. Returns the last copy.
async fn hold(
    api: &Api<Lease>,
    config: &Config,
    mut lease: Lease,
    mut deadline: Instant,
    shutdown: &CancellationToken,
) -> Lease {
    let mut pause = RENEW;
    loop {
        tokio::select! {
            () = sleep(pause) => {}
            () = shutdown.cancelled() => return lease,
        }
        let begun = Instant::now();
        match timeout_at(deadline, take(api, config, Some(&lease))).await {
            Ok(Some(renewed)) => {
                (lease, deadline, pause) = (renewed, begun + DEADLINE, RENEW);
                continue;
            }
            Ok(None) => {}
            Err(_) => return lease,
        }
        // Refused or not answered: perhaps only our copy is old.
        match timeout_at(deadline, api.get_opt(&config.name)).await {
            Ok(Ok(Some(live))) if holder(&live) == Some(&config.identity) => lease = live,
            Ok(Ok(_)) | Err(_) => return lease,
            Ok(Err(error)) => tracing::warn!(%error, "cannot renew the lease, trying again"),
        }
        pause = PAUSE;
        if Instant::now() + pause >= deadline {
            return lease;
        }
    }
}

async fn release(api: &Api<Lease>, config: &Config, mut lease: Lease) {
    if let Some(spec) = &mut lease.spec {
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
    }
    let params = PostParams::default();
    let released = api.replace(&config.name, &params, &lease);
    match tokio::time::timeout(Duration::from_secs(2), released).await {
        Ok(Ok(_)) => tracing::info!("gave the lease back"),
        Ok(Err(error)) => tracing::warn!(%error, "could not give the lease back"),
        Err(_) => tracing::warn!("could not give the lease back: no answer"),
    }
}
