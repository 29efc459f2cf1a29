//! What a component declares of how its objects are applied and waited for.

use serde::Deserialize;

use super::Object;
use crate::plan::{FieldPolicy, Loss};
use crate::readiness::Declared;

/// What a component declares of its objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    /// What becomes of fields that others own.
    pub conflicts: Vec<FieldPolicy>,
    /// What may be lost when an object has to be made anew.
    pub recreate: Loss,
    /// When objects of kinds that have no rule of their own are ready.
    pub readiness: Vec<Declared>,
    /// What proves that its webhooks work.
    pub probes: Vec<Probe>,
}

/// Two objects that prove that a webhook is called, and answers rightly.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// Name of the webhook configuration.
    pub webhook: String,
    /// What it must let pass.
    pub accept: Option<Object>,
    /// What it must refuse.
    pub reject: Option<Object>,
}

/// A probe as it is declared: manifests are templates.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeclaredProbe {
    /// Name of the webhook configuration.
    pub webhook: String,
    /// What it must let pass.
    #[serde(default)]
    pub accept: Option<String>,
    /// What it must refuse.
    #[serde(default)]
    pub reject: Option<String>,
}

/// The part of a `component.yaml` that is about this.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DeclaredPolicy {
    /// See [`Policy::conflicts`].
    pub conflicts: Vec<FieldPolicy>,
    /// See [`Policy::recreate`].
    pub recreate: Loss,
    /// See [`Policy::readiness`].
    pub readiness: Vec<Declared>,
    /// See [`Policy::probes`].
    pub probes: Vec<DeclaredProbe>,
}

impl DeclaredPolicy {
    /// What is wrong with it, if anything.
    pub(super) fn fault(&self) -> Option<String> {
        if self.recreate == Loss::Data {
            return Some("recreate: what holds data is never made anew; want none or downtime".into());
        }
        let path = |policy: &&FieldPolicy| !policy.field.starts_with('.');
        if let Some(policy) = self.conflicts.iter().find(path) {
            return Some(format!("conflicts: field \"{}\" must begin with a dot, as in .spec.replicas", policy.field));
        }
        None
    }
}
