//! The gateway: reads the server name of a TLS ClientHello, maps it to a
//! daemon, and relays the still-encrypted bytes. It terminates no TLS.
//!
//! A connection's way: accept → `peek` (deadlines) → `limits` → `backend`
//! (choose, `wake` and hold, dial) → replay → `relay` → end. A refused client
//! gets an `alert`. Domains and limits are [`rules`], which `reload` changes.
//! Parsing ([`crate::sni`]), the choice of a backend and the moving of bytes
//! know nothing of the event loop that drives them.

mod accept;
mod alert;
pub mod args;
mod backend;
mod connection;
pub mod directory;
mod limits;
pub mod metrics;
mod peek;
pub mod proxy;
mod refusals;
mod relay;
pub mod reload;
pub mod rules;
mod source;
pub mod streams;
pub mod wake;

use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::sni::Reason;
use directory::Directory;
pub use limits::Limits;
use limits::{Full, Lobby, Tally};
use metrics::Metrics;
use refusals::Refusals;
pub use relay::Close;
use rules::Rules;
use streams::Streams;
use wake::Waker;

/// Keepalive: idle time, interval, probes. Finds a peer that vanished without
/// data in flight in 60 s.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(10), 3);

/// `TCP_USER_TIMEOUT`: finds a peer that vanished with data in flight. What
/// gRPC, and so BuildKit's client, sets for itself.
const USER_TIMEOUT: Duration = Duration::from_secs(20);

/// Refused clients that may take their time at once to read their alert.
const LINGERING: usize = 256;

/// What the gateway is told. Times are from accept unless they say otherwise.
#[derive(Clone, Debug)]
pub struct Config {
    /// Domains and limits, as they are now.
    pub rules: watch::Receiver<Rules>,
    /// How long streams may go on after shutdown. The reference's default.
    pub drain: Duration,
    /// Until the first byte.
    pub first_byte: Duration,
    /// Until the whole ClientHello.
    pub hello: Duration,
    /// Until the daemon is reached: stock clients give up 20 s after they began.
    pub hold: Duration,
    /// For one address of a daemon, from its dial. The reference's.
    pub dial: Duration,
    /// For one half of a stream without a byte, after the other has ended.
    pub half_close: Duration,
    /// For a stream without a byte either way; any time without it.
    pub idle: Option<Duration>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            rules: Rules::default().fixed(),
            drain: Duration::from_secs(3600),
            first_byte: Duration::from_secs(5),
            hello: Duration::from_secs(10),
            hold: Duration::from_secs(18),
            dial: Duration::from_secs(10),
            half_close: Duration::from_secs(60),
            idle: None,
        }
    }
}

/// Why a client is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rejection {
    /// The first bytes are not TLS.
    NotTls,
    /// The ClientHello is malformed or ends early.
    Malformed,
    /// The ClientHello is too large.
    TooLarge,
    /// The ClientHello did not come in time.
    Timeout,
    /// The ClientHello names no server.
    NoSni,
    /// No project owns the name.
    Unmatched,
    /// Too many connections.
    OverLimit,
    /// The daemon was not ready in time, or could not be reached.
    BackendDown,
    /// The gateway stopped before the connection was routed.
    Draining,
}

impl Rejection {
    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotTls => "not_tls",
            Self::Malformed => "malformed",
            Self::TooLarge => "too_large",
            Self::Timeout => "timeout",
            Self::NoSni => "no_sni",
            Self::Unmatched => "unmatched",
            Self::OverLimit => "over_limit",
            Self::BackendDown => "backend_down",
            Self::Draining => "draining",
        }
    }
}

impl From<Reason> for Rejection {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::NotTls => Self::NotTls,
            Reason::Malformed => Self::Malformed,
            Reason::TooLarge => Self::TooLarge,
            Reason::NoSni => Self::NoSni,
        }
    }
}

