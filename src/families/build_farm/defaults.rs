//! What a new project begins with, by rules over its repository: a file that the
//! server reads at its start. Pure. Projects that exist are never changed.

use glob::{MatchOptions, Pattern as Glob};
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::api::{S3CachePolicy, Tier};
use crate::identity::allowlist::{Allowlist, Pattern};
use crate::key::{Arch, Project};
use crate::manifest::{describe, parse_value};
use crate::profile::strict;
use crate::profile::syntax::{amount, is_quantity};

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

/// What is wrong with rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DefaultsFault {
    /// It cannot be read.
    #[error("want rules in YAML: {0}")]
    Syntax(String),
    /// It is no list of rules.
    #[error("want a list of rules, or a mapping with the one field rules: {0}")]
    Shape(String),
    /// Rules are wrong: every fault.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Rules(Vec<RuleFault>),
}

/// Which field of which rule is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rules[{index}]{}{field}: {what}", if field.is_empty() { "" } else { "." })]
pub struct RuleFault {
    /// The rule, counted from 0.
    pub index: usize,
    /// Its field; empty for the rule as a whole.
    pub field: String,
    /// What it may be, and what was found.
    pub what: String,
}

impl ProjectDefaults {
    /// Reads rules in YAML, of which JSON is a part. Nothing makes no rules.
    ///
    /// # Errors
    /// Every fault.
    pub fn read(text: &str) -> Result<Self, DefaultsFault> {
        let shape = |what: String| Err(DefaultsFault::Shape(what));
        let syntax = |said: String| {
            let list = if said.starts_with('[') { "rules" } else { "" };
            DefaultsFault::Syntax(format!("{list}{said}"))
        };
        match parse_value(text).map_err(syntax)? {
            Value::Null => Ok(Self::default()),
            Value::Array(rules) => Self::from_values(&rules),
            Value::Object(file) => match (file.keys().find(|key| *key != "rules"), file.get("rules")) {
                (Some(other), _) => shape(format!("unknown field {other:?}")),
                (None, None) => Ok(Self::default()),
                (None, Some(Value::Array(rules))) => Self::from_values(rules),
                (None, Some(other)) => shape(format!("rules: want a list, found {}", describe(other))),
            },
            other => shape(format!("found {}", describe(&other))),
        }
    }

    /// Checks rules as they stand among an installer's values.
    ///
    /// # Errors
    /// Every fault.
    pub fn from_values(rules: &[Value]) -> Result<Self, DefaultsFault> {
        let mut faults = Vec::new();
        let read = |(index, raw): (usize, &Value)| {
            let mut reader = Reader { index, faults: &mut faults };
            rule(raw, &mut reader)
        };
        let rules = rules.iter().enumerate().map(read).collect();
        if faults.is_empty() { Ok(Self(rules)) } else { Err(DefaultsFault::Rules(faults)) }
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

/// Gathers what is wrong with one rule.
struct Reader<'a> {
    index: usize,
    faults: &'a mut Vec<RuleFault>,
}

impl Reader<'_> {
    fn fault(&mut self, field: &str, what: String) {
        self.faults.push(RuleFault { index: self.index, field: field.to_owned(), what });
    }

    /// What was read, or a fault of a field.
    fn take<T: Default>(&mut self, field: &str, read: Result<T, String>) -> T {
        read.unwrap_or_else(|what| {
            self.fault(field, what);
            T::default()
        })
    }

    /// The fields of a mapping, which has no others.
    fn fields<'a>(&mut self, at: &str, raw: Option<&'a Value>, known: &[&str]) -> Fields<'a> {
        let Some(raw) = raw else { return Fields(None) };
        let wanted = known.join(", ");
        let Some(map) = raw.as_object() else {
            self.fault(at, format!("want a mapping of {wanted}, found {}", describe(raw)));
            return Fields(None);
        };
        for other in map.keys().filter(|key| !known.contains(&key.as_str())) {
            let field = if at.is_empty() { other.clone() } else { format!("{at}.{other}") };
            self.fault(&field, format!("unknown field, want some of {wanted}"));
        }
        Fields(Some(map))
    }
}

struct Fields<'a>(Option<&'a Map<String, Value>>);

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0?.get(name)
    }
}

fn rule(raw: &Value, reader: &mut Reader<'_>) -> Rule {
    const KNOWN: [&str; 6] = ["match", "tier", "idleTimeoutSec", "cacheVolumeGi", "s3Cache", "resources"];
    let fields = reader.fields("", Some(raw), &KNOWN);
    let matches = reader.fields("match", fields.get("match"), &["repo", "name", "arch"]);
    let resources = fields.get("resources").map_or_else(|| Ok(ResourceRequirements::default()), resources);
    Rule {
        repo: reader.take("match.repo", repos(matches.get("repo"))),
        name: reader.take("match.name", glob(matches.get("name"))),
        arch: reader.take("match.arch", word(matches.get("arch"), "amd64 or arm64")),
        seed: Seed {
            tier: reader.take("tier", word(fields.get("tier"), "hot or warm")),
            idle_timeout_sec: reader.take("idleTimeoutSec", number(fields.get("idleTimeoutSec"), i32::MAX)),
            cache_volume_gi: reader.take("cacheVolumeGi", number(fields.get("cacheVolumeGi"), 65_536)),
            s3_cache: reader.take("s3Cache", word(fields.get("s3Cache"), "cadence, always or never")),
            resources: resources.unwrap_or_else(|(field, what)| {
                reader.fault(&format!("resources{field}"), what);
                ResourceRequirements::default()
            }),
        },
    }
}

