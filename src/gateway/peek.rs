//! Reads a ClientHello off a socket, within its deadlines, and keeps every byte
//! for the replay. The parser is [`crate::sni`].

use std::io;
use std::net::SocketAddr;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::relay::Pool;
use super::{Config, Refusal, Rejection, proxy};
use crate::sni::{self, MAX_WIRE, Peek, Reason};

/// A whole ClientHello.
#[derive(Debug)]
pub(super) struct Hello {
    /// The name in it, as sent; none where the client dialled an address.
    pub(super) sni: Option<String>,
    /// Everything read so far, which may go on behind the hello.
    pub(super) received: Vec<u8>,
}

/// Waits for a ClientHello. Both deadlines count from `accepted`, so that a
/// client that drips gains nothing by it. A silent socket holds no buffer. When
/// the peer is `trusted` with it, a PROXY header before the hello is taken away,
/// and the source that it tells is put into `peer`.
pub(super) async fn peek(
    client: &TcpStream,
    accepted: Instant,
    config: &Config,
    pool: &Pool,
    (peer, trusted): (&mut SocketAddr, bool),
) -> Result<Hello, Refusal> {
    let (mut received, mut begun, mut header) = (Vec::new(), false, trusted);
    loop {
        let allowed = if begun { config.hello } else { config.first_byte.min(config.hello) };
        match timeout_at(accepted + allowed, client.readable()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return Err(Refusal::Gone),
            Err(_) => return Err(Refusal::Rejected(Rejection::Timeout)),
        }
        match read(client, &mut received, pool) {
            Ok(0) if received.is_empty() => return Err(Refusal::Gone),
            // It may still listen for an answer.
            Ok(0) => return Err(Refusal::Rejected(Rejection::Malformed)),
            Ok(_) => begun = true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_) => return Err(Refusal::Gone),
        }
        if header {
            match proxy::peek(&received) {
                proxy::Peek::Incomplete => continue,
                proxy::Peek::Malformed => return Err(Refusal::Rejected(Rejection::NotTls)),
                proxy::Peek::Other => {}
                proxy::Peek::Header { length, source } => {
                    received.drain(..length);
                    *peer = source.unwrap_or(*peer);
                }
            }
            header = false;
        }
        match sni::peek(&received) {
            Peek::Sni(sni) => return Ok(Hello { sni: Some(sni), received }),
            Peek::Reject(Reason::NoSni) => return Ok(Hello { sni: None, received }),
            Peek::Incomplete => {}
            Peek::Reject(reason) => return Err(Refusal::Rejected(reason.into())),
        }
    }
}

/// Reads once, never past the most that a decision may need.
fn read(client: &TcpStream, received: &mut Vec<u8>, pool: &Pool) -> io::Result<usize> {
    let mut buffer = pool.take();
    let room = buffer.len().min(MAX_WIRE - received.len());
    let result = client.try_read(&mut buffer[..room]);
    if let Ok(count) = result {
        received.extend_from_slice(&buffer[..count]);
    }
    pool.give(buffer);
    result
}
