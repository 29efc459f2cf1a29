//! The server name of a TLS ClientHello, and the daemon that it means ([`Domains`]).
//!
//! In: the bytes received so far, however TCP and TLS records split them. Out:
//! a name, incomplete, or the reason for a rejection. Pure; reads nothing behind
//! the received bytes and never panics.
//!
//! Nothing is decided before the whole ClientHello is there: a half-read hello
//! has sent connections to a wrong backend in other proxies. What comes behind
//! the hello is left to the daemon.

mod domains;

use std::borrow::Cow;

pub use domains::{Domains, DomainsError, Target};

/// Most bytes of a ClientHello, its handshake header included.
pub const MAX_HANDSHAKE: usize = 16 * 1024;

/// Most TLS records that a ClientHello may be split over.
pub const MAX_RECORDS: usize = 64;

/// So many received bytes always suffice for a decision.
pub const MAX_WIRE: usize = MAX_HANDSHAKE + MAX_RECORDS * RECORD_HEADER;

const RECORD_HEADER: usize = 5;
const HANDSHAKE_HEADER: usize = 4;
/// RFC 8446 §5.1: longest fragment of a plaintext record.
const MAX_FRAGMENT: usize = 1 << 14;
const HANDSHAKE_RECORD: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME_EXTENSION: usize = 0;
const HOST_NAME: usize = 0;
/// RFC 1035 §2.3.4, with the trailing dot.
const MAX_NAME: usize = 254;

/// What the bytes received so far say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peek {
    /// The server name as it was sent: visible ASCII, neither lower-cased nor matched yet.
    Sni(String),
    /// More bytes are needed.
    Incomplete,
    /// No further byte can make this a ClientHello with a server name.
    Reject(Reason),
}

/// Why bytes are no ClientHello with a server name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Reason {
    /// The first bytes begin no TLS handshake record.
    #[error("the first bytes are not TLS")]
    NotTls,
    /// A TLS record or the ClientHello is not well formed.
    #[error("the ClientHello is malformed")]
    Malformed,
    /// More than [`MAX_HANDSHAKE`] bytes, or more than [`MAX_RECORDS`] records.
    #[error("the ClientHello is too large")]
    TooLarge,
    /// A ClientHello without a server name.
    #[error("the ClientHello names no server")]
    NoSni,
}

/// Reads the server name out of the bytes received since the connection began.
pub fn peek(received: &[u8]) -> Peek {
    match client_hello(received) {
        Ok(None) => Peek::Incomplete,
        Ok(Some(body)) => server_name(&body).map_or_else(Peek::Reject, Peek::Sni),
        Err(reason) => Peek::Reject(reason),
    }
}

/// The body of the ClientHello, once all of it has been received. Only record
/// headers and the first four bytes are looked at before that, so that a client
/// that drips bytes costs little.
fn client_hello(received: &[u8]) -> Result<Option<Cow<'_, [u8]>>, Reason> {
    let mut header = [0; HANDSHAKE_HEADER];
    let mut have = 0;
    for fragment in Records::new(received) {
        let fragment = fragment?;
        for (slot, byte) in header.iter_mut().skip(have).zip(fragment) {
            *slot = *byte;
        }
        have += fragment.len();
        if have > 0 && header[0] != CLIENT_HELLO {
            return Err(Reason::Malformed);
        }
        if have < HANDSHAKE_HEADER {
            continue;
        }
        let length = HANDSHAKE_HEADER + header[1..].iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
        if length > MAX_HANDSHAKE {
            return Err(Reason::TooLarge);
        }
        if have >= length {
            return gather(received, length).map(Some);
        }
    }
    Ok(None)
}

/// The first `length` handshake bytes without their header; copied only when
/// several records carry them.
fn gather(received: &[u8], length: usize) -> Result<Cow<'_, [u8]>, Reason> {
    let mut joined = Vec::new();
    for fragment in Records::new(received) {
        let fragment = fragment?;
        if joined.is_empty() && fragment.len() >= length {
            return Ok(Cow::Borrowed(&fragment[HANDSHAKE_HEADER..length]));
        }
        joined.extend_from_slice(&fragment[..fragment.len().min(length - joined.len())]);
        if joined.len() == length {
            break;
        }
    }
    joined.drain(..HANDSHAKE_HEADER.min(joined.len()));
    Ok(Cow::Owned(joined))
}