/// One pattern, or a list of them.
fn repos(raw: Option<&Value>) -> Result<Allowlist, String> {
    let wanted = |found: &Value| format!("want a repository or a list of them, found {}", describe(found));
    let patterns = match raw {
        None => return Ok(Allowlist::default()),
        Some(Value::String(text)) if text.is_empty() => return Ok(Allowlist::default()),
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    let read = |raw: &Value| {
        let text = raw.as_str().ok_or_else(|| wanted(raw))?;
        text.parse::<Pattern>().map_err(|error| error.to_string())
    };
    patterns.iter().map(read).collect::<Result<_, _>>().map(Allowlist::new)
}

/// A pattern of shells; `[^a]` as Go writes it is `[!a]` here.
fn glob(raw: Option<&Value>) -> Result<Option<Glob>, String> {
    let text = match raw {
        None => return Ok(None),
        Some(Value::String(text)) if text.is_empty() => return Ok(None),
        Some(Value::String(text)) => text,
        Some(other) => return Err(format!("want a pattern of *, ? and [a-z], found {}", describe(other))),
    };
    if text.contains('\\') || text.contains("**") {
        return Err(format!("want a pattern of *, ? and [a-z], found {text:?}; a star itself is [*]"));
    }
    let pattern = Glob::new(&text.to_lowercase().replace("[^", "[!"));
    pattern.map(Some).map_err(|error| format!("{text:?}: {}, at character {}", error.msg, error.pos))
}

/// One of an enumeration's words; empty is none.
fn word<T: for<'a> Deserialize<'a>>(raw: Option<&Value>, wanted: &str) -> Result<Option<T>, String> {
    let wrong = |found: &Value| format!("want {wanted}, found {}", describe(found));
    match raw {
        None => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(raw @ Value::String(_)) => serde_json::from_value(raw.clone()).map(Some).map_err(|_| wrong(raw)),
        Some(other) => Err(wrong(other)),
    }
}

/// Zero is none.
fn number(raw: Option<&Value>, most: i32) -> Result<Option<i32>, String> {
    let Some(raw) = raw else { return Ok(None) };
    match raw.as_i64().map(i32::try_from) {
        Some(Ok(0)) => Ok(None),
        Some(Ok(value)) if (1..=most).contains(&value) => Ok(Some(value)),
        _ => Err(format!("want a number from 1 to {most}, or 0 for the usual, found {}", describe(raw))),
    }
}

/// Requests and limits that a pod may have, or the field that is wrong.
fn resources(raw: &Value) -> Result<ResourceRequirements, (String, String)> {
    let resources: ResourceRequirements = strict::read(raw).map_err(|said| match said.split_once(": ") {
        Some((field, what)) if !field.contains(' ') => (format!(".{field}"), what.to_owned()),
        _ => (String::new(), said),
    })?;
    for (field, map) in [("requests", &resources.requests), ("limits", &resources.limits)] {
        if let Some((name, bad)) = map.iter().flatten().find(|(_, quantity)| !is_quantity(&quantity.0)) {
            let what = format!("want a quantity such as 500m or 2Gi, found {:?}", bad.0);
            return Err((format!(".{field}.{name}"), what));
        }
    }
    for (name, limit) in resources.limits.iter().flatten() {
        let Some(request) = resources.requests.as_ref().and_then(|requests| requests.get(name)) else { continue };
        if amount(&limit.0) < amount(&request.0) {
            let what = format!("want no less than the request, which is {:?}, found {:?}", request.0, limit.0);
            return Err((format!(".limits.{name}"), what));
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
            ("- teir: hot", "rules[0].teir: unknown field, want some of match, tier"),
            ("- match: {rpo: '*'}", "rules[0].match.rpo: unknown field, want some of repo, name, arch"),
            ("- {tier: hot, tier: warm}", "want rules in YAML: rules[0]: duplicate entry with key \"tier\" at line 1"),
            ("rules:\n- {}\n- {tier: hot, tier: warm}", "rules[1]: duplicate entry with key \"tier\" at line 3"),
            ("- resources: {reqests: {cpu: '1'}}", "rules[0].resources.reqests: unknown field"),
            (
                "- resources: {requests: {cpu: [2]}}",
                "rules[0].resources.requests.cpu: want a quantity such as 500m or 2Gi, found a list",
            ),
            ("- resources: 5", "rules[0].resources: want a mapping, found 5"),
            (
                "- resources: {requests: {memory: 4Gi}, limits: {memory: 4G}}",
                "rules[0].resources.limits.memory: want no less than the request, which is \"4Gi\", found \"4G\"",
            ),
            (
                "- cacheVolumeGi: lots",
                "rules[0].cacheVolumeGi: want a number from 1 to 65536, or 0 for the usual, found \"lots\"",
            ),
            ("- tier:", "rules[0].tier: want hot or warm, found null"),
            ("- match: {repo: [5]}", "rules[0].match.repo: want a repository or a list of them, found 5"),
            ("- hot", "rules[0]: want a mapping of match, tier"),
            (
                "- tier: cold\n- {}\n- {tier: hot, s3Cache: 1}",
                "found \"cold\"; rules[2].s3Cache: want cadence, always or never, found 1",
            ),
            ("rule: []", "one field rules: unknown field \"rule\""),
        ] {
            let error = ProjectDefaults::read(text).unwrap_err().to_string();
            assert!(error.contains(said), "{text}: {error}");
        }
        assert_eq!(ProjectDefaults::read("").unwrap(), ProjectDefaults::default());
    }
}
