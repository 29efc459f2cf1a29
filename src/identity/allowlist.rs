//! Which repositories may build. Pure; no IO.

use std::str::FromStr;

use crate::key::{KeyError, Repo};

/// Patterns, of which one must match; none at all lets everybody in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowlist(Vec<Pattern>);

/// `*`, `prefix/*`, or one repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Every repository.
    Any,
    /// This, and everything below it.
    Below(Repo),
    /// This alone.
    Exactly(Repo),
}

/// Why a text is no pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParsePattern {
    /// A star in another place.
    #[error("want \"*\", \"host/owner/*\" or \"host/owner/repository\", found {0:?}")]
    Star(String),
    /// No repository.
    #[error("{pattern:?}: {source}")]
    Repo {
        /// The pattern.
        pattern: String,
        /// Why.
        source: KeyError,
    },
}

impl FromStr for Pattern {
    type Err = ParsePattern;

    fn from_str(s: &str) -> Result<Self, ParsePattern> {
        let s = s.trim();
        if s == "*" {
            return Ok(Self::Any);
        }
        let (text, below) = s.strip_suffix("/*").map_or((s, false), |prefix| (prefix, true));
        if text.contains('*') {
            return Err(ParsePattern::Star(s.to_owned()));
        }
        let repo = Repo::normalize(text).map_err(|source| ParsePattern::Repo { pattern: s.to_owned(), source })?;
        Ok(if below { Self::Below(repo) } else { Self::Exactly(repo) })
    }
}

impl Pattern {
    fn matches(&self, repo: &Repo) -> bool {
        match self {
            Self::Any => true,
            Self::Exactly(exact) => exact == repo,
            Self::Below(prefix) => {
                repo.as_str().strip_prefix(prefix.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
        }
    }
}

impl Allowlist {
    /// Of patterns.
    pub fn new(patterns: Vec<Pattern>) -> Self {
        Self(patterns)
    }

    /// Whether nothing is listed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a repository may build.
    pub fn allows(&self, repo: &Repo) -> bool {
        self.0.is_empty() || self.0.iter().any(|pattern| pattern.matches(repo))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_cross_slashes_and_end_at_one() {
        for (pattern, repo, allowed) in [
            ("*", "github.com/acme/shop", true),
            ("github.com/acme/*", "github.com/acme/shop", true),
            ("github.com/acme/*", "github.com/acme/group/shop", true),
            ("github.com/acme/*", "github.com/acme", true),
            ("github.com/acme/*", "github.com/acme-evil/shop", false),
            ("GitHub.com/Acme/*", "github.com/acme/shop", true),
            ("github.com/acme/shop", "github.com/acme/shop", true),
            ("https://github.com/acme/shop.git", "github.com/acme/shop", true),
            ("github.com/acme/shop", "github.com/acme/shop2", false),
            ("github.com/acme/shop", "github.com/acme/shop/sub", false),
        ] {
            let list = Allowlist::new(vec![pattern.parse().unwrap()]);
            assert_eq!(list.allows(&Repo::normalize(repo).unwrap()), allowed, "{pattern} {repo}");
        }
        assert!(Allowlist::default().allows(&Repo::normalize("a/b").unwrap()));
    }

    #[test]
    fn a_star_elsewhere_is_no_pattern() {
        for bad in ["github.com/ac*", "*/shop", "github.com/*/shop", "**", "", "/*"] {
            assert!(bad.parse::<Pattern>().is_err(), "{bad:?}");
        }
    }
}
