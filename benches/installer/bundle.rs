//! Synthetic objects, as a bundle and as a list for kubectl.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

const IMAGE: &str = "registry.example/app:1";

const GLOBALS: &str = "values:\n  image: {type: image, optional: true, default: \"\", description: Image}\n  \
                       namespaces.operator: {type: string, format: label, default: buildkit-operator, description: Namespace}\n";

/// Which of the objects, and how.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    changed: bool,
    pruned: bool,
}

impl Part {
    /// All of them.
    pub(crate) fn whole() -> Self {
        Self { changed: false, pruned: false }
    }

    /// All of them, one with another value.
    pub(crate) fn changed() -> Self {
        Self { changed: true, pruned: false }
    }

    /// Without a tenth of them.
    pub(crate) fn pruned() -> Self {
        Self { changed: true, pruned: true }
    }

    pub(crate) fn is_pruned(self) -> bool {
        self.pruned
    }
}

/// So many objects in a namespace of their own.
pub(crate) struct Synthetic {
    namespace: String,
    count: usize,
    folder: tempfile::TempDir,
}

impl Synthetic {
    /// Nothing is written yet.
    pub(crate) fn new(namespace: &str, count: usize) -> anyhow::Result<Self> {
        Ok(Self { namespace: namespace.to_owned(), count, folder: tempfile::tempdir()? })
    }

    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The bundle that was written last.
    pub(crate) fn folder(&self) -> PathBuf {
        self.folder.path().join("bundle")
    }

    /// Writes a bundle: a component of each level for each hundred objects.
    pub(crate) fn write_bundle(&self, part: Part) -> anyhow::Result<()> {
        let folder = self.folder();
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        write(&folder.join("manifests/globals.yaml"), GLOBALS)?;
        let mut profile = "description: scale\nrunlevels:\n".to_owned();
        for level in ["rc0", "rc1", "rc3"] {
            let mut names = Vec::new();
            for number in 0..self.count.div_ceil(100) {
                let numbers = number * 100..self.count.min(number * 100 + 100);
                let objects: Vec<Value> = self.objects(numbers, part).filter(|o| level_of(o) == level).collect();
                if objects.is_empty() {
                    continue;
                }
                let name = format!("{level}part{number}");
                let component = folder.join("manifests").join(&name);
                let image = if level == "rc3" {
                    format!(
                        "images: [{name}.image]\nvalues:\n  {name}.image: {{type: image, default: '{IMAGE}', description: Image}}\n"
                    )
                } else {
                    String::new()
                };
                write(&component.join("component.yaml"), &format!("description: part {number} of {level}\n{image}"))?;
                write(&component.join("objects.yaml"), &documents(&objects))?;
                names.push(name);
            }
            writeln!(profile, "  {level}: [{}]", names.join(", "))?;
        }
        write(&folder.join("profiles/default.yaml"), &profile)
    }

    /// Writes all objects into a file for kubectl.
    pub(crate) fn write_list(&self, part: Part) -> anyhow::Result<PathBuf> {
        let path = self.folder.path().join("list.yaml");
        write(&path, &documents(&self.objects(0..self.count, part).collect::<Vec<_>>()))?;
        Ok(path)
    }

    /// Writes the tenth that goes into a file for kubectl.
    pub(crate) fn write_pruned(&self) -> anyhow::Result<PathBuf> {
        let path = self.folder.path().join("pruned.yaml");
        let gone = (0..self.count).filter(|number| is_pruned(*number));
        write(&path, &documents(&gone.map(|number| self.object(number, false)).collect::<Vec<_>>()))?;
        Ok(path)
    }

    fn objects(&self, numbers: std::ops::Range<usize>, part: Part) -> impl Iterator<Item = Value> {
        let numbers = numbers.filter(move |number| !(part.pruned && is_pruned(*number)));
        numbers.map(move |number| self.object(number, part.changed))
    }

