//! What somebody had set of a Helm release of the reference, in our values. Pure.
//!
//! In: the values that the user gave to Helm. Out: ours that mean the same, and
//! the names of those that have no equal, so that nothing is lost in silence.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

use super::HelmRelease;

/// What is taken over of a release's values.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReleaseValues {
    /// Whose they are.
    pub release: HelmRelease,
    /// The values.
    #[serde(flatten)]
    pub values: Carried,
}

impl ReleaseValues {
    /// What a person has to set by hand, or to do without.
    pub fn warning(&self) -> Option<String> {
        let left = self.values.left.join(", ");
        let what = "have no equal here, or none that is valid: set what you need of them with -f or --set";
        (!left.is_empty()).then(|| format!("values of {} that {what}: {left}", self.release))
    }
}

impl std::fmt::Display for ReleaseValues {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { release, values: Carried { taken, left } } = self;
        writeln!(f, "values of {release}")?;
        taken.iter().try_for_each(|(name, value)| writeln!(f, "  taken      {name}: {value}"))?;
        left.iter().try_for_each(|name| writeln!(f, "  left       {name}"))
    }
}

/// Values of a release.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Carried {
    /// Ours, by name.
    pub taken: BTreeMap<String, Value>,
    /// Theirs that have no equal here, by name; never with their content, which
    /// may be secret.
    pub left: Vec<String>,
}

/// Theirs, ours, and how one becomes the other.
type Rule = (&'static str, &'static str, fn(&Value) -> Option<Value>);

/// Values that mean the same. What is below a name of this table goes with it.
const RULES: [Rule; 51] = [
    ("adaptiveIdle.maxSeconds", "adaptiveIdle.maxSeconds", same),
    ("api.rateBurst", "api.rateBurst", same),
    ("api.rateLimit", "api.rateLimit", same),
    ("api.requireBuildId", "api.requireBuildId", same),
    ("auth.tokenSecret", "auth.tokenSecret", filled),
    ("buildkit.image", "daemon.image", filled),
    ("buildkit.port", "daemon.port", same),
    ("certs.clientSecretName", "certs.clientSecretName", filled),
    ("certs.daemonSecretName", "certs.daemonSecretName", filled),
    ("createNamespaces", "namespaces.create", same),
    ("daemonScheduling", "daemon.scheduling", same),
    ("defaultStorageClass", "cache.storageClass", same),
    ("gateway.drainSeconds", "gateway.drainSeconds", same),
    ("gateway.externalPort", "gateway.externalPort", number),
    ("gateway.maxConns", "gateway.maxConns", same),
    ("gateway.nodeSelector", "gateway.nodeSelector", same),
    ("gateway.replicas", "gateway.replicas", same),
    ("gateway.resources.limits.cpu", "gateway.resources.limits.cpu", text),
    ("gateway.resources.limits.memory", "gateway.resources.limits.memory", text),
    ("gateway.resources.requests.cpu", "gateway.resources.requests.cpu", text),
    ("gateway.resources.requests.memory", "gateway.resources.requests.memory", text),
    ("gateway.service.annotations", "gateway.service.annotations", same),
    ("gateway.service.loadBalancerSourceRanges", "gateway.service.loadBalancerSourceRanges", same),
    ("gateway.service.type", "gateway.service.type", same),
    ("gateway.tolerations", "gateway.tolerations", same),
    ("imagePullSecrets", "imagePullSecrets", names),
    ("maxBuildSeconds", "maxBuildSeconds", same),
    ("maxColdStarts", "maxColdStarts", same),
    ("mirror.host", "registries.mirrors", mirror),
    ("namespaces.builds", "namespaces.builds", filled),
    ("namespaces.operator", "namespaces.operator", filled),
    ("networkPolicy.enabled", "networkPolicy.enabled", same),
    ("networkPolicy.extraEgress", "networkPolicy.extraEgress", same),
    ("networkPolicy.forkEgressStrict", "networkPolicy.forkEgressStrict", same),
    ("nodeSelector", "server.nodeSelector", same),
    ("oidc.adminTokenSecret", "oidc.adminTokenSecret", same),
    ("oidc.disable", "oidc.disable", same),
    ("oidc.providers", "oidc.providers", same),
    ("oidc.repoAllowlist", "oidc.repoAllowlist", same),
    ("projectDefaults", "projects.defaults", same),
    ("replicaCount", "server.replicas", same),
    ("resources.limits.cpu", "server.resources.limits.cpu", text),
    ("resources.limits.memory", "server.resources.limits.memory", text),
    ("resources.requests.cpu", "server.resources.requests.cpu", text),
    ("resources.requests.memory", "server.resources.requests.memory", text),
    ("sandbox.buildkitImage", "forks.sandbox.image", same),
    ("sandbox.runtimeClass", "forks.sandbox.runtimeClass", same),
    ("service.type", "server.service.type", same),
    ("service.annotations", "server.service.annotations", same),
    ("service.loadBalancerSourceRanges", "server.service.loadBalancerSourceRanges", same),
    ("tolerations", "server.tolerations", same),
];

impl Carried {
    /// Of the values that a user gave to Helm. `is_valid` says whether we take
    /// a value; one that we do not counts as left.
    pub fn of(config: &Value, is_valid: impl Fn(&str, &Value) -> bool) -> Self {
        let mut config = config.as_object().cloned().unwrap_or_default();
        let mut carried = Self::default();
        carried.domains(&mut config, &is_valid);
        for (theirs, ours, convert) in RULES {
            let path: Vec<&str> = theirs.split('.').collect();
            let Some(value) = find(&config, &path) else { continue };
            match convert(value).filter(|value| value.is_null() || is_valid(ours, value)) {
                // Empty, which is what ours is without being told.
                Some(Value::Null) => {}
                Some(value) => drop(carried.taken.insert(ours.to_owned(), value)),
                None => carried.left.push(theirs.to_owned()),
            }
            remove(&mut config, &path);
        }
        leaves(&config, "", &mut carried.left);
        carried.left.sort();
        carried
    }

