//! Which loopback address a project has: from its key, so that it is the same
//! for everybody who knows the key. Pure.

use std::net::Ipv4Addr;

use sha2::{Digest, Sha256};

/// Addresses that are tried before giving up; with a million projects each try
/// fails in one case of sixteen.
const TRIES: u32 = 64;

/// The first address in the key's row that nobody has; `None` when all are taken.
///
/// The row is `127.a.b.c` from SHA-256 over the key, then over the key, NUL and
/// 1, 2, …. `127.0.0.0/16`, where other programs of a host listen, and the ends
/// of each /24 are left out.
pub fn choose(key: &str, taken: impl Fn(Ipv4Addr) -> bool) -> Option<Ipv4Addr> {
    (0..TRIES).filter_map(|n| nth(key, n)).find(|address| !taken(*address))
}

fn nth(key: &str, n: u32) -> Option<Ipv4Addr> {
    let mut hash = Sha256::new();
    hash.update(key);
    if n > 0 {
        hash.update("\0");
        hash.update(n.to_string());
    }
    let hash = hash.finalize();
    let (a, b, c) = (hash[0], hash[1], hash[2]);
    (a != 0 && !matches!(c, 0 | 255)).then(|| Ipv4Addr::new(127, a, b, c))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn an_address_follows_from_the_key() {
        let free = |_| false;
        assert_eq!(choose("pa081c22c974da132", free), Some(Ipv4Addr::new(127, 176, 48, 63)));
        assert_eq!(choose("pa081c22c974da132", free), choose("pa081c22c974da132", free));
    }

    #[test]
    fn ten_thousand_projects_have_an_address_each_outside_what_others_use() {
        let mut taken = HashSet::new();
        for i in 0..10_000 {
            let address = choose(&format!("p{i:016x}"), |a| taken.contains(&a)).unwrap();
            let [first, second, _, last] = address.octets();
            assert!(first == 127 && second != 0 && last != 0 && last != 255, "{address}");
            assert!(taken.insert(address));
        }
    }

    #[test]
    fn a_taken_address_leads_to_the_next_in_the_row() {
        let first = choose("p1", |_| false).unwrap();
        let second = choose("p1", |a| a == first).unwrap();
        assert_ne!(first, second);
        assert_eq!(choose("p1", |_| true), None);
    }
}
