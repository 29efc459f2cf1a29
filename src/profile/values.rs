//! Values in layers: component default < profile chain < recorded overrides <
//! values files < `--set` < `--image`.

use std::collections::BTreeMap;
use std::fmt;

use indexmap::IndexMap;
use serde_json::{Map, Value};

use crate::manifest::fault::Fault;
use crate::manifest::{Bundle, Document, kind_of, parse_mapping, parse_value};

use super::nest::nest;
use super::suggest::did_you_mean;
use super::syntax::relocated;
use super::{ARCHITECTURE, ARCHITECTURES, IMAGE, REGISTRY, Type, ValueSpec};

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Its component's default.
    Default,
    /// The image of this executable.
    Executable,
    /// An override of an earlier run.
    Recorded,
    /// A profile or values file.
    File {
        /// Path.
        path: String,
        /// Line.
        line: usize,
    },
    /// `--set` or `--image`.
    Argument(&'static str),
}

/// `default`, `profiles/dev.yaml:12`, `--set`.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Executable => f.write_str("this executable"),
            Self::Recorded => f.write_str("recorded"),
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Argument(flag) => f.write_str(flag),
        }
    }
}

/// One value, resolved.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Component that declares it, or `global`.
    pub owner: String,
    /// Its declaration.
    pub spec: ValueSpec,
    /// What it is.
    pub value: Value,
    /// Who says so.
    pub source: Source,
}

/// Every value of the bundle, resolved.
#[derive(Clone, Debug)]
pub struct Values {
    entries: IndexMap<String, Entry>,
    overrides: BTreeMap<String, Value>,
    forgotten: Vec<String>,
}

impl Values {
    /// All values, in the order of their declaration.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// One value.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.entries.get(name).map(|entry| &entry.value)
    }

    /// The overrides that the record keeps: those recorded before and those
    /// given now. Never a secret, nothing of the profile.
    pub fn overrides(&self) -> &BTreeMap<String, Value> {
        &self.overrides
    }

    /// Recorded overrides that this version has no value for.
    pub fn forgotten(&self) -> &[String] {
        &self.forgotten
    }

    /// As templates see them: `server.replicas` is `replicas` within `server`.
    pub fn tree(&self) -> Value {
        let mut root = Map::new();
        for (name, entry) in &self.entries {
            insert(&mut root, name, entry.value.clone());
        }
        Value::Object(root)
    }
}

fn insert(map: &mut Map<String, Value>, name: &str, value: Value) {
    match name.split_once('.') {
        None => {
            map.insert(name.to_owned(), value);
        }
        Some((group, rest)) => {
            let inner = map.entry(group).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

/// Values while layers are laid on one another.
pub(super) struct Layers<'a> {
    bundle: &'a Bundle,
    default_image: &'a str,
    values: Values,
    faults: &'a mut Vec<Fault>,
    /// Recorded overrides that this version cannot take, unless somebody gives them anew.
    stale: BTreeMap<String, Fault>,
}

/// Whether a layer is an override that the record keeps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    Yes,
    No,
}

/// One mapping that is read: whose it is, and where its nodes are.
struct Reading<'a> {
    place: &'a str,
    document: &'a Document,
    kept: Kept,
    given: BTreeMap<String, usize>,
}

impl<'a> Layers<'a> {
    pub(super) fn new(bundle: &'a Bundle, default_image: &'a str, faults: &'a mut Vec<Fault>) -> Self {
        let entry = |(name, declared): (&String, &crate::manifest::Declared)| {
            let (owner, spec) = (declared.owner.clone(), declared.spec.clone());
            (name.clone(), Entry { owner, value: spec.default.clone(), spec, source: Source::Default })
        };
        let entries = bundle.values.iter().map(entry).collect();
        let values = Values { entries, overrides: BTreeMap::new(), forgotten: Vec::new() };
        Self { bundle, default_image, values, faults, stale: BTreeMap::new() }
    }

