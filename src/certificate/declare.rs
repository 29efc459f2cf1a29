//! `certs/*.yaml` → [`CertificateSpec`]. YAML is parsed first and each scalar
//! is rendered then, unescaped, so that no value can inject structure. All
//! faults are reported at once, each with its file and field.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use serde_yaml::{Mapping, Value};

use super::{CertificateSpec, Role, Usage};
use crate::manifest::Runlevel;

/// One fault of one declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// `certs/daemon.yaml`.
    pub file: String,
    /// `dnsNames[3]`; empty when the whole file is at fault.
    pub field: String,
    /// What is wrong, and what is wanted.
    pub problem: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if self.field.is_empty() { "" } else { ": " };
        write!(f, "{}{separator}{}: {}", self.file, self.field, self.problem)
    }
}

/// Everything that is wrong with the declarations.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct CertificateError(pub Vec<Fault>);

/// Renders one scalar; the second argument is `item` within an `each`.
type Render<'a> = &'a dyn Fn(&str, Option<&str>) -> Result<String, String>;
/// The texts of a list value, by its dotted name.
type List<'a> = &'a dyn Fn(&str) -> Result<Vec<String>, String>;

/// Reads declarations (path and text).
///
/// A list entry is a template, or `{each: <list value>, value: <template>}`,
/// which stands for one entry an item of that value, called `item`.
///
/// # Errors
/// All faults, in the order of the files.
pub fn parse(
    files: &[(String, String)],
    render: Render<'_>,
    list: List<'_>,
) -> Result<Vec<CertificateSpec>, CertificateError> {
    let faults = RefCell::new(Vec::new());
    let mut specs = Vec::new();
    for (file, text) in files {
        let reader = Reader { file, render, list, faults: &faults };
        match serde_yaml::from_str::<Value>(text) {
            Ok(Value::Mapping(map)) => specs.extend(reader.spec(&map)),
            Ok(other) => reader.fault("", format!("want a mapping, got {}", kind(&other))),
            Err(error) => reader.fault("", format!("not YAML: {error}")),
        }
    }
    let mut faults = faults.into_inner();
    faults.extend(cross_faults(&specs));
    if faults.is_empty() { Ok(specs) } else { Err(CertificateError(faults)) }
}

/// What no single file shows.
fn cross_faults(specs: &[CertificateSpec]) -> Vec<Fault> {
    let mut faults = Vec::new();
    let (mut names, mut secrets) = (BTreeMap::new(), BTreeMap::new());
    for spec in specs {
        let mut fault = |field: &str, problem: String| {
            faults.push(Fault { file: spec.source.clone(), field: field.to_owned(), problem });
        };
        if let Some(first) = names.insert(spec.name.as_str(), spec.source.as_str()) {
            fault("name", format!("\"{}\" is declared in {first} already", spec.name));
        }
        if let Some(first) = secrets.insert((&spec.namespace, &spec.secret), spec.source.as_str()) {
            fault("secret", format!("\"{}\" is the Secret of {first} already", spec.secret_path()));
        }
        let Role::Leaf { issuer, .. } = &spec.role else { continue };
        if !specs.iter().any(|other| other.is_authority() && other.name == *issuer) {
            fault("issuer", format!("\"{issuer}\" is no authority declared here"));
        }
    }
    faults
}

struct Reader<'a> {
    file: &'a str,
    render: Render<'a>,
    list: List<'a>,
    faults: &'a RefCell<Vec<Fault>>,
}

const FIELDS: [&str; 13] = [
    "name",
    "component",
    "runlevel",
    "secret",
    "labels",
    "authority",
    "issuer",
    "usages",
    "commonName",
    "dnsNames",
    "ipAddresses",
    "lifetime",
    "optional",
];
const RENEW: &str = "renewBefore";