/// Why a connection is not routed.
#[derive(Debug)]
enum Refusal {
    /// We refuse it.
    Rejected(Rejection),
    /// A limit is reached.
    Over(Full),
    /// The client left.
    Gone,
}

/// What a gateway works with, and others too.
#[derive(Clone, Debug)]
pub struct Links {
    /// Which daemon is where. It should have been filled before the first client
    /// comes: a name that is not in it is refused.
    pub directory: Arc<Directory>,
    /// Told of every stream to a daemon.
    pub streams: Arc<Streams>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// The way to the control plane.
    pub waker: Arc<Waker>,
}

/// What all connections share.
#[derive(Debug)]
struct Gateway {
    config: Config,
    directory: Arc<Directory>,
    streams: Arc<Streams>,
    metrics: Arc<Metrics>,
    waker: Arc<Waker>,
    pool: relay::Pool,
    lobby: Lobby,
    tally: Tally,
    refusals: Refusals,
    lingering: Semaphore,
    /// Ends every connection.
    cut: CancellationToken,
}

impl Gateway {
    fn new(config: Config, links: Links) -> Self {
        let Links { directory, streams, metrics, waker } = links;
        Self {
            config,
            directory,
            streams,
            metrics,
            waker,
            pool: relay::Pool::default(),
            lobby: Lobby::default(),
            tally: Tally::default(),
            refusals: Refusals::default(),
            lingering: Semaphore::new(LINGERING),
            cut: CancellationToken::new(),
        }
    }

    fn limits(&self) -> Limits {
        self.config.rules.borrow().limits
    }
}

/// Serves `listener` until `shutdown`, then lets streams finish for
/// [`Config::drain`] and cuts those that are left. When to stop accepting is the
/// caller's choice.
pub async fn run(listener: TcpListener, config: Config, links: Links, shutdown: CancellationToken) {
    tune(&listener);
    let gateway = Arc::new(Gateway::new(config, links));
    let tasks = TaskTracker::new();
    accept::accept(&gateway, &listener, &tasks, &shutdown).await;
    drop(listener);
    drain(&gateway, &tasks).await;
}

async fn drain(gateway: &Gateway, tasks: &TaskTracker) {
    tasks.close();
    tracing::info!(connections = tasks.len(), "draining");
    if tokio::time::timeout(gateway.config.drain, tasks.wait()).await.is_err() {
        gateway.cut.cancel();
        tasks.wait().await;
    }
    tracing::info!("drained");
}

/// Sets what every connection needs. Accepted sockets have it from their
/// listener, which saves six system calls for each.
fn tune<'a>(socket: impl Into<SockRef<'a>>) {
    let socket = socket.into();
    let (idle, interval, probes) = KEEPALIVE;
    let keepalive = TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(probes);
    let tuned = socket
        .set_tcp_nodelay(true)
        .and_then(|()| socket.set_tcp_keepalive(&keepalive))
        .and_then(|()| socket.set_tcp_user_timeout(Some(USER_TIMEOUT)));
    if let Err(error) = tuned {
        tracing::debug!(%error, "cannot set the options of a socket");
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    fn gateway() -> Gateway {
        let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
        let waker = Arc::new(Waker::new(None, 0));
        let links = Links { directory: Arc::default(), streams: Arc::default(), metrics: Arc::new(metrics), waker };
        Gateway::new(Config::default(), links)
    }

    #[tokio::test]
    async fn a_connection_is_small_while_it_waits() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let peer = client.local_addr().unwrap();
        let connection = connection::serve(Arc::new(gateway()), client, peer);
        // Buffers apart, this is what 10,000 idle streams cost 10,000 times.
        assert!(size_of_val(&connection) <= 1400, "{} bytes", size_of_val(&connection));
    }

    #[tokio::test]
    async fn accepted_sockets_inherit_the_options_of_their_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        tune(&listener);
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let socket = SockRef::from(&accepted);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), KEEPALIVE.0);
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), KEEPALIVE.1);
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), KEEPALIVE.2);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(USER_TIMEOUT));
    }
}
