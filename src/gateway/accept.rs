//! The accept loop, which outlives every error that a socket can raise.
#![expect(clippy::disallowed_methods, reason = "spaces out its complaints")]

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{Gateway, connection};

/// Pause when descriptors or memory have run out: the error would come back at
/// once, and only connections that end can help.
const PAUSE: Duration = Duration::from_millis(100);

/// At most one complaint in this time.
const COMPLAINTS: Duration = Duration::from_secs(60);

/// Accepts and serves until `shutdown`, then takes what the kernel has already
/// accepted: closing the listener would reset those.
pub(super) async fn accept(
    gateway: &Arc<Gateway>,
    listener: &TcpListener,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) {
    let serve = |(client, peer): (TcpStream, _)| {
        gateway.metrics.accepted.inc();
        tasks.spawn(connection::serve(Arc::clone(gateway), client, peer));
    };
    let mut complained: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            biased;
            () = shutdown.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(accepted) => serve(accepted),
            Err(error) if exhausted(&error) => {
                if complained.is_none_or(|when| when.elapsed() > COMPLAINTS) {
                    complained = Some(Instant::now());
                    tracing::error!(%error, "cannot accept connections: raise the limit of open files or of memory");
                }
                tokio::select! {
                    () = shutdown.cancelled() => break,
                    () = sleep(PAUSE) => {}
                }
            }
            // One client that left before it was accepted.
            Err(error) => tracing::debug!(%error, "lost a connection before it was accepted"),
        }
    }
    while let Some(Ok(accepted)) = listener.accept().now_or_never() {
        serve(accepted);
    }
}

/// Whether the process or the system has run out of something.
fn exhausted(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(code, Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) | None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_out_is_told_from_a_client_that_left() {
        let error = |errno: rustix::io::Errno| io::Error::from_raw_os_error(errno.raw_os_error());
        assert!(exhausted(&error(rustix::io::Errno::MFILE)));
        assert!(exhausted(&io::Error::other("the reactor is gone")), "no loop without a pause on the unknown");
        assert!(!exhausted(&error(rustix::io::Errno::CONNABORTED)));
    }
}
