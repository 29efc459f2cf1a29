//! What a new project begins with, by rules over its repository: a file that the
//! server reads at its start. Pure. Projects that exist are never changed.

use glob::{MatchOptions, Pattern as Glob};
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde::Deserialize;
use serde_json::Value;

use super::api::{S3CachePolicy, Tier};
use crate::identity::allowlist::{Allowlist, Pattern};
use crate::key::{Arch, Project};
use crate::profile::syntax::is_quantity;

/// Rules, of which the first that matches a new project counts, alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProjectDefaults(Vec<Rule>);

#[derive(Clone, Debug, PartialEq)]
struct Rule {
    repo: Allowlist,
    name: Option<Glob>,
    arch: Option<Arch>,
    seed: Seed,
}

/// What a rule says of a new project. What it leaves out is as without it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seed {
    /// Whether the daemon ever scales to zero.
    pub tier: Option<Tier>,
    /// Seconds without a build after which it does.
    pub idle_timeout_sec: Option<i32>,
    /// Size of the cache volume.
    pub cache_volume_gi: Option<i32>,
    /// When builds export to the cold cache.
    pub s3_cache: Option<S3CachePolicy>,
    /// Requests and limits of the daemon's container.
    pub resources: ResourceRequirements,
}

/// Which rule is wrong, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DefaultsFault {
    /// It is no list of rules.
    #[error("want a list of rules, or a mapping with the one field rules: {0}")]
    Shape(String),
    /// A rule is wrong.
    #[error("rules[{index}].{what}")]
    Rule {
        /// Counted from 0.
        index: usize,
        /// Its field, what it may be, and what was found.
        what: String,
    },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    rules: Vec<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RawRule {
    #[serde(default, rename = "match")]
    matches: RawMatch,
    #[serde(default)]
    tier: String,
    #[serde(default)]
    idle_timeout_sec: i64,
    #[serde(default)]
    cache_volume_gi: i64,
    #[serde(default)]
    s3_cache: String,
    #[serde(default)]
    resources: ResourceRequirements,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMatch {
    #[serde(default)]
    repo: OneOrMore,
    #[serde(default)]
    name: String,
    #[serde(default)]
    arch: String,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(String),
    More(Vec<String>),
}

impl Default for OneOrMore {
    fn default() -> Self {
        Self::More(Vec::new())
    }
}

impl ProjectDefaults {
    /// Reads rules in YAML, of which JSON is a part. Nothing makes no rules.
    ///
    /// # Errors
    /// The first fault.
    pub fn read(text: &str) -> Result<Self, DefaultsFault> {
        let shape = |error: &dyn std::fmt::Display| DefaultsFault::Shape(error.to_string());
        let raw: Option<Value> = serde_yaml::from_str(text).map_err(|error| shape(&error))?;
        match raw {
            None => Ok(Self::default()),
            Some(Value::Array(rules)) => Self::from_values(&rules),
            Some(file) => {
                let file: File = serde_json::from_value(file).map_err(|error| shape(&error))?;
                Self::from_values(&file.rules)
            }
        }
    }

    /// Checks rules as they stand among an installer's values.
    ///
    /// # Errors
    /// The first fault.
    pub fn from_values(rules: &[Value]) -> Result<Self, DefaultsFault> {
        let read = |(index, raw): (usize, &Value)| rule(raw).map_err(|what| DefaultsFault::Rule { index, what });
        rules.iter().enumerate().map(read).collect::<Result<_, _>>().map(Self)
    }

    /// What a new project begins with. A fork lives by its own rules, so that no
    /// code of strangers keeps a daemon for ever; only its size counts.
    pub fn seed(&self, project: &Project) -> Seed {
        let seed = self.0.iter().find(|rule| rule.matches(project)).map(|rule| rule.seed.clone()).unwrap_or_default();
        if project.untrusted { Seed { tier: None, idle_timeout_sec: None, s3_cache: None, ..seed } } else { seed }
    }
}

impl Rule {
    fn matches(&self, project: &Project) -> bool {
        let options = MatchOptions { require_literal_separator: true, ..MatchOptions::default() };
        self.repo.allows(&project.repo)
            && self.name.as_ref().is_none_or(|name| name.matches_with(&project.name, options))
            && self.arch.is_none_or(|arch| arch == project.arch)
    }
}

fn rule(raw: &Value) -> Result<Rule, String> {
    let raw: RawRule = serde_json::from_value(raw.clone()).map_err(|error| format!("{error}"))?;
    let RawRule { matches, tier, idle_timeout_sec, cache_volume_gi, s3_cache, resources } = raw;
    let repos = match matches.repo {
        OneOrMore::One(repo) if repo.is_empty() => Vec::new(),
        OneOrMore::One(repo) => vec![repo],
        OneOrMore::More(repos) => repos,
    };
    let repos = repos.iter().map(|repo| repo.parse::<Pattern>()).collect::<Result<Vec<_>, _>>();
    Ok(Rule {
        repo: Allowlist::new(repos.map_err(|error| format!("match.repo: {error}"))?),
        name: glob(&matches.name)?,
        arch: word("match.arch", &matches.arch, "amd64 or arm64")?,
        seed: Seed {
            tier: word("tier", &tier, "hot or warm")?,
            idle_timeout_sec: number("idleTimeoutSec", idle_timeout_sec, i32::MAX)?,
            cache_volume_gi: number("cacheVolumeGi", cache_volume_gi, 65_536)?,
            s3_cache: word("s3Cache", &s3_cache, "cadence, always or never")?,
            resources: quantities(resources)?,
        },
    })
}

/// A pattern of shells; `[^a]` as Go writes it is `[!a]` here.
fn glob(text: &str) -> Result<Option<Glob>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    if text.contains('\\') || text.contains("**") {
        return Err(format!("match.name: want a pattern of *, ? and [a-z], found {text:?}; a star itself is [*]"));
    }
    let pattern = Glob::new(&text.to_lowercase().replace("[^", "[!"));
    pattern.map(Some).map_err(|error| format!("match.name: {text:?}: {}, at character {}", error.msg, error.pos))
}

