//! The sidecar beside each daemon: whether it is healthy, what it builds and
//! what its cache holds; its drain; room on its volume. BuildKit stays stock.
//!
//! | Core | |
//! |---|---|
//! | [`observation`] | what is known of the daemon, and what that means for probes |
//! | [`drain`] | when a drain is over |
//! | [`prune`] | when the cache is pruned |
//! | [`progress`] | how far a running build has come |
//!
//! | Shell | |
//! |---|---|
//! | [`daemon`] | a client of BuildKit's Control API |
//! | [`observer`] | the task that asks it, and publishes what it learns |
//! | [`follow`] | one stream for each running build |
//! | [`watch`] | the gate, the observation and the drain that joins them |
//! | [`upkeep`], [`memory`] | measures, and prunes |
//! | [`http`], [`metrics`] | read only, for probes, the controller and Prometheus |
//! | [`control`] | drain and prune, over a private socket |
//! | [`hook`] | the `preStop` hook of the daemon's container |

pub mod control;
pub mod daemon;
pub mod drain;
pub mod follow;
pub mod hook;
pub mod http;
pub mod memory;
pub mod metrics;
pub mod observation;
pub mod observer;
pub mod progress;
pub mod prune;
pub mod reserve;
pub mod upkeep;
pub mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use prometheus_client::registry::Registry;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::runtime::listen::ListenAddress;
use daemon::{Daemon, SocketAddress};
use metrics::{Counters, Present};
use reserve::Reserve;
use upkeep::Pruner;
use watch::Watch;

/// Where a stock daemon serves.
pub const BUILDKIT_ADDRESS: &str = "unix:///run/buildkit/buildkitd.sock";
/// Where the companion is controlled.
pub const CONTROL_SOCKET: &str = "/run/companion/control.sock";
/// How long a drain waits: as long as a build may take.
pub const DRAIN_SECONDS: u64 = 7200;

/// Flags of `companion`, under the reference's names.
#[derive(Clone, Debug, Args)]
pub struct CompanionArgs {
    /// The daemon's socket
    #[arg(long, value_name = "ADDRESS", default_value = BUILDKIT_ADDRESS, env = "BUILDKIT_OPERATOR_BUILDKIT_ADDR")]
    pub buildkit_addr: SocketAddress,
    /// Folder of the daemon's cache; its volume is watched
    #[arg(long, value_name = "DIR", default_value = "/var/lib/buildkit", env = "BUILDKIT_OPERATOR_CACHE_DIR")]
    pub cache_dir: PathBuf,
    /// Address of the read-only HTTP endpoints
    #[arg(long, value_name = "ADDRESS", default_value = ":8080", env = "BUILDKIT_OPERATOR_LISTEN")]
    pub listen: ListenAddress,
    /// Socket for drain and prune, open to this user only
    #[arg(long, value_name = "PATH", default_value = CONTROL_SOCKET, env = "BUILDKIT_OPERATOR_CONTROL_SOCKET")]
    pub control_socket: PathBuf,
    /// Folder to copy this executable into, for the daemon's preStop hook
    #[arg(long, value_name = "DIR", env = "BUILDKIT_OPERATOR_INSTALL_TO")]
    pub install_to: Option<PathBuf>,
    /// Pause after a prune before the next
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = humantime::parse_duration, env = "BUILDKIT_OPERATOR_INODE_CHECK_INTERVAL")]
    pub inode_check_interval: Duration,
    /// Share of the inodes from which on the cache is pruned
    #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = share, env = "BUILDKIT_OPERATOR_INODE_THRESHOLD")]
    pub inode_threshold: f64,
    /// Share of the bytes from which on the cache is pruned
    #[arg(long, value_name = "SHARE", default_value_t = 0.93, value_parser = share, env = "BUILDKIT_OPERATOR_SPACE_THRESHOLD")]
    pub space_threshold: f64,
    /// Seconds that a drain waits at most
    #[arg(long, value_name = "SECONDS", default_value_t = DRAIN_SECONDS, env = "BUILDKIT_OPERATOR_DRAIN_SECONDS")]
    pub drain_seconds: u64,
    /// File whose existence ends a drain; empty for none
    #[arg(long, value_name = "PATH", default_value = "", env = "BUILDKIT_OPERATOR_DRAIN_DONE_FILE")]
    pub drain_done_file: String,
    /// Snapshotter without which the daemon is not ready, for example overlayfs
    #[arg(long, value_name = "NAME", env = "BUILDKIT_OPERATOR_EXPECT_SNAPSHOTTER")]
    pub expect_snapshotter: Option<String>,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "want a number above 0 and up to 1".to_owned())
}

