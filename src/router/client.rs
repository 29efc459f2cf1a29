//! Where a call comes from: the peer's address, or, if the peer is a proxy that
//! we trust, the address that it vouches for. Pure; no IO.

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::{HeaderMap, HeaderName};

use crate::runtime::network::Networks;
pub use crate::runtime::network::ParseNetwork;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Networks whose `X-Forwarded-For` is believed; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Networks);

/// A list separated by commas; blank is empty.
impl FromStr for TrustedProxies {
    type Err = ParseNetwork;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        s.parse().map(Self)
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
            if !self.0.contains(client) {
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
}
