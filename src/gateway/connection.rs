//! One connection, from accept to its end.
#![expect(clippy::disallowed_methods, reason = "a connection has an age and deadlines")]

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::time::Instant;

use super::limits::Ticket;
use super::metrics::Counted;
use super::peek::{Hello, peek};
use super::refusals::Refused;
use super::relay::{Close, Ended, Relay};
use super::source::Prefix;
use super::{Full, Gateway, Refusal, Rejection, alert, backend};
use crate::names::DaemonName;
use crate::sni::Target;
use backend::Backing;

/// A connection whose daemon has been reached.
struct Routed<'a> {
    backing: Backing,
    /// What the client has sent so far.
    received: Vec<u8>,
    ticket: Ticket<'a>,
}

/// What is known of a client.
struct Client {
    /// Where it comes from, as a trusted proxy says, or its own address.
    peer: SocketAddr,
    sni: Option<Box<str>>,
    accepted: Instant,
}

/// Serves one client. Logs once, when it has ended.
pub(super) async fn serve(gateway: Arc<Gateway>, socket: TcpStream, peer: SocketAddr) {
    let _active = Counted::new(&gateway.metrics.active);
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    let mut client = Client { peer, sni: None, accepted: Instant::now() };
    // In a box of its own, which is gone while the stream lives.
    let routed = tokio::select! {
        routed = Box::pin(route(&gateway, &socket, &mut client)) => routed,
        () = gateway.cut.cancelled() => Err(Refusal::Rejected(Rejection::Draining)),
    };
    let (rejection, full) = match routed {
        Ok(routed) => {
            let ended = relay(&gateway, &socket, routed).await;
            drop(socket);
            gateway.metrics.closed(ended.cause);
            return client.ended(&ended);
        }
        Err(Refusal::Gone) => {
            gateway.metrics.closed(Close::Gone);
            return client.gone();
        }
        Err(Refusal::Rejected(rejection)) => (rejection, None),
        Err(Refusal::Over(full)) => (Rejection::OverLimit, Some(full)),
    };
    gateway.metrics.reject(rejection);
    gateway.refusals.tell(&client.refused(rejection, full));
    let linger = gateway.lingering.try_acquire();
    Box::pin(alert::send(socket, rejection, &gateway.pool, linger.is_ok())).await;
}

/// Peek → daemon → permit → dial.
async fn route<'a>(gateway: &'a Gateway, socket: &TcpStream, client: &mut Client) -> Result<Routed<'a>, Refusal> {
    let Hello { sni, received } = hello(gateway, socket, client).await?;
    let limits = gateway.limits();
    let target = match &sni {
        Some(sni) => gateway.config.rules.borrow().domains.target(sni).ok_or(Rejection::Unmatched),
        // An address is no name: only where it was dialled to tells whom it means.
        None => dialled(gateway, socket).map(Target::Daemon).ok_or(Rejection::NoSni),
    };
    client.sni = sni.map(Into::into);
    let target = target.map_err(Refusal::Rejected)?;
    let source = Prefix::of(client.peer.ip());
    let daemon = match &target {
        Target::Daemon(daemon) => Some(daemon),
        Target::Api => None,
    };
    let ticket = gateway.tally.admit(source, daemon, &limits).map_err(Refusal::Over)?;
    let deadline = client.accepted + gateway.config.hold;
    let backing = backend::connect(gateway, ticket.daemon(), source, socket, deadline).await?;
    gateway.metrics.routed.inc();
    Ok(Routed { backing, received, ticket })
}

/// The daemon whose address a client dialled.
fn dialled(gateway: &Gateway, socket: &TcpStream) -> Option<DaemonName> {
    gateway.directory.at(socket.local_addr().ok()?.ip())
}

/// The ClientHello, unless the socket must make way for another.
async fn hello(gateway: &Gateway, socket: &TcpStream, client: &mut Client) -> Result<Hello, Refusal> {
    let _peeking = Counted::new(&gateway.metrics.peeking);
    let (seats, trusted) = {
        let rules = gateway.config.rules.borrow();
        (rules.limits.unidentified, rules.proxy_from.contains(client.peer.ip()))
    };
    let seat = gateway.lobby.enter(seats);
    let hello = tokio::select! {
        biased;
        hello = peek(socket, client.accepted, &gateway.config, &gateway.pool, (&mut client.peer, trusted)) => hello?,
        () = seat.evicted() => return Err(Refusal::Over(Full::Unidentified)),
    };
    gateway.metrics.hello(client.accepted.elapsed());
    Ok(hello)
}

async fn relay(gateway: &Gateway, socket: &TcpStream, mut routed: Routed<'_>) -> Ended {
    let Backing { stream: connected, life } = &routed.backing;
    let stream = routed.ticket.daemon().map(|daemon| gateway.streams.open(daemon));
    let relay = Relay {
        client: socket,
        daemon: connected,
        stream: stream.as_ref(),
        pool: &gateway.pool,
        metrics: &gateway.metrics,
        config: &gateway.config,
        cut: &gateway.cut,
        life,
    };
    relay.run(std::mem::take(&mut routed.received)).await
}

impl Client {
    fn duration_ms(&self) -> u64 {
        self.accepted.elapsed().as_millis().try_into().unwrap_or(u64::MAX)
    }

    fn refused(&self, rejection: Rejection, full: Option<Full>) -> Refused<'_> {
        Refused { peer: self.peer, sni: self.sni.as_deref(), rejection, full, duration_ms: self.duration_ms() }
    }

    fn ended(&self, ended: &Ended) {
        let (sni, peer, duration_ms) = (self.sni.as_deref().unwrap_or_default(), self.peer, self.duration_ms());
        let Ended { cause, up, down } = *ended;
        if cause == Close::Cut {
            tracing::warn!(sni, peer.addr = %peer, duration_ms, bytes.up = up, bytes.down = down,
                "stream cut at the end of the drain");
        } else {
            tracing::info!(sni, peer.addr = %peer, duration_ms, cause = cause.as_str(), bytes.up = up,
                bytes.down = down, "stream closed");
        }
    }

    fn gone(&self) {
        tracing::debug!(sni = self.sni, peer.addr = %self.peer, duration_ms = self.duration_ms(),
            "client left before it was routed");
    }
}