/// Why the companion cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RunCompanion {
    /// Signals cannot be handled.
    #[error("cannot handle signals")]
    HandleSignals(#[source] std::io::Error),
    /// The executable cannot be left for the hook.
    #[error("cannot copy this executable into \"{0}\"")]
    Install(PathBuf, #[source] std::io::Error),
    /// The HTTP address is not free.
    #[error("cannot listen on \"{0}\"")]
    Listen(ListenAddress, #[source] std::io::Error),
    /// The control socket cannot be made.
    #[error("cannot make the control socket \"{0}\"")]
    MakeControlSocket(PathBuf, #[source] std::io::Error),
    /// A part of the companion ended.
    #[error("\"{0}\" ended")]
    Ended(&'static str, #[source] Option<std::io::Error>),
}

/// How long requests under way are waited for in the end.
const FAREWELL: Duration = Duration::from_millis(500);

/// Runs the companion until it is told to end and no build runs.
///
/// # Errors
/// When it cannot begin, or a listener fails.
pub async fn run(args: CompanionArgs) -> Result<(), RunCompanion> {
    let mut signals = Signals::new().map_err(RunCompanion::HandleSignals)?;
    if let Some(folder) = &args.install_to {
        hook::install(folder).map_err(|error| RunCompanion::Install(folder.clone(), error))?;
    }
    let budget = Duration::from_secs(args.drain_seconds);
    let closing = CancellationToken::new();
    let (watch, mut parts) = begin(args, budget, closing.clone())?;
    tokio::select! {
        () = signals.next() => {}
        ended = ended(&mut parts) => return Err(ended),
    }
    // The cluster ends a sidecar after the daemon. Whatever else ends it early
    // must not take probes, metrics and the hook from a build that still runs.
    tokio::select! {
        _ = watch.drain(false, budget) => {}
        () = signals.next() => tracing::warn!("ending at once, on a second signal"),
        ended = ended(&mut parts) => return Err(ended),
    }
    closing.cancel();
    let farewell = async { while parts.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
    Ok(())
}

type Parts = JoinSet<(&'static str, std::io::Result<()>)>;

/// Starts all parts. They end when `closing` is cancelled.
fn begin(args: CompanionArgs, budget: Duration, closing: CancellationToken) -> Result<(Watch, Parts), RunCompanion> {
    let listen = |error| RunCompanion::Listen(args.listen, error);
    let listener = args.listen.bind().map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    let control = control::bind(&args.control_socket)
        .map_err(|error| RunCompanion::MakeControlSocket(args.control_socket.clone(), error))?;
    let daemon = Daemon::new(args.buildkit_addr.clone());
    let counters = Counters::default();
    let done_file = Some(args.drain_done_file).filter(|file| !file.is_empty()).map(PathBuf::from);
    let (watch, observer) = Watch::new(daemon.clone(), counters.clone(), done_file);
    let (publish, samples) = tokio::sync::watch::channel(None);
    let mut registry = Registry::default();
    counters.register(&mut registry);
    registry.register_collector(Box::new(Present { watch: watch.clone(), samples: samples.clone() }));

    let thresholds = prune::Thresholds { inodes: args.inode_threshold, bytes: args.space_threshold };
    let pause = args.inode_check_interval;
    let reserve = Arc::new(Reserve::new(&args.cache_dir));
    let pruner = Pruner {
        daemon: daemon.clone(),
        watch: watch.clone(),
        samples: samples.clone(),
        thresholds,
        reserve,
        pause,
        counters,
    };
    let sources = http::Sources {
        watch: watch.clone(),
        samples,
        registry: Arc::new(registry),
        snapshotter: args.expect_snapshotter,
        longest: budget,
    };
    let sampling = upkeep::sample(args.cache_dir, daemon.clone(), watch.clock, publish);
    let targets = control::Targets { watch: watch.clone(), daemon, budget };

    let mut parts = Parts::new();
    task(&mut parts, &closing, "observer", observer.run());
    task(&mut parts, &closing, "sampler", sampling);
    task(&mut parts, &closing, "pruner", pruner.run());
    let http = axum::serve(listener, http::router(sources)).with_graceful_shutdown(closing.clone().cancelled_owned());
    parts.spawn(async { ("http", http.await) });
    let control = axum::serve(control, control::router(targets)).with_graceful_shutdown(closing.cancelled_owned());
    parts.spawn(async { ("control", control.await) });
    tracing::info!(http.address = %address, daemon.address = %args.buildkit_addr, "serving");
    Ok((watch, parts))
}

fn task(
    parts: &mut Parts,
    closing: &CancellationToken,
    name: &'static str,
    work: impl Future<Output = ()> + Send + 'static,
) {
    let closing = closing.clone();
    parts.spawn(async move {
        closing.run_until_cancelled(work).await;
        (name, Ok(()))
    });
}

/// A part that ended, though none should.
async fn ended(parts: &mut Parts) -> RunCompanion {
    match parts.join_next().await {
        Some(Ok((name, result))) => RunCompanion::Ended(name, result.err()),
        Some(Err(error)) => RunCompanion::Ended("a task", Some(std::io::Error::other(error))),
        None => RunCompanion::Ended("everything", None),
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