/// One of an enumeration's words; empty is none.
fn word<T: for<'a> Deserialize<'a>>(field: &str, text: &str, wanted: &str) -> Result<Option<T>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let parsed = serde_json::from_value(Value::from(text));
    parsed.map(Some).map_err(|_| format!("{field}: want {wanted}, found {text:?}"))
}

/// Zero is none.
fn number(field: &str, value: i64, most: i32) -> Result<Option<i32>, String> {
    match i32::try_from(value) {
        Ok(0) => Ok(None),
        Ok(value) if (1..=most).contains(&value) => Ok(Some(value)),
        _ => Err(format!("{field}: want a number from 1 to {most}, or 0 for the usual, found {value}")),
    }
}

fn quantities(resources: ResourceRequirements) -> Result<ResourceRequirements, String> {
    for (field, map) in [("requests", &resources.requests), ("limits", &resources.limits)] {
        if let Some((name, bad)) = map.iter().flatten().find(|(_, quantity)| !is_quantity(&quantity.0)) {
            return Err(format!("resources.{field}.{name}: want a quantity such as 500m or 2Gi, found {:?}", bad.0));
        }
    }
    Ok(resources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::Repo;

    fn project(repo: &str, name: &str, arch: Arch) -> Project {
        Project {
            repo: Repo::normalize(repo).unwrap(),
            name: name.to_owned(),
            target: "default".to_owned(),
            arch,
            untrusted: false,
            pull_request: None,
        }
    }

    const FILE: &str = "\
rules:
  - match: {repo: github.com/acme/*, name: 'api-*', arch: arm64}
    tier: hot
    resources: {requests: {memory: 4Gi}}
  - match: {repo: [github.com/acme/shop, gitlab.com/acme/*]}
    idleTimeoutSec: 3600
    cacheVolumeGi: 200
    s3Cache: never
  - cacheVolumeGi: 0
    tier: ''
";

    #[test]
    fn the_first_rule_that_matches_counts_alone() {
        let defaults = ProjectDefaults::read(FILE).unwrap();
        let seed = |repo, name, arch| defaults.seed(&project(repo, name, arch));
        let hot = seed("github.com/acme/shop", "api-v1", Arch::Arm64);
        assert_eq!((hot.tier, hot.cache_volume_gi), (Some(Tier::Hot), None), "rules are not merged");
        assert_eq!(hot.resources.requests.unwrap()["memory"].0, "4Gi");
        let large = seed("https://github.com/Acme/shop.git", "api-v1", Arch::Amd64);
        assert_eq!((large.tier, large.idle_timeout_sec, large.cache_volume_gi), (None, Some(3600), Some(200)));
        assert_eq!(large.s3_cache, Some(S3CachePolicy::Never));
        assert_eq!(seed("gitlab.com/acme/deep/er", "", Arch::Amd64), Seed { ..large });
        // Zero and empty values leave the usual ones.
        assert_eq!(seed("github.com/other/shop", "", Arch::Amd64), Seed::default());
    }

    #[test]
    fn a_fork_is_sized_and_no_more() {
        let rule = "[{tier: hot, idleTimeoutSec: 9, s3Cache: always, cacheVolumeGi: 7}]";
        let fork = Project { untrusted: true, ..project("github.com/acme/shop", "", Arch::Amd64) };
        let seed = ProjectDefaults::read(rule).unwrap().seed(&fork);
        assert_eq!(seed, Seed { cache_volume_gi: Some(7), ..Seed::default() });
    }

    #[test]
    fn names_match_as_in_a_shell() {
        for (pattern, name, matches) in [
            ("api-*", "api-v1", true),
            ("API-*", "api-v1", true),
            ("api-*", "web-v1", false),
            ("api-?", "api-10", false),
            ("[a-c]*", "bee", true),
            ("[^a-c]*", "bee", false),
            ("[!a-c]*", "zoo", true),
            ("*", "a/b", false),
            ("*/*", "a/b", true),
            ("", "anything", true),
            ("[*]", "*", true),
        ] {
            let rule = serde_json::json!([{"match": {"name": pattern}, "tier": "hot"}]);
            let defaults = ProjectDefaults::from_values(rule.as_array().unwrap()).unwrap();
            let seed = defaults.seed(&project("github.com/acme/shop", name, Arch::Amd64));
            assert_eq!(seed.tier.is_some(), matches, "{pattern} {name}");
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (text, said) in [
            ("rules: 5", "want a list of rules"),
            ("- match: {repo: 'github.com/*/x'}", "rules[0].match.repo: want \"*\""),
            ("- {}\n- match: {name: '[a'}", "rules[1].match.name: \"[a\""),
            ("- match: {name: 'a\\*'}", "a star itself is [*]"),
            ("- match: {arch: x86}", "rules[0].match.arch: want amd64 or arm64, found \"x86\""),
            ("- tier: cold", "rules[0].tier: want hot or warm, found \"cold\""),
            ("- s3Cache: sometimes", "rules[0].s3Cache: want cadence, always or never, found \"sometimes\""),
            ("- idleTimeoutSec: -1", "rules[0].idleTimeoutSec: want a number from 1 to 2147483647"),
            ("- cacheVolumeGi: 65537", "rules[0].cacheVolumeGi: want a number from 1 to 65536"),
            ("- resources: {limits: {memory: lots}}", "rules[0].resources.limits.memory: want a quantity"),
            ("- teir: hot", "unknown field `teir`"),
        ] {
            let error = ProjectDefaults::read(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        assert_eq!(ProjectDefaults::read("").unwrap(), ProjectDefaults::default());
    }
}
