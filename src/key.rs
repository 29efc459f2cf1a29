//! The routing key: request → [`ProjectKey`] → daemon name → endpoint.
//!
//! All builds that must share a cache resolve to the same key, hence to the
//! same daemon. The key is byte for byte the reference's for every repository
//! reference that it normalises sanely. Pure; no IO.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::names::{DAEMON_PREFIX, DaemonName};

/// What a build asks for, normalised: the input of the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Project {
    /// Normalised repository reference, never empty.
    pub repo: Repo,
    /// Component of a monorepo, trimmed and lower-cased; empty when absent.
    pub name: String,
    /// Dockerfile target, trimmed and lower-cased; `default` when absent.
    pub target: String,
    /// Architecture that the daemon builds natively.
    pub arch: Arch,
    /// Whether the build comes from code that nobody has reviewed.
    pub untrusted: bool,
    /// The pull request that an untrusted build belongs to, on a provider's word.
    pub pull_request: Option<NonZeroU32>,
}

/// A normalised repository reference, for example `github.com/acme/shop`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Repo(String);

/// Architecture of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// x86-64.
    Amd64,
    /// AArch64.
    Arm64,
}

/// `p` and 16 hex digits for a project, `fork…` or `fork<n>-…` for its
/// untrusted builds, `c<i>…` for its clones.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ProjectKey(String);

/// Why a part of a request has no key.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeyError {
    /// Nothing is left of the repository reference.
    #[error("repo is required")]
    RepoRequired,
    /// A control character, which no forge allows and no log should show.
    #[error("{field} contains a control character (U+{code:04X})")]
    ControlCharacter {
        /// The field at fault: `repo`, `name` or `target`.
        field: &'static str,
        /// Its code point.
        code: u32,
    },
    /// A scheme that is no Git transport.
    #[error("repo has the scheme \"{0}\", want https, http, ssh, git or git+ssh")]
    UnsupportedScheme(String),
    /// A URL without a host.
    #[error("repo \"{0}\" is a URL without a host")]
    HostMissing(String),
    /// An IPv6 host without its closing bracket.
    #[error("repo \"{0}\" has an IPv6 host without a closing bracket")]
    UnclosedBracket(String),
    /// Longer than a request may have it.
    #[error("{0} is too long")]
    TooLong(&'static str),
    /// Neither amd64 nor arm64.
    #[error("unsupported arch {0:?}")]
    UnsupportedArch(String),
    /// Longer than the daemon's name can carry.
    #[error("\"{0}\" is not a project key")]
    MalformedKey(String),
}

/// Most bytes of the parts of a request, as they are sent.
pub const LONGEST: [(&str, usize); 3] = [("repo", 512), ("name", 128), ("target", 128)];

const SCHEMES: [&str; 7] = ["https", "http", "git", "ssh", "git+ssh", "git+https", "git+http"];

impl Repo {
    /// Normalises a repository reference.
    ///
    /// URL form (`scheme://[user@]host[:port]/path`), scp form
    /// (`user@host:path`), `host[:port]/path` and bare names all converge.
    /// A port is dropped only in URL form and in `host:port/path` without a
    /// user: in scp form the colon begins the path, so digits after it are a
    /// path segment. Query and fragment are dropped.
    ///
    /// # Errors
    /// Names the part at fault; see [`KeyError`].
    pub fn normalize(reference: &str) -> Result<Self, KeyError> {
        let reference = lower(reference.trim());
        refuse_control("repo", &reference)?;
        let (scheme, rest) = match reference.split_once("://") {
            Some((scheme, rest)) => (Some(scheme), rest),
            None => (None, reference.as_str()),
        };
        if let Some(scheme) = scheme.filter(|s| !SCHEMES.contains(s)) {
            return Err(KeyError::UnsupportedScheme(scheme.to_owned()));
        }
        let rest = rest.split(['?', '#']).next().unwrap_or_default();
        let slash = rest.find('/').unwrap_or(rest.len());
        let (authority, path) = rest.split_at(slash);
        let at = if scheme.is_some() { authority.rfind('@') } else { authority.find('@') };
        let host = at.map_or(authority, |at| &authority[at + 1..]);
        if scheme.is_some() && host.is_empty() {
            return Err(KeyError::HostMissing(reference.clone()));
        }
        let (host, after_host) = split_host(host).ok_or_else(|| KeyError::UnclosedBracket(reference.clone()))?;
        let digits = after_host.strip_prefix(':').unwrap_or(after_host);
        let is_port =
            digits.bytes().all(|b| b.is_ascii_digit()) && (scheme.is_some() || (at.is_none() && path.len() > 1));
        let segment = if is_port { "" } else { after_host };
        let tail = format!("{segment}{path}").replace(':', "/");
        let joined = collapse(&format!("{host}{tail}"));
        let joined = joined.trim_end_matches('/');
        let joined = joined.strip_suffix(".git").unwrap_or(joined).trim_end_matches('/');
        if joined.is_empty() {
            return Err(KeyError::RepoRequired);
        }
        Ok(Self(joined.to_owned()))
    }

