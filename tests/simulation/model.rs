//! A modelled API server: objects, resource versions, conflicts, and the log
//! that watches read. Values in, values out; no time, no randomness.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Bytes;
use serde_json::{Map, Value, json};

/// The kinds that the control plane uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Project,
    StatefulSet,
    Service,
    Pod,
    ConfigMap,
    Claim,
    Lease,
    Budget,
    Slice,
    Event,
}

impl Kind {
    /// From the plural in a path.
    pub(crate) fn from_plural(plural: &str) -> Option<Self> {
        Some(match plural {
            "buildprojects" => Self::Project,
            "statefulsets" => Self::StatefulSet,
            "services" => Self::Service,
            "pods" => Self::Pod,
            "configmaps" => Self::ConfigMap,
            "persistentvolumeclaims" => Self::Claim,
            "leases" => Self::Lease,
            "poddisruptionbudgets" => Self::Budget,
            "endpointslices" => Self::Slice,
            "events" => Self::Event,
            _ => return None,
        })
    }

    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Project => "buildprojects",
            Self::StatefulSet => "statefulsets",
            Self::Service => "services",
            Self::Pod => "pods",
            Self::ConfigMap => "configmaps",
            Self::Claim => "persistentvolumeclaims",
            Self::Lease => "leases",
            Self::Budget => "poddisruptionbudgets",
            Self::Slice => "endpointslices",
            Self::Event => "events",
        }
    }

    /// Kind and version, for lists.
    pub(crate) fn type_meta(self) -> (&'static str, &'static str) {
        match self {
            Self::Project => ("buildkit-operator.socialgouv.github.io/v1alpha1", "BuildProject"),
            Self::StatefulSet => ("apps/v1", "StatefulSet"),
            Self::Service => ("v1", "Service"),
            Self::Pod => ("v1", "Pod"),
            Self::ConfigMap => ("v1", "ConfigMap"),
            Self::Claim => ("v1", "PersistentVolumeClaim"),
            Self::Lease => ("coordination.k8s.io/v1", "Lease"),
            Self::Budget => ("policy/v1", "PodDisruptionBudget"),
            Self::Slice => ("discovery.k8s.io/v1", "EndpointSlice"),
            Self::Event => ("events.k8s.io/v1", "Event"),
        }
    }

    fn has_status(self) -> bool {
        matches!(self, Self::Project | Self::StatefulSet | Self::Service | Self::Pod | Self::Claim | Self::Budget)
    }

    fn has_generation(self) -> bool {
        matches!(self, Self::Project | Self::StatefulSet | Self::Budget)
    }

    /// Whether to replace what is not there is to create it.
    fn comes_by_replacement(self) -> bool {
        matches!(self, Self::Service | Self::Lease)
    }

    /// Whether a replacement may leave out the version that it replaces.
    fn unconditional(self) -> bool {
        !matches!(self, Self::Project | Self::Lease)
    }
}

/// How many there are.
pub(crate) const KINDS: usize = Kind::Event as usize + 1;

/// Which object.
pub(crate) type Id = (Kind, String);

/// Why a request was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    pub(crate) code: u16,
    pub(crate) reason: &'static str,
}

pub(crate) const NOT_FOUND: Refused = Refused { code: 404, reason: "NotFound" };
pub(crate) const EXISTS: Refused = Refused { code: 409, reason: "AlreadyExists" };
pub(crate) const CONFLICT: Refused = Refused { code: 409, reason: "Conflict" };
pub(crate) const INVALID: Refused = Refused { code: 422, reason: "Invalid" };

/// What happened to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Added,
    Modified,
    Deleted,
}

/// One entry of the log.
#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) id: Id,
    pub(crate) change: Change,
    pub(crate) version: u64,
    /// Milliseconds of the world's time.
    pub(crate) at: u64,
    pub(crate) json: Bytes,
}

/// An object as stored.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stored {
    pub(crate) value: Arc<Value>,
    pub(crate) json: Bytes,
}

/// Where everything is, unless it says otherwise.
const NAMESPACE: &str = "buildkit-builds";

