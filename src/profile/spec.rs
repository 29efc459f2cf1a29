//! What a value may be: its type, its bounds, and what it is for.

use std::fmt;

use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::api::networking::v1::NetworkPolicyEgressRule;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::families::build_farm::defaults::ProjectDefaults;
use crate::families::build_farm::scheduling::Scheduling;
use crate::identity::allowlist::Pattern;
use crate::identity::authorities;
use crate::identity::config::check_providers;
use crate::manifest::{describe, parse_value};
use crate::runtime::network::{is_cidr, is_network};
use crate::sni::Domains;

use super::{strict, syntax};

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Type {
    /// Any text.
    String,
    /// A whole number.
    Int,
    /// `true` or `false`.
    Bool,
    /// `90s`, `5m`, `1h 30m`; reaches templates in seconds, as `90s`.
    Duration,
    /// A Kubernetes quantity: `500m`, `2Gi`.
    Quantity,
    /// A DNS name without wildcard.
    Host,
    /// A pinned image reference: with a digest, or a tag other than `latest`.
    Image,
    /// A list of `items`.
    List,
    /// A mapping of names to `items`; without `items`, to anything.
    Map,
    /// One of `choices`.
    Enum,
}

/// A stricter form of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// A DNS-1123 label, as namespaces have: at most 63 of `a-z`, `0-9`, `-`.
    Label,
    /// A DNS-1123 subdomain, as most objects have.
    Name,
    /// Which repositories: `*`, `github.com/acme/*`, `github.com/acme/shop`.
    Pattern,
    /// A list of identity providers.
    Providers,
    /// Domains of the gateway, as it reads them itself.
    Domains,
    /// A list of rules for new projects.
    Rules,
    /// An address, or a network as `address/prefix`.
    Network,
    /// A network as `address/prefix`.
    Cidr,
    /// Certificates in PEM; nothing is none.
    Authorities,
    /// A registry with or without a path; nothing is none.
    Registry,
    /// `http://HOST:PORT`; nothing is none.
    Proxy,
    /// Registries, each with its mirrors.
    Mirrors,
    /// On which nodes daemons run.
    Scheduling,
    /// A list of tolerations of a pod.
    Tolerations,
    /// A list of egress rules, as in a NetworkPolicy.
    Egress,
}

/// How one value is declared in a `component.yaml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValueSpec {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: Type,
    /// What it is when nobody says otherwise.
    pub default: Value,
    /// What it is for: one line.
    pub description: String,
    /// Least number.
    pub min: Option<i64>,
    /// Greatest number.
    pub max: Option<i64>,
    /// What an enum may be.
    #[serde(default)]
    pub choices: Vec<String>,
    /// A stricter form of text.
    pub format: Option<Format>,
    /// Type of a list's or map's items.
    pub items: Option<Type>,
    /// Whether the empty string stands for "none".
    #[serde(default)]
    pub optional: bool,
    /// Whether it is never printed and never recorded.
    #[serde(default)]
    pub secret: bool,
}

impl ValueSpec {
    /// Checks a value and brings it to the form that templates see.
    ///
    /// # Errors
    /// What was wanted and what was found; the value itself unless it is secret.
    pub fn accept(&self, raw: &Value) -> Result<Value, String> {
        self.accept_as(self.kind, raw).map_err(|problem| match (self.secret, problem) {
            (true, _) => format!("want {}, found something else (the value is secret and not shown)", self.wanted()),
            (false, Problem(message)) => message,
        })
    }

    /// Reads the text of `--set NAME=TEXT`.
    ///
    /// # Errors
    /// What was wanted and what was found.
    pub fn read(&self, text: &str) -> Result<Value, String> {
        let raw = match self.kind {
            Type::List | Type::Map if text.starts_with(['[', '{']) => {
                parse_value(text).map_err(|error| format!("want {} in YAML: {error}", self.wanted()))?
            }
            Type::Int => text.parse::<i64>().map_or_else(|_| text.into(), Value::from),
            Type::Bool => text.parse::<bool>().map_or_else(|_| text.into(), Value::from),
            Type::List if text.is_empty() => Value::Array(Vec::new()),
            Type::List => text.split(',').map(|item| self.read_item(item.trim())).collect(),
            Type::Map if text.is_empty() => Value::Object(Map::new()),
            Type::Map => parse_value(text).unwrap_or_else(|_| text.into()),
            _ => text.into(),
        };
        self.accept(&raw)
    }