    /// The normalised reference.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Repo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Arch {
    /// `amd64` or `arm64`, the name that images and nodes carry.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }
}

impl FromStr for Arch {
    type Err = KeyError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match lower(s.trim()).as_str() {
            "amd64" | "x86_64" => Ok(Self::Amd64),
            "arm64" | "aarch64" => Ok(Self::Arm64),
            _ => Err(KeyError::UnsupportedArch(s.to_owned())),
        }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Project {
    /// Normalises the parts of a request.
    ///
    /// # Errors
    /// The first part at fault, in the order repo, name, target, arch.
    pub fn new(repo: &str, name: &str, target: &str, arch: &str, untrusted: bool) -> Result<Self, KeyError> {
        let repo = Repo::normalize(repo)?;
        let name = lower(name.trim());
        refuse_control("name", &name)?;
        let target = lower(target.trim());
        refuse_control("target", &target)?;
        let target = if target.is_empty() { "default".to_owned() } else { target };
        Ok(Self { repo, name, target, arch: arch.parse()?, untrusted, pull_request: None })
    }

    /// The same of a request, whose parts may not be longer than [`LONGEST`].
    /// A repository must survive normalisation before its length counts.
    ///
    /// # Errors
    /// See [`Project::new`], and [`KeyError::TooLong`].
    pub fn requested(repo: &str, name: &str, target: &str, arch: &str, untrusted: bool) -> Result<Self, KeyError> {
        Repo::normalize(repo)?;
        for ((field, most), value) in LONGEST.into_iter().zip([repo, name, target]) {
            if value.len() > most {
                return Err(KeyError::TooLong(field));
            }
        }
        Self::new(repo, name, target, arch, untrusted)
    }

    /// The key that trusted builds share: `p` and the first 16 hex digits of
    /// SHA-256 over `repo [NUL "n:" name] NUL target NUL arch`. The name is
    /// left out when empty, so that keys older than names stay as they are.
    pub fn canonical_key(&self) -> ProjectKey {
        let mut hash = Sha256::new();
        hash.update(&self.repo.0);
        if !self.name.is_empty() {
            hash.update("\0n:");
            hash.update(&self.name);
        }
        hash.update("\0");
        hash.update(&self.target);
        hash.update("\0");
        hash.update(self.arch.as_str());
        ProjectKey(format!("p{}", &hex::encode(hash.finalize())[..16]))
    }

    /// The key of the daemon that serves this build: the canonical one, or its
    /// fork when the build is untrusted: that of its pull request, if known.
    pub fn key(&self) -> ProjectKey {
        let key = self.canonical_key();
        match (self.untrusted, self.pull_request) {
            (false, _) => key,
            (true, None) => key.fork(),
            (true, Some(number)) => key.fork_of(number),
        }
    }
}

impl ProjectKey {
    /// The key as text; also the name of its `BuildProject`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The key of the ephemeral daemon for this project's untrusted builds.
    pub fn fork(&self) -> Self {
        Self(format!("fork{}", self.0))
    }

    /// The key of the ephemeral daemon for one pull request of this project. It
    /// is as long as a daemon's name allows, and what is a fork's key stays one.
    pub fn fork_of(&self, pull_request: NonZeroU32) -> Self {
        Self(format!("fork{pull_request}-{}", self.0))
    }

    /// The key of this project's `i`-th clone, counted from 1.
    pub fn clone_number(&self, i: u32) -> Self {
        Self(format!("c{i}{}", self.0))
    }

    /// Whether this is the key of a fork.
    pub fn is_fork(&self) -> bool {
        self.0.starts_with("fork")
    }

    /// The pull request whose fork this is the key of.
    pub fn pull_request(&self) -> Option<NonZeroU32> {
        self.0.strip_prefix("fork")?.split_once('-')?.0.parse().ok()
    }

    /// `buildkitd-<key>`: StatefulSet, Service and host name of the daemon.
    pub fn daemon(&self) -> String {
        format!("{DAEMON_PREFIX}{}", self.0)
    }

    /// The claim that holds the cache: `cache-buildkitd-<key>-0`.
    pub fn cache_claim(&self) -> String {
        format!("cache-{}-0", self.daemon())
    }

    /// `tcp://<daemon>.<namespace>.svc:<port>`, for clients in the cluster.
    pub fn in_cluster_endpoint(&self, namespace: &str, port: u16) -> String {
        format!("tcp://{}.{namespace}.svc:{port}", self.daemon())
    }

    /// `tcp://<daemon>.<domain>:<port>`, through the gateway.
    pub fn gateway_endpoint(&self, domain: &str, port: u16) -> String {
        format!("tcp://{}.{domain}:{port}", self.daemon())
    }
}

/// A key as it appears in a request or as the name of an object.
impl FromStr for ProjectKey {
    type Err = KeyError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        format!("{DAEMON_PREFIX}{s}")
            .parse::<DaemonName>()
            .map(|_| Self(s.to_owned()))
            .map_err(|_| KeyError::MalformedKey(s.to_owned()))
    }
}

