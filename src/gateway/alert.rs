//! The last word to a refused client: a TLS alert, which it shows as the reason.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::Rejection;
use super::relay::Pool;

/// How long a refused client may take to read its alert and leave.
const LINGER: Duration = Duration::from_secs(1);

/// RFC 8446 §6.2.
const UNRECOGNIZED_NAME: u8 = 112;
const INTERNAL_ERROR: u8 = 80;

/// A fatal alert in a record of its own, as any version of TLS understands it.
pub(super) fn record(rejection: Rejection) -> [u8; 7] {
    let description = match rejection {
        Rejection::NoSni | Rejection::Unmatched => UNRECOGNIZED_NAME,
        _ => INTERNAL_ERROR,
    };
    [21, 3, 3, 0, 2, 2, description]
}

/// Sends the alert, ends the connection, and reads away what the client still
/// sends: closing a socket with unread bytes would reset it, and the reset may
/// overtake the alert. With `linger` false the socket is closed at once.
pub(super) async fn send(mut client: TcpStream, rejection: Rejection, pool: &Pool, linger: bool) {
    let farewell = async {
        client.write_all(&record(rejection)).await?;
        client.shutdown().await?;
        if !linger {
            return Ok(());
        }
        loop {
            client.readable().await?;
            let mut buffer = pool.take();
            let read = client.try_read(&mut buffer);
            pool.give(buffer);
            match read {
                Ok(0) => return Ok(()),
                Ok(_) => tokio::task::consume_budget().await,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    };
    // A client that left, or that neither reads nor leaves, has had its chance.
    let _: Result<std::io::Result<()>, _> = timeout(LINGER, farewell).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_nobody_has_is_told_from_other_trouble() {
        assert_eq!(record(Rejection::Unmatched), [21, 3, 3, 0, 2, 2, 112]);
        assert_eq!(record(Rejection::NoSni), record(Rejection::Unmatched));
        assert_eq!(record(Rejection::BackendDown), [21, 3, 3, 0, 2, 2, 80]);
    }
}
