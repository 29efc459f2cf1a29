//! From a name to a connection with what it means: choose, wake and hold, dial.
#![expect(clippy::disallowed_methods, reason = "measures how long it holds and dials")]

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::directory::{API, Backend};
use super::limits::{Full, Held};
use super::metrics::Counted;
use super::source::Prefix;
use super::wake::{Pending, TooOften, Verdict};
use super::{Gateway, Refusal, Rejection, tune};
use crate::names::DaemonName;

/// How long news of a daemon is waited for that refused every connection: one
/// that has just stopped is still listed for a moment.
const STALE: Duration = Duration::from_secs(2);

/// What to do about one connection.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    /// Dial these, in this order.
    Dial(Vec<SocketAddr>),
    /// Wait until one is ready.
    Hold,
    /// No project owns the name.
    Unknown,
}

/// Ready addresses are dialled. One that terminates is dialled only while it has
/// streams, which means that a build runs there: its client may open more.
fn choose(backend: Option<Backend>, has_streams: bool) -> Choice {
    match backend {
        None => Choice::Unknown,
        Some(Backend { ready, .. }) if !ready.is_empty() => Choice::Dial(ready),
        Some(Backend { terminating, .. }) if has_streams && !terminating.is_empty() => Choice::Dial(terminating),
        Some(_) => Choice::Hold,
    }
}

/// What a client is connected with.
pub(super) struct Backing {
    pub(super) stream: TcpStream,
    /// Cancelled when the pod behind the stream has gone, and at the end of the drain.
    pub(super) life: CancellationToken,
}

/// Connects to `daemon`, or, without one, to the routing API; wakes it and waits where it is not ready, until
/// `deadline`.
pub(super) async fn connect(
    gateway: &Gateway,
    daemon: Option<&DaemonName>,
    source: Prefix,
    client: &TcpStream,
    deadline: Instant,
) -> Result<Backing, Refusal> {
    let name = daemon.map_or(API, DaemonName::as_str);
    let mut news = gateway.directory.subscribe();
    let mut hold = None;
    // Addresses that refused, and until when to believe that better ones come.
    let mut refused = None;
    loop {
        news.borrow_and_update();
        let has_streams = daemon.is_some_and(|daemon| gateway.streams.any(daemon));
        match choose(gateway.directory.get(name), has_streams) {
            Choice::Unknown => return Err(Refusal::Rejected(Rejection::Unmatched)),
            Choice::Dial(addresses) if refused.as_ref().is_none_or(|(old, _)| *old != addresses) => {
                if let Some(Hold { since, .. }) = hold.take() {
                    gateway.metrics.woken(since.elapsed());
                }
                if let Some((address, stream)) = dial(gateway, name, &addresses, deadline).await {
                    let life = gateway.directory.life(name, address, &gateway.cut);
                    return Ok(Backing { stream, life });
                }
                refused = Some((addresses, Instant::now() + STALE));
            }
            Choice::Dial(_) => {}
            Choice::Hold => {
                refused = None;
                if hold.is_none() {
                    hold = Some(Hold::begin(gateway, daemon, source)?);
                }
            }
        }
        let patience = refused.as_ref().map_or(deadline, |(_, until)| deadline.min(*until));
        let pending = hold.as_mut().and_then(|hold| hold.pending.as_mut());
        match wait(&mut news, client, pending, patience).await? {
            Waited::News => {}
            // A wake outlasts every client that waits for it.
            Waited::Told(Verdict::Starting | Verdict::Unanswered) => {
                if let Some(hold) = &mut hold {
                    hold.pending = None;
                }
            }
            Waited::Told(Verdict::Asleep) => return Err(Refusal::Rejected(Rejection::BackendDown)),
            Waited::Told(Verdict::Unknown) => return Err(Refusal::Rejected(Rejection::Unmatched)),
        }
    }
}

/// A connection that waits for its daemon, which has been asked to wake.
struct Hold<'a> {
    since: Instant,
    pending: Option<Pending>,
    _held: Held<'a>,
    _counted: Counted,
}

impl<'a> Hold<'a> {
    fn begin(gateway: &'a Gateway, daemon: Option<&DaemonName>, source: Prefix) -> Result<Self, Refusal> {
        let held = gateway.tally.hold(&gateway.limits()).map_err(Refusal::Over)?;
        let pending = match daemon {
            Some(daemon) => gateway.waker.wake(daemon, source, &gateway.metrics),
            None => Ok(None),
        };
        let pending = pending.map_err(|TooOften| Refusal::Over(Full::Wakes))?;
        tracing::debug!(daemon.name = daemon.map(DaemonName::as_str), "holding a client until its daemon is ready");
        Ok(Self { since: Instant::now(), pending, _held: held, _counted: Counted::new(&gateway.metrics.held) })
    }
}

/// What ended a wait.
enum Waited {
    /// Something is new in the directory.
    News,
    /// The control plane has answered.
    Told(Verdict),
}

/// Waits for news of any daemon. A client that resets its connection meanwhile
/// is gone; one that only ended its half may have sent all that it has to say.
async fn wait(
    news: &mut watch::Receiver<u64>,
    client: &TcpStream,
    pending: Option<&mut Pending>,
    until: Instant,
) -> Result<Waited, Refusal> {
    let told = async {
        match pending {
            Some(pending) => pending.await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        changed = news.changed() => match changed {
            Ok(()) => Ok(Waited::News),
            Err(_) => std::future::pending().await,
        },
        verdict = told => Ok(Waited::Told(verdict)),
        _ = client.ready(Interest::ERROR) => Err(Refusal::Gone),
        () = sleep_until(until) => Err(Refusal::Rejected(Rejection::BackendDown)),
    }
}

/// The first of `addresses` that accepts.
async fn dial(
    gateway: &Gateway,
    daemon: &str,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Option<(SocketAddr, TcpStream)> {
    for address in addresses {
        let began = Instant::now();
        let error = match timeout_at(deadline.min(began + gateway.config.dial), TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                tune(&stream);
                gateway.metrics.dialled(began.elapsed());
                return Some((*address, stream));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "timed out".to_owned(),
        };
        tracing::warn!(daemon.name = daemon, backend.addr = %address, error, "cannot reach a daemon that is listed");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(ports: &[u16]) -> Vec<SocketAddr> {
        ports.iter().map(|port| SocketAddr::from(([10, 0, 0, 1], *port))).collect()
    }

    fn backend(ready: &[u16], terminating: &[u16]) -> Option<Backend> {
        Some(Backend { ready: addresses(ready), terminating: addresses(terminating) })
    }

    #[test]
    fn ready_addresses_are_dialled_and_terminating_ones_only_while_a_build_runs_there() {
        for (backend, has_streams, choice) in [
            (None, false, Choice::Unknown),
            (None, true, Choice::Unknown),
            (backend(&[], &[]), false, Choice::Hold),
            (backend(&[], &[]), true, Choice::Hold),
            (backend(&[1, 2], &[]), false, Choice::Dial(addresses(&[1, 2]))),
            (backend(&[1], &[2]), true, Choice::Dial(addresses(&[1]))),
            (backend(&[], &[2]), false, Choice::Hold),
            (backend(&[], &[2]), true, Choice::Dial(addresses(&[2]))),
        ] {
            assert_eq!(choose(backend.clone(), has_streams), choice, "{backend:?}, streams: {has_streams}");
        }
    }
}