    /// The `values` of a profile.
    pub(super) fn mapping(&mut self, place: &str, values: &Value, document: &Document, at: &[&str]) {
        let at: Vec<String> = at.iter().map(|step| (*step).to_owned()).collect();
        let Value::Object(map) = values else {
            let message = format!("want a mapping of values, found {}", kind_of(values));
            self.faults.push(Fault::at(place, document.line(&at), message));
            return;
        };
        let mut reading = Reading { place, document, kept: Kept::No, given: BTreeMap::new() };
        self.group(&mut reading, "", &at, map);
    }

    pub(super) fn recorded(&mut self, overrides: &BTreeMap<String, Value>) {
        for (name, raw) in overrides {
            match self.values.entries.get(name) {
                None => self.values.forgotten.push(name.clone()),
                Some(entry) => match entry.spec.accept(raw) {
                    Ok(value) => self.assign(name, value, Source::Recorded, Kept::Yes),
                    Err(problem) => {
                        let message = format!("value \"{name}\": {problem}; give it anew with --set");
                        self.stale.insert(name.clone(), Fault::of("recorded override", message));
                    }
                },
            }
        }
    }

    /// A values file of the user's.
    pub(super) fn file(&mut self, path: &str, text: &str) {
        match parse_mapping(path, text) {
            Ok((map, document)) => {
                let mut reading = Reading { place: path, document: &document, kept: Kept::Yes, given: BTreeMap::new() };
                self.group(&mut reading, "", &[], &map);
            }
            Err(fault) => self.faults.push(fault),
        }
    }

    /// `NAME=VALUE`; a map takes `NAME.KEY=VALUE` too.
    pub(super) fn set(&mut self, argument: &str) {
        let Some((name, text)) = argument.split_once('=') else {
            self.faults.push(Fault::of(format!("--set {argument}"), "want NAME=VALUE"));
            return;
        };
        let (name, read) = match self.values.entries.get(name) {
            Some(entry) => {
                self.stale.remove(name);
                (name, entry.spec.read(text))
            }
            None => match self.map_entry(name, text) {
                Some(found) => found,
                None => {
                    let message = self.unknown(name);
                    self.faults.push(Fault::of(format!("--set {name}"), message));
                    return;
                }
            },
        };
        match read {
            Ok(value) => self.assign(name, value, Source::Argument("--set"), Kept::Yes),
            Err(problem) => {
                self.faults.push(Fault::of(format!("--set {name}"), format!("value \"{name}\": {problem}")));
            }
        }
    }

    pub(super) fn image(&mut self, image: &str) {
        let Some(entry) = self.values.entries.get(IMAGE) else { return };
        self.stale.remove(IMAGE);
        match entry.spec.accept(&image.into()) {
            Ok(value) => self.assign(IMAGE, value, Source::Argument("--image"), Kept::Yes),
            Err(problem) => self.faults.push(Fault::of("--image", problem)),
        }
    }

    pub(super) fn finish(mut self) -> Values {
        self.faults.extend(std::mem::take(&mut self.stale).into_values());
        if let Some(entry) = self.values.entries.get_mut(IMAGE)
            && entry.value == ""
        {
            entry.value = self.default_image.into();
            entry.source = Source::Executable;
            self.bind_to_own_architecture();
        }
        self.relocate();
        self.values
    }

    /// The image of this executable runs where this executable does.
    fn bind_to_own_architecture(&mut self) {
        if let Some(entry) = self.values.entries.get_mut(ARCHITECTURES)
            && entry.value.as_array().is_some_and(Vec::is_empty)
        {
            entry.value = Value::from(vec![ARCHITECTURE]);
            entry.source = Source::Executable;
        }
    }