/// The server's memory. One namespace.
#[derive(Debug, Default)]
pub(crate) struct Model {
    objects: BTreeMap<Id, Stored>,
    version: u64,
    born: u64,
    pub(crate) log: Vec<Event>,
    /// What time it is, set by the owner before every request.
    pub(crate) now: Now,
}

/// The server's time.
#[derive(Clone, Debug, Default)]
pub(crate) struct Now {
    pub(crate) ms: u64,
    /// The same for people, whole seconds.
    pub(crate) text: String,
}

/// What a delete insists on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Preconditions {
    pub(crate) uid: Option<String>,
    pub(crate) version: Option<String>,
}

type Answer = Result<Stored, Refused>;

impl Model {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn get(&self, kind: Kind, name: &str) -> Option<&Stored> {
        self.objects.get(&(kind, name.to_owned()))
    }

    pub(crate) fn list(&self, kind: Kind) -> impl Iterator<Item = (&str, &Stored)> {
        self.objects.iter().filter(move |((k, _), _)| *k == kind).map(|((_, name), stored)| (name.as_str(), stored))
    }

    pub(crate) fn create(&mut self, kind: Kind, mut value: Value) -> Answer {
        let name = text(&value, "/metadata/name").to_owned();
        let id = (kind, name);
        if self.objects.contains_key(&id) {
            return Err(EXISTS);
        }
        if !text(&value, "/metadata/resourceVersion").is_empty() {
            return Err(Refused { code: 500, reason: "" });
        }
        self.born += 1;
        let metadata = object(&mut value, "metadata");
        metadata.entry("namespace").or_insert_with(|| NAMESPACE.into());
        metadata.insert("uid".into(), format!("uid-{}", self.born).into());
        metadata.insert("creationTimestamp".into(), self.now.text.clone().into());
        if kind.has_generation() {
            metadata.insert("generation".into(), 1.into());
        }
        if kind.has_status()
            && let Some(fields) = value.as_object_mut()
        {
            fields.remove("status");
        }
        if kind == Kind::StatefulSet {
            value["status"] = json!({"replicas": 0});
        }
        Ok(self.store(id, value, Change::Added))
    }

    /// Replaces everything but the status.
    pub(crate) fn replace(&mut self, kind: Kind, name: &str, mut value: Value) -> Answer {
        if kind.comes_by_replacement() && self.get(kind, name).is_none() {
            object(&mut value, "metadata").remove("resourceVersion");
            return self.create(kind, value);
        }
        let old = self.check(kind, name, &value)?;
        keep_identity(&old.value, &mut value);
        if kind.has_status() {
            copy(&old.value, &mut value, "status");
        }
        if kind.has_generation() && old.value["spec"] != value["spec"] {
            let generation = old.value["metadata"]["generation"].as_i64().unwrap_or(0);
            object(&mut value, "metadata").insert("generation".into(), (generation + 1).into());
        }
        Ok(self.update((kind, name.to_owned()), &old, value))
    }

    /// Replaces the status and nothing else.
    pub(crate) fn replace_status(&mut self, kind: Kind, name: &str, value: &Value) -> Answer {
        let old = self.check(kind, name, value)?;
        let mut next = (*old.value).clone();
        copy(value, &mut next, "status");
        Ok(self.update((kind, name.to_owned()), &old, next))
    }

    /// A JSON merge patch.
    pub(crate) fn merge(&mut self, kind: Kind, name: &str, patch: &Value) -> Answer {
        let old = self.get(kind, name).ok_or(NOT_FOUND)?.clone();
        let mut next = (*old.value).clone();
        merge(&mut next, patch);
        if text(&next, "/metadata/resourceVersion") != text(&old.value, "/metadata/resourceVersion") {
            return Err(CONFLICT);
        }
        self.replace(kind, name, next)
    }

