//! What an object must be before it is worth sending: faults that the API
//! server would find late, or never.

use serde_json::Value;

use crate::profile::syntax::{self, ImageProblem};

/// Path within an object, and what is wrong there.
pub(crate) type Finding = (Vec<String>, String);

/// All findings of one object. `images`: what its containers may run.
pub(crate) fn object(body: &Value, images: &[String]) -> Vec<Finding> {
    let kind = body.get("kind").and_then(Value::as_str).unwrap_or_default();
    let mut walk = Walk { kind, images, path: Vec::new(), findings: Vec::new() };
    walk.value(body);
    walk.findings
}

struct Walk<'a> {
    kind: &'a str,
    images: &'a [String],
    path: Vec<String>,
    findings: Vec<Finding>,
}

impl Walk<'_> {
    fn value(&mut self, value: &Value) {
        match value {
            Value::Object(map) => {
                for (key, inner) in map {
                    self.path.push(key.clone());
                    self.field(key, inner);
                    self.value(inner);
                    self.path.pop();
                }
            }
            Value::Array(list) => {
                for (position, inner) in list.iter().enumerate() {
                    self.path.push(position.to_string());
                    self.value(inner);
                    self.path.pop();
                }
            }
            _ => {}
        }
    }

    fn field(&mut self, key: &str, value: &Value) {
        match (key, value) {
            ("mode" | "defaultMode", Value::String(text)) => self.mode(key, text),
            ("image", Value::String(image)) if self.in_container() => self.image(image),
            (_, Value::Array(list)) => self.list(key, list),
            _ => {}
        }
    }

    /// YAML 1.1 reads `0644` as 420, YAML 1.2 as the text "0644".
    fn mode(&mut self, key: &str, text: &str) {
        let octal = text.strip_prefix("0o").unwrap_or(text);
        let message = match u32::from_str_radix(octal, 8) {
            Ok(mode) => format!("{key}: {text} is read differently by different parsers: write {mode} or 0o{mode:o}"),
            Err(_) => format!("{key}: want a number such as 420 or 0o644, found \"{text}\""),
        };
        self.find(message);
    }

    fn image(&mut self, image: &str) {
        let message = match syntax::image(image) {
            Err(ImageProblem::Unpinned) => {
                format!("image \"{image}\" is not pinned: give it a digest, or a tag other than latest")
            }
            Err(ImageProblem::Malformed) => format!("\"{image}\" is no image reference"),
            Ok(()) if self.images.iter().any(|known| known == image) => return,
            Ok(()) => format!("image \"{image}\" is none of those that component.yaml lists under images"),
        };
        self.find(message);
    }

    fn in_container(&self) -> bool {
        let parent = self.path.len().checked_sub(3).map(|at| self.path[at].as_str());
        matches!(parent, Some("containers" | "initContainers" | "ephemeralContainers"))
    }

    /// Lists that the API server takes for maps: server-side apply refuses two
    /// entries of one key.
    fn list(&mut self, key: &str, list: &[Value]) {
        let keys: &[&str] = match key {
            "containers" | "initContainers" | "ephemeralContainers" | "env" | "volumes" | "imagePullSecrets" => {
                &["name"]
            }
            "webhooks" | "versions" => &["name"],
            "volumeMounts" => &["mountPath"],
            "volumeDevices" => &["devicePath"],
            "hostAliases" => &["ip"],
            "topologySpreadConstraints" => &["topologyKey", "whenUnsatisfiable"],
            "ports" if self.kind == "NetworkPolicy" => return,
            "ports" if self.kind == "Service" => &["port", "protocol"],
            "ports" => &["containerPort", "protocol"],
            _ => return,
        };
        let identity = |item: &Value| -> Option<Vec<String>> {
            let part = |key: &&str| match item.get(*key) {
                Some(Value::String(text)) => Some(text.clone()),
                Some(other) => Some(other.to_string()),
                None if *key == "protocol" => Some("TCP".to_owned()),
                None => None,
            };
            keys.iter().map(part).collect()
        };
        let mut seen = Vec::new();
        for (position, item) in list.iter().enumerate() {
            let Some(identity) = identity(item) else { continue };
            if seen.contains(&identity) {
                self.path.push(position.to_string());
                self.find(format!("{key}: {} is given twice, which server-side apply refuses", identity.join("/")));
                self.path.pop();
            }
            seen.push(identity);
        }
    }

    fn find(&mut self, message: String) {
        self.findings.push((self.path.clone(), message));
    }
}
