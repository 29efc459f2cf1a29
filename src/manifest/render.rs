//! Profile and values → objects, in the order of applying.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::certificate::{self, CertificateError, CertificateSpec, Mode};
use crate::profile::{Profile, Values};

use super::bundle::{Bundle, Component};
use super::fault::{Fault, Faults, unless};
use super::kinds::{self, Kind};
use super::template::{RenderError, Renderer, Text};
use super::yaml::{self, Document};
use super::{Declarations, GeneratedSecret, Object, ObjectId, Policy, Probe, Rendered, Runlevel, check};

/// Renders every component of a profile.
///
/// # Errors
/// Everything that is wrong with the templates or with the objects that come
/// of them.
pub fn render(bundle: &Bundle, profile: &Profile, values: &Values) -> Result<Rendered, Faults> {
    let mut renderer = Renderer::new(values);
    let mut faults = Vec::new();
    let mut drafts = Vec::new();
    let (mut generated, mut expected) = (Vec::new(), Vec::new());
    let mut policies = BTreeMap::new();
    let components = enabled_components(bundle, profile, &renderer, &mut faults);
    for (runlevel, component) in &components {
        let mut collector =
            Collector { renderer: &renderer, values, component, runlevel: *runlevel, faults: &mut faults };
        collector.generated(&mut generated, &mut expected);
        policies.insert(component.name.clone(), collector.policy());
    }
    let certificates = certificates(bundle, profile, values).unwrap_or_else(|Faults(found)| {
        faults.extend(found);
        Vec::new()
    });
    // Small bundles of tests have no such value.
    let mode = values.get("certs.mode").and_then(Value::as_str).and_then(|text| text.parse().ok()).unwrap_or_default();
    let own = if mode == Mode::Own { certificates.clone() } else { Vec::new() };
    renderer.declare(&certificates, &Declarations { certificates: own, generated: generated.clone() });
    for (runlevel, component) in &components {
        Collector { renderer: &renderer, values, component, runlevel: *runlevel, faults: &mut faults }
            .objects(&mut drafts);
    }
    let objects = order(drafts, &mut faults);
    let rendered = Rendered {
        profile: profile.name.clone(),
        operator_namespace: text_of(values, "namespaces.operator"),
        objects,
        certificates: if mode == Mode::CertManager { Vec::new() } else { certificates },
        mode,
        generated,
        expected,
        policies,
    };
    unless(faults, rendered)
}

fn enabled_components<'b>(
    bundle: &'b Bundle,
    profile: &Profile,
    renderer: &Renderer,
    faults: &mut Vec<Fault>,
) -> Vec<(Runlevel, &'b Component)> {
    let placed = profile.runlevels.iter().flat_map(|(level, names)| names.iter().map(move |name| (*level, name)));
    let known = placed.filter_map(|(level, name)| Some((level, bundle.components.get(name)?)));
    let mut is_enabled = |component: &Component| match enabled(renderer, component) {
        Ok(enabled) => enabled,
        Err(fault) => {
            faults.push(fault);
            false
        }
    };
    known.filter(|(_, component)| is_enabled(component)).collect()
}

/// The certificates of a profile's components.
///
/// # Errors
/// Everything that is wrong with their declarations.
pub fn certificates(bundle: &Bundle, profile: &Profile, values: &Values) -> Result<Vec<CertificateSpec>, Faults> {
    let renderer = Renderer::new(values);
    let render = |text: &str, item: Option<&str>| {
        let rendered = match item {
            Some(item) => renderer.scalar_with(text, item),
            None => renderer.scalar(text),
        };
        rendered.map_err(|error| error.to_string())
    };
    let list = |name: &str| match values.get(name) {
        Some(Value::Array(list)) => Ok(list.iter().filter_map(Value::as_str).map(str::to_owned).collect()),
        _ => Err(format!("\"{name}\" is no value that is a list")),
    };
    let mut specs = certificate::parse(&bundle.certificates, &render, &list).map_err(|CertificateError(faults)| {
        let fault = |fault: certificate::Fault| Fault::of(fault.file, format!("{}: {}", fault.field, fault.problem));
        Faults(faults.into_iter().map(fault).collect())
    })?;
    specs.retain(|spec| profile.runlevels.values().flatten().any(|component| *component == spec.component));
    for spec in &mut specs {
        let own = std::mem::replace(&mut spec.labels, common_labels(&spec.component));
        spec.labels.extend(own);
    }
    Ok(specs)
}