    /// Reads one item of a list or map from the command line.
    pub(super) fn read_item(&self, text: &str) -> Value {
        match self.items {
            Some(Type::Int) => text.parse::<i64>().map_or_else(|_| text.into(), Value::from),
            Some(Type::Bool) => text.parse::<bool>().map_or_else(|_| text.into(), Value::from),
            _ => text.into(),
        }
    }

    /// For people: `int`, `list of host`, `enum (ClusterIP, NodePort)`.
    pub fn type_name(&self) -> String {
        match (self.kind, self.items) {
            (Type::Enum, _) => format!("enum ({})", self.choices.join(", ")),
            (Type::List | Type::Map, Some(items)) => format!("{} of {items}", self.kind),
            (kind, _) => kind.to_string(),
        }
    }

    /// A printable value: what is secret is not.
    pub fn show(&self, value: &Value) -> Value {
        if self.secret && value != "" { "(secret)".into() } else { value.clone() }
    }

    fn accept_as(&self, kind: Type, raw: &Value) -> Result<Value, Problem> {
        let problem = || Problem::new(&self.wanted_as(kind), &describe(raw));
        if self.optional && raw == "" && kind == self.kind {
            return Ok(raw.clone());
        }
        let text = || raw.as_str().ok_or_else(problem);
        match kind {
            Type::Bool => raw.is_boolean().then(|| raw.clone()).ok_or_else(problem),
            Type::Int => {
                let number = raw.as_i64().ok_or_else(problem)?;
                self.within(number).then(|| raw.clone()).ok_or_else(problem)
            }
            Type::String => {
                let text = text()?;
                let valid = match self.format {
                    None => true,
                    Some(Format::Label) => syntax::is_label(text),
                    Some(Format::Name) => syntax::is_host(text),
                    Some(Format::Pattern) => text.parse::<Pattern>().is_ok(),
                    Some(Format::Network) => is_network(text),
                    Some(Format::Cidr) => is_cidr(text),
                    Some(Format::Registry) => text.is_empty() || syntax::is_registry(text),
                    Some(Format::Proxy) if text.is_empty() || syntax::is_proxy(text) => true,
                    Some(Format::Proxy) => {
                        return Err(Problem::new(&self.wanted(), "something else (not shown: it may hold a password)"));
                    }
                    Some(Format::Authorities) if text.is_empty() || authorities::check(text).is_ok() => true,
                    // A whole file: not for a message.
                    Some(Format::Authorities) => return Err(Problem::new(&self.wanted(), "none")),
                    Some(_) => false,
                };
                valid.then(|| raw.clone()).ok_or_else(problem)
            }
            Type::Enum => self.choices.iter().any(|choice| raw == choice).then(|| raw.clone()).ok_or_else(problem),
            Type::Duration => {
                let duration = syntax::duration(text()?).ok_or_else(problem)?;
                let seconds = i64::try_from(duration.as_secs()).map_err(|_| problem())?;
                self.within(seconds).then(|| format!("{seconds}s").into()).ok_or_else(problem)
            }
            // A CPU count is a number to people, and a string to the API server.
            Type::Quantity if raw.is_u64() => Ok(raw.to_string().into()),
            Type::Quantity => syntax::is_quantity(text()?).then(|| raw.clone()).ok_or_else(problem),
            Type::Host => syntax::is_host(text()?).then(|| raw.clone()).ok_or_else(problem),
            Type::Image => syntax::image(text()?).map(|()| raw.clone()).map_err(|_| problem()),
            Type::List => self.accept_list(raw),
            Type::Map => self.accept_map(kind, raw),
        }
    }

