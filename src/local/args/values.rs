//! What flags of `bko-install up` may be set to, read and written. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use oci_client::Reference;

use crate::names::DAEMON_PORT;
use crate::runtime::listen::{ListenAddress, ParseListenAddress};

/// Where BuildKit comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Buildkit {
    /// `PATH`, else the stock image.
    Auto,
    /// A file `buildkitd`, or the folder that has it.
    Path(PathBuf),
    /// An image as moby/buildkit.
    Image(Reference),
}

impl FromStr for Buildkit {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        if s == "auto" {
            return Ok(Self::Auto);
        }
        // As a shell tells programs from paths.
        if s.starts_with(['/', '.']) {
            return Ok(Self::Path(s.into()));
        }
        let image = s.parse().map(Self::Image);
        image.map_err(|error| format!("want auto, a path such as ./buildkitd, or an image: {error}"))
    }
}

impl std::fmt::Display for Buildkit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Path(path) => path.display().fmt(f),
            Self::Image(image) => image.fmt(f),
        }
    }
}

/// Where builds connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatewayListen {
    /// `lo:PORT`: every loopback address of this host, and nothing else.
    Loopback(u16),
    /// An address that other hosts may reach.
    Address(ListenAddress),
}

impl GatewayListen {
    /// Where it is reached from this host.
    pub fn from_here(self) -> IpAddr {
        match self {
            Self::Address(ListenAddress::One(address)) if address.ip().is_unspecified() && address.is_ipv6() => {
                Ipv6Addr::LOCALHOST.into()
            }
            Self::Address(ListenAddress::One(address)) if !address.ip().is_unspecified() => address.ip(),
            _ => Ipv4Addr::LOCALHOST.into(),
        }
    }
}

impl FromStr for GatewayListen {
    type Err = ParseListenAddress;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s.strip_prefix("lo:").and_then(|port| port.parse().ok()) {
            Some(port) => Ok(Self::Loopback(port)),
            // Without a port, the usual one.
            None => match s.parse::<std::net::IpAddr>() {
                Ok(ip) => Ok(Self::Address(ListenAddress::One(SocketAddr::new(ip, DAEMON_PORT)))),
                Err(_) => s.parse().map(Self::Address),
            },
        }
    }
}

impl std::fmt::Display for GatewayListen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loopback(port) => write!(f, "lo:{port}"),
            Self::Address(address) => address.fmt(f),
        }
    }
}

/// A number of bytes, with or without Ki, Mi, Gi or Ti.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        "Ti" => 40,
        _ => return Err("want a number of bytes, such as 200Gi".to_owned()),
    };
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    match number {
        Some(0) => Err("want more than 0 bytes; leave it out for no bound".to_owned()),
        number => number.ok_or_else(|| "want a number of bytes, such as 200Gi".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_addresses_are_read_and_written() {
        for (text, shown) in [
            ("lo:1234", "lo:1234"),
            ("0.0.0.0", "0.0.0.0:1234"),
            ("0.0.0.0:7", "0.0.0.0:7"),
            (":9", ":9"),
            ("::1", "[::1]:1234"),
        ] {
            assert_eq!(text.parse::<GatewayListen>().unwrap().to_string(), shown);
        }
        for text in ["lo", "lo:", "lo:70000", "eth0:1"] {
            assert!(text.parse::<GatewayListen>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn bytes_have_units() {
        assert_eq!(["7", "2Ki", "3Mi", "200Gi", "1Ti"].map(bytes), [7, 2 << 10, 3 << 20, 200 << 30, 1 << 40].map(Ok));
        for text in ["", "Gi", "1G", "1.5Gi", "-1", "99999999Ti", "0", "0Gi"] {
            assert!(bytes(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn buildkit_is_a_path_or_an_image() {
        let read = |text: &str| text.parse::<Buildkit>();
        assert_eq!(read("auto"), Ok(Buildkit::Auto));
        for path in ["/usr/bin/buildkitd", "./buildkitd", "../bin"] {
            assert_eq!(read(path), Ok(Buildkit::Path(path.into())));
        }
        assert_eq!(read("moby/buildkit:v1").unwrap().to_string(), "docker.io/moby/buildkit:v1");
        assert!(read("NOT AN IMAGE").unwrap_err().starts_with("want auto, a path"));
    }
}
