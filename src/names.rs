//! Newtypes at the borders: names that the rest of the program may trust.
//! Pure; no IO.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// API group of the custom resources, and prefix of labels and annotations.
/// The reference's, so that existing objects and dashboards keep working.
pub const GROUP: &str = "buildkit-operator.socialgouv.github.io";

/// Field manager of everything the installer applies.
pub const INSTALLER_MANAGER: &str = "bko-install";

/// Field manager of everything the controller applies; never shared.
pub const CONTROLLER_MANAGER: &str = "bko-controller";

/// Label of every object of ours: the component that it is of.
pub const COMPONENT_LABEL: &str = "bko-install/component";

/// Default namespace of the control plane.
pub const OPERATOR_NAMESPACE: &str = "buildkit-operator";

/// Default namespace of the daemons, their projects and certificates.
pub const BUILDS_NAMESPACE: &str = "buildkit-builds";

/// Default namespace of node plumbing for sandboxed daemons.
pub const SYSTEM_NAMESPACE: &str = "buildkit-system";

/// Default port of a daemon, and of the gateway.
pub const DAEMON_PORT: u16 = 1234;

/// A DNS-1123 label that names a daemon: `buildkitd-<key>`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DaemonName(String);

/// Every daemon's name begins with this.
pub const DAEMON_PREFIX: &str = "buildkitd-";

/// Why a string is no daemon name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("\"{0}\" is not a daemon name: want `buildkitd-` and 1 to 53 of a-z, 0-9 and -")]
pub struct ParseDaemonName(String);

impl DaemonName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The project key within the name.
    pub fn key(&self) -> &str {
        &self.0[DAEMON_PREFIX.len()..]
    }
}

impl FromStr for DaemonName {
    type Err = ParseDaemonName;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let valid = s.strip_prefix(DAEMON_PREFIX).is_some_and(|key| {
            (1..=53).contains(&key.len())
                && !key.ends_with('-')
                && key.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        });
        if valid { Ok(Self(s.to_owned())) } else { Err(ParseDaemonName(s.to_owned())) }
    }
}

impl TryFrom<String> for DaemonName {
    type Error = ParseDaemonName;

    fn try_from(s: String) -> Result<Self, Self::Error> {
        s.parse()
    }
}

impl From<DaemonName> for String {
    fn from(name: DaemonName) -> Self {
        name.0
    }
}

impl fmt::Display for DaemonName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a string is no DNS name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ParseDnsName {
    /// Not a label: a namespace, for example.
    #[error("\"{0}\" is not a DNS label: want 1 to 63 of a-z, 0-9 and -, not at the ends")]
    Label(String),
    /// Not the name of an object.
    #[error("\"{0}\" is no name of a Kubernetes object: want a-z, 0-9, - and ., with letters or digits at the ends")]
    Object(String),
    /// Not labels with dots between them.
    #[error(
        "\"{0}\" is not a domain: want DNS labels of a-z, 0-9 and - with dots between them, such as builds.example.org"
    )]
    Domain(String),
}

/// A DNS-1123 label, such as the name of a namespace.
///
/// # Errors
/// [`ParseDnsName::Label`].
pub fn dns_label(s: &str) -> Result<String, ParseDnsName> {
    if is_label(s) { Ok(s.to_owned()) } else { Err(ParseDnsName::Label(s.to_owned())) }
}

/// The name of an object such as a Secret: DNS-1123 labels with dots between them.
///
/// # Errors
/// [`ParseDnsName::Object`].
pub fn object_name(s: &str) -> Result<String, ParseDnsName> {
    let valid = s.len() <= 253 && s.split('.').all(is_label);
    if valid { Ok(s.to_owned()) } else { Err(ParseDnsName::Object(s.to_owned())) }
}

/// A domain, lower-cased, without the dot at its end; or nothing.
///
/// # Errors
/// [`ParseDnsName::Domain`].
pub fn domain_or_nothing(s: &str) -> Result<String, ParseDnsName> {
    let domain = s.trim().to_ascii_lowercase();
    let domain = domain.strip_suffix('.').unwrap_or(&domain);
    if domain.is_empty() || (domain.len() <= 253 && domain.split('.').all(is_label)) {
        Ok(domain.to_owned())
    } else {
        Err(ParseDnsName::Domain(s.to_owned()))
    }
}

fn is_label(s: &str) -> bool {
    (1..=63).contains(&s.len())
        && !s.starts_with('-')
        && !s.ends_with('-')
        && s.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_names_are_refused() {
        for good in ["buildkit-builds", "a", "0"] {
            assert_eq!(dns_label(good).as_deref(), Ok(good));
        }
        for bad in ["", "Bad_NS", "-a", "a-", "a.b", &"a".repeat(64)] {
            assert!(dns_label(bad).is_err(), "{bad:?}");
        }
        assert_eq!(object_name("a-b.c").as_deref(), Ok("a-b.c"));
        for bad in ["", "a/b", "A", "a..b", "../a", "a b", &"a.".repeat(127)] {
            assert!(object_name(bad).is_err(), "{bad:?}");
        }
        assert_eq!(domain_or_nothing(" Builds.Example.ORG. ").as_deref(), Ok("builds.example.org"));
        assert_eq!(domain_or_nothing("").as_deref(), Ok(""));
        for bad in ["bad host!", "a..b", "*.example.org", ".org"] {
            assert!(domain_or_nothing(bad).is_err(), "{bad:?}");
        }
    }
}
