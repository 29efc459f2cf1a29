//! One `Application` of Argo CD a level, and one above them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::{File, Group, Manifest, Metadata, below, document, documents, levels};
use crate::manifest::{Object, Runlevel};

/// Folder of the levels' applications.
pub(super) const FOLDER: &str = "apps";

/// The application that holds the others.
pub(super) const ROOT: &str = "root.yaml";

const WAVE: &str = "argocd.argoproj.io/sync-wave";
const SYNC: &str = "argocd.argoproj.io/sync-options";

/// Where Argo CD finds the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argo {
    /// URL of the repository.
    pub repository: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// Folder of the export within it.
    pub path: String,
    /// Namespace of the applications.
    pub namespace: String,
    /// Project of the applications.
    pub project: String,
}

type Application<'a> = Manifest<'a, Spec<'a>>;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec<'a> {
    project: &'a str,
    source: Source<'a>,
    destination: Destination<'a>,
    sync_policy: SyncPolicy,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Source<'a> {
    #[serde(rename = "repoURL")]
    repository: &'a str,
    target_revision: &'a str,
    path: String,
}

#[derive(Serialize)]
struct Destination<'a> {
    server: &'static str,
    namespace: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SyncPolicy {
    automated: Automated,
    sync_options: [&'static str; 1],
    retry: Retry,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Automated {
    prune: bool,
    self_heal: bool,
}

/// A level that was begun too early gets there by itself.
#[derive(Serialize)]
struct Retry {
    limit: i8,
    backoff: Backoff,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Backoff {
    duration: &'static str,
    factor: u8,
    max_duration: &'static str,
}

pub(super) fn files(groups: &[Group<'_>], options: &Argo, operator_namespace: &str) -> Vec<File> {
    let mut files = Vec::new();
    for group in groups {
        let bodies: Vec<Value> = group.objects.iter().map(|object| in_wave(object)).collect();
        files.push((format!("{}/{}.yaml", group.runlevel, group.component), documents(&bodies)));
    }
    for (level, _) in levels(groups) {
        let annotations = BTreeMap::from([(WAVE, wave(level))]);
        let name = format!("buildkit-operator-{level}");
        let application = application(name, &level.to_string(), annotations, options, operator_namespace);
        files.push((format!("{FOLDER}/{level}.yaml"), document(&application)));
    }
    let root = application("buildkit-operator".to_owned(), FOLDER, BTreeMap::new(), options, &options.namespace);
    files.push((ROOT.to_owned(), document(&root)));
    files
}

fn wave(level: Runlevel) -> String {
    (level as u8).to_string()
}

/// An object that says its level, for those who make one application of all;
/// and what holds projects and caches stays when it is removed from the export.
fn in_wave(object: &Object) -> Value {
    let mut body = Value::clone(&object.body);
    let annotations = &mut body["metadata"]["annotations"];
    annotations[WAVE] = wave(object.runlevel).into();
    if matches!(object.id.kind.as_str(), "Namespace" | "CustomResourceDefinition") {
        annotations[SYNC] = "Prune=false,Delete=false".into();
    }
    body
}

fn application<'a>(
    name: String,
    folder: &str,
    annotations: BTreeMap<&'static str, String>,
    options: &'a Argo,
    namespace: &'a str,
) -> Application<'a> {
    Application {
        api_version: "argoproj.io/v1alpha1",
        kind: "Application",
        metadata: Metadata { name, namespace: &options.namespace, annotations },
        spec: Spec {
            project: &options.project,
            source: Source {
                repository: &options.repository,
                target_revision: &options.revision,
                path: below(&options.path, folder),
            },
            destination: Destination { server: "https://kubernetes.default.svc", namespace },
            sync_policy: SyncPolicy {
                automated: Automated { prune: true, self_heal: true },
                sync_options: ["ServerSideApply=true"],
                retry: Retry { limit: -1, backoff: Backoff { duration: "5s", factor: 2, max_duration: "1m" } },
            },
        },
    }
}
