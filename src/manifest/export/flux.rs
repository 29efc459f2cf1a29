//! One `Kustomization` of Flux a level, which waits for the level before it.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::Serialize;

use super::{File, Group, Manifest, Metadata, below, document, kustomize, levels};
use crate::manifest::{Object, Runlevel};
use crate::profile::syntax;

/// Folder of Flux's own objects.
pub(super) const FOLDER: &str = "flux";

/// Where Flux finds the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flux {
    /// The source that has it.
    pub source: FluxSource,
    /// Namespace of the `Kustomization`s, and of the source unless it says otherwise.
    pub namespace: String,
    /// Folder of the export within the source.
    pub path: String,
}

/// `KIND/NAME` of a source, or `KIND/NAMESPACE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FluxSource {
    kind: &'static str,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
}

/// Why a text names no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("want KIND/NAME or KIND/NAMESPACE/NAME, of kind GitRepository, OCIRepository or Bucket")]
pub struct ParseFluxSource;

impl FromStr for FluxSource {
    type Err = ParseFluxSource;

    fn from_str(s: &str) -> Result<Self, ParseFluxSource> {
        let parts: Vec<&str> = s.split('/').collect();
        let (kind, namespace, name) = match parts.as_slice() {
            [kind, name] => (kind, None, name),
            [kind, namespace, name] => (kind, Some(*namespace), name),
            _ => return Err(ParseFluxSource),
        };
        let kinds = ["GitRepository", "OCIRepository", "Bucket"];
        let kind = kinds.into_iter().find(|known| known == kind).ok_or(ParseFluxSource)?;
        if ![Some(*name), namespace].into_iter().flatten().all(syntax::is_host) {
            return Err(ParseFluxSource);
        }
        Ok(Self { kind, name: (*name).to_owned(), namespace: namespace.map(str::to_owned) })
    }
}

type Kustomization<'a> = Manifest<'a, Spec<'a>>;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    depends_on: Vec<Name>,
    source_ref: &'a FluxSource,
    path: String,
    interval: &'static str,
    retry_interval: &'static str,
    timeout: &'static str,
    prune: bool,
    wait: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    health_checks: Vec<Health<'a>>,
}

#[derive(Serialize)]
struct Name {
    name: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Health<'a> {
    api_version: String,
    kind: &'a str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a str>,
}

pub(super) fn files(groups: &[Group<'_>], options: &Flux) -> Vec<File> {
    let mut files = kustomize::folders(groups);
    let (mut before, mut names) = (None, Vec::new());
    for (level, components) in levels(groups) {
        names.push(format!("{level}.yaml"));
        files.push((format!("{FOLDER}/{level}.yaml"), document(&of_level(level, before, components, options))));
        before = Some(level);
    }
    files.push((format!("{FOLDER}/{}", kustomize::FILE), kustomize::kustomization(names)));
    files
}

/// Name of a level's `Kustomization`.
pub(super) fn name(level: Runlevel) -> String {
    format!("buildkit-operator-{level}")
}

fn of_level<'a>(
    level: Runlevel,
    before: Option<Runlevel>,
    components: &[Group<'a>],
    options: &'a Flux,
) -> Kustomization<'a> {
    let objects = components.iter().flat_map(|group| group.objects.iter().copied());
    Kustomization {
        api_version: "kustomize.toolkit.fluxcd.io/v1",
        kind: "Kustomization",
        metadata: Metadata { name: name(level), namespace: &options.namespace, annotations: BTreeMap::new() },
        spec: Spec {
            depends_on: before.into_iter().map(|level| Name { name: name(level) }).collect(),
            source_ref: &options.source,
            path: format!("./{}", below(&options.path, &level.to_string())),
            interval: "10m",
            retry_interval: "1m",
            timeout: "10m",
            // The namespaces and the definition hold every project and every cache.
            prune: level != Runlevel::Rc0,
            wait: true,
            health_checks: objects.filter(|object| is_checked(object)).map(health).collect(),
        },
    }
}

/// What has a health of its own.
fn is_checked(object: &Object) -> bool {
    matches!(object.id.kind.as_str(), "Deployment" | "Job" | "CustomResourceDefinition" | "Certificate")
}

fn health(object: &Object) -> Health<'_> {
    let id = &object.id;
    Health { api_version: id.api_version(), kind: &id.kind, name: &id.name, namespace: id.namespace.as_deref() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_kind_and_a_name() {
        let parse = |text: &str| text.parse::<FluxSource>();
        assert!(parse("GitRepository/flux-system").is_ok_and(|source| source.namespace.is_none()));
        assert!(parse("OCIRepository/infra/farm").is_ok_and(|source| source.namespace.as_deref() == Some("infra")));
        for text in ["", "flux-system", "HelmRepository/x", "GitRepository/", "GitRepository/a/b/c", "Bucket/A b"] {
            assert_eq!(parse(text), Err(ParseFluxSource), "{text}");
        }
    }
}