    /// Images that nobody has named come from the one registry, if there is one.
    fn relocate(&mut self) {
        let registry = self.values.get(REGISTRY).and_then(Value::as_str).unwrap_or_default().to_owned();
        if registry.is_empty() {
            return;
        }
        let Values { entries, overrides, .. } = &mut self.values;
        for (name, entry) in entries.iter_mut().filter(|(_, entry)| entry.spec.kind == Type::Image) {
            let named = overrides.contains_key(name.as_str());
            if let Some(image) = entry.value.as_str().filter(|image| !image.is_empty() && !named) {
                entry.value = relocated(image, &registry).into();
            }
        }
    }

    fn group(&mut self, reading: &mut Reading<'_>, prefix: &str, at: &[String], map: &Map<String, Value>) {
        for (key, raw) in map {
            let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            let at: Vec<String> = at.iter().chain([key]).cloned().collect();
            let line = reading.document.line(&at);
            match self.values.entries.get(&name) {
                Some(entry) => match entry.spec.accept(raw) {
                    Ok(_) if reading.given.contains_key(&name) => {
                        let message = format!("value \"{name}\" is given in line {} already", reading.given[&name]);
                        self.faults.push(Fault::at(reading.place, line, message));
                    }
                    Ok(value) => {
                        if reading.kept == Kept::Yes {
                            self.stale.remove(&name);
                        }
                        let source = Source::File { path: reading.place.to_owned(), line };
                        self.assign(&name, value, source, reading.kept);
                        reading.given.insert(name, line);
                    }
                    Err(problem) => {
                        self.faults.push(Fault::at(reading.place, line, format!("value \"{name}\": {problem}")));
                    }
                },
                None => match raw {
                    Value::Object(inner) if self.members(&name).next().is_some() => {
                        self.group(reading, &name, &at, inner);
                    }
                    _ => {
                        let message = self.unknown(&name);
                        self.faults.push(Fault::at(reading.place, line, message));
                    }
                },
            }
        }
    }

    fn assign(&mut self, name: &str, value: Value, source: Source, kept: Kept) {
        let Some(entry) = self.values.entries.get_mut(name) else { return };
        if kept == Kept::Yes && !entry.spec.secret {
            self.values.overrides.insert(name.to_owned(), value.clone());
        }
        entry.value = value;
        entry.source = source;
    }

    /// `--set server.nodeSelector.disk=ssd`: one entry of a map, the others stay.
    /// Keys of texts may have dots; in a map that is free in form, dots nest.
    fn map_entry<'n>(&self, name: &'n str, text: &str) -> Option<(&'n str, Result<Value, String>)> {
        let split = name.match_indices('.').rev().map(|(at, _)| (&name[..at], &name[at + 1..]));
        let mut maps = split.filter_map(|(group, key)| {
            let entry = self.values.entries.get(group)?;
            entry.value.as_object().map(|map| (group, key, map.clone(), &entry.spec))
        });
        let (group, key, mut map, spec) = maps.next()?;
        let put = match spec.items {
            Some(_) => {
                map.insert(key.to_owned(), spec.read_item(text));
                Ok(())
            }
            None if text.is_empty() => nest(&mut map, key, "".into()),
            None => parse_value(text).and_then(|value| nest(&mut map, key, value)),
        };
        Some((group, put.and_then(|()| spec.accept(&Value::Object(map)))))
    }

    fn members<'n>(&'n self, group: &'n str) -> impl Iterator<Item = &'n str> {
        let within = move |name: &&str| name.strip_prefix(group).is_some_and(|rest| rest.starts_with('.'));
        self.bundle.values.keys().map(String::as_str).filter(within)
    }

    fn unknown(&self, name: &str) -> String {
        let members: Vec<&str> = self.members(name).collect();
        if members.is_empty() {
            let hint = did_you_mean(name, self.bundle.values.keys().map(String::as_str));
            return format!("unknown value \"{name}\"{hint}");
        }
        format!("\"{name}\" is a group of values: want a mapping of {}", members.join(", "))
    }
}
