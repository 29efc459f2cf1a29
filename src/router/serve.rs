//! Connections: accept, time-outs, and an end that leaves no build behind.
#![expect(clippy::disallowed_methods, reason = "connections are held to the clock")]

use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;
use tracing::{debug, warn};

use super::Router;

/// How long a connection may take for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// The head of a request, from the connection's begin or its first byte.
    pub header: Duration,
    /// The body of a request, from the end of its head.
    pub read: Duration,
    /// The answer, from the end of the request's head.
    pub write: Duration,
    /// A connection between two requests.
    pub idle: Duration,
    /// Open calls, and then the releases they leave, after the shutdown began.
    pub shutdown: Duration,
}

impl Timeouts {
    /// The reference's, for routes that wait up to `route_wait`.
    pub fn new(route_wait: Duration) -> Self {
        const ANSWER: Duration = Duration::from_secs(30);
        Self {
            header: Duration::from_secs(5),
            read: Duration::from_secs(15),
            write: route_wait.saturating_add(ANSWER),
            idle: Duration::from_secs(60),
            shutdown: Duration::from_secs(5),
        }
    }

    fn of(&self, phase: Phase) -> Duration {
        match phase {
            Phase::Head => self.header,
            Phase::Answer => self.write,
            Phase::Idle => self.idle,
        }
    }
}

/// What the connection knows of a request; an extension of the request.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// The other end of the connection.
    pub peer: SocketAddr,
    /// When the body must have been read.
    pub read_by: Instant,
}

/// Serves the routing API until `shutdown`, then lets open calls end, cuts what
/// is left, and waits until the builds of the cut calls are released. With `tls`
/// every connection begins with a handshake.
pub async fn run(
    listener: TcpListener,
    router: Router,
    timeouts: Timeouts,
    tls: Option<TlsAcceptor>,
    shutdown: CancellationToken,
) {
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, peer)) => {
                let connection = Connection { router: router.clone(), peer, timeouts };
                let served = connection.accepted(stream, tls.clone(), shutdown.clone());
                connections.spawn(cut.clone().run_until_cancelled_owned(served));
            }
            Err(error) => {
                // Out of descriptors, most likely: others must end first.
                warn!(%error, "cannot accept a connection");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
    drop(listener);
    connections.close();
    if timeout(timeouts.shutdown, connections.wait()).await.is_err() {
        cut.cancel();
        connections.wait().await;
    }
    router.releases.close();
    if timeout(timeouts.shutdown, router.releases.wait()).await.is_err() {
        warn!(entries = router.releases.len(), "entries of cut routes stay until they expire");
    }
}

struct Connection {
    router: Router,
    peer: SocketAddr,
    timeouts: Timeouts,
}

impl Connection {
    async fn accepted(self, stream: TcpStream, tls: Option<TlsAcceptor>, shutdown: CancellationToken) {
        // Answers are one small segment each.
        let _ = stream.set_nodelay(true);
        let Some(tls) = tls else { return self.serve(stream, shutdown).await };
        match timeout(self.timeouts.header, tls.accept(stream)).await {
            Ok(Ok(stream)) => self.serve(stream, shutdown).await,
            Ok(Err(error)) => debug!(peer.addr = %self.peer, %error, "handshake failed"),
            Err(_) => debug!(peer.addr = %self.peer, "handshake timed out"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, shutdown: CancellationToken) {
        let phase = watch::Sender::new((Phase::Head, Instant::now()));
        let io = TokioIo::new(Watched { stream, phase: phase.clone() });
        let service = service_fn(|request: Request<Incoming>| {
            enter(&phase, Phase::Answer);
            let answer = self.answer(request);
            let phase = phase.clone();
            async move {
                let answer = answer.await;
                enter(&phase, Phase::Idle);
                answer
            }
        });
        let mut connection = pin!(http1::Builder::new().header_read_timeout(None).serve_connection(io, service));
        let mut stopping = false;
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        debug!(peer.addr = %self.peer, %error, "connection ended early");
                    }
                    return;
                }
                late = expired(phase.subscribe(), self.timeouts) => {
                    debug!(peer.addr = %self.peer, phase = ?late, "connection timed out");
                    return;
                }
                () = shutdown.cancelled(), if !stopping => {
                    stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }

    fn answer(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Result<axum::response::Response, std::convert::Infallible>> + use<> {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(Arrival { peer: self.peer, read_by: Instant::now() + self.timeouts.read });
        self.router.service().oneshot(request)
    }
}

/// What a connection is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Reads the head of a request.
    Head,
    /// Works on an answer.
    Answer,
    /// Nothing: all that was asked is answered.
    Idle,
}

fn enter(phase: &watch::Sender<(Phase, Instant)>, next: Phase) {
    phase.send_replace((next, Instant::now()));
}

/// Returns the phase that took too long.
async fn expired(mut phase: watch::Receiver<(Phase, Instant)>, timeouts: Timeouts) -> Phase {
    loop {
        let (now, since) = *phase.borrow_and_update();
        tokio::select! {
            _ = phase.changed() => {}
            () = sleep_until(since + timeouts.of(now)) => return now,
        }
    }
}

/// A stream that tells when an idle connection begins a new request.
struct Watched<S> {
    stream: S,
    phase: watch::Sender<(Phase, Instant)>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before && self.phase.borrow().0 == Phase::Idle {
            enter(&self.phase, Phase::Head);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
}
