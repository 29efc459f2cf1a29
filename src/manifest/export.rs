//! An installation as files, for those who apply it themselves.
//!
//! No private key and no token ever leaves in an export: what holds one is
//! named in a note, with how to make it.

use std::fmt::Write as _;

use super::{Object, Rendered, emit};

/// How every exported file begins, so that an export can be told from
/// somebody's own files.
pub const HEADER: &str = "Written by `bko-install export`";

/// The note beside the manifests.
pub const NOTE: &str = "README.md";

/// Whether a text is a file of an earlier export.
pub fn is_exported(text: &str) -> bool {
    let first = text.lines().next().unwrap_or_default();
    first.trim_start_matches(['#', '<', '!', '-', ' ']).starts_with(HEADER)
}

/// One file a component, named so that their order is the order of applying:
/// `NN-rcX-component.yaml`; and a note on what is left out.
pub fn plain(rendered: &Rendered) -> Vec<(String, String)> {
    let mut groups: Vec<(&Object, Vec<&Object>)> = Vec::new();
    for object in &rendered.objects {
        match groups.iter_mut().find(|(first, _)| first.component == object.component) {
            Some((_, objects)) => objects.push(object),
            None => groups.push((object, vec![object])),
        }
    }
    let groups: Vec<(String, Vec<&Object>)> = groups
        .into_iter()
        .enumerate()
        .map(|(number, (first, objects))| (format!("{number:02}-{}-{}.yaml", first.runlevel, first.component), objects))
        .collect();
    let mut files: Vec<_> = groups
        .iter()
        .map(|(name, objects)| {
            let documents: Vec<String> = objects.iter().map(|object| emit::to_yaml(&object.body)).collect();
            (name.clone(), format!("# {HEADER}, version {}\n{}", crate::VERSION, documents.join("---\n")))
        })
        .collect();
    files.push((NOTE.to_owned(), note(rendered, &groups)));
    files
}

/// The Secrets that an export leaves out: `namespace/name`.
pub fn left_out(rendered: &Rendered) -> Vec<String> {
    let generated = rendered.generated.iter().map(|secret| format!("{}/{}", secret.namespace, secret.name));
    let certificates = rendered.certificates.iter().map(|spec| format!("{}/{}", spec.namespace, spec.secret));
    generated.chain(certificates).collect()
}

/// The commands that apply one file and wait for what the next one needs.
fn apply_and_wait(note: &mut String, name: &str, objects: &[&Object]) {
    let _ = writeln!(note, "kubectl apply --server-side -f {name}");
    for object in objects {
        let namespace = object.id.namespace.as_deref().unwrap_or_default();
        let _ = match object.id.kind.as_str() {
            "CustomResourceDefinition" => {
                writeln!(note, "kubectl wait --for=condition=Established crd/{}", object.id.name)
            }
            "Deployment" => writeln!(note, "kubectl -n {namespace} rollout status deployment/{}", object.id.name),
            _ => Ok(()),
        };
    }
    if objects.iter().any(|object| object.id.kind == "Namespace") {
        note.push_str("# Now make the Secrets below.\n");
    }
}

fn note(rendered: &Rendered, groups: &[(String, Vec<&Object>)]) -> String {
    let mut note = format!("<!-- {HEADER}, version {} -->\n# Profile {}\n", crate::VERSION, rendered.profile);
    note.push_str("\nApply the files in the order of their names:\n\n```sh\n");
    for (name, objects) in groups {
        apply_and_wait(&mut note, name, objects);
    }
    note.push_str("```\n");
    if !rendered.generated.is_empty() {
        note.push_str(
            "\nNo token leaves in an export. Make once what `bko-install cluster init` would make:\n\n```sh\n",
        );
        for secret in &rendered.generated {
            let _ = writeln!(
                note,
                "kubectl -n {} create secret generic {} --from-literal={}=\"$(openssl rand -base64 {} | tr '+/' '-_' | tr -d '=\\n')\"",
                secret.namespace, secret.name, secret.key, secret.bytes
            );
        }
        note.push_str("```\n");
    }
    if !rendered.certificates.is_empty() {
        note.push_str(
            "\nNo private key leaves in an export either. These Secrets hold the certificates; make them with your own \
             authority (docs/certificates.md says what they must cover), or install with `bko-install cluster init` \
             instead, which makes them:\n\n",
        );
        for spec in &rendered.certificates {
            let keys = if spec.is_authority() { "`ca.pem`, `ca-key.pem`" } else { "`ca.pem`, `cert.pem`, `key.pem`" };
            let _ = writeln!(note, "- `{}/{}`: {keys}", spec.namespace, spec.secret);
        }
    }
    note
}