    fn accept_list(&self, raw: &Value) -> Result<Value, Problem> {
        let list = raw.as_array().ok_or_else(|| Problem::new(&self.wanted(), &describe(raw)))?;
        let item = |(position, item): (usize, &Value)| match self.items {
            Some(kind) => self.accept_as(kind, item).map_err(|problem| problem.at(&format!("item {position}"))),
            None => Ok(item.clone()),
        };
        let list = all(list.iter().enumerate().map(item))?;
        self.check_list(&list)?;
        Ok(list.into())
    }

    /// A list with a parser of its own.
    fn check_list(&self, items: &[Value]) -> Result<(), Problem> {
        match self.format {
            Some(Format::Providers) => check_providers(items).map_err(|faults| {
                let faults = faults.iter().map(|(position, what)| format!("a wrong one as item {position}: {what}"));
                Problem::new("identity providers", &faults.collect::<Vec<_>>().join("; "))
            }),
            Some(Format::Domains) if !items.is_empty() => {
                let names = items.iter().filter_map(Value::as_str).map(str::to_owned).collect();
                Domains::new(names).map(drop).map_err(|error| Problem(error.to_string()))
            }
            Some(Format::Rules) => {
                ProjectDefaults::from_values(items).map(drop).map_err(|fault| Problem(fault.to_string()))
            }
            Some(Format::Tolerations) => {
                each(items, |item| strict::read::<Toleration>(item).map(drop)).map_err(Problem)
            }
            Some(Format::Egress) => each(items, egress).map_err(Problem),
            _ => Ok(()),
        }
    }

    fn accept_map(&self, kind: Type, raw: &Value) -> Result<Value, Problem> {
        let map = raw.as_object().ok_or_else(|| Problem::new(&self.wanted_as(kind), &describe(raw)))?;
        if self.format == Some(Format::Mirrors) {
            mirrors(map).map_err(Problem)?;
        }
        if self.format == Some(Format::Scheduling) {
            raw.to_string().parse::<Scheduling>().map_err(|error| Problem(error.to_string()))?;
        }
        // Items of a list of maps are free in form.
        let items = if self.kind == Type::Map { self.items } else { None };
        let entry = |(name, item): (&String, &Value)| match items {
            Some(kind) => {
                let item = self.accept_as(kind, item).map_err(|problem| problem.at(&format!("\"{name}\"")))?;
                Ok((name.clone(), item))
            }
            None => Ok((name.clone(), item.clone())),
        };
        Ok(Value::Object(all(map.iter().map(entry))?.into_iter().collect()))
    }

    fn within(&self, number: i64) -> bool {
        self.min.is_none_or(|min| number >= min) && self.max.is_none_or(|max| number <= max)
    }

    fn wanted(&self) -> String {
        self.wanted_as(self.kind)
    }

    fn wanted_as(&self, kind: Type) -> String {
        let unit = if kind == Type::Duration { " seconds" } else { "" };
        let bounds = match (self.min, self.max) {
            (Some(min), Some(max)) => format!(" from {min} to {max}{unit}"),
            (Some(min), None) => format!(" of at least {min}{unit}"),
            (None, Some(max)) => format!(" of at most {max}{unit}"),
            (None, None) => String::new(),
        };
        let wanted = match kind {
            Type::String => match self.format {
                None => "a string",
                Some(Format::Label) => "a name of at most 63 of a-z, 0-9 and -",
                Some(Format::Name) => "a name of a-z, 0-9, - and .",
                Some(Format::Pattern) => "\"*\", \"host/owner/*\" or \"host/owner/repository\"",
                Some(Format::Network) => "an address, or a network such as 10.0.0.0/8",
                Some(Format::Cidr) => "a network such as 10.0.0.0/8",
                Some(Format::Registry) => "a registry such as registry.example.com/mirror",
                Some(Format::Proxy) => "a proxy such as http://proxy.example.com:3128, without user and password",
                Some(Format::Authorities) => "certificates in PEM, at least one, that can be used",
                Some(_) => "a text of another form",
            },
            Type::Int => return format!("an integer{bounds}"),
            Type::Bool => "true or false",
            Type::Duration => return format!("a duration such as \"90s\" or \"5m\"{bounds}"),
            Type::Quantity => "a quantity such as \"500m\" or \"2Gi\"",
            Type::Host => "a DNS name in lower case, without scheme, port or wildcard",
            Type::Image => "an image with a digest, or a tag other than latest",
            Type::List => "a list",
            Type::Map => "a mapping",
            Type::Enum => return format!("one of {}", self.choices.join(", ")),
        };
        wanted.to_owned()
    }
}

