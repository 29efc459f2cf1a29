//! An installation as files, for those who apply it themselves.
//!
//! In: what was rendered with the component `bootstrap`. Out: files, path and
//! text, the same bytes for the same input. No private key and no token ever
//! leaves in an export: its second level has a Job of our own image that makes
//! them in the cluster, once. Pure.

mod argocd;
mod flux;
mod kustomize;
mod note;
mod plain;

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::{Object, Rendered, Runlevel, emit};
use crate::certificate::Mode;

pub use argocd::Argo;
pub use flux::{Flux, FluxSource, ParseFluxSource};

/// How every exported file begins, so that an export can be told from
/// somebody's own files.
pub const HEADER: &str = "Written by `bko-install export`";

/// The note beside the manifests.
pub const NOTE: &str = "README.md";

/// The component that makes what no export holds; its level is that of the
/// first Secrets.
pub const BOOTSTRAP: (Runlevel, &str) = (Runlevel::Rc1, "bootstrap");

/// Path below the folder of the export, and text.
pub type File = (String, String);

/// In which form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Format {
    /// One file a component, to be applied in the order of their names.
    Plain,
    /// A folder a level, each a kustomization, and one above them.
    Kustomize,
    /// The same, and for each level a `Kustomization` of Flux that waits for the one before.
    Flux(Flux),
    /// A folder a level, and for each an `Application` of Argo CD.
    Argo(Argo),
}

/// The files of an export.
pub fn files(rendered: &Rendered, format: &Format) -> Vec<File> {
    let groups = groups(rendered);
    let mut files = match format {
        Format::Plain => plain::files(&groups),
        Format::Kustomize => kustomize::files(&groups),
        Format::Flux(options) => flux::files(&groups, options),
        Format::Argo(options) => argocd::files(&groups, options, &rendered.operator_namespace),
    };
    files.push((NOTE.to_owned(), note::note(rendered, &groups, format)));
    files
}

/// Whether a text is a file of an earlier export.
pub fn is_exported(text: &str) -> bool {
    let first = text.lines().next().unwrap_or_default();
    first.trim_start_matches(['#', '<', '!', '-', ' ']).starts_with(HEADER)
}

/// The Secrets that the export's own step makes: `namespace/name`.
pub fn made_in_cluster(rendered: &Rendered) -> Vec<String> {
    let declared = rendered.declarations();
    let generated = declared.generated.iter().map(|secret| format!("{}/{}", secret.namespace, secret.name));
    let certificates = declared.certificates.iter().map(|spec| spec.secret_path());
    generated.chain(certificates).collect()
}

/// The Secrets that somebody else has to make: `namespace/name`, and what they hold.
pub fn yours_to_make(rendered: &Rendered) -> Vec<(String, String)> {
    let provided = rendered.mode == Mode::Provided;
    let leaves = rendered.certificates.iter().filter(|spec| provided && !spec.is_authority() && !spec.optional);
    let leaves = leaves.map(|spec| (spec.secret_path(), "`ca.pem`, `cert.pem`, `key.pem`".to_owned()));
    let values = rendered
        .expected
        .iter()
        .map(|value| (format!("{}/{}", value.namespace, value.name), format!("`{}`", value.key)));
    values.chain(leaves).collect()
}

/// The objects of one component, in the order of applying.
struct Group<'a> {
    runlevel: Runlevel,
    component: &'a str,
    objects: Vec<&'a Object>,
}

/// Components in the order of their first objects; those of one level are together.
fn groups(rendered: &Rendered) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for object in &rendered.objects {
        match groups.iter_mut().find(|group| group.component == object.component) {
            Some(group) => group.objects.push(object),
            None => {
                groups.push(Group { runlevel: object.runlevel, component: &object.component, objects: vec![object] })
            }
        }
    }
    // It needs what the others of its level make.
    groups.sort_by_key(|group| (group.runlevel, group.component == BOOTSTRAP.1));
    groups
}

/// The levels that have objects, in order.
fn levels<'g, 'a>(groups: &'g [Group<'a>]) -> impl Iterator<Item = (Runlevel, &'g [Group<'a>])> {
    groups.chunk_by(|a, b| a.runlevel == b.runlevel).map(|level| (level[0].runlevel, level))
}

/// Documents of one file.
fn documents<'v>(bodies: impl IntoIterator<Item = &'v Value>) -> String {
    let documents: Vec<String> = bodies.into_iter().map(emit::to_yaml).collect();
    format!("# {HEADER}, version {}\n{}", crate::VERSION, documents.join("---\n"))
}

/// An object of somebody else's kind.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest<'a, S> {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata<'a>,
    spec: S,
}

#[derive(Serialize)]
struct Metadata<'a> {
    name: String,
    namespace: &'a str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, String>,
}

/// One object of somebody else's kind as a file.
fn document(object: &impl Serialize) -> String {
    // What is written here is plain text, lists and maps of text.
    documents(&serde_json::to_value(object).ok())
}

/// A folder within a repository, without `./` before it and `/` behind it.
fn below(prefix: &str, path: &str) -> String {
    let prefix = prefix.trim_start_matches("./").trim_matches('/');
    if prefix.is_empty() || prefix == "." { path.to_owned() } else { format!("{prefix}/{path}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_written_in_one_way() {
        for prefix in ["", ".", "./", "/"] {
            assert_eq!(below(prefix, "rc0"), "rc0");
        }
        for prefix in ["farm/prod", "./farm/prod/", "/farm/prod"] {
            assert_eq!(below(prefix, "rc0"), "farm/prod/rc0");
        }
    }

    #[test]
    fn files_of_an_export_are_known_by_their_first_line() {
        assert!(is_exported(&documents([])));
        assert!(is_exported(&format!("<!-- {HEADER}, version 1 -->\n# Profile")));
        assert!(!is_exported("apiVersion: v1\n"));
        assert!(!is_exported(&format!("a\n# {HEADER}")));
    }
}
