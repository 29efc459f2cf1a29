//! From a server name to a daemon's name. Pure; no IO.

use std::fmt;

use crate::names::DaemonName;

/// The domains that daemons are reached under: `buildkitd-<key>.<domain>`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Domains(Vec<String>);

/// What a server name means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `buildkitd-<key>.<domain>`.
    Daemon(DaemonName),
    /// `api.<domain>`: the routing API.
    Api,
}

/// The label of the routing API.
const API_LABEL: &str = "api";

/// Why a list of gateway domains is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DomainsError {
    /// No domain at all.
    #[error("no gateway domain: want at least one, for example \"builds.example.org\"")]
    Empty,
    /// Not a DNS name.
    #[error("gateway domain \"{domain}\": {problem}")]
    Invalid {
        /// As configured.
        domain: String,
        /// What is wrong with it, and what is wanted.
        problem: &'static str,
    },
    /// One domain is another one, or lies below it.
    #[error("gateway domains \"{outer}\" and \"{inner}\" overlap: keep one of them")]
    Overlap {
        /// The shorter one.
        outer: String,
        /// The one below or equal to it.
        inner: String,
    },
}

impl Domains {
    /// Checks a list of domains. They are lower-cased and lose one trailing dot.
    ///
    /// # Errors
    /// When the list is empty, a domain is no DNS name, or two of them overlap.
    pub fn new(domains: Vec<String>) -> Result<Self, DomainsError> {
        if domains.is_empty() {
            return Err(DomainsError::Empty);
        }
        let domains = domains.into_iter().map(normalize).collect::<Result<Vec<_>, _>>()?;
        for (index, a) in domains.iter().enumerate() {
            for b in &domains[index + 1..] {
                let (outer, inner) = if a.len() <= b.len() { (a, b) } else { (b, a) };
                let below = inner.strip_suffix(outer.as_str());
                if below.is_some_and(|below| below.is_empty() || below.ends_with('.')) {
                    return Err(DomainsError::Overlap { outer: outer.clone(), inner: inner.clone() });
                }
            }
        }
        Ok(Self(domains))
    }

    /// What a server name means: exactly one label, `buildkitd-<key>` or `api`,
    /// below one of the domains, in any case, with or without a trailing dot.
    pub fn target(&self, sni: &str) -> Option<Target> {
        let name = sni.strip_suffix('.').unwrap_or(sni).to_ascii_lowercase();
        let (label, domain) = name.split_once('.')?;
        if !self.0.iter().any(|known| known == domain) {
            return None;
        }
        if label == API_LABEL { Some(Target::Api) } else { label.parse().ok().map(Target::Daemon) }
    }
}

impl fmt::Display for Domains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join(","))
    }
}

fn normalize(domain: String) -> Result<String, DomainsError> {
    let normal = domain.strip_suffix('.').unwrap_or(&domain).to_ascii_lowercase();
    match domain_problem(&normal) {
        Some(problem) => Err(DomainsError::Invalid { domain, problem }),
        None => Ok(normal),
    }
}

fn domain_problem(domain: &str) -> Option<&'static str> {
    // A daemon's label, 63 bytes with its dot, must fit in front of it.
    const LONGEST: usize = 253 - 64;
    if domain.starts_with("*.") {
        return Some("leave out the \"*.\", daemons are matched one label below it");
    }
    if domain.len() > LONGEST {
        return Some("longer than 189 bytes");
    }
    let label_fits = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
    };
    if !domain.split('.').all(label_fits) {
        return Some("not a DNS name, want labels of a-z, 0-9 and - with dots between");
    }
    let top = domain.rsplit('.').next().unwrap_or(domain);
    top.bytes().all(|byte| byte.is_ascii_digit()).then_some("an address, want a DNS name")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domains(list: &[&str]) -> Result<Domains, DomainsError> {
        Domains::new(list.iter().map(|domain| (*domain).to_owned()).collect())
    }

    #[test]
    fn one_label_below_a_configured_domain_is_a_daemon() {
        let domains = domains(&["Builds.example.org.", "ci.test"]).unwrap();
        let long = format!("buildkitd-{}", "a".repeat(53));
        for (sni, daemon) in [
            ("buildkitd-abc.builds.example.org", "buildkitd-abc"),
            ("buildkitd-abc.ci.test", "buildkitd-abc"),
            ("BUILDKITD-ABC.Builds.Example.ORG", "buildkitd-abc"),
            ("buildkitd-abc.ci.test.", "buildkitd-abc"),
            ("buildkitd-a-0.ci.test", "buildkitd-a-0"),
            (&format!("{long}.ci.test"), &long),
        ] {
            assert_eq!(domains.target(sni), Some(Target::Daemon(daemon.parse().unwrap())), "{sni}");
        }
    }

    #[test]
    fn one_label_of_every_domain_is_the_routing_api() {
        let domains = domains(&["builds.example.org", "ci.test"]).unwrap();
        for sni in ["api.builds.example.org", "API.ci.test."] {
            assert_eq!(domains.target(sni), Some(Target::Api), "{sni}");
        }
    }

    #[test]
    fn every_other_name_is_nobody() {
        let domains = domains(&["builds.example.org", "ci.test"]).unwrap();
        let long = format!("buildkitd-{}.ci.test", "a".repeat(54));
        for sni in [
            "",
            ".",
            "ci.test",
            ".ci.test",
            "buildkitd-.ci.test",
            "buildkitd-abc",
            "buildkitd-abc.",
            "buildkitd-abc.test",
            "buildkitd-abc.ci.test..",
            "buildkitd-abc..ci.test",
            "buildkitd-abc.xci.test",
            "buildkitd-abc.example.org",
            "buildkitd-abc.x.ci.test",
            "x.buildkitd-abc.ci.test",
            "buildkitd-abc.ci.test.evil.org",
            "buildkitd-a_c.ci.test",
            "buildkitd-a/c.ci.test",
            "buildkitd-\u{212a}.ci.test",
            "*.ci.test",
            "buildkitd-*.ci.test",
            "abc.ci.test",
            "api",
            "api.evil.org",
            "api.x.ci.test",
            "apis.ci.test",
            "192.0.2.7",
            "[2001:db8::1]",
            &long,
        ] {
            assert_eq!(domains.target(sni), None, "{sni}");
        }
    }

    #[test]
    fn without_domains_nobody_is_matched() {
        assert_eq!(Domains::default().target("buildkitd-abc."), None);
        assert_eq!(Domains::default().target("buildkitd-abc.ci.test"), None);
    }

    #[test]
    fn overlapping_domains_are_a_configuration_error() {
        for list in [&["a.test", "b.a.test"], &["b.a.test", "a.test"], &["a.test", "A.test."]] {
            assert!(matches!(domains(list), Err(DomainsError::Overlap { outer, .. }) if outer == "a.test"), "{list:?}");
        }
        assert!(domains(&["a.test", "ba.test", "b.test"]).is_ok());
    }

    #[test]
    fn domains_that_are_no_dns_names_are_refused() {
        assert_eq!(domains(&[]), Err(DomainsError::Empty));
        let long = vec!["a".repeat(60); 4].join(".");
        for domain in ["", ".", "*.ci.test", "ci..test", "-ci.test", "ci_.test", "ci.test:1234", "192.0.2.7", &long] {
            assert!(matches!(domains(&[domain]), Err(DomainsError::Invalid { .. })), "{domain}");
        }
        assert!(domains(&["localhost"]).is_ok());
        assert!(domains(&["127.0.0.1.sslip.io"]).is_ok());
    }
}