/// `host`, `int`: as in a `component.yaml`.
impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::String => "string",
            Self::Int => "int",
            Self::Bool => "bool",
            Self::Duration => "duration",
            Self::Quantity => "quantity",
            Self::Host => "host",
            Self::Image => "image",
            Self::List => "list",
            Self::Map => "map",
            Self::Enum => "enum",
        })
    }
}

/// A rule of a NetworkPolicy, and what of it the API server would refuse.
fn egress(item: &Value) -> Result<(), String> {
    let rule: NetworkPolicyEgressRule = strict::read(item)?;
    for (at, port) in rule.ports.iter().flatten().enumerate() {
        if let Some(other) = port.protocol.as_deref().filter(|name| !matches!(*name, "TCP" | "UDP" | "SCTP")) {
            return Err(format!("ports[{at}].protocol: want TCP, UDP or SCTP, found {other:?}"));
        }
    }
    for (at, block) in rule.to.iter().flatten().enumerate().filter_map(|(at, peer)| Some((at, peer.ip_block.as_ref()?)))
    {
        let networks = std::iter::once(&block.cidr).chain(block.except.iter().flatten());
        if let Some(bad) = networks.into_iter().find(|network| !is_cidr(network)) {
            return Err(format!("to[{at}].ipBlock: want networks such as 10.0.0.0/8, found {bad:?}"));
        }
    }
    Ok(())
}

/// Registries, each with the mirrors that are asked first.
fn mirrors(map: &Map<String, Value>) -> Result<(), String> {
    for (registry, mirrors) in map {
        if !syntax::is_registry(registry) || registry.contains('/') {
            return Err(format!("want registries such as docker.io, found {registry:?}"));
        }
        let list = mirrors.as_array().filter(|list| !list.is_empty());
        let list =
            list.ok_or_else(|| format!("\"{registry}\": want a list of mirrors, found {}", describe(mirrors)))?;
        let good = |mirror: &&Value| mirror.as_str().is_some_and(syntax::is_registry);
        if let Some(bad) = list.iter().find(|mirror| !good(mirror)) {
            let wanted = "want mirrors such as mirror.example.com/hub";
            return Err(format!("\"{registry}\": {wanted}, found {}", describe(bad)));
        }
    }
    Ok(())
}

/// Every fault of a list.
fn each(items: &[Value], check: impl Fn(&Value) -> Result<(), String>) -> Result<(), String> {
    let fault = |(at, item): (usize, &Value)| check(item).err().map(|what| format!("item {at}: {what}"));
    let faults: Vec<String> = items.iter().enumerate().filter_map(fault).collect();
    if faults.is_empty() { Ok(()) } else { Err(faults.join("; ")) }
}

/// Every item, or every problem.
fn all<T>(items: impl Iterator<Item = Result<T, Problem>>) -> Result<Vec<T>, Problem> {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    for item in items {
        match item {
            Ok(item) => good.push(item),
            Err(Problem(what)) => bad.push(what),
        }
    }
    if bad.is_empty() { Ok(good) } else { Err(Problem(bad.join("; "))) }
}

/// What was wanted and what was found.
struct Problem(String);

impl Problem {
    fn new(wanted: &str, found: &str) -> Self {
        Self(format!("want {wanted}, found {found}"))
    }