    fn object(&self, number: usize, changed: bool) -> Value {
        if number == 0 {
            return json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace}});
        }
        let name = format!("app-{number}");
        let mut object = match number % 100 {
            0 => return definition(&format!("{}.example.com", self.namespace), number, &self.namespace),
            1..25 => configuration(if changed && number == 2 { "debug" } else { "info" }, number),
            25..35 => secret(number),
            35..47 => json!({"apiVersion": "v1", "kind": "ServiceAccount"}),
            47..59 => role(),
            59..71 => binding(number),
            71..77 => network_policy(&name),
            77..89 => service(number - 11),
            _ => deployment(number),
        };
        object["metadata"] = json!({
            "name": name,
            "namespace": self.namespace,
            "labels": {"app": name, "tier": "backend"},
            "annotations": {"example.com/owner": "team-a"},
        });
        object
    }
}

/// Of each hundred, ten ConfigMaps.
fn is_pruned(number: usize) -> bool {
    (10..20).contains(&(number % 100))
}

fn level_of(object: &Value) -> &'static str {
    match object["kind"].as_str() {
        Some("Namespace" | "CustomResourceDefinition") => "rc0",
        Some("Service" | "Deployment") => "rc3",
        _ => "rc1",
    }
}

fn documents(objects: &[Value]) -> String {
    objects.iter().fold(String::new(), |mut all, object| {
        let _ = writeln!(all, "---\n{}", serde_json::to_string_pretty(object).unwrap());
        all
    })
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    Ok(std::fs::write(path, text)?)
}

/// A definition with a schema of some size, labelled `bench: LABEL`.
pub(crate) fn definition(group: &str, number: usize, label: &str) -> Value {
    let field = |text: &str| json!({"type": "string", "description": format!("{text}, as the controller reads it")});
    let fields: serde_json::Map<String, Value> =
        (0..20).map(|n| (format!("field{n}"), field(&format!("Field {n}")))).collect();
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("things{number}.{group}"), "labels": {"bench": label}},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": format!("Thing{number}"), "listKind": format!("Thing{number}List"),
                "plural": format!("things{number}"), "singular": format!("thing{number}"),
            },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {
                    "spec": {"type": "object", "properties": fields},
                    "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
                }}},
            }],
        },
    })
}

fn configuration(level: &str, number: usize) -> Value {
    let line = |n: usize| format!("option{n} = \"value {n} of application {number}\"\n");
    let text: String = (0..20).map(line).collect();
    json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"level": level, "config.toml": text}})
}

fn secret(number: usize) -> Value {
    let data = ["dXNlcm5hbWU=", "cGFzc3dvcmQgb2YgYW4gYXBwbGljYXRpb24="];
    json!({"apiVersion": "v1", "kind": "Secret", "type": "Opaque",
           "data": {"user": data[0], "password": data[1], format!("key-{number}"): data[0]}})
}

fn role() -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "rules": [
        {"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get", "patch"]},
    ]})
}

/// Binds the role and the account that are twelve and twenty-four before.
fn binding(number: usize) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
           "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": format!("app-{}", number - 12)},
           "subjects": [{"kind": "ServiceAccount", "name": format!("app-{}", number - 24)}]})
}

fn network_policy(name: &str) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": {
        "podSelector": {"matchLabels": {"app": name}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"tier": "frontend"}}}],
                     "ports": [{"protocol": "TCP", "port": 8080}]}],
    }})
}

fn service(number: usize) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "spec": {
        "selector": {"app": format!("app-{number}")},
        "ports": [{"name": "http", "port": 80, "targetPort": 8080, "protocol": "TCP"}],
    }})
}

fn deployment(number: usize) -> Value {
    let name = format!("app-{number}");
    let env: Vec<Value> =
        (0..6).map(|n| json!({"name": format!("OPTION_{n}"), "value": format!("value {n}")})).collect();
    json!({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {
        "replicas": 0,
        "selector": {"matchLabels": {"app": name}},
        "template": {
            "metadata": {"labels": {"app": name, "tier": "backend"}},
            "spec": {
                "automountServiceAccountToken": false,
                "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "app", "image": IMAGE, "env": env,
                    "ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}],
                    "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}},
                    "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5},
                    "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }],
                "volumes": [{"name": "tmp", "emptyDir": {}}],
            },
        },
    }})
}
