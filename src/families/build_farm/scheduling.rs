//! On which nodes daemons run, as told on the command line. Pure.

use std::collections::BTreeMap;
use std::str::FromStr;

use k8s_openapi::api::core::v1::{Affinity, Toleration};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::key::Arch;
use crate::manifest::describe;
use crate::profile::strict;

/// Placement of all daemons.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Scheduling {
    /// Labels that a node must have.
    pub node_selector: BTreeMap<String, String>,
    /// Taints that daemons stand.
    pub tolerations: Vec<Toleration>,
    /// Finer rules.
    pub affinity: Option<Affinity>,
    /// Whether a daemon runs only on nodes of its architecture.
    pub pin_arch: bool,
}

/// Label of a node's architecture.
const ARCH: &str = "kubernetes.io/arch";

impl Default for Scheduling {
    fn default() -> Self {
        Self { node_selector: BTreeMap::new(), tolerations: Vec::new(), affinity: None, pin_arch: true }
    }
}

impl Scheduling {
    /// The labels that the node of a daemon for `arch` must have. The build's
    /// architecture wins over a selector for all: a build that lands on the
    /// wrong machine is slower than none.
    pub fn selector(&self, arch: Arch) -> BTreeMap<String, String> {
        let mut selector = self.node_selector.clone();
        if self.pin_arch {
            selector.insert(ARCH.to_owned(), arch.as_str().to_owned());
        }
        selector
    }
}

/// Why a text says nothing of nodes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseScheduling {
    /// It is no JSON.
    #[error("want a JSON object: {0}")]
    Json(String),
    /// A field is wrong.
    #[error("{0}")]
    Field(String),
}

impl FromStr for Scheduling {
    type Err = ParseScheduling;

    fn from_str(json: &str) -> Result<Self, Self::Err> {
        if json.trim().is_empty() {
            return Ok(Self::default());
        }
        let syntax = |error: serde_json::Error| ParseScheduling::Json(error.to_string());
        let raw: Value = serde_json::from_str(json).map_err(syntax)?;
        // A list would be taken for the fields in their order.
        if !raw.is_object() {
            return Err(ParseScheduling::Field(format!("want a mapping, found {}", describe(&raw))));
        }
        let asked = strict::read(&raw).map_err(ParseScheduling::Field)?;
        // Of two fields of one name, the first is gone by now.
        serde_json::from_str::<Self>(json).map_err(syntax)?;
        Ok(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builds_architecture_wins_over_a_selector_for_all() {
        let asked: Scheduling =
            r#"{"nodeSelector": {"pool": "builds", "kubernetes.io/arch": "arm64"}}"#.parse().unwrap();
        let selector = asked.selector(Arch::Amd64);
        assert_eq!((selector["pool"].as_str(), selector[ARCH].as_str()), ("builds", "amd64"));
        let loose: Scheduling = r#"{"pinArch": false}"#.parse().unwrap();
        assert!(loose.selector(Arch::Amd64).is_empty());
        assert_eq!("".parse::<Scheduling>().unwrap(), Scheduling::default());
    }

    #[test]
    fn a_misspelt_field_is_refused() {
        let error = r#"{"nodeselector": {}}"#.parse::<Scheduling>().unwrap_err().to_string();
        assert!(error.contains("nodeselector") && error.contains("nodeSelector"), "{error}");
    }

    #[test]
    fn a_wrong_field_is_named_however_deep() {
        for (json, want) in [
            ("{", "want a JSON object: EOF"),
            ("[]", "want a mapping, found a list"),
            (r#"{"pinArch": true, "pinArch": false}"#, "duplicate field `pinArch`"),
            (r#"{"pinArch": "false"}"#, "pinArch: want true or false, found \"false\""),
            (r#"{"nodeSelector": {"gpu": true}}"#, "nodeSelector.gpu: want a string, found true"),
            (r#"{"tolerations": [{"kee": "a"}]}"#, "tolerations[0].kee: unknown field"),
            (r#"{"affinity": {"nodeAfinity": {}}}"#, "affinity.nodeAfinity: unknown field"),
        ] {
            let error = json.parse::<Scheduling>().unwrap_err().to_string();
            assert!(error.contains(want), "{json}: {error}");
        }
    }
}
