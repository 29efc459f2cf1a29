//! The PROXY protocol, versions 1 and 2: where a client behind a load balancer
//! comes from. Pure. Only asked about peers that are trusted to say so.
//!
//! The header is framed here, since a parser that is shown a part of it may
//! take that for a faulty whole.

use std::net::SocketAddr;

use ppp::{v1, v2};

/// Most bytes of a header of version 1, its end of line included.
const LONGEST_V1: usize = 107;

/// Most bytes of a header of version 2: addresses, and what cloud load balancers add.
const LONGEST_V2: usize = 4096;

/// What the bytes received so far begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peek {
    /// Something else.
    Other,
    /// More bytes are needed.
    Incomplete,
    /// A header of `length` bytes. Without a source it speaks for the proxy itself.
    Header {
        /// Bytes to take away.
        length: usize,
        /// The client.
        source: Option<SocketAddr>,
    },
    /// A header that cannot be read.
    Malformed,
}

/// Looks for a header.
pub fn peek(received: &[u8]) -> Peek {
    match received.first() {
        None => Peek::Incomplete,
        Some(b'P') => text(received),
        Some(b'\r') => binary(received),
        Some(_) => Peek::Other,
    }
}

fn text(received: &[u8]) -> Peek {
    let head = &received[..received.len().min(LONGEST_V1)];
    let Some(end) = head.iter().position(|byte| *byte == b'\n') else {
        return if head.len() < LONGEST_V1 { Peek::Incomplete } else { Peek::Malformed };
    };
    let source = match v1::Header::try_from(&head[..=end]) {
        Ok(header) if header.header.len() == end + 1 => match header.addresses {
            v1::Addresses::Tcp4(of) => Some((of.source_address, of.source_port).into()),
            v1::Addresses::Tcp6(of) => Some((of.source_address, of.source_port).into()),
            v1::Addresses::Unknown => None,
        },
        _ => return Peek::Malformed,
    };
    Peek::Header { length: end + 1, source }
}

fn binary(received: &[u8]) -> Peek {
    let known = received.len().min(v2::PROTOCOL_PREFIX.len());
    if received[..known] != v2::PROTOCOL_PREFIX[..known] {
        return Peek::Malformed;
    }
    let Some([high, low]) = received.get(14..16) else { return Peek::Incomplete };
    let length = 16 + usize::from(u16::from_be_bytes([*high, *low]));
    if length > LONGEST_V2 {
        return Peek::Malformed;
    }
    let Some(whole) = received.get(..length) else { return Peek::Incomplete };
    match v2::Header::try_from(whole) {
        Ok(header) => {
            let told = header.command == v2::Command::Proxy && header.protocol == v2::Protocol::Stream;
            let source = match header.addresses {
                v2::Addresses::IPv4(of) if told => Some((of.source_address, of.source_port).into()),
                v2::Addresses::IPv6(of) if told => Some((of.source_address, of.source_port).into()),
                _ => None,
            };
            Peek::Header { length, source }
        }
        Err(_) => Peek::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn v2(command: u8, family: u8, body: &[u8]) -> Vec<u8> {
        let length = u16::try_from(body.len()).unwrap().to_be_bytes();
        [b"\r\n\r\n\0\r\nQUIT\n".as_slice(), &[command, family], &length, body].concat()
    }

    fn from(text: &str) -> Option<SocketAddr> {
        Some(text.parse().unwrap())
    }

    fn headers() -> Vec<(Vec<u8>, Option<SocketAddr>)> {
        let v4 = [192, 0, 2, 7, 10, 0, 0, 1, 0x30, 0x39, 4, 210];
        let mut v6 = [0; 36];
        v6[..4].copy_from_slice(&[0x20, 1, 0x0d, 0xb8]);
        v6[15] = 7;
        v6[32..34].copy_from_slice(&[0x30, 0x39]);
        let tlv = [v4.as_slice(), &[4, 0, 3, 1, 2, 3]].concat();
        let most = [v4.as_slice(), &[4, 0x0f, 0xe1], &[0; 0x0fe1]].concat();
        vec![
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 12345 1234\r\n".to_vec(), from("192.0.2.7:12345")),
            (b"PROXY TCP6 2001:db8::7 ::1 12345 1234\r\n".to_vec(), from("[2001:db8::7]:12345")),
            (b"PROXY UNKNOWN\r\n".to_vec(), None),
            (b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n".to_vec(), None),
            (v2(0x21, 0x11, &v4), from("192.0.2.7:12345")),
            (v2(0x21, 0x11, &tlv), from("192.0.2.7:12345")),
            (v2(0x21, 0x11, &most), from("192.0.2.7:12345")),
            (v2(0x21, 0x21, &v6), from("[2001:db8::7]:12345")),
            (v2(0x20, 0x00, &[]), None),
            (v2(0x20, 0x11, &v4), None),
        ]
    }

    #[test]
    fn every_prefix_is_incomplete_and_the_whole_tells_the_client() {
        for (header, source) in headers() {
            for length in 0..header.len() {
                assert_eq!(peek(&header[..length]), Peek::Incomplete, "{length} bytes of {header:?}");
            }
            let length = header.len();
            assert_eq!(peek(&header), Peek::Header { length, source });
            let followed = [header.as_slice(), &[22, 3, 1]].concat();
            assert_eq!(peek(&followed), Peek::Header { length, source });
        }
    }

    #[test]
    fn what_is_no_header_is_told_from_a_faulty_one() {
        assert_eq!(peek(&[22, 3, 1]), Peek::Other);
        assert_eq!(peek(b"GET / HTTP/1.1\r\n"), Peek::Other);
        let too_long = v2(0x21, 0x11, &[0; 4081]);
        for faulty in [
            b"POST / HTTP/1.1\r\n".as_slice(),
            b"PROXY TCP4 192.0.2.7\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 12345 1234\n",
            b"PROXY TCP4 2001:db8::7 ::1 1 2\r\n",
            b"PROXY TCP4 192.0.2.7 10.0.0.1 1 70000\r\n",
            &[b'P'; 107],
            b"\r\n\r\nGET",
            &v2(0x11, 0x11, &[0; 12]),
            &v2(0x21, 0x11, &[0; 4]),
            &too_long[..16],
        ] {
            assert_eq!(peek(faulty), Peek::Malformed, "{:?}", String::from_utf8_lossy(faulty));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived_and_a_decision_never_changes(
            start in prop::sample::select(vec![&b""[..], b"PROXY ", b"PROXY TCP4 ", b"\r\n\r\n\0\r\nQUIT\n"]),
            bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in any::<prop::sample::Index>(),
        ) {
            let whole = [start, bytes.as_slice()].concat();
            let early = peek(&whole[..cut.index(whole.len() + 1)]);
            if early != Peek::Incomplete {
                prop_assert_eq!(peek(&whole), early);
            }
        }
    }
}