    pub(crate) fn delete(&mut self, kind: Kind, name: &str, preconditions: &Preconditions) -> Answer {
        let id = (kind, name.to_owned());
        let stored = self.objects.get(&id).ok_or(NOT_FOUND)?;
        let (uid, version) = (text(&stored.value, "/metadata/uid"), text(&stored.value, "/metadata/resourceVersion"));
        let differs = |wanted: &Option<String>, found: &str| wanted.as_ref().is_some_and(|wanted| wanted != found);
        if differs(&preconditions.uid, uid) || differs(&preconditions.version, version) {
            return Err(CONFLICT);
        }
        let mut value = (*stored.value).clone();
        // A pod ends when its kubelet says so.
        if kind == Kind::Pod && value["metadata"]["deletionTimestamp"].is_null() {
            object(&mut value, "metadata").insert("deletionTimestamp".into(), self.now.text.clone().into());
            return Ok(self.store(id, value, Change::Modified));
        }
        self.objects.remove(&id);
        self.version += 1;
        object(&mut value, "metadata").insert("resourceVersion".into(), self.version.to_string().into());
        Ok(self.record(id, value, Change::Deleted))
    }

    /// The object that a write is about, if the write is about this copy of it.
    fn check(&self, kind: Kind, name: &str, value: &Value) -> Answer {
        let old = self.get(kind, name).ok_or(NOT_FOUND)?;
        let version = text(value, "/metadata/resourceVersion");
        if version.is_empty() && !kind.unconditional() {
            return Err(INVALID);
        }
        let same = |path: &str| [text(&old.value, path), ""].contains(&text(value, path));
        if same("/metadata/resourceVersion") && same("/metadata/uid") { Ok(old.clone()) } else { Err(CONFLICT) }
    }

    /// A write that changes nothing is none.
    fn update(&mut self, id: Id, old: &Stored, mut value: Value) -> Stored {
        copy(&old.value["metadata"], &mut value["metadata"], "resourceVersion");
        if value["metadata"]["annotations"].as_object().is_some_and(Map::is_empty) {
            object(&mut value, "metadata").remove("annotations");
        }
        if *old.value == value { old.clone() } else { self.store(id, value, Change::Modified) }
    }

    fn store(&mut self, id: Id, mut value: Value, change: Change) -> Stored {
        self.version += 1;
        object(&mut value, "metadata").insert("resourceVersion".into(), self.version.to_string().into());
        let stored = self.record(id.clone(), value, change);
        self.objects.insert(id, stored.clone());
        stored
    }

    fn record(&mut self, id: Id, value: Value, change: Change) -> Stored {
        let json = Bytes::from(serde_json::to_vec(&value).unwrap());
        let (version, at) = (self.version, self.now.ms);
        self.log.push(Event { id, change, version, at, json: json.clone() });
        Stored { value: Arc::new(value), json }
    }
}

/// The text at a pointer; empty when there is none.
pub(crate) fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    value.pointer(path).and_then(Value::as_str).unwrap_or_default()
}

/// How people name an object.
pub(crate) fn describe((kind, name): &Id) -> String {
    match kind {
        // Named by the true time.
        Kind::Event => kind.plural().to_owned(),
        _ => format!("{}/{name}", kind.plural()),
    }
}

fn object<'a>(value: &'a mut Value, field: &str) -> &'a mut Map<String, Value> {
    if !value[field].is_object() {
        value[field] = json!({});
    }
    value[field].as_object_mut().unwrap()
}

fn copy(from: &Value, to: &mut Value, field: &str) {
    match from.get(field) {
        Some(found) => to[field] = found.clone(),
        None => drop(to.as_object_mut().and_then(|fields| fields.remove(field))),
    }
}

/// What no writer can change.
fn keep_identity(old: &Value, new: &mut Value) {
    for field in ["uid", "creationTimestamp", "generation", "deletionTimestamp", "namespace"] {
        copy(&old["metadata"], &mut new["metadata"], field);
    }
}

/// RFC 7386.
fn merge(target: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (field, value) in patch {
        if value.is_null() {
            drop(target.as_object_mut().and_then(|fields| fields.remove(field)));
        } else {
            merge(&mut target[field], value);
        }
    }
}
