//! Bytes both ways between a client and its daemon.
//!
//! The ends are carried over one by one; a reset of either side resets the
//! other. Which bytes move is decided in `half`; here is only who is waited
//! for, on tokio's readiness.
#![expect(clippy::disallowed_methods, reason = "the surviving half of a stream has a deadline")]

mod half;

use std::io;
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{Interest, Ready};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use super::Config;
use super::metrics::Metrics;
use super::streams::Stream;
pub(super) use half::Pool;
use half::{Failure, Half, Socket, Wants};

/// How a connection ended that was not rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Close {
    /// Both sides ended.
    Finished,
    /// The client reset its connection, or was lost.
    ClientReset,
    /// The daemon reset its connection, or was lost.
    DaemonReset,
    /// One side ended and the other fell silent.
    HalfCloseTimeout,
    /// No byte moved for as long as is allowed.
    Idle,
    /// The daemon's pod has left the cluster.
    DaemonGone,
    /// Cut at the end of the drain.
    Cut,
    /// The client left before it was routed.
    Gone,
}

impl Close {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::ClientReset => "client_reset",
            Self::DaemonReset => "daemon_reset",
            Self::HalfCloseTimeout => "half_close_timeout",
            Self::Idle => "idle",
            Self::DaemonGone => "daemon_gone",
            Self::Cut => "cut",
            Self::Gone => "gone",
        }
    }
}

/// A stream that has ended: how, and the bytes that went to each side.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) cause: Close,
    pub(super) up: u64,
    pub(super) down: u64,
}

/// A client, its daemon, and what their stream shares with all others.
pub(super) struct Relay<'a> {
    pub(super) client: &'a TcpStream,
    pub(super) daemon: &'a TcpStream,
    /// Told whenever bytes move.
    pub(super) stream: Option<&'a Stream<'a>>,
    pub(super) pool: &'a Pool,
    pub(super) metrics: &'a Metrics,
    /// How long a stream, and the half that survives the other, may rest.
    pub(super) config: &'a Config,
    /// Ends the stream when cancelled: because `cut` is, or the daemon's pod has gone.
    pub(super) life: &'a CancellationToken,
    /// Ends all streams.
    pub(super) cut: &'a CancellationToken,
}

impl Relay<'_> {
    /// Writes `replay` to the daemon and then moves bytes both ways until the
    /// stream has ended. Both sockets are to be closed then, which resets them
    /// unless both sides ended by themselves.
    pub(super) async fn run(&self, replay: Vec<u8>) -> Ended {
        let (mut up, mut down) = (Half::new(replay), Half::new(Vec::new()));
        let cause = self.until_ended(&mut up, &mut down).await;
        if cause != Close::Finished {
            reset_on_close(self.client);
            reset_on_close(self.daemon);
        }
        Ended { cause, up: up.written(), down: down.written() }
    }

    async fn until_ended(&self, up: &mut Half, down: &mut Half) -> Close {
        let mut dead = pin!(self.life.cancelled());
        let mut silence = self.config.idle.map(|idle| Box::pin(tokio::time::sleep(idle)));
        let mut overdue = Close::Idle;
        let mut failed = None;
        loop {
            tokio::task::consume_budget().await;
            let moved = match self.step(up, down) {
                Ok(moved) => moved,
                Err(cause) => return cause,
            };
            let ended = [&*up, &*down].map(|half| half.wants() == Wants::Nothing);
            if ended == [true, true] {
                return Close::Finished;
            }
            // A socket that failed may still have bytes to read; not for one that cannot be written.
            if let (false, Some(cause)) = (moved, failed) {
                return cause;
            }
            if ended.contains(&true) && overdue == Close::Idle {
                overdue = Close::HalfCloseTimeout;
                silence = Some(Box::pin(tokio::time::sleep(self.allowed(overdue))));
            } else if let (true, Some(silence)) = (moved, &mut silence) {
                silence.as_mut().reset(Instant::now() + self.allowed(overdue));
            }
            failed = tokio::select! {
                ready = self.client.ready(interest(up, down)) => lost(ready).then_some(Close::ClientReset),
                ready = self.daemon.ready(interest(down, up)) => lost(ready).then_some(Close::DaemonReset),
                () = expired(&mut silence) => return overdue,
                () = &mut dead => return if self.cut.is_cancelled() { Close::Cut } else { Close::DaemonGone },
            };
        }
    }

    /// For how long no byte may move.
    fn allowed(&self, overdue: Close) -> Duration {
        let (idle, half_close) = (self.config.idle, self.config.half_close);
        match overdue {
            Close::Idle => idle.unwrap_or(Duration::MAX),
            _ => idle.map_or(half_close, |idle| idle.min(half_close)),
        }
    }

    /// One step of both directions; whether bytes moved.
    fn step(&self, up: &mut Half, down: &mut Half) -> Result<bool, Close> {
        let before = (up.written(), down.written());
        let went_up = up.step(self.client, self.daemon, self.pool);
        let went_down = down.step(self.daemon, self.client, self.pool);
        self.metrics.up.inc_by(up.written() - before.0);
        self.metrics.down.inc_by(down.written() - before.1);
        let moved = (up.written(), down.written()) != before;
        if let (true, Some(stream)) = (moved, self.stream) {
            stream.moves();
        }
        went_up.map_err(|failure| blame(&failure, Close::ClientReset, Close::DaemonReset))?;
        went_down.map_err(|failure| blame(&failure, Close::DaemonReset, Close::ClientReset))?;
        Ok(moved)
    }
}

fn blame(failure: &Failure, from: Close, to: Close) -> Close {
    match failure {
        Failure::From(error) => {
            tracing::debug!(%error, cause = from.as_str(), "cannot read");
            from
        }
        Failure::To(error) => {
            tracing::debug!(%error, cause = to.as_str(), "cannot write");
            to
        }
    }
}

/// What to wait for on a socket that `outgoing` reads and `incoming` writes. A
/// failure always counts: a stream whose one side is full must hear of it too.
fn interest(outgoing: &Half, incoming: &Half) -> Interest {
    let mut interest = Interest::ERROR;
    if outgoing.wants() == Wants::Read {
        interest |= Interest::READABLE;
    }
    if incoming.wants() == Wants::Write {
        interest |= Interest::WRITABLE;
    }
    interest
}

fn lost(ready: io::Result<Ready>) -> bool {
    ready.map_or(true, Ready::is_error)
}

async fn expired(silence: &mut Option<Pin<Box<Sleep>>>) {
    match silence {
        Some(sleep) => sleep.as_mut().await,
        None => std::future::pending().await,
    }
}

/// Makes closing `socket` abort the connection, so that its peer hears of it at
/// once and nothing of it stays behind here.
fn reset_on_close(socket: &TcpStream) {
    // Fails only on a connection that is gone already.
    let _ = SockRef::from(socket).set_linger(Some(Duration::ZERO));
}

impl Socket for TcpStream {
    fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Self::try_read(self, buffer)
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        Self::try_write(self, bytes)
    }

    fn end_write(&self) -> io::Result<()> {
        SockRef::from(self).shutdown(Shutdown::Write)
    }
}