/// Labels of every object of a component.
pub fn common_labels(component: &str) -> BTreeMap<String, String> {
    [
        ("app.kubernetes.io/name", "buildkit-operator"),
        ("app.kubernetes.io/instance", "buildkit-operator"),
        ("app.kubernetes.io/managed-by", crate::names::INSTALLER_MANAGER),
        ("app.kubernetes.io/version", crate::VERSION),
        (crate::names::COMPONENT_LABEL, component),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .collect()
}

fn enabled(renderer: &Renderer, component: &Component) -> Result<bool, Fault> {
    let Some(expression) = &component.enabled else { return Ok(true) };
    renderer.holds(expression).map_err(|error| declaration_fault(component, &error))
}

fn declaration_fault(component: &Component, error: &RenderError) -> Fault {
    Fault::of(format!("manifests/{}/component.yaml", component.name), error.to_string())
}

fn text_of(values: &Values, name: &str) -> String {
    values.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// An object whose kind may still turn out to be unknown.
struct Draft {
    object: Object,
    place: Fault,
}

struct Collector<'a> {
    renderer: &'a Renderer,
    values: &'a Values,
    component: &'a Component,
    runlevel: Runlevel,
    faults: &'a mut Vec<Fault>,
}

impl Collector<'_> {
    fn objects(&mut self, drafts: &mut Vec<Draft>) {
        for (path, source) in &self.component.files {
            let text = if path.ends_with(".j2") {
                match self.renderer.yaml(path, source) {
                    Ok(text) => text,
                    Err(faults) => {
                        self.faults.extend(faults);
                        continue;
                    }
                }
            } else {
                Text::plain(source)
            };
            let (documents, faults) = yaml::parse(path, &text.text);
            let to_template = |fault: Fault| Fault { line: fault.line.map(|line| text.line(line)), ..fault };
            self.faults.extend(faults.into_iter().map(to_template));
            drafts.extend(documents.into_iter().filter_map(|document| self.draft(path, &text, document)));
        }
    }

    fn policy(&mut self) -> Policy {
        let declared = &self.component.policy;
        let path = format!("manifests/{}/component.yaml", self.component.name);
        let probes = declared.probes.iter().map(|probe| Probe {
            webhook: probe.webhook.clone(),
            accept: probe.accept.as_ref().and_then(|text| self.probe(&path, text)),
            reject: probe.reject.as_ref().and_then(|text| self.probe(&path, text)),
        });
        Policy {
            probes: probes.collect(),
            conflicts: declared.conflicts.clone(),
            recreate: declared.recreate,
            readiness: declared.readiness.clone(),
        }
    }

    /// The object of a probe.
    fn probe(&mut self, path: &str, source: &str) -> Option<Object> {
        let text = match self.renderer.yaml(path, source) {
            Ok(text) => text,
            Err(faults) => {
                self.faults.extend(faults);
                return None;
            }
        };
        let (documents, faults) = yaml::parse(path, &text.text);
        self.faults.extend(faults);
        let body = documents.into_iter().next()?.value;
        match identity(&body) {
            Ok(id) => {
                let component = self.component.name.clone();
                Some(Object { id, component, runlevel: self.runlevel, body: Arc::new(body), source: path.to_owned() })
            }
            Err((_, message)) => {
                self.faults.push(Fault::of(path, format!("probes: {message}")));
                None
            }
        }
    }

    fn draft(&mut self, path: &str, text: &Text, document: Document) -> Option<Draft> {
        let line = |at: &[String]| text.line(document.line(at));
        let place = Fault::at(path, line(&[]), String::new());
        let id = match identity(&document.value) {
            Ok(id) => id,
            Err((at, message)) => {
                self.faults.push(Fault::at(path, line(&at), message));
                return None;
            }
        };
        let images: Vec<String> = self.component.images.iter().map(|name| text_of(self.values, name)).collect();
        for (at, message) in check::object(&document.value, &images) {
            self.faults.push(Fault::at(path, line(&at), format!("{id}: {message}")));
        }
        let mut body = document.value;
        label(&mut body, &common_labels(&self.component.name));
        let source = format!("{path}:{}", place.line.unwrap_or(1));
        let object = Object {
            id,
            component: self.component.name.clone(),
            runlevel: self.runlevel,
            body: Arc::new(body),
            source,
        };
        Some(Draft { object, place })
    }

    fn generated(&mut self, generated: &mut Vec<GeneratedSecret>, expected: &mut Vec<GeneratedSecret>) {
        for declared in &self.component.generated {
            let made = (|| {
                let holds = |condition: &Option<String>| {
                    condition.as_deref().map_or(Ok(true), |condition| self.renderer.holds(condition))
                };
                let (wanted, made) = (holds(&declared.when)?, holds(&declared.make)?);
                let secret = GeneratedSecret {
                    component: self.component.name.clone(),
                    runlevel: self.runlevel,
                    namespace: self.renderer.scalar(&declared.namespace)?,
                    name: self.renderer.scalar(&declared.secret)?,
                    key: self.renderer.scalar(&declared.key)?,
                    bytes: declared.bytes,
                    labels: common_labels(&self.component.name),
                };
                Ok(wanted.then_some((made, secret)))
            })();
            match made {
                Ok(None) => {}
                Ok(Some((true, secret))) => generated.push(secret),
                Ok(Some((false, secret))) => expected.push(secret),
                Err(error) => self.faults.push(declaration_fault(self.component, &error)),
            }
        }
    }
}

