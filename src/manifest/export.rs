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
    let mut files: Vec<_> = groups
        .iter()
        .enumerate()
        .map(|(number, (first, objects))| {
            let name = format!("{number:02}-{}-{}.yaml", first.runlevel, first.component);
            let documents: Vec<String> = objects.iter().map(|object| emit::to_yaml(&object.body)).collect();
            (name, format!("# {HEADER}, version {}\n{}", crate::VERSION, documents.join("---\n")))
        })
        .collect();
    files.push((NOTE.to_owned(), note(rendered)));
    files
}

/// The Secrets that an export leaves out: `namespace/name`.
pub fn left_out(rendered: &Rendered) -> Vec<String> {
    let generated = rendered.generated.iter().map(|secret| format!("{}/{}", secret.namespace, secret.name));
    let certificates = rendered.certificates.iter().map(|spec| format!("{}/{}", spec.namespace, spec.secret));
    generated.chain(certificates).collect()
}

fn note(rendered: &Rendered) -> String {
    let mut note = format!("<!-- {HEADER}, version {} -->\n# Profile {}\n", crate::VERSION, rendered.profile);
    note.push_str(
        "\nApply the files in the order of their names, each when what the one before it holds is ready:\n\n\
         ```sh\nfor file in *.yaml; do kubectl apply --server-side -f \"$file\"; done\n```\n",
    );
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
            "\nNo private key leaves in an export either. These Secrets hold the certificates, in the keys \
             `ca.pem`, `cert.pem` and `key.pem`; make them yourself, or let `bko-install cluster init` make them:\n\n",
        );
        for spec in &rendered.certificates {
            let _ = writeln!(note, "- `{}/{}`", spec.namespace, spec.secret);
        }
    }
    note
}