    /// One domain there, and more beside it.
    fn domains(&mut self, config: &mut Map<String, Value>, is_valid: &impl Fn(&str, &Value) -> bool) {
        let host = find(config, &["gateway", "host"]).and_then(Value::as_str).filter(|host| !host.is_empty());
        let extra = find(config, &["gateway", "extraDomains"]).and_then(Value::as_array).into_iter().flatten();
        let Some(host) = host else { return };
        let all: Value = std::iter::once(Value::from(host)).chain(extra.cloned()).collect();
        if is_valid("gateway.domains", &all) {
            self.taken.insert("gateway.domains".to_owned(), all);
            remove(config, &["gateway", "host"]);
            remove(config, &["gateway", "extraDomains"]);
        }
    }

    /// Whether the release was installed as its chart is.
    pub fn is_empty(&self) -> bool {
        self.taken.is_empty() && self.left.is_empty()
    }
}

fn find<'a>(map: &'a Map<String, Value>, path: &[&str]) -> Option<&'a Value> {
    match path {
        [] => None,
        [last] => map.get(*last),
        [first, rest @ ..] => find(map.get(*first)?.as_object()?, rest),
    }
}

fn remove(map: &mut Map<String, Value>, path: &[&str]) {
    match path {
        [] => {}
        [last] => drop(map.remove(*last)),
        [first, rest @ ..] => {
            if let Some(Value::Object(inner)) = map.get_mut(*first) {
                remove(inner, rest);
            }
        }
    }
}

/// Names of everything that says something.
fn leaves(map: &Map<String, Value>, prefix: &str, names: &mut Vec<String>) {
    for (key, value) in map {
        let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        match value {
            Value::Object(inner) => leaves(inner, &name, names),
            Value::Null => {}
            _ => names.push(name),
        }
    }
}

#[expect(clippy::unnecessary_wraps, reason = "one of several conversions")]
fn same(value: &Value) -> Option<Value> {
    Some(value.clone())
}

/// A text that says nothing when it is empty.
fn filled(value: &Value) -> Option<Value> {
    let text = value.as_str()?;
    Some(if text.is_empty() { Value::Null } else { text.into() })
}

/// A number, also where it is written as a text.
fn number(value: &Value) -> Option<Value> {
    match value {
        Value::String(text) if text.is_empty() => Some(Value::Null),
        Value::String(text) => text.parse::<i64>().ok().map(Value::from),
        Value::Number(_) => Some(value.clone()),
        _ => None,
    }
}

/// A quantity, also where it is written as a number.
fn text(value: &Value) -> Option<Value> {
    match value {
        Value::String(_) => Some(value.clone()),
        Value::Number(number) => Some(number.to_string().into()),
        _ => None,
    }
}

/// Names of Secrets, which are objects with a name there.
fn names(value: &Value) -> Option<Value> {
    value
        .as_array()?
        .iter()
        .map(|item| item.get("name").or(Some(item)).filter(|name| name.is_string()).cloned())
        .collect()
}

/// The host that daemons ask instead of Docker Hub.
fn mirror(value: &Value) -> Option<Value> {
    let host = value.as_str()?;
    Some(if host.is_empty() { Value::Null } else { serde_json::json!({"docker.io": [host]}) })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::manifest::Bundle;

    #[test]
    fn every_value_of_ours_exists() {
        let request = crate::profile::Request::named("default", "i:1");
        let (_, values) = crate::profile::resolve(Bundle::embedded().unwrap(), &request).unwrap();
        for (theirs, ours, _) in RULES {
            assert!(values.get(ours).is_some(), "{theirs} becomes {ours}");
        }
        assert!(values.get("gateway.domains").is_some());
    }

    #[test]
    fn what_means_the_same_is_taken_and_the_rest_is_named_without_its_content() {
        let config = json!({
            "gateway": {"host": "builds.example.org", "extraDomains": ["b.example.org"], "externalPort": "443",
                "image": {"tag": "dev"}, "resources": {"limits": {"cpu": 1}}},
            "replicaCount": 3,
            "defaultStorageClass": "fast",
            "imagePullSecrets": [{"name": "pull"}, "other"],
            "mirror": {"enabled": true, "host": "mirror:5000"},
            "auth": {"tokenSecret": ""},
            "s3": {"bucket": "b", "accessKey": "hush"},
            "oidc": {"providers": 5},
            "daemonScheduling": {"nodeSelector": {"pool": "builds"}, "tolerations": []},
        });
        let carried = Carried::of(&config, |name, value| name != "oidc.providers" || value.is_array());
        assert_eq!(
            serde_json::to_value(&carried).unwrap(),
            json!({
                "taken": {
                    "cache.storageClass": "fast",
                    "daemon.scheduling": {"nodeSelector": {"pool": "builds"}, "tolerations": []},
                    "gateway.domains": ["builds.example.org", "b.example.org"],
                    "gateway.externalPort": 443,
                    "gateway.resources.limits.cpu": "1",
                    "imagePullSecrets": ["pull", "other"],
                    "registries.mirrors": {"docker.io": ["mirror:5000"]},
                    "server.replicas": 3,
                },
                "left": ["gateway.image.tag", "mirror.enabled", "oidc.providers", "s3.accessKey", "s3.bucket"],
            })
        );
        assert!(Carried::of(&json!(null), |_, _| true).is_empty());
    }
}