fn identity(body: &Value) -> Result<ObjectId, check::Finding> {
    let field = |path: &[&str]| {
        let found = path.iter().try_fold(body, |value, step| value.get(step)).and_then(Value::as_str);
        found.filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let missing = |path: &[&str]| {
        let at = path.iter().map(|step| (*step).to_owned()).collect();
        (at, format!("object without {}", path.join(".")))
    };
    let required = |path: &[&str]| field(path).ok_or_else(|| missing(path));
    let api_version = required(&["apiVersion"])?;
    let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
    Ok(ObjectId {
        kind: required(&["kind"])?,
        group: group.to_owned(),
        version: version.to_owned(),
        namespace: field(&["metadata", "namespace"]),
        name: required(&["metadata", "name"])?,
    })
}

/// Adds the common labels; the object's own win.
fn label(body: &mut Value, common: &BTreeMap<String, String>) {
    let Some(metadata) = body.get_mut("metadata").and_then(Value::as_object_mut) else { return };
    let mut labels: Map<String, Value> =
        common.iter().map(|(key, value)| (key.clone(), value.clone().into())).collect();
    if let Some(Value::Object(own)) = metadata.get("labels") {
        labels.extend(own.clone());
    }
    labels.sort_keys();
    metadata.insert("labels".to_owned(), Value::Object(labels));
}

/// Checks what takes all objects to see, and sorts.
fn order(drafts: Vec<Draft>, faults: &mut Vec<Fault>) -> Vec<Object> {
    let custom: HashMap<(String, String), bool> =
        drafts.iter().filter_map(|draft| defines(&draft.object.body)).collect();
    let mut seen: HashMap<(String, String, Option<String>, String), String> = HashMap::new();
    let mut keyed = Vec::new();
    for Draft { object, place } in drafts {
        let id = &object.id;
        let known = kinds::find(&id.group, &id.kind)
            .or_else(|| custom.get(&(id.group.clone(), id.kind.clone())).map(|namespaced| kinds::custom(*namespaced)));
        let kind = match known {
            None => {
                faults.push(Fault { message: unknown_kind(id), ..place });
                continue;
            }
            Some(Kind { namespaced: true, .. }) if id.namespace.is_none() => {
                faults.push(Fault { message: format!("{id}: has no namespace"), ..place });
                continue;
            }
            Some(Kind { namespaced: false, .. }) if id.namespace.is_some() => {
                faults.push(Fault { message: format!("{id}: a {} has no namespace", id.kind), ..place });
                continue;
            }
            Some(kind) => kind,
        };
        let identity = (id.group.clone(), id.kind.clone(), id.namespace.clone(), id.name.clone());
        if let Some(first) = seen.insert(identity, object.source.clone()) {
            faults.push(Fault { message: format!("{id}: is in {first} already"), ..place });
            continue;
        }
        keyed.push((object.runlevel, kind.order, object));
    }
    keyed.sort_by(|(level_a, order_a, a), (level_b, order_b, b)| {
        (level_a, order_a, &a.id.name, &a.id.namespace).cmp(&(level_b, order_b, &b.id.name, &b.id.namespace))
    });
    keyed.into_iter().map(|(_, _, object)| object).collect()
}

fn unknown_kind(id: &ObjectId) -> String {
    let hint = match kinds::groups_of(&id.kind).next() {
        Some("") => "; its apiVersion is v1".to_owned(),
        Some(group) => format!("; its group is {group}"),
        None => "; a kind of your own needs its CustomResourceDefinition in the bundle".to_owned(),
    };
    format!("unknown kind \"{}\" of {}{hint}", id.kind, id.api_version())
}

/// Group, kind and scope that a CustomResourceDefinition defines.
fn defines(body: &Value) -> Option<((String, String), bool)> {
    if body.get("kind")? != "CustomResourceDefinition" {
        return None;
    }
    let spec = body.get("spec")?;
    let group = spec.get("group")?.as_str()?;
    let kind = spec.get("names")?.get("kind")?.as_str()?;
    Some(((group.to_owned(), kind.to_owned()), spec.get("scope")? == "Namespaced"))
}
