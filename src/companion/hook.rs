//! The `preStop` hook of the daemon's container. The stock image has nothing
//! to make a request with, so the companion leaves its own executable in a
//! shared volume.

use std::fs::{Permissions, copy, rename, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use http::{Request, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::daemon::{Daemon, SocketAddress};
use super::metrics::Counters;
use super::watch::{Drained, Watch};

/// Name of the executable in the shared volume.
pub const EXECUTABLE: &str = "bko-install";

/// Flags of `companion wait-idle`.
#[derive(Clone, Debug, Args)]
pub struct WaitIdleArgs {
    /// Control socket of the companion
    #[arg(long, value_name = "PATH", default_value = super::CONTROL_SOCKET, env = "BUILDKIT_OPERATOR_CONTROL_SOCKET")]
    pub control_socket: PathBuf,
    /// The daemon's socket, asked when the companion cannot be
    #[arg(long, value_name = "ADDRESS", default_value = super::BUILDKIT_ADDRESS, env = "BUILDKIT_OPERATOR_BUILDKIT_ADDR")]
    pub buildkit_addr: SocketAddress,
    /// Seconds to wait at most
    #[arg(long, value_name = "SECONDS", default_value_t = super::DRAIN_SECONDS, env = "BUILDKIT_OPERATOR_DRAIN_SECONDS")]
    pub drain_seconds: u64,
}

/// The companion could not be asked.
#[derive(Debug, thiserror::Error)]
enum AskCompanion {
    #[error("cannot connect to \"{0}\"")]
    Connect(PathBuf, #[source] std::io::Error),
    #[error("no answer from the companion")]
    Request(#[source] hyper::Error),
    #[error("the companion answered {0}")]
    Status(http::StatusCode),
}

/// Time that the companion gets beyond the budget to answer that it is over.
const MARGIN: Duration = Duration::from_secs(5);

/// Waits until no build runs. Asks the companion; asks the daemon itself when
/// the companion is not there, or goes away: its absence must not cut a build.
/// Returns whether builds may still be running.
pub async fn wait_idle(args: &WaitIdleArgs) -> bool {
    let budget = Duration::from_secs(args.drain_seconds);
    let (watch, observer) = Watch::new(Daemon::new(args.buildkit_addr.clone()), Counters::default(), None);
    match timeout(budget + MARGIN, ask(&args.control_socket, args.drain_seconds)).await {
        Ok(Ok(cut)) => return cut,
        Ok(Err(error)) => tracing::warn!(%error, "asking the daemon instead of the companion"),
        Err(_) => return true,
    }
    let left = budget.saturating_sub(watch.clock.now());
    tokio::select! {
        () = observer.run() => true,
        drained = watch.drain(false, left) => drained.outcome.cuts(),
    }
}

async fn ask(socket: &Path, seconds: u64) -> Result<bool, AskCompanion> {
    let stream = UnixStream::connect(socket).await.map_err(|e| AskCompanion::Connect(socket.to_owned(), e))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(AskCompanion::Request)?;
    let connection = tokio::spawn(connection);
    let mut request = Request::new(String::new());
    *request.method_mut() = http::Method::POST;
    *request.uri_mut() = http::Uri::try_from(format!("/drain?until=process&seconds={seconds}")).unwrap_or_default();
    request.headers_mut().insert(header::HOST, header::HeaderValue::from_static("companion"));
    let answer = sender.send_request(request).await.map_err(AskCompanion::Request)?;
    let status = answer.status();
    let body = axum::body::to_bytes(axum::body::Body::new(answer.into_body()), 4096).await.unwrap_or_default();
    connection.abort();
    if !status.is_success() {
        return Err(AskCompanion::Status(status));
    }
    let drained: Option<Drained> = serde_json::from_slice(&body).ok();
    Ok(drained.is_none_or(|drained| drained.outcome.cuts()))
}

/// Copies the running executable into a folder, in place of what was there.
///
/// # Errors
/// When the folder is missing, read-only or full.
pub fn install(folder: &Path) -> std::io::Result<PathBuf> {
    let target = folder.join(EXECUTABLE);
    let part = folder.join(format!(".{EXECUTABLE}.{}", std::process::id()));
    copy("/proc/self/exe", &part)?;
    set_permissions(&part, Permissions::from_mode(0o755))?;
    rename(&part, &target)?;
    Ok(target)
}
