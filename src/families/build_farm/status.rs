//! What the reconcile reports of a daemon: phase, replicas and conditions as a
//! pure function of what was observed.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::api::{BuildProjectStatus, Phase};

/// The part of a status that the reconcile owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Where the daemon is in its life.
    pub phase: Phase,
    /// Replicas asked of the StatefulSet.
    pub replicas: i32,
    /// Where clients reach the daemon.
    pub endpoint: String,
    /// Generation of the project that this report is about.
    pub generation: i64,
    /// Reason of the `Ready` condition, in CamelCase.
    pub reason: &'static str,
    /// One sentence for people.
    pub message: String,
}

impl Report {
    /// Sets the reported fields. A condition that still says the same keeps
    /// its transition time, so that a steady daemon causes no write.
    pub fn apply(&self, status: &mut BuildProjectStatus, now: Timestamp) {
        status.phase = Some(self.phase);
        status.replicas = self.replicas;
        status.endpoint.clone_from(&self.endpoint);
        let state = if self.phase == Phase::Warm { "True" } else { "False" };
        let old = status.conditions.iter().position(|c| c.type_ == "Ready");
        let since = old.map(|i| &status.conditions[i]).filter(|c| c.status == state).map_or_else(
            || Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
            |c| c.last_transition_time.clone(),
        );
        let condition = Condition {
            type_: "Ready".to_owned(),
            status: state.to_owned(),
            reason: self.reason.to_owned(),
            message: self.message.clone(),
            observed_generation: Some(self.generation),
            last_transition_time: since,
        };
        match old {
            Some(i) => status.conditions[i] = condition,
            None => status.conditions.push(condition),
        }
    }
}

/// Why a pod cannot run until somebody mends something; `None` while it may
/// still come up by itself. Only the current state counts: an earlier crash of
/// a container that runs now does not.
pub fn pod_failure(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() == Some("Failed") {
        let why = status.message.clone().or_else(|| status.reason.clone()).unwrap_or_else(|| "no reason given".into());
        return Some(format!("pod failed: {why}"));
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    containers.filter_map(container_failure).next()
}

fn container_failure(container: &ContainerStatus) -> Option<String> {
    const STUCK: [&str; 6] = [
        "CrashLoopBackOff",
        "ImagePullBackOff",
        "ErrImagePull",
        "ErrImageNeverPull",
        "CreateContainerError",
        "CreateContainerConfigError",
    ];
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let reason = waiting.reason.as_deref()?;
    if !STUCK.contains(&reason) && reason != "InvalidImageName" {
        return None;
    }
    let detail = waiting.message.as_deref().unwrap_or_default();
    Some(format!("container {}: {reason}: {detail}", container.name).trim_end_matches([':', ' ']).to_owned())
}

/// Why a pod that has not failed is not ready yet, for messages.
pub fn pod_pending(pod: Option<&Pod>) -> String {
    let Some(status) = pod.and_then(|p| p.status.as_ref()) else { return "waiting for the pod".to_owned() };
    let unscheduled = status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled" && c.status == "False");
    if let Some(message) = unscheduled.and_then(|c| c.message.as_deref()) {
        return format!("not scheduled: {message}");
    }
    let waiting =
        status.container_statuses.iter().flatten().find_map(|c| c.state.as_ref()?.waiting.as_ref()?.reason.as_deref());
    match waiting {
        Some(reason) => format!("starting: {reason}"),
        None => "waiting for the daemon to be ready".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(status: serde_json::Value) -> Pod {
        serde_json::from_value(serde_json::json!({"metadata": {"name": "x"}, "status": status})).unwrap()
    }

    #[test]
    fn only_the_current_state_of_a_pod_is_a_failure() {
        let waiting = |reason: &str, message: &str| {
            pod(
                serde_json::json!({"phase": "Pending", "containerStatuses": [{"name": "buildkitd", "image": "", "imageID": "", "ready": false,
                "restartCount": 1, "state": {"waiting": {"reason": reason, "message": message}}}]}),
            )
        };
        assert_eq!(
            pod_failure(&waiting("ImagePullBackOff", "no such image")),
            Some("container buildkitd: ImagePullBackOff: no such image".into())
        );
        assert_eq!(pod_failure(&waiting("CrashLoopBackOff", "")), Some("container buildkitd: CrashLoopBackOff".into()));
        assert_eq!(pod_failure(&waiting("ContainerCreating", "")), None);
        assert_eq!(
            pod_failure(&pod(serde_json::json!({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}))),
            Some("pod failed: low on disk".into())
        );
        let once_killed = pod(
            serde_json::json!({"phase": "Running", "containerStatuses": [{"name": "buildkitd", "image": "", "imageID": "",
            "ready": true, "restartCount": 1, "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}),
        );
        assert_eq!(pod_failure(&once_killed), None);
    }

    #[test]
    fn a_report_that_says_the_same_changes_nothing() {
        let report = Report {
            phase: Phase::Warm,
            replicas: 1,
            endpoint: "tcp://x".into(),
            generation: 1,
            reason: "DaemonReady",
            message: "ready".into(),
        };
        let mut status = BuildProjectStatus::default();
        report.apply(&mut status, Timestamp::from_second(10).unwrap());
        let once = status.clone();
        report.apply(&mut status, Timestamp::from_second(20).unwrap());
        assert_eq!(status, once);
        Report { phase: Phase::Idle, ..report }.apply(&mut status, Timestamp::from_second(30).unwrap());
        assert_eq!(status.conditions[0].last_transition_time, Time(Timestamp::from_second(30).unwrap()));
    }
}
