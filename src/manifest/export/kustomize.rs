//! A folder a level with a kustomization, and one above them.

use serde::Serialize;

use super::{File, Group, document, documents, levels};

/// The file that `kubectl kustomize` reads.
pub(super) const FILE: &str = "kustomization.yaml";

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Kustomization {
    api_version: &'static str,
    kind: &'static str,
    /// As they are written: its own order would put a Job before its Role.
    sort_options: SortOptions,
    resources: Vec<String>,
}

#[derive(Serialize)]
struct SortOptions {
    order: &'static str,
}

/// A kustomization of these files and folders.
pub(super) fn kustomization(resources: Vec<String>) -> String {
    document(&Kustomization {
        api_version: "kustomize.config.k8s.io/v1beta1",
        kind: "Kustomization",
        sort_options: SortOptions { order: "fifo" },
        resources,
    })
}

/// Levels as folders.
pub(super) fn folders(groups: &[Group<'_>]) -> Vec<File> {
    let mut files = Vec::new();
    for (level, components) in levels(groups) {
        let names: Vec<String> = components.iter().map(|group| format!("{}.yaml", group.component)).collect();
        for (name, group) in names.iter().zip(components) {
            files.push((format!("{level}/{name}"), documents(group.objects.iter().map(|object| &*object.body))));
        }
        files.push((format!("{level}/{FILE}"), kustomization(names)));
    }
    files
}

pub(super) fn files(groups: &[Group<'_>]) -> Vec<File> {
    let mut files = folders(groups);
    let all = levels(groups).map(|(level, _)| level.to_string()).collect();
    files.push((FILE.to_owned(), kustomization(all)));
    files
}
