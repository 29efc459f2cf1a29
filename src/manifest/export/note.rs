//! What to do with an export, in words beside it.

use std::fmt::Write as _;

use super::{BOOTSTRAP, Format, Group, HEADER, argocd, below, flux, levels, made_in_cluster, plain, yours_to_make};
use crate::manifest::Rendered;

pub(super) fn note(rendered: &Rendered, groups: &[Group<'_>], format: &Format) -> String {
    let mut note = format!("<!-- {HEADER}, version {} -->\n# Profile {}\n", crate::VERSION, rendered.profile);
    match format {
        Format::Plain => {
            note.push_str("\nApply the files in the order of their names:\n\n```sh\n");
            for (number, group) in groups.iter().enumerate() {
                let _ = writeln!(note, "kubectl apply --server-side -f {}", plain::name(number, group));
                wait(&mut note, group);
            }
            note.push_str("```\n");
        }
        Format::Kustomize => {
            note.push_str("\nApply level by level; each needs what the one before it made:\n\n```sh\n");
            for (level, components) in levels(groups) {
                let _ = writeln!(note, "kubectl apply --server-side -k {level}");
                components.iter().for_each(|group| wait(&mut note, group));
            }
            note.push_str("```\n\n`kubectl kustomize .` prints all of it, to be built upon.\n");
        }
        Format::Flux(options) => of_flux(&mut note, options),
        Format::Argo(options) => of_argo(&mut note, options),
    }
    secrets(&mut note, rendered);
    note
}

/// The commands that wait for what the next one needs.
fn wait(note: &mut String, group: &Group<'_>) {
    for object in &group.objects {
        let (name, namespace) = (&object.id.name, object.id.namespace.as_deref().unwrap_or_default());
        let _ = match object.id.kind.as_str() {
            "CustomResourceDefinition" => writeln!(note, "kubectl wait --for=condition=Established crd/{name}"),
            "Deployment" => writeln!(note, "kubectl -n {namespace} rollout status deployment/{name}"),
            "Job" => {
                writeln!(note, "kubectl -n {namespace} wait --for=condition=Complete --timeout=10m job/{name}")
            }
            "Certificate" => {
                writeln!(note, "kubectl -n {namespace} wait --for=condition=Ready --timeout=10m certificate/{name}")
            }
            _ => Ok(()),
        };
    }
}

fn of_flux(note: &mut String, options: &flux::Flux) {
    let (folder, namespace) = (below(&options.path, ""), &options.namespace);
    let folder = if folder.is_empty() { "the root".to_owned() } else { format!("`{}`", folder.trim_end_matches('/')) };
    let _ = write!(
        note,
        "\nCommit this folder as {folder} of the source, and apply `{}` once, or include it in what Flux already \
         follows:\n\n```sh\nkubectl apply -k {}\nkubectl -n {namespace} get kustomizations --watch\n```\n\n\
         Each level waits until the one before it is healthy. What is taken out of the export is deleted, but for \
         level rc0: namespaces and the definition hold every project and every cache.\n",
        flux::FOLDER,
        flux::FOLDER,
    );
}

fn of_argo(note: &mut String, options: &argocd::Argo) {
    let argocd::Argo { repository, namespace, .. } = options;
    let _ = write!(
        note,
        "\nCommit this folder to {repository}, and apply its first application once:\n\n```sh\nkubectl apply -f {}\n```\n\n\
         Every object and every application has a sync wave, its level. Argo CD waits between applications only if it \
         is told how to judge one; without that it tries again until a level succeeds. To have it wait, add to the \
         ConfigMap `{namespace}/argocd-cm`:\n\n```yaml\n{HEALTH}```\n\nNamespaces and the definition, which hold every \
         project and every cache, are neither pruned nor deleted.\n",
        argocd::ROOT,
    );
}

const HEALTH: &str = "\
resource.customizations.health.argoproj.io_Application: |
  hs = {status = \"Progressing\", message = \"\"}
  if obj.status ~= nil and obj.status.health ~= nil then
    hs.status = obj.status.health.status
    hs.message = obj.status.health.message or \"\"
  end
  return hs
";

fn secrets(note: &mut String, rendered: &Rendered) {
    let made = made_in_cluster(rendered);
    if !made.is_empty() {
        let _ = write!(
            note,
            "\nNo key and no token leaves in an export. The Job of `{}` makes these Secrets in the cluster, once, and \
             keeps what is there:\n\n",
            BOOTSTRAP.1
        );
        for path in &made {
            let _ = writeln!(note, "- `{path}`");
        }
    }
    let yours = yours_to_make(rendered);
    if !yours.is_empty() {
        note.push_str("\nThese Secrets are yours to make (docs/certificates.md says what they must cover):\n\n");
        for (path, keys) in &yours {
            let _ = writeln!(note, "- `{path}`: {keys}");
        }
    }
}
