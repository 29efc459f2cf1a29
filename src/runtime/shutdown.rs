//! How a server ends: signals, and the two steps that they start.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::admin::Readiness;

/// Two steps: first nothing new is decided and readiness fails, then, once load
/// balancers have noticed, listeners close and streams drain.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    /// Cancelled at once: the lease goes back, the controller stops.
    pub leaving: CancellationToken,
    /// Cancelled after the delay: listeners close.
    pub closing: CancellationToken,
}

/// Waits for SIGTERM or Ctrl-C. SIGTERM, which is how a cluster ends a pod,
/// goes on accepting for `delay`, since its address is still being given out;
/// a second signal, and Ctrl-C, skip the delay.
///
/// # Errors
/// When signal handlers cannot be installed.
pub async fn on_signal(shutdown: Shutdown, readiness: Readiness, delay: Duration) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let delay = tokio::select! {
        _ = terminate.recv() => delay,
        _ = interrupt.recv() => Duration::ZERO,
        () = shutdown.closing.cancelled() => return Ok(()),
    };
    tracing::info!(accept_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX), "ending");
    readiness.set("ending", false);
    shutdown.leaving.cancel();
    tokio::select! {
        () = tokio::time::sleep(delay) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    shutdown.closing.cancel();
    Ok(())
}
