//! From a daemon's name to a connection with it: choose, hold, dial.
#![expect(clippy::disallowed_methods, reason = "measures how long it holds and dials")]

use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::directory::Backend;
use super::metrics::Counted;
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

/// Connects to `daemon`, and waits for it where it is not ready, until `deadline`.
pub(super) async fn connect(
    gateway: &Gateway,
    daemon: &DaemonName,
    client: &TcpStream,
    deadline: Instant,
) -> Result<TcpStream, Refusal> {
    let mut news = gateway.directory.subscribe();
    let mut hold = None;
    // Addresses that refused, and until when to believe that better ones come.
    let mut refused = None;
    loop {
        news.borrow_and_update();
        match choose(gateway.directory.get(daemon.as_str()), gateway.streams.any(daemon)) {
            Choice::Unknown => return Err(Refusal::Rejected(Rejection::Unmatched)),
            Choice::Dial(addresses) if refused.as_ref().is_none_or(|(old, _)| *old != addresses) => {
                if let Some(hold) = hold.take() {
                    let Hold { since, .. } = hold;
                    gateway.metrics.woken(since.elapsed());
                }
                if let Some(stream) = dial(gateway, daemon, &addresses, deadline).await {
                    return Ok(stream);
                }
                refused = Some((addresses, Instant::now() + STALE));
            }
            Choice::Dial(_) => {}
            Choice::Hold => {
                refused = None;
                if hold.is_none() {
                    hold = Some(Hold::begin(gateway, daemon)?);
                }
            }
        }
        let patience = refused.as_ref().map_or(deadline, |(_, until)| deadline.min(*until));
        wait(&mut news, client, patience).await?;
    }
}

/// A connection that waits for its daemon. They are limited in number, and so
/// in bytes, since none holds more than a hello may have.
struct Hold<'a> {
    since: Instant,
    _permit: tokio::sync::SemaphorePermit<'a>,
    _counted: Counted,
}

impl<'a> Hold<'a> {
    fn begin(gateway: &'a Gateway, daemon: &DaemonName) -> Result<Self, Refusal> {
        let permit = gateway.held.try_acquire().map_err(|_| Refusal::Rejected(Rejection::OverLimit))?;
        tracing::debug!(daemon.name = %daemon, "holding a client until its daemon is ready");
        Ok(Self { since: Instant::now(), _permit: permit, _counted: Counted::new(&gateway.metrics.held) })
    }
}

/// Waits for news of any daemon. A client that resets its connection meanwhile
/// is gone; one that only ended its half may have sent all that it has to say.
async fn wait(news: &mut watch::Receiver<u64>, client: &TcpStream, until: Instant) -> Result<(), Refusal> {
    tokio::select! {
        changed = news.changed() => match changed {
            Ok(()) => Ok(()),
            Err(_) => pending().await,
        },
        _ = client.ready(Interest::ERROR) => Err(Refusal::Gone),
        () = sleep_until(until) => Err(Refusal::Rejected(Rejection::BackendDown)),
    }
}

/// The first of `addresses` that accepts.
async fn dial(
    gateway: &Gateway,
    daemon: &DaemonName,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Option<TcpStream> {
    for address in addresses {
        let began = Instant::now();
        let error = match timeout_at(deadline.min(began + gateway.config.dial), TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                tune(&stream);
                gateway.metrics.dialled(began.elapsed());
                return Some(stream);
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => "timed out".to_owned(),
        };
        tracing::warn!(daemon.name = %daemon, backend.addr = %address, error, "cannot reach a daemon that is listed");
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
