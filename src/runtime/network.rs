//! Lists of networks, as flags and files give them. Pure; no IO.

use std::net::IpAddr;
use std::str::FromStr;

/// Any number of networks; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Networks(Vec<Network>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    prefix: u8,
}

/// Not an address, nor `address/prefix`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("\"{0}\" is not a network: want an address such as 10.0.0.1, or address/prefix such as 10.0.0.0/8")]
pub struct ParseNetwork(String);

/// Digits alone: no sign.
fn whole(text: &str) -> Option<u8> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// Whether a text is one network.
pub fn is_network(text: &str) -> bool {
    text.parse::<Network>().is_ok()
}

/// Whether a text is `address/prefix`, as Kubernetes wants it.
pub fn is_cidr(text: &str) -> bool {
    let padded = |prefix: &str| prefix.len() > 1 && prefix.starts_with('0');
    text.split_once('/').is_some_and(|(_, prefix)| !padded(prefix)) && is_network(text)
}

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
            let prefix = prefix.map_or(Some(most), whole)?;
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
impl FromStr for Networks {
    type Err = ParseNetwork;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        s.split(',').map(str::trim).filter(|s| !s.is_empty()).map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl Networks {
    /// Whether an address lies in one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_lies_in_its_networks() {
        let networks: Networks = "10.0.0.0/8, 2001:db8::/32,192.0.2.7".parse().unwrap();
        for (address, inside) in [
            ("10.255.0.1", true),
            ("::ffff:10.0.0.1", true),
            ("11.0.0.1", false),
            ("192.0.2.7", true),
            ("192.0.2.8", false),
            ("2001:db8:ffff::1", true),
            ("2001:db9::1", false),
        ] {
            assert_eq!(networks.contains(address.parse().unwrap()), inside, "{address}");
        }
        assert!(!Networks::default().contains("10.0.0.1".parse().unwrap()));
        assert!("0.0.0.0/0".parse::<Networks>().unwrap().contains("198.51.100.1".parse().unwrap()));
    }

    #[test]
    fn kubernetes_wants_a_prefix() {
        assert!(is_cidr("10.0.0.0/8") && is_cidr("2001:db8::/32") && is_network("192.0.2.1"));
        assert!(!is_cidr("192.0.2.1") && !is_cidr("10.0.0.0/08") && !is_cidr("10.0.0.0/8,192.0.2.0/24"));
    }

    #[test]
    fn what_is_no_network_is_named() {
        for bad in ["10.0.0.0/33", "::/129", "10.0.0/8", "host", "10.0.0.0/", "/8", "10.0.0.0/-1", "10.0.0.0/+8"] {
            assert_eq!(bad.parse::<Networks>(), Err(ParseNetwork(bad.to_owned())));
        }
    }
}
