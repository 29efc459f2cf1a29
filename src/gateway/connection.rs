//! One connection, from accept to its end.
#![expect(clippy::disallowed_methods, reason = "a connection has an age and deadlines")]

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::metrics::Counted;
use super::peek::{Hello, peek};
use super::relay::{Close, Ended, Relay};
use super::{Gateway, Refusal, Rejection, alert, backend};
use crate::names::DaemonName;

/// A connection whose daemon has been reached.
struct Routed {
    daemon: DaemonName,
    stream: TcpStream,
    /// What the client has sent so far.
    received: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

/// Serves one client. Logs once, when it has ended.
pub(super) async fn serve(gateway: Arc<Gateway>, client: TcpStream, peer: SocketAddr) {
    let accepted = Instant::now();
    let _active = Counted::new(&gateway.metrics.active);
    let mut sni = None;
    // In a box of its own, which is gone while the stream lives.
    let routed = tokio::select! {
        routed = Box::pin(route(&gateway, &client, accepted, &mut sni)) => routed,
        () = gateway.cut.cancelled() => Err(Refusal::Rejected(Rejection::Draining)),
    };
    let log = Log { peer: SocketAddr::new(peer.ip().to_canonical(), peer.port()), accepted };
    match (routed, sni) {
        (Ok(routed), sni) => {
            let ended = relay(&gateway, &client, routed).await;
            drop(client);
            gateway.metrics.closed(ended.cause);
            log.ended(&ended, sni.as_deref().unwrap_or_default());
        }
        (Err(Refusal::Gone), sni) => {
            gateway.metrics.closed(Close::Gone);
            log.gone(sni.as_deref());
        }
        (Err(Refusal::Rejected(rejection)), sni) => {
            gateway.metrics.reject(rejection);
            log.rejected(rejection, sni.as_deref());
            let linger = gateway.lingering.try_acquire();
            Box::pin(alert::send(client, rejection, &gateway.pool, linger.is_ok())).await;
        }
    }
}

/// Peek → daemon → permit → dial.
async fn route(
    gateway: &Gateway,
    client: &TcpStream,
    accepted: Instant,
    sni: &mut Option<String>,
) -> Result<Routed, Refusal> {
    let hello = hello(gateway, client, accepted).await?;
    let sni = sni.insert(hello.sni);
    let daemon = gateway.config.domains.daemon(sni).ok_or(Refusal::Rejected(Rejection::Unmatched))?;
    let permit = Arc::clone(&gateway.conns).try_acquire_owned().map_err(|_| Refusal::Rejected(Rejection::OverLimit))?;
    let deadline = accepted + gateway.config.hold;
    let stream = backend::connect(gateway, &daemon, client, deadline).await?;
    gateway.metrics.routed.inc();
    Ok(Routed { daemon, stream, received: hello.received, _permit: permit })
}

/// The ClientHello, unless the socket must make way for another.
async fn hello(gateway: &Gateway, client: &TcpStream, accepted: Instant) -> Result<Hello, Refusal> {
    let _peeking = Counted::new(&gateway.metrics.peeking);
    let seat = gateway.lobby.enter();
    let hello = tokio::select! {
        biased;
        hello = peek(client, accepted, &gateway.config, &gateway.pool) => hello?,
        () = seat.evicted() => return Err(Refusal::Rejected(Rejection::OverLimit)),
    };
    gateway.metrics.hello(accepted.elapsed());
    Ok(hello)
}

async fn relay(gateway: &Gateway, client: &TcpStream, mut routed: Routed) -> Ended {
    let stream = gateway.streams.open(&routed.daemon);
    let relay = Relay {
        client,
        daemon: &routed.stream,
        stream: &stream,
        pool: &gateway.pool,
        metrics: &gateway.metrics,
        half_close: gateway.config.half_close,
        cut: &gateway.cut,
    };
    relay.run(std::mem::take(&mut routed.received)).await
}

/// What the line about a connection says in any case.
struct Log {
    peer: SocketAddr,
    accepted: Instant,
}

impl Log {
    fn duration_ms(&self) -> u64 {
        self.accepted.elapsed().as_millis().try_into().unwrap_or(u64::MAX)
    }

    fn ended(&self, ended: &Ended, sni: &str) {
        let (peer, duration_ms, cause) = (self.peer, self.duration_ms(), ended.cause.as_str());
        let Ended { up, down, .. } = *ended;
        if ended.cause == Close::Cut {
            tracing::warn!(sni, peer.addr = %peer, duration_ms, cause, bytes.up = up, bytes.down = down,
                "stream cut at the end of the drain");
        } else {
            tracing::info!(sni, peer.addr = %peer, duration_ms, cause, bytes.up = up, bytes.down = down,
                "stream closed");
        }
    }

    /// Those who named a server may wonder; the rest are scanners and probes.
    fn rejected(&self, rejection: Rejection, sni: Option<&str>) {
        let (peer, duration_ms, reason) = (self.peer, self.duration_ms(), rejection.as_str());
        match sni {
            Some(sni) => tracing::info!(sni, peer.addr = %peer, duration_ms, reason, "connection rejected"),
            None => tracing::debug!(peer.addr = %peer, duration_ms, reason, "connection rejected"),
        }
    }

    fn gone(&self, sni: Option<&str>) {
        tracing::debug!(sni, peer.addr = %self.peer, duration_ms = self.duration_ms(), "client left before it was routed");
    }
}