impl Reader<'_> {
    fn fault(&self, field: impl Into<String>, problem: impl Into<String>) {
        let fault = Fault { file: self.file.to_owned(), field: field.into(), problem: problem.into() };
        self.faults.borrow_mut().push(fault);
    }

    /// Reads every field, so that every fault is found, before it gives up.
    fn spec(&self, map: &Mapping) -> Option<CertificateSpec> {
        let known: Vec<_> = FIELDS.into_iter().chain([RENEW]).collect();
        self.refuse_unknown(map, "", &known);
        let name = self.text(map, "", "name");
        let component = self.text(map, "", "component");
        let runlevel = self.runlevel(map);
        let secret = self.secret(map);
        let labels = self.labels(map);
        let common_name = self.text(map, "", "commonName");
        let role = self.role(map);
        let dns_names = self.dns_names(map);
        let ip_addresses = self.parsed::<IpAddr>(map, "ipAddresses", "an address such as 127.0.0.1");
        let times = self.times(map);
        let optional = self.optional(map);
        let (namespace, secret) = secret?;
        let (lifetime, renew_before) = times?;
        Some(CertificateSpec {
            name: name?,
            component: component?,
            runlevel: runlevel?,
            namespace,
            secret,
            labels,
            common_name: common_name?,
            role: role?,
            dns_names,
            ip_addresses,
            lifetime,
            renew_before,
            optional,
            source: self.file.to_owned(),
        })
    }

    fn optional(&self, map: &Mapping) -> bool {
        match map.get("optional") {
            None => false,
            Some(Value::Bool(optional)) => *optional,
            Some(other) => {
                self.fault("optional", format!("want true or false, got {}", kind(other)));
                false
            }
        }
    }

    fn refuse_unknown(&self, map: &Mapping, prefix: &str, known: &[&str]) {
        for key in map.keys() {
            let Some(key) = key.as_str() else {
                self.fault(prefix, format!("want text as key, got {}", kind(key)));
                continue;
            };
            if known.contains(&key) {
                continue;
            }
            let nearest = known.iter().max_by(|a, b| strsim::jaro(a, key).total_cmp(&strsim::jaro(b, key)));
            let hint = nearest.map(|nearest| format!(", did you mean \"{nearest}\"?")).unwrap_or_default();
            self.fault(format!("{prefix}{key}"), format!("unknown field{hint}"));
        }
    }

    fn rendered(&self, field: &str, template: &str, item: Option<&str>) -> Option<String> {
        match (self.render)(template, item) {
            Ok(text) if text.trim().is_empty() => {
                self.fault(field, format!("\"{template}\" renders to nothing"));
                None
            }
            Ok(text) if text.chars().any(char::is_control) => {
                self.fault(field, format!("\"{template}\" renders to text with a control character"));
                None
            }
            Ok(text) => Some(text),
            Err(problem) => {
                self.fault(field, problem);
                None
            }
        }
    }

    fn scalar(&self, field: &str, value: &Value) -> Option<String> {
        if let Value::String(template) = value {
            return self.rendered(field, template, None);
        }
        self.fault(field, format!("want text, got {}", kind(value)));
        None
    }

    fn text(&self, map: &Mapping, prefix: &str, name: &str) -> Option<String> {
        let field = format!("{prefix}{name}");
        match map.get(name) {
            Some(value) => self.scalar(&field, value),
            None => {
                self.fault(field, "is missing");
                None
            }
        }
    }

    fn runlevel(&self, map: &Mapping) -> Option<Runlevel> {
        let text = self.text(map, "", "runlevel")?;
        let level = Runlevel::ALL.into_iter().find(|level| level.to_string() == text);
        if level.is_none() {
            self.fault("runlevel", format!("\"{text}\" is no runlevel, want rc0 to rc4"));
        }
        level
    }

    fn secret(&self, map: &Mapping) -> Option<(String, String)> {
        let Some(secret) = map.get("secret").and_then(Value::as_mapping) else {
            self.fault("secret", "want a mapping with namespace and name");
            return None;
        };
        self.refuse_unknown(secret, "secret.", &["namespace", "name"]);
        let namespace = self.text(secret, "secret.", "namespace");
        let name = self.text(secret, "secret.", "name");
        Some((namespace?, name?))
    }

    fn labels(&self, map: &Mapping) -> BTreeMap<String, String> {
        let Some(value) = map.get("labels") else { return BTreeMap::new() };
        let Some(labels) = value.as_mapping() else {
            self.fault("labels", format!("want a mapping, got {}", kind(value)));
            return BTreeMap::new();
        };
        let label = |(key, value): (&Value, &Value)| {
            let key = key.as_str()?;
            Some((key.to_owned(), self.scalar(&format!("labels.{key}"), value)?))
        };
        labels.iter().filter_map(label).collect()
    }

    fn role(&self, map: &Mapping) -> Option<Role> {
        match map.get("authority") {
            None | Some(Value::Bool(false)) => {}
            Some(Value::Bool(true)) => return self.authority(map),
            Some(other) => self.fault("authority", format!("want true or false, got {}", kind(other))),
        }
        let issuer = self.text(map, "", "issuer");
        let usages: Vec<_> = self.list(map, "usages").into_iter().filter_map(|(f, t)| self.usage(f, &t)).collect();
        if usages.is_empty() {
            self.fault("usages", "want serverAuth, clientAuth or both");
        }
        Some(Role::Leaf { issuer: issuer?, usages })
    }

    fn authority(&self, map: &Mapping) -> Option<Role> {
        for field in ["issuer", "usages", "dnsNames", "ipAddresses"] {
            if map.contains_key(field) {
                self.fault(field, "an authority has none");
            }
        }
        Some(Role::Authority)
    }

    fn usage(&self, field: String, text: &str) -> Option<Usage> {
        match text {
            "serverAuth" => Some(Usage::ServerAuth),
            "clientAuth" => Some(Usage::ClientAuth),
            _ => {
                self.fault(field, format!("\"{text}\" is no usage, want serverAuth or clientAuth"));
                None
            }
        }
    }

    /// The entries of a list, rendered, each with its field; `each` expanded.
    fn list(&self, map: &Mapping, name: &str) -> Vec<(String, String)> {
        let Some(value) = map.get(name) else { return Vec::new() };
        let Some(entries) = value.as_sequence() else {
            self.fault(name, format!("want a list, got {}", kind(value)));
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let field = format!("{name}[{index}]");
            let found = match entry {
                Value::Mapping(each) => self.each(&field, each),
                other => self.scalar(&field, other).into_iter().collect(),
            };
            texts.extend(found.into_iter().map(|text| (field.clone(), text)));
        }
        texts
    }

    fn each(&self, field: &str, map: &Mapping) -> Vec<String> {
        let prefix = format!("{field}.");
        self.refuse_unknown(map, &prefix, &["each", "value"]);
        let text = |name: &str| {
            let text = map.get(name).and_then(Value::as_str);
            if text.is_none() {
                self.fault(format!("{prefix}{name}"), "want text");
            }
            text
        };
        let (Some(list), Some(template)) = (text("each"), text("value")) else { return Vec::new() };
        match (self.list)(list) {
            Ok(items) => {
                let at = |(i, item): (usize, &String)| {
                    self.rendered(&format!("{prefix}value, {list}[{i}]"), template, Some(item))
                };
                items.iter().enumerate().filter_map(at).collect()
            }
            Err(problem) => {
                self.fault(format!("{prefix}each"), problem);
                Vec::new()
            }
        }
    }

    /// Lower case, valid, each once: two gateway domains may be the same.
    fn dns_names(&self, map: &Mapping) -> Vec<String> {
        let mut seen = BTreeSet::new();
        let mut names = Vec::new();
        for (field, text) in self.list(map, "dnsNames") {
            let name = text.trim().trim_end_matches('.').to_ascii_lowercase();
            if !is_dns_name(&name) {
                self.fault(field, format!("\"{text}\" is no DNS name, nor a wildcard such as *.example.org"));
            } else if seen.insert(name.clone()) {
                names.push(name);
            }
        }
        names
    }

    fn parsed<T: std::str::FromStr + PartialEq>(&self, map: &Mapping, name: &str, want: &str) -> Vec<T> {
        let mut all = Vec::new();
        for (field, text) in self.list(map, name) {
            match text.parse() {
                Ok(value) if all.contains(&value) => {}
                Ok(value) => all.push(value),
                Err(_) => self.fault(field, format!("want {want}, got \"{text}\"")),
            }
        }
        all
    }

    fn times(&self, map: &Mapping) -> Option<(Duration, Duration)> {
        let lifetime = self.duration(map, "lifetime");
        let renew = self.duration(map, RENEW);
        let (lifetime, renew) = (lifetime?, renew?);
        if renew >= lifetime {
            self.fault(RENEW, "must be shorter than lifetime, or every run would renew");
            return None;
        }
        Some((lifetime, renew))
    }

    fn duration(&self, map: &Mapping, name: &str) -> Option<Duration> {
        let text = self.text(map, "", name)?;
        let duration = humantime::parse_duration(&text).ok().filter(|d| (HOUR..=CENTURY).contains(d));
        if duration.is_none() {
            self.fault(name, format!("want a duration from 1h to 36500d such as 365d, got \"{text}\""));
        }
        duration
    }
}

const HOUR: Duration = Duration::from_secs(3600);
const CENTURY: Duration = Duration::from_secs(36_500 * 86_400);

fn is_dns_name(name: &str) -> bool {
    let host = name.strip_prefix("*.").unwrap_or(name);
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_'))
    };
    // An all-numeric last label is an address, which clients never match by name.
    let numeric = host.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
    name.len() <= 253 && !numeric && host.split('.').all(label)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number; quote it",
        Value::String(_) => "text",
        Value::Sequence(_) => "a list",
        Value::Mapping(_) => "a mapping",
        Value::Tagged(_) => "a YAML tag",
    }
}