/// The fragments of TLS records, as far as they have been received.
struct Records<'a> {
    rest: &'a [u8],
    count: usize,
    /// The last fragment was not received whole, or was refused.
    ended: bool,
}

impl<'a> Records<'a> {
    fn new(received: &'a [u8]) -> Self {
        Self { rest: received, count: 0, ended: false }
    }

    fn fragment(&mut self) -> Result<Option<&'a [u8]>, Reason> {
        if self.count == MAX_RECORDS {
            return Err(Reason::TooLarge);
        }
        let header = &self.rest[..self.rest.len().min(RECORD_HEADER)];
        let foreign = header.first().is_some_and(|kind| *kind != HANDSHAKE_RECORD)
            || header.get(1).is_some_and(|version| *version != 3);
        if foreign {
            return Err(if self.count == 0 { Reason::NotTls } else { Reason::Malformed });
        }
        let [_, _, _, high, low] = *header else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([high, low]));
        if length == 0 {
            // RFC 8446 §5.1: no empty fragments of handshake messages.
            return Err(Reason::Malformed);
        }
        if length > MAX_FRAGMENT {
            return Err(Reason::TooLarge);
        }
        let received = &self.rest[RECORD_HEADER..];
        let (fragment, rest) = received.split_at(received.len().min(length));
        self.rest = rest;
        self.count += 1;
        self.ended = fragment.len() < length;
        Ok(Some(fragment))
    }
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<&'a [u8], Reason>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let fragment = self.fragment();
        self.ended |= !matches!(fragment, Ok(Some(_)));
        fragment.transpose()
    }
}

/// RFC 8446 §4.1.2, as far as its extensions.
fn server_name(body: &[u8]) -> Result<String, Reason> {
    let mut hello = Reader(body);
    hello.take(2 + 32)?;
    if hello.vector(1)?.len() > 32 {
        return Err(Reason::Malformed);
    }
    let cipher_suites = hello.vector(2)?;
    let compressions = hello.vector(1)?;
    if cipher_suites.is_empty() || !cipher_suites.len().is_multiple_of(2) || compressions.is_empty() {
        return Err(Reason::Malformed);
    }
    if hello.is_empty() {
        return Err(Reason::NoSni);
    }
    let mut extensions = Reader(hello.vector(2)?);
    if !hello.is_empty() {
        return Err(Reason::Malformed);
    }
    let mut found = None;
    while !extensions.is_empty() {
        let kind = extensions.number(2)?;
        let data = extensions.vector(2)?;
        // Two of them: the daemon might believe the other one.
        if kind == SERVER_NAME_EXTENSION && found.replace(data).is_some() {
            return Err(Reason::Malformed);
        }
    }
    host_name(found.ok_or(Reason::NoSni)?)
}

/// RFC 6066 §3: a list, of which one entry of one kind has ever been defined.
fn host_name(extension: &[u8]) -> Result<String, Reason> {
    let mut extension = Reader(extension);
    let mut list = Reader(extension.vector(2)?);
    let kind = list.number(1)?;
    let name = list.vector(2)?;
    let alone = list.is_empty() && extension.is_empty() && kind == HOST_NAME;
    if !alone || name.is_empty() || name.len() > MAX_NAME || !name.iter().all(u8::is_ascii_graphic) {
        return Err(Reason::Malformed);
    }
    String::from_utf8(name.to_vec()).map_err(|_| Reason::Malformed)
}

/// Takes bytes from the front; too few of them make the hello malformed.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Reason> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Reason::Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    /// A big-endian number of `width` bytes.
    fn number(&mut self, width: usize) -> Result<usize, Reason> {
        Ok(self.take(width)?.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
    }

    /// A vector behind its length, which takes `width` bytes.
    fn vector(&mut self, width: usize) -> Result<&'a [u8], Reason> {
        let length = self.number(width)?;
        self.take(length)
    }
}
