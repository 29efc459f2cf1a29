//! ClientHellos: captured ones, ones that rustls makes, and ones made up here.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};

/// The name in the captured hellos.
pub(super) const NAME: &str = "buildkitd-abc123.builds.example.org";

/// Captured from other TLS stacks: file name, name that was sent, bytes.
pub(super) fn captured() -> Vec<(&'static str, Option<&'static str>, Vec<u8>)> {
    macro_rules! hello {
        ($file:literal, $name:expr) => {
            ($file, $name, unhex(include_str!(concat!("../../vectors/hellos/", $file, ".hex"))))
        };
    }
    vec![
        hello!("go-1.26-mlkem", Some(NAME)),
        hello!("go-1.26-classic", Some(NAME)),
        hello!("openssl-3.0", Some(NAME)),
        hello!("openssl-3.0-upper-case", Some("BUILDKITD-ABC123.Builds.Example.Org")),
        hello!("openssl-3.0-tls12", Some(NAME)),
        hello!("openssl-3.0-no-sni", None),
        hello!("curl-7.88-http2", Some(NAME)),
    ]
}

fn unhex(text: &str) -> Vec<u8> {
    hex::decode(text.split_whitespace().collect::<String>()).unwrap()
}

/// What rustls sends for `name`; an address makes it leave the name out.
pub(super) fn rustls(name: &str, versions: &[&'static rustls::SupportedProtocolVersion], alpn: &[&[u8]]) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    let mut client = ClientConnection::new(Arc::new(config), ServerName::try_from(name.to_owned()).unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}

/// A ClientHello put together by hand.
#[derive(Default)]
pub(super) struct Made {
    extensions: Vec<(u16, Vec<u8>)>,
}

impl Made {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn extension(mut self, kind: u16, data: &[u8]) -> Self {
        self.extensions.push((kind, data.to_vec()));
        self
    }

    pub(super) fn sni(self, name: &[u8]) -> Self {
        let entry = [&[0], vector16(name).as_slice()].concat();
        let list = vector16(&entry);
        self.extension(0, &list)
    }

    /// Fills up with padding (RFC 7685) until the whole message has `size` bytes.
    pub(super) fn padded_to(self, size: usize) -> Self {
        let short = size - self.handshake().len() - 4;
        self.extension(21, &vec![0; short])
    }

    /// The handshake message.
    pub(super) fn handshake(&self) -> Vec<u8> {
        let mut extensions = Vec::new();
        for (kind, data) in &self.extensions {
            extensions.extend_from_slice(&kind.to_be_bytes());
            extensions.extend(vector16(data));
        }
        let mut body = vec![3, 3];
        body.extend([7; 32]);
        body.extend([0, 0, 2, 0x13, 1, 1, 0]);
        body.extend(vector16(&extensions));
        handshake(&body)
    }

    /// In records as large as they may be.
    pub(super) fn wire(&self) -> Vec<u8> {
        records(&self.handshake(), 1 << 14)
    }
}

/// A ClientHello with any body.
pub(super) fn handshake(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[1], &length[1..], body].concat()
}

fn vector16(data: &[u8]) -> Vec<u8> {
    [u16::try_from(data.len()).unwrap().to_be_bytes().as_slice(), data].concat()
}

/// Handshake bytes in records of `size` bytes.
pub(super) fn records(handshake: &[u8], size: usize) -> Vec<u8> {
    handshake.chunks(size).flat_map(record).collect()
}

/// One handshake record.
pub(super) fn record(fragment: &[u8]) -> Vec<u8> {
    [&[22, 3, 1], vector16(fragment).as_slice()].concat()
}

/// The handshake bytes of a hello on the wire, for another split.
pub(super) fn joined(mut wire: &[u8]) -> Vec<u8> {
    let mut handshake = Vec::new();
    while let [22, 3, _, high, low, rest @ ..] = wire {
        let (fragment, rest) = rest.split_at(usize::from(u16::from_be_bytes([*high, *low])));
        handshake.extend_from_slice(fragment);
        wire = rest;
    }
    assert!(wire.is_empty());
    handshake
}
