//! Where a client comes from, as limits count it. Pure.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// The network that one party is taken to hold: an IPv4 address, or 64 bits of
/// an IPv6 address, since every host has as many addresses as it likes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Prefix(IpAddr);

impl Prefix {
    /// The network of an address.
    pub(super) fn of(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX))),
            v4 => v4,
        })
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0, if self.0.is_ipv4() { 32 } else { 64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_address_and_64_bits_of_an_ipv6_address_are_one_source() {
        for (address, prefix) in [
            ("192.0.2.7", "192.0.2.7/32"),
            ("::ffff:192.0.2.7", "192.0.2.7/32"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ] {
            assert_eq!(Prefix::of(address.parse().unwrap()).to_string(), prefix);
        }
    }
}
