//! Where a call comes from: the peer's address, or, if the peer is a proxy that
//! we trust, the address that it vouches for. Pure; no IO.

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::{HeaderMap, HeaderName};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Networks whose `X-Forwarded-For` is believed; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<Network>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    prefix: u8,
}

/// Not an address, nor `address/prefix`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("\"{0}\" is not a network: want an address such as 10.0.0.1, or address/prefix such as 10.0.0.0/8")]
pub struct ParseNetwork(String);

impl FromStr for Network {
    type Err = ParseNetwork;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let (address, prefix) = match s.split_once('/') {
                Some((address, prefix)) => (address, Some(prefix)),
                None => (s, None),
            };
            let address: IpAddr = address.parse().ok()?;
            let most = if address.is_ipv4() { 32 } else { 128 };
            let prefix = prefix.map_or(Some(most), |p| p.parse().ok())?;
            (prefix <= most).then_some(Self { address, prefix })
        };
        parse().ok_or_else(|| ParseNetwork(s.to_owned()))
    }
}

impl Network {
    fn contains(self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => {
                (a.to_bits() ^ b.to_bits()).checked_shr(32 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            (IpAddr::V6(a), IpAddr::V6(b)) => {
                (a.to_bits() ^ b.to_bits()).checked_shr(128 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

/// A list separated by commas; blank is empty.
impl FromStr for TrustedProxies {
    type Err = ParseNetwork;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        s.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl TrustedProxies {
    /// The client behind `peer`: from the nearest hop outwards, the first that
    /// is not a proxy of ours. What stands before it anybody can have written.
    pub(super) fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer.to_canonical();
        let hops: Vec<&str> =
            headers.get_all(FORWARDED_FOR).iter().filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(',')).collect();
        for hop in hops.into_iter().rev() {
            if !self.0.iter().any(|network| network.contains(client)) {
                break;
            }
            let Ok(address) = hop.trim().parse::<IpAddr>() else { break };
            client = address.to_canonical();
        }
        client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_trusted_peer_is_believed_and_only_its_own_hop() {
        let proxies: TrustedProxies = "10.0.0.0/8, 2001:db8::/32,192.0.2.7".parse().unwrap();
        for (peer, forwarded, want) in [
            ("198.51.100.1", "1.2.3.4", "198.51.100.1"),
            ("10.1.2.3", "1.2.3.4", "1.2.3.4"),
            ("::ffff:10.1.2.3", "1.2.3.4", "1.2.3.4"),
            ("10.1.2.3", "6.6.6.6, 1.2.3.4", "1.2.3.4"),
            ("10.1.2.3", "6.6.6.6, 1.2.3.4, 192.0.2.7", "1.2.3.4"),
            ("10.1.2.3", "10.9.9.9", "10.9.9.9"),
            ("10.1.2.3", "nonsense", "10.1.2.3"),
            ("10.1.2.3", "", "10.1.2.3"),
            ("2001:db8::1", "2001:db9::1", "2001:db9::1"),
            ("2001:db9::1", "1.2.3.4", "2001:db9::1"),
        ] {
            let headers = HeaderMap::from_iter([(FORWARDED_FOR, forwarded.parse().unwrap())]);
            assert_eq!(proxies.client(peer.parse().unwrap(), &headers).to_string(), want, "{peer} {forwarded}");
        }
    }

    #[test]
    fn the_whole_internet_may_be_trusted_and_nobody_is_by_default() {
        let headers = HeaderMap::from_iter([(FORWARDED_FOR, "1.2.3.4".parse().unwrap())]);
        let peer = "198.51.100.1".parse().unwrap();
        assert_eq!("0.0.0.0/0".parse::<TrustedProxies>().unwrap().client(peer, &headers).to_string(), "1.2.3.4");
        assert_eq!("".parse::<TrustedProxies>().unwrap().client(peer, &headers), peer);
    }

    #[test]
    fn what_is_no_network_is_named() {
        for bad in ["10.0.0.0/33", "::/129", "10.0.0/8", "host", "10.0.0.0/", "/8", "10.0.0.0/-1"] {
            assert_eq!(bad.parse::<TrustedProxies>(), Err(ParseNetwork(bad.to_owned())));
        }
    }
}
