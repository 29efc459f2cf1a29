//! What is kept of a project. Pure.

use std::net::Ipv4Addr;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::{Deserialize, Serialize};

use crate::families::build_farm::api::{BuildProject, BuildProjectSpec};
use crate::families::build_farm::lifecycle::WAKE;

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

    /// The record with every time that is yet to come taken for now; `None` when there is none.
    pub fn until(&self, now: Timestamp) -> Option<Self> {
        let mut record = self.clone();
        let past = |time: &mut Time| time.0 = time.0.min(now);
        record.project.metadata.creation_timestamp.iter_mut().for_each(past);
        if let Some(status) = &mut record.project.status {
            status.last_build_time.iter_mut().for_each(past);
            status.recent_build_times.iter_mut().for_each(past);
            status.last_cache_export_grant.iter_mut().for_each(past);
            status.inflight.iter_mut().for_each(|entry| past(&mut entry.since));
            // This one is to come, but not later than a dial of now would make it.
            status.wake_until.iter_mut().for_each(|until| until.0 = until.0.min(now + WAKE));
        }
        (record != *self).then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::build_farm::lifecycle::tests::project;

    #[test]
    fn times_that_are_yet_to_come_are_taken_for_now() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let spec = project("p1", &[], None).spec;
        let mut record = Record::new("p1", spec, [127, 1, 2, 3].into(), at(50));
        let status = record.project.status.get_or_insert_default();
        status.recent_build_times = vec![Time(at(40)), Time(at(99))];
        (status.last_build_time, status.wake_until) = (Some(Time(at(99))), Some(Time(at(110))));
        assert_eq!(record.until(at(100)), None);
        let earlier = record.until(at(45)).unwrap();
        let status = earlier.project.status_or_default();
        assert_eq!(
            (earlier.project.metadata.creation_timestamp, status.last_build_time),
            (Some(Time(at(45))), Some(Time(at(45))))
        );
        assert_eq!(status.recent_build_times, [Time(at(40)), Time(at(45))]);
        assert_eq!(status.wake_until, Some(Time(at(110))), "a dial of now would keep it for longer");
    }
}