impl fmt::Display for ProjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Lower-cases scalar by scalar (simple mapping), as the reference does:
/// `str::to_lowercase` would turn a final `Σ` into `ς` and `İ` into two scalars.
fn lower(s: &str) -> String {
    s.chars().map(|c| c.to_lowercase().next().unwrap_or(c)).collect()
}

fn refuse_control(field: &'static str, s: &str) -> Result<(), KeyError> {
    match s.chars().find(|c| c.is_control()) {
        Some(c) => Err(KeyError::ControlCharacter { field, code: u32::from(c) }),
        None => Ok(()),
    }
}

/// Splits `host[:…]` before the colon; an IPv6 host keeps its brackets.
fn split_host(authority: &str) -> Option<(&str, &str)> {
    let end = if authority.starts_with('[') {
        authority.find(']')? + 1
    } else {
        authority.find(':').unwrap_or(authority.len())
    };
    Some(authority.split_at(end))
}

fn collapse(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    for c in s.chars() {
        if c != '/' || !out.ends_with('/') {
            out.push(c);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn norm(s: &str) -> String {
        Repo::normalize(s).map_or_else(|e| format!("error: {e}"), |r| r.0)
    }

    #[test]
    fn scp_form_keeps_a_numeric_first_segment() {
        assert_eq!(norm("git@host:123/repo.git"), "host/123/repo");
        assert_eq!(norm("git@host:456/repo.git"), "host/456/repo");
        assert_eq!(norm("host:123/repo.git"), "host/repo");
        assert_eq!(norm("ssh://git@host:123/repo.git"), "host/repo");
        assert_eq!(norm("host:123"), "host/123");
    }

    #[test]
    fn what_the_reference_lets_through_is_normalised_or_refused() {
        for (input, want) in [
            ("git+ssh://git@github.com/acme/shop.git", "github.com/acme/shop"),
            ("https://github.com/acme/shop.git//", "github.com/acme/shop"),
            ("https://github.com/acme/shop?tab=readme", "github.com/acme/shop"),
            ("https://github.com/acme/shop.git#main:sub", "github.com/acme/shop"),
            ("https://user:p@ss@github.com/acme/shop", "github.com/acme/shop"),
            ("ssh://git@[2001:DB8::1]:2222/acme/shop.git", "[2001:db8::1]/acme/shop"),
            ("git@[2001:db8::1]:acme/shop.git", "[2001:db8::1]/acme/shop"),
            ("ssh://git@github.com:acme/shop.git", "github.com/acme/shop"),
            ("acme/\0shop", "error: repo contains a control character (U+0000)"),
            ("acme/\u{85}shop", "error: repo contains a control character (U+0085)"),
            ("file:///srv/git/x", "error: repo has the scheme \"file\", want https, http, ssh, git or git+ssh"),
            ("https:///acme/shop", "error: repo \"https:///acme/shop\" is a URL without a host"),
            ("ssh://git@[::1/acme", "error: repo \"ssh://git@[::1/acme\" has an IPv6 host without a closing bracket"),
            ("https://.git", "error: repo is required"),
            ("  ", "error: repo is required"),
        ] {
            assert_eq!(norm(input), want, "{input:?}");
        }
    }

    #[test]
    fn forks_and_clones_are_told_from_projects_by_prefix() {
        let key: ProjectKey = "p41bd34a2227aca39".parse().unwrap_or_else(|e| unreachable!("{e}"));
        assert!(key.fork().is_fork() && !key.is_fork() && !key.clone_number(1).is_fork());
        assert_eq!(key.clone_number(2).as_str(), "c2p41bd34a2227aca39");
        assert_eq!(key.cache_claim(), "cache-buildkitd-p41bd34a2227aca39-0");
    }

    #[test]
    fn each_pull_request_has_a_fork_of_its_own_whose_name_fits() {
        let mut project = Project::new("github.com/acme/shop", "", "", "amd64", true).unwrap();
        assert_eq!(project.key().as_str(), "forkp41bd34a2227aca39");
        project.pull_request = NonZeroU32::new(7);
        assert_eq!(project.key().as_str(), "fork7-p41bd34a2227aca39");
        project.pull_request = Some(NonZeroU32::MAX);
        let key = project.key();
        assert_eq!(key.as_str(), "fork4294967295-p41bd34a2227aca39");
        assert_eq!(key.pull_request(), Some(NonZeroU32::MAX));
        assert_eq!(project.canonical_key().fork().pull_request(), None);
        assert!(key.is_fork() && key.as_str().parse::<ProjectKey>() == Ok(key.clone()));
        // The label that a StatefulSet's controller puts on its pods: the name and a hash of ten.
        assert!(key.daemon().len() + "-0123456789".len() <= 63, "{}", key.daemon().len());
        project.untrusted = false;
        assert_eq!(project.key(), project.canonical_key());
    }

    #[test]
    fn a_malformed_key_is_refused() {
        for key in ["", "Not A Key!", "../secrets", "UPPER", "a-", &"k".repeat(54)] {
            assert!(key.parse::<ProjectKey>().is_err(), "{key:?}");
        }
    }
}
