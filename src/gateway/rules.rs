//! What may change while streams go on: domains, limits, and whose word on a
//! client's address is believed. `reload` reads the file.

use serde::Deserialize;
use tokio::sync::watch;

use super::limits::{Limits, SomeLimits};
use crate::runtime::network::{Networks, ParseNetwork};
use crate::sni::{Domains, DomainsError};

/// What every new connection is held to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Domains that daemons are reached under.
    pub domains: Domains,
    /// How many connections at once.
    pub limits: Limits,
    /// Peers whose PROXY header is believed.
    pub proxy_from: Networks,
}

/// Why a file makes no rules.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// Not what a configuration looks like.
    #[error("{0}")]
    Syntax(#[source] serde_yaml::Error),
    /// The domains.
    #[error("domains: {0}")]
    Domains(#[source] DomainsError),
    /// The networks.
    #[error("proxyFrom: {0}")]
    ProxyFrom(#[source] ParseNetwork),
}

/// A configuration file. What it leaves out is as the flags say.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct File {
    domains: Option<Vec<String>>,
    #[serde(default)]
    limits: SomeLimits,
    proxy_from: Option<Vec<String>>,
}

impl Rules {
    /// These rules, changed by what a file says.
    ///
    /// # Errors
    /// See [`RulesError`].
    pub fn with(&self, file: &str) -> Result<Self, RulesError> {
        let File { domains, limits, proxy_from } = serde_yaml::from_str(file).map_err(RulesError::Syntax)?;
        let domains = match domains {
            Some(domains) => Domains::new(domains).map_err(RulesError::Domains)?,
            None => self.domains.clone(),
        };
        let proxy_from = match proxy_from {
            Some(networks) => networks.join(",").parse().map_err(RulesError::ProxyFrom)?,
            None => self.proxy_from.clone(),
        };
        if domains == Domains::default() {
            return Err(RulesError::Domains(DomainsError::Empty));
        }
        Ok(Self { domains, limits: limits.or(self.limits), proxy_from })
    }

    /// These rules for good.
    pub fn fixed(self) -> watch::Receiver<Self> {
        watch::channel(self).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> Rules {
        Rules { domains: Domains::new(vec!["a.test".into()]).unwrap(), ..Rules::default() }
    }

    #[test]
    fn a_file_changes_what_it_names() {
        let file = "domains: [b.test, c.test]\nlimits: {connections: 7, perDaemon: 3}\nproxyFrom: [10.0.0.0/8]\n";
        let rules = flags().with(file).unwrap();
        assert_eq!(rules.domains.to_string(), "b.test,c.test");
        assert_eq!(rules.limits, Limits { connections: 7, per_daemon: 3, ..Limits::default() });
        assert!(rules.proxy_from.contains("10.1.2.3".parse().unwrap()));
        assert_eq!(flags().with("limits: {}").unwrap(), flags());
    }

    #[test]
    fn what_is_wrong_with_a_file_is_said() {
        for (file, error) in [
            (
                "domains: [a.test, b.a.test]",
                "domains: gateway domains \"a.test\" and \"b.a.test\" overlap: keep one of them",
            ),
            ("domains: []", "domains: no gateway domain: want at least one, for example \"builds.example.org\""),
            (
                "proxyFrom: [10.0.0.0/33]",
                "proxyFrom: \"10.0.0.0/33\" is not a network: want an address such as 10.0.0.1, or address/prefix such as 10.0.0.0/8",
            ),
            ("limit: {}", "unknown field `limit`, expected one of `domains`, `limits`, `proxyFrom`"),
        ] {
            assert_eq!(flags().with(file).unwrap_err().to_string(), error);
        }
        assert!(matches!(Rules::default().with("limits: {}"), Err(RulesError::Domains(DomainsError::Empty))));
        assert!(flags().with("limits: {connections: -1}").is_err());
        assert!(flags().with("limits: {perHost: 1}").unwrap_err().to_string().contains("perHost"));
    }
}