    fn at(self, place: &str) -> Self {
        Self(format!("{} as {place}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn spec(yaml: &str) -> ValueSpec {
        serde_yaml::from_str(&format!("{{default: null, description: d, {yaml}}}")).unwrap()
    }

    #[test]
    fn each_type_takes_what_it_should_and_says_what_it_wants() {
        let table: &[(&str, Value, Result<Value, &str>)] = &[
            ("type: string", json!("a\nkind: Secret"), Ok(json!("a\nkind: Secret"))),
            ("type: string", json!(1), Err("want a string, found 1")),
            ("type: string", json!(null), Err("want a string, found null")),
            ("type: string, format: label", json!("a-b"), Ok(json!("a-b"))),
            (
                "type: string, format: label",
                json!("a.b"),
                Err("want a name of at most 63 of a-z, 0-9 and -, found \"a.b\""),
            ),
            ("type: string, format: name", json!("a_b"), Err("want a name of a-z, 0-9, - and ., found \"a_b\"")),
            ("type: string, format: name, optional: true", json!(""), Ok(json!(""))),
            ("type: int, min: 1, max: 9", json!(9), Ok(json!(9))),
            ("type: int, min: 1, max: 9", json!(10), Err("want an integer from 1 to 9, found 10")),
            ("type: int, min: 0", json!(-1), Err("want an integer of at least 0, found -1")),
            ("type: int", json!("1"), Err("want an integer, found \"1\"")),
            ("type: int", json!(1.5), Err("want an integer, found 1.5")),
            ("type: bool", json!("yes"), Err("want true or false, found \"yes\"")),
            ("type: bool", json!(false), Ok(json!(false))),
            ("type: duration", json!("1m 30s"), Ok(json!("90s"))),
            ("type: duration", json!(90), Err("want a duration such as \"90s\" or \"5m\", found 90")),
            ("type: duration", json!("90"), Err("want a duration such as \"90s\" or \"5m\", found \"90\"")),
            (
                "type: duration, max: 60",
                json!("2m"),
                Err("want a duration such as \"90s\" or \"5m\" of at most 60 seconds, found \"2m\""),
            ),
            ("type: quantity", json!(2), Ok(json!("2"))),
            ("type: quantity", json!("1.5Gi"), Ok(json!("1.5Gi"))),
            ("type: quantity", json!("1.5 Gi"), Err("want a quantity such as \"500m\" or \"2Gi\", found \"1.5 Gi\"")),
            (
                "type: host",
                json!("*.a.b"),
                Err("want a DNS name in lower case, without scheme, port or wildcard, found \"*.a.b\""),
            ),
            (
                "type: image",
                json!("a/b:latest"),
                Err("want an image with a digest, or a tag other than latest, found \"a/b:latest\""),
            ),
            ("type: image", json!("r:5000/a/b:1"), Ok(json!("r:5000/a/b:1"))),
            ("type: enum, choices: [a, b]", json!("c"), Err("want one of a, b, found \"c\"")),
            (
                "type: list, items: host",
                json!(["a.b", "A"]),
                Err("want a DNS name in lower case, without scheme, port or wildcard, found \"A\" as item 1"),
            ),
            ("type: list, items: map", json!([{"a": 1}]), Ok(json!([{"a": 1}]))),
            ("type: list, items: map", json!(["a"]), Err("want a mapping, found \"a\" as item 0")),
            ("type: list", json!("a"), Err("want a list, found \"a\"")),
            (
                "type: list, items: string, format: pattern",
                json!(["github.com/acme/*", "github.com/ac*"]),
                Err("want \"*\", \"host/owner/*\" or \"host/owner/repository\", found \"github.com/ac*\" as item 1"),
            ),
            (
                "type: list, items: map, format: providers",
                json!([{"type": "github"}, {"type": "forgejo"}]),
                Err(
                    "want identity providers, found a wrong one as item 1: issuer: is missing; type \"forgejo\" needs it",
                ),
            ),
            ("type: list, items: map, format: providers", json!([{"type": "github"}]), Ok(json!([{"type": "github"}]))),
            (
                "type: list, items: map, format: providers",
                json!([{"type": "github", "caFile": "/ca.pem"}]),
                Err("want identity providers, found a wrong one as item 0: caFile: nothing mounts such a file in a \
                     cluster; put the authority into oidc.caBundle"),
            ),
            (
                "type: list, items: string, format: network",
                json!(["10.0.0.0/8", "::1"]),
                Ok(json!(["10.0.0.0/8", "::1"])),
            ),
            (
                "type: list, items: string, format: network",
                json!(["10.0.0.1", "10.0.0.0/33"]),
                Err("want an address, or a network such as 10.0.0.0/8, found \"10.0.0.0/33\" as item 1"),
            ),
            (
                "type: list, items: string, format: cidr",
                json!(["192.0.2.1"]),
                Err("want a network such as 10.0.0.0/8, found \"192.0.2.1\" as item 0"),
            ),
            ("type: string, format: authorities", json!(""), Ok(json!(""))),
            (
                "type: string, format: authorities",
                json!("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
                Err("want certificates in PEM, at least one, that can be used, found none"),
            ),
            ("type: map, format: scheduling", json!({"pinArch": false}), Ok(json!({"pinArch": false}))),
            (
                "type: map, format: scheduling",
                json!({"nodeSelector": {"a": 1}}),
                Err("nodeSelector.a: want a string, found 1"),
            ),
            (
                "type: list, items: map, format: tolerations",
                json!([{"key": "a", "efect": "NoSchedule"}, {"operator": 1}]),
                Err("item 0: efect: unknown field; item 1: operator: want a string, found 1"),
            ),
            (
                "type: list, items: map, format: egress",
                json!([
                    {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}], "ports": [{"port": 5000, "protocol": "TCP"}]},
                    {"too": []},
                    {"to": [{"ipBlock": {"cidr": "10.1.0.0"}}]},
                    {"ports": [{"protocol": "tcp"}]},
                    {"ports": [{"prt": 1}]},
                ]),
                Err("item 1: too: unknown field; item 2: to[0].ipBlock: want networks such as 10.0.0.0/8, found \
                     \"10.1.0.0\"; item 3: ports[0].protocol: want TCP, UDP or SCTP, found \"tcp\"; item 4: \
                     ports[0].prt: unknown field"),
            ),
            ("type: map, items: string", json!({"a": true}), Err("want a string, found true as \"a\"")),
            ("type: map", json!({"a": {"b": [1]}}), Ok(json!({"a": {"b": [1]}}))),
            (
                "type: string, format: label, secret: true",
                json!("Hush!"),
                Err(
                    "want a name of at most 63 of a-z, 0-9 and -, found something else (the value is secret and not shown)",
                ),
            ),
        ];
        for (yaml, raw, expected) in table {
            assert_eq!(spec(yaml).accept(raw), expected.clone().map_err(str::to_owned), "{yaml} {raw}");
        }
    }

    #[test]
    fn the_command_line_is_read_by_type() {
        let table: &[(&str, &str, Value)] = &[
            ("type: string", "8080", json!("8080")),
            ("type: string", "true", json!("true")),
            ("type: int", "8080", json!(8080)),
            ("type: bool", "true", json!(true)),
            ("type: quantity", "2", json!("2")),
            ("type: list, items: host", "a.b, c.d", json!(["a.b", "c.d"])),
            ("type: list, items: int", "1,2", json!([1, 2])),
            ("type: list, items: host", "", json!([])),
            ("type: list, items: map", "[{a: 1}]", json!([{"a": 1}])),
            ("type: map", "{a: b}", json!({"a": "b"})),
            ("type: map", "a: b", json!({"a": "b"})),
        ];
        for (yaml, text, expected) in table {
            assert_eq!(spec(yaml).read(text).as_ref(), Ok(expected), "{yaml} {text}");
        }
        assert_eq!(spec("type: bool").read("yes"), Err("want true or false, found \"yes\"".to_owned()));
        assert_eq!(spec("type: map").read("a"), Err("want a mapping, found \"a\"".to_owned()));
        let twice = spec("type: list, items: map").read("[{a: 1, a: 2}]").unwrap_err();
        assert!(twice.contains("duplicate entry with key \"a\""), "{twice}");
    }
}
