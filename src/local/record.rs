//! What is kept of a project. Pure.

use std::net::Ipv4Addr;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

use crate::families::build_farm::api::{BuildProject, BuildProjectSpec};

/// A project, and what it has on this host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The same value as in a cluster.
    pub project: BuildProject,
    /// Where it is reached, and its daemon listens. Never changes.
    pub address: Ipv4Addr,
    /// The process of its daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<ProcessId>,
}

/// A process, told from a later one of the same number by when it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessId {
    /// Its number.
    pub pid: u32,
    /// When it began, in clock ticks since the host did.
    pub started: u64,
}

impl Record {
    /// A project that begins now.
    pub fn new(key: &str, spec: BuildProjectSpec, address: Ipv4Addr, now: Timestamp) -> Self {
        let mut project = BuildProject::new(key, spec);
        project.metadata.creation_timestamp = Some(Time(now));
        project.metadata.generation = Some(1);
        Self { project, address, process: None }
    }
}
