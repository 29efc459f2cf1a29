//! A profile's file, those it extends, and the runlevels that come of them.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::manifest::fault::Fault;
use crate::manifest::{Bundle, Document, Runlevel, kind_of, parse_mapping};

use super::ProfileSource;
use super::suggest::did_you_mean;

/// A profile and its bases, the outermost base first.
pub(super) struct Chain {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) links: Vec<Link>,
}

/// One file of a chain.
pub(super) struct Link {
    pub(super) place: String,
    pub(super) map: Map<String, Value>,
    pub(super) document: Document,
}

/// A component within a level, and where a profile says so.
type Placed = (String, Fault);

impl Chain {
    pub(super) fn read(bundle: &Bundle, source: &ProfileSource, faults: &mut Vec<Fault>) -> Self {
        let name = match source {
            ProfileSource::Named(name) => name.clone(),
            ProfileSource::File { path, .. } => path.clone(),
        };
        let mut chain = Self { name: name.clone(), description: String::new(), links: Vec::new() };
        let mut next = match source {
            ProfileSource::File { path, text } => Some((path.clone(), text.clone())),
            ProfileSource::Named(name) => match bundle.profiles.get(name) {
                Some(text) => Some((place_of(name), text.clone())),
                None => {
                    faults.push(Fault::of("--profile", unknown_profile(bundle, name)));
                    None
                }
            },
        };
        let mut seen = vec![name];
        while let Some((place, text)) = next.take() {
            let Some(link) = Link::read(place, &text, faults) else { break };
            if let Some(base) = link.base(faults) {
                match bundle.profiles.get(&base) {
                    Some(_) if seen.contains(&base) => {
                        faults.push(link.fault(&["extends"], format!("profile \"{base}\" extends itself")));
                    }
                    Some(text) => next = Some((place_of(&base), text.clone())),
                    None => faults.push(link.fault(&["extends"], unknown_profile(bundle, &base))),
                }
                seen.push(base);
            }
            chain.links.push(link);
        }
        if let Some(own) = chain.links.first() {
            chain.description = own.description(faults);
        }
        chain.links.reverse();
        chain
    }

    /// A level that a profile gives replaces its base's.
    pub(super) fn runlevels(&self, bundle: &Bundle, faults: &mut Vec<Fault>) -> BTreeMap<Runlevel, Vec<String>> {
        let mut levels: BTreeMap<Runlevel, Vec<Placed>> = BTreeMap::new();
        for link in &self.links {
            levels.extend(link.runlevels(bundle, faults));
        }
        let mut level_of: BTreeMap<&str, Runlevel> = BTreeMap::new();
        for (level, placed) in &levels {
            for (component, place) in placed {
                if let Some(first) = level_of.insert(component, *level) {
                    let message = format!("component \"{component}\" is in {first} already");
                    faults.push(Fault { message, ..place.clone() });
                }
            }
        }
        for (level, placed) in &levels {
            for (component, place) in placed {
                let needs = bundle.components.get(component).map_or(&[][..], |component| &component.needs);
                for needed in needs.iter().filter(|needed| level_of.get(needed.as_str()).is_none_or(|at| at > level)) {
                    let message = format!("component \"{component}\" needs \"{needed}\" in {level} or before it");
                    faults.push(Fault { message, ..place.clone() });
                }
            }
        }
        levels.into_iter().map(|(level, placed)| (level, placed.into_iter().map(|(name, _)| name).collect())).collect()
    }
}

impl Link {
    fn read(place: String, text: &str, faults: &mut Vec<Fault>) -> Option<Self> {
        const KNOWN: [&str; 4] = ["description", "extends", "runlevels", "values"];
        let (map, document) = parse_mapping(&place, text).map_err(|fault| faults.push(fault)).ok()?;
        let link = Self { place, map, document };
        for key in link.map.keys().filter(|key| !KNOWN.contains(&key.as_str())) {
            let message = format!("unknown key \"{key}\" of a profile{}", did_you_mean(key, KNOWN.into_iter()));
            faults.push(link.fault(&[key], message));
        }
        Some(link)
    }

    fn fault(&self, path: &[&str], message: impl Into<String>) -> Fault {
        Fault::at(self.place.clone(), self.document.line(path), message)
    }

    fn base(&self, faults: &mut Vec<Fault>) -> Option<String> {
        match self.map.get("extends")? {
            Value::String(base) => Some(base.clone()),
            other => {
                faults.push(self.fault(&["extends"], format!("want the name of a profile, found {}", kind_of(other))));
                None
            }
        }
    }

    fn description(&self, faults: &mut Vec<Fault>) -> String {
        match self.map.get("description") {
            Some(Value::String(text)) => return text.clone(),
            Some(other) => {
                faults.push(self.fault(&["description"], format!("want a string, found {}", kind_of(other))))
            }
            None => faults.push(Fault::of(self.place.clone(), "has no description")),
        }
        String::new()
    }

    fn runlevels(&self, bundle: &Bundle, faults: &mut Vec<Fault>) -> BTreeMap<Runlevel, Vec<Placed>> {
        let mut levels = BTreeMap::new();
        let given = match self.map.get("runlevels") {
            None => return levels,
            Some(Value::Object(given)) => given,
            Some(other) => {
                let message = format!("want a mapping of rc0 to rc4, found {}", kind_of(other));
                faults.push(self.fault(&["runlevels"], message));
                return levels;
            }
        };
        for (name, components) in given {
            let Some(level) = Runlevel::ALL.into_iter().find(|level| level.to_string() == *name) else {
                faults.push(self.fault(&["runlevels", name], format!("unknown runlevel \"{name}\": want rc0 to rc4")));
                continue;
            };
            let Some(components) = components.as_array() else {
                let message = format!("want a list of components, found {}", kind_of(components));
                faults.push(self.fault(&["runlevels", name], message));
                continue;
            };
            let placed = components.iter().enumerate().filter_map(|(position, component)| {
                let place = self.fault(&["runlevels", name, &position.to_string()], String::new());
                known_component(bundle, component, place, faults)
            });
            levels.insert(level, placed.collect());
        }
        levels
    }
}

fn known_component(bundle: &Bundle, component: &Value, place: Fault, faults: &mut Vec<Fault>) -> Option<Placed> {
    let message = match component.as_str() {
        Some(name) if bundle.components.contains_key(name) => return Some((name.to_owned(), place)),
        Some(name) => {
            let hint = did_you_mean(name, bundle.components.keys().map(String::as_str));
            format!("unknown component \"{name}\"{hint}")
        }
        None => format!("want the name of a component, found {}", kind_of(component)),
    };
    faults.push(Fault { message, ..place });
    None
}

fn place_of(profile: &str) -> String {
    format!("profiles/{profile}.yaml")
}

fn unknown_profile(bundle: &Bundle, name: &str) -> String {
    let names = || bundle.profiles.keys().map(String::as_str);
    let hint = did_you_mean(name, names());
    format!("unknown profile \"{name}\": there are {}{hint}", names().collect::<Vec<_>>().join(", "))
}
