//! In which state a daemon is, and what keeps it from starting: pure functions
//! of its pod and of what the cluster's Events say ([`super::signs`]).
//!
//! Every fault has a patience: how long after it was first seen it may still
//! pass by itself. Without one it usually does, and is only told. Beyond it
//! the daemon counts as failed, and routes are answered so at once.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStateWaiting, ContainerStatus, Pod, PodCondition};

use super::knobs;
use super::lifecycle::age;
use super::signs::{Sign, Signs};

/// Whether a daemon can take a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DaemonState {
    /// It can.
    Ready,
    /// Not yet, for this reason.
    Starting(String),
    /// Not yet, and something is wrong that may pass by itself; with the time
    /// that is left to it, if that is limited.
    Troubled(Fault, Option<Duration>),
    /// Not before somebody mends this.
    Failed(Fault),
}

/// What keeps a daemon from starting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// In CamelCase, as conditions and Events carry it.
    pub reason: &'static str,
    /// The cluster's own words.
    pub message: String,
    /// How long it may pass by itself, counted from when it is first seen.
    pub patience: Option<Duration>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

impl Fault {
    /// The state of a daemon that has had this fault for `seen`.
    pub fn judge(self, seen: Duration) -> DaemonState {
        match self.patience {
            Some(patience) if seen >= patience => DaemonState::Failed(self),
            Some(patience) => DaemonState::Troubled(self, Some(patience - seen)),
            None => DaemonState::Troubled(self, None),
        }
    }
}

/// Long enough for what a cluster mends within seconds: a Secret that is being
/// made, a webhook that is being rolled.
const SHORT: Duration = Duration::from_secs(5);
/// For a volume that is being made.
const PROVISIONING: Duration = Duration::from_secs(30);
/// A pod that failed is made anew by its controller.
const REPLACED: Duration = Duration::from_secs(8);
/// A container that ran for less than this before it ended cannot start.
const CANNOT_START: Duration = Duration::from_secs(10);
/// One that ends again and again after longer runs is not waited for either.
const MANY_RESTARTS: i32 = 5;

/// What is wrong with a daemon that is wanted; `None` while nothing is.
///
/// `unschedulable` is how long a pod may wait for a node when no autoscaler is
/// known to be making one.
pub fn find(pod: Option<&Pod>, signs: &Signs, unschedulable: Duration, now: Timestamp) -> Option<Fault> {
    let Some(pod) = pod else { return signs.create_failed(now).map(not_created) };
    if pod.metadata.deletion_timestamp.is_some() {
        return node_lost(pod);
    }
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() == Some("Failed") {
        let why = status.message.clone().or_else(|| status.reason.clone()).unwrap_or_else(|| "no reason given".into());
        return Some(Fault { reason: "PodFailed", message: why, patience: Some(REPLACED) });
    }
    let containers = status.init_container_statuses.iter().chain(&status.container_statuses).flatten();
    containers
        .filter_map(container_fault)
        .next()
        .or_else(|| unscheduled(pod, signs, unschedulable, now))
        .or_else(|| unmounted(pod, signs, now))
}

/// A pod that its node no longer ends: its StatefulSet makes no other until
/// somebody says that the node is down, or it comes back.
fn node_lost(pod: &Pod) -> Option<Fault> {
    let status = pod.status.as_ref()?;
    let taken =
        |c: &PodCondition| c.type_ == "DisruptionTarget" && c.reason.as_deref() == Some("DeletionByTaintManager");
    let lost = status.reason.as_deref() == Some("NodeLost") || status.conditions.iter().flatten().any(taken);
    let node = pod.spec.as_ref()?.node_name.as_deref().filter(|_| lost)?;
    let message = format!(
        "node {node} does not answer, and the daemon's pod ends, and its volume is free, only when it does; if it is \
         down for good: kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    );
    Some(Fault { reason: "NodeLost", message, patience: Some(SHORT) })
}

/// A pod that has a node, whose volumes it does not get: only Events say so.
fn unmounted(pod: &Pod, signs: &Signs, now: Timestamp) -> Option<Fault> {
    let status = pod.status.as_ref()?;
    // Once the sandbox stands, all volumes are there; what it waits for then is images.
    let stands = |c: &PodCondition| c.type_ == "PodReadyToStartContainers" && c.status == "True";
    let waits = status.phase.as_deref() == Some("Pending") && !status.conditions.iter().flatten().any(stands);
    pod.spec.as_ref()?.node_name.as_ref().filter(|_| waits)?;
    let born = pod.metadata.creation_timestamp.as_ref().map_or(now, |t| t.0);
    let (sign, reason, patience) = match (signs.attach_failed(born, now), signs.mount_failed(born, now)) {
        (Some(sign), _) if sign.message.contains("Multi-Attach") => (sign, "WaitingForDetach", SHORT),
        (Some(sign), _) => (sign, "VolumeNotAttached", PROVISIONING),
        (None, Some(sign)) => (sign, "VolumeNotMounted", PROVISIONING),
        (None, None) => return None,
    };
    Some(Fault { reason, message: sign.message.clone(), patience: Some(patience) })
}

/// Quota, admission, a missing service account: the pod does not even exist.
fn not_created(sign: &Sign) -> Fault {
    let reason = if sign.message.contains("exceeded quota") { "QuotaExceeded" } else { "PodNotCreated" };
    Fault { reason, message: sign.message.clone(), patience: Some(SHORT) }
}

fn unscheduled(pod: &Pod, signs: &Signs, unschedulable: Duration, now: Timestamp) -> Option<Fault> {
    if pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()) {
        return None;
    }
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let refused =
        conditions.filter(|c| c.type_ == "PodScheduled" && c.status == "False").find_map(|c| c.message.clone());
    let about_volumes = refused.as_deref().map(|m| m.contains("PersistentVolumeClaim") || m.contains("storageclass"));
    let claim = signs.claim_failed(now).filter(|_| about_volumes != Some(false));
    if let Some(sign) = claim {
        return Some(Fault { reason: "VolumeNotBound", message: sign.message.clone(), patience: Some(SHORT) });
    }
    let message = refused?;
    if about_volumes == Some(true) {
        // A volume that is bound at once is being made; one that waits for its
        // first consumer does not keep a pod from being scheduled.
        return Some(Fault { reason: "VolumeNotBound", message, patience: Some(PROVISIONING) });
    }
    let born = pod.metadata.creation_timestamp.as_ref().map_or(now, |t| t.0);
    let patience = (!signs.scaling_up(born, now)).then_some(unschedulable);
    Some(Fault { reason: "Unschedulable", message, patience })
}

fn container_fault(container: &ContainerStatus) -> Option<Fault> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    let (reason, patience) = match waiting.reason.as_deref()? {
        "InvalidImageName" | "ErrImageNeverPull" => ("ImageNotFound", Some(Duration::ZERO)),
        "ErrImagePull" | "ImagePullBackOff" if is_missing(waiting) => ("ImageNotFound", Some(SHORT)),
        // A registry that does not answer usually does later.
        "ErrImagePull" | "ImagePullBackOff" => ("ImagePullFailed", None),
        "CreateContainerConfigError" => ("ConfigurationMissing", Some(SHORT)),
        "CreateContainerError" | "RunContainerError" => ("ContainerNotStarted", Some(SHORT)),
        "CrashLoopBackOff" => ("CrashLooping", cannot_start(container).then_some(Duration::ZERO)),
        _ => return None,
    };
    let said = waiting.reason.iter().chain(&waiting.message).map(String::as_str).collect::<Vec<_>>().join(": ");
    let message = match last_end(container) {
        Some(end) if reason == "CrashLooping" => format!("container {}: {end}", container.name),
        _ => format!("container {}: {said}", container.name),
    };
    Some(Fault { reason, message, patience })
}

/// The registry answered, and has nothing for us.
fn is_missing(waiting: &ContainerStateWaiting) -> bool {
    const ANSWERS: [&str; 8] = [
        "not found",
        "manifest unknown",
        "denied",
        "unauthorized",
        "authentication required",
        "authorization failed",
        "no matching manifest",
        "no match for platform",
    ];
    waiting.message.as_ref().is_some_and(|message| {
        let message = message.to_lowercase();
        ANSWERS.iter().any(|answer| message.contains(answer))
    })
}

fn cannot_start(container: &ContainerStatus) -> bool {
    let ended = container.last_state.as_ref().and_then(|state| state.terminated.as_ref());
    let ran = ended.and_then(|t| Some(age(t.started_at.as_ref()?.0, t.finished_at.as_ref()?.0)));
    container.restart_count >= MANY_RESTARTS || ran.is_some_and(|ran| ran < CANNOT_START)
}

/// How a container of a daemon's pod ended before it was started again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The container.
    pub container: String,
    /// What identifies this end among others of the same container.
    pub id: String,
    /// When.
    pub at: Timestamp,
    /// Exit code.
    pub code: i32,
    /// Whether the kernel killed it for memory.
    pub out_of_memory: bool,
    /// The last line that it wrote, if it said anything.
    pub said: Option<String>,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = if self.out_of_memory { " (out of memory)" } else { "" };
        write!(f, "ended with exit code {}{why}", self.code)?;
        let Some(said) = &self.said else { return Ok(()) };
        write!(f, ": {said}")?;
        knobs::advice(said).map_or(Ok(()), |advice| write!(f, "; {advice}"))
    }
}

/// The last end of every container of a pod that has ended once.
pub fn ends(pod: &Pod) -> Vec<End> {
    let status = pod.status.as_ref();
    let containers = status.into_iter().flat_map(|s| s.init_container_statuses.iter().chain(&s.container_statuses));
    containers.flatten().filter_map(last_end).collect()
}

fn last_end(container: &ContainerStatus) -> Option<End> {
    let ended = container.last_state.as_ref()?.terminated.as_ref()?;
    let at = ended.finished_at.as_ref()?.0;
    Some(End {
        container: container.name.clone(),
        id: ended.container_id.clone().unwrap_or_else(|| at.to_string()),
        at,
        code: ended.exit_code,
        out_of_memory: ended.reason.as_deref() == Some("OOMKilled"),
        said: ended.message.as_deref().filter(|_| ended.exit_code != 137).and_then(last_line),
    })
}

/// The last line with words, of a length that a condition can carry.
fn last_line(text: &str) -> Option<String> {
    const LONGEST: usize = 300;
    // Some programs break the line before the code with which a helper of theirs ended.
    let line = text.lines().map(str::trim).rfind(|line| !line.is_empty() && !line.starts_with(':'))?;
    Some(line.chars().filter(|c| !c.is_control()).take(LONGEST).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NODE_WAIT: Duration = Duration::from_secs(8);

    fn now() -> Timestamp {
        "2026-01-01T00:10:00Z".parse().unwrap()
    }

    fn pod(status: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": "x", "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"containers": []}, "status": status,
        }))
        .unwrap()
    }

    fn waiting(reason: &str, message: &str, last: Value) -> Pod {
        pod(json!({"phase": "Pending", "containerStatuses": [{
            "name": "buildkitd", "image": "", "imageID": "", "ready": false, "restartCount": 1,
            "state": {"waiting": {"reason": reason, "message": message}}, "lastState": last,
        }]}))
    }

    fn ran(from: &str, to: &str) -> Value {
        json!({"terminated": {"exitCode": 1, "reason": "Error", "startedAt": from, "finishedAt": to}})
    }

    fn unscheduled(message: &str) -> Pod {
        pod(json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]}))
    }

    fn signs(slot: &str, message: &str, at: &str) -> Signs {
        let (kind, name, reason) = match slot {
            "create" => ("StatefulSet", "buildkitd-p1", "FailedCreate"),
            "attach" => ("Pod", "buildkitd-p1-0", "FailedAttachVolume"),
            "mount" => ("Pod", "buildkitd-p1-0", "FailedMount"),
            "claim" => ("PersistentVolumeClaim", "cache-buildkitd-p1-0", "ProvisioningFailed"),
            _ => ("Pod", "buildkitd-p1-0", "TriggeredScaleUp"),
        };
        let event = json!({"metadata": {"name": "e"}, "reason": reason, "message": message, "lastTimestamp": at,
            "involvedObject": {"kind": kind, "name": name}});
        let (key, sign) = Sign::read(&serde_json::from_value(event).unwrap()).unwrap();
        assert_eq!(key, "p1");
        let mut signs = Signs::default();
        signs.note(sign);
        signs
    }

    #[test]
    fn every_fault_has_its_reason_and_patience() {
        let none = Signs::default();
        let quick = ran("2026-01-01T00:00:00Z", "2026-01-01T00:00:02Z");
        let long = ran("2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z");
        let nodes = "0/3 nodes are available: 3 Insufficient cpu.";
        let immediate = "pod has unbound immediate PersistentVolumeClaims";
        let quota = signs("create", "create Pod failed: exceeded quota: pods", "2026-01-01T00:09:00Z");
        let denied = signs("create", "admission webhook denied the request", "2026-01-01T00:09:00Z");
        let old = signs("create", "exceeded quota", "2025-12-31T23:00:00Z");
        let claim = signs("claim", "storageclass \"x\" not found", "2026-01-01T00:09:00Z");
        let autoscaler = signs("up", "pod triggered scale-up", "2026-01-01T00:09:00Z");
        let secs = |n| Some(Some(Duration::from_secs(n)));
        for (name, pod, signs, reason, patience) in [
            ("no pod, no word", None, &none, "", None),
            ("quota", None, &quota, "QuotaExceeded", secs(5)),
            ("admission", None, &denied, "PodNotCreated", secs(5)),
            ("word of an earlier failure", None, &old, "", None),
            ("being made", Some(waiting("ContainerCreating", "", json!({}))), &none, "", None),
            (
                "registry down",
                Some(waiting("ErrImagePull", "dial tcp: i/o timeout", json!({}))),
                &none,
                "ImagePullFailed",
                Some(None),
            ),
            (
                "image missing",
                Some(waiting("ErrImagePull", "manifest: not found", json!({}))),
                &none,
                "ImageNotFound",
                secs(5),
            ),
            (
                "still missing",
                Some(waiting("ImagePullBackOff", "ErrImagePull: x: not found", json!({}))),
                &none,
                "ImageNotFound",
                secs(5),
            ),
            ("no image name", Some(waiting("InvalidImageName", "", json!({}))), &none, "ImageNotFound", secs(0)),
            (
                "secret missing",
                Some(waiting("CreateContainerConfigError", "secret \"s\" not found", json!({}))),
                &none,
                "ConfigurationMissing",
                secs(5),
            ),
            ("ends at once", Some(waiting("CrashLoopBackOff", "", quick)), &none, "CrashLooping", secs(0)),
            ("was killed in its work", Some(waiting("CrashLoopBackOff", "", long)), &none, "CrashLooping", Some(None)),
            ("evicted", Some(pod(json!({"phase": "Failed", "message": "low on disk"}))), &none, "PodFailed", secs(8)),
            ("no node", Some(unscheduled(nodes)), &none, "Unschedulable", secs(8)),
            ("a node is being made", Some(unscheduled(nodes)), &autoscaler, "Unschedulable", Some(None)),
            ("no node, and an old word of a claim", Some(unscheduled(nodes)), &claim, "Unschedulable", secs(8)),
            ("volume being made", Some(unscheduled(immediate)), &none, "VolumeNotBound", secs(30)),
            ("no such class", Some(unscheduled(immediate)), &claim, "VolumeNotBound", secs(5)),
            (
                "no such class, not looked at yet",
                Some(pod(json!({"phase": "Pending"}))),
                &claim,
                "VolumeNotBound",
                secs(5),
            ),
            ("claim waits for its first consumer", Some(pod(json!({"phase": "Pending"}))), &none, "", None),
        ] {
            let fault = find(pod.as_ref(), signs, NODE_WAIT, now());
            assert_eq!(fault.as_ref().map_or("", |f| f.reason), reason, "{name}");
            assert_eq!(fault.map(|f| f.patience), patience, "{name}");
        }
    }

    /// B28: a volume that a lost node still holds.
    #[test]
    fn a_pod_that_does_not_get_its_volumes_says_so() {
        let on_node = |conditions: Value| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": "x", "creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"containers": [], "nodeName": "n2"},
                "status": {"phase": "Pending", "conditions": conditions, "containerStatuses": [{
                    "name": "buildkitd", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                    "state": {"waiting": {"reason": "ContainerCreating"}}}]},
            }))
            .unwrap()
        };
        let held = "Multi-Attach error for volume \"pvc-1\" Volume is already exclusively attached to one node";
        let (multi, full) = (signs("attach", held, "2026-01-01T00:09:00Z"), "maximum volume count exceeded");
        let (other, secret) = (signs("attach", full, "2026-01-01T00:09:00Z"), "secret \"certs\" not found");
        let before = signs("attach", held, "2025-12-31T23:59:00Z");
        let mount = signs("mount", secret, "2026-01-01T00:09:00Z");
        let sandbox = json!([{"type": "PodReadyToStartContainers", "status": "True"}]);
        for (name, conditions, signs, reason, patience) in [
            ("held by another node", json!([]), &multi, "WaitingForDetach", Some(SHORT)),
            ("no more volumes on this node", json!([]), &other, "VolumeNotAttached", Some(PROVISIONING)),
            ("a Secret is missing", json!([]), &mount, "VolumeNotMounted", Some(PROVISIONING)),
            ("said of an earlier pod", json!([]), &before, "", None),
            ("got them since, the image is pulled", sandbox, &multi, "", None),
        ] {
            let fault = find(Some(&on_node(conditions)), signs, NODE_WAIT, now());
            assert_eq!(fault.as_ref().map_or("", |f| f.reason), reason, "{name}");
            assert_eq!(fault.and_then(|f| f.patience), patience, "{name}");
        }
    }

    #[test]
    fn a_pod_that_cannot_end_names_its_node() {
        let ending = |reason: &str| -> Pod {
            serde_json::from_value(json!({
                "metadata": {"name": "x", "deletionTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"containers": [], "nodeName": "n1"},
                "status": {"phase": "Running", "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": reason}]},
            }))
            .unwrap()
        };
        let lost = find(Some(&ending("DeletionByTaintManager")), &Signs::default(), NODE_WAIT, now()).unwrap();
        assert!(lost.reason == "NodeLost" && lost.message.contains("kubectl taint node n1"), "{lost}");
        assert_eq!(find(Some(&ending("EvictionByEvictionAPI")), &Signs::default(), NODE_WAIT, now()), None);
    }

    /// B20: a setting of the node that a rootless daemon needs.
    #[test]
    fn a_daemon_that_cannot_start_says_why_and_what_to_set() {
        let words = "time=\"x\" level=info\n[rootlesskit:parent] error: failed to start the child: \
                     fork/exec /proc/self/exe: operation not permitted\n";
        let ended = json!({"terminated": {"exitCode": 1, "reason": "Error", "message": words,
            "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z"}});
        let fault = find(Some(&waiting("CrashLoopBackOff", "", ended)), &Signs::default(), NODE_WAIT, now()).unwrap();
        assert_eq!((fault.reason, fault.patience), ("CrashLooping", Some(Duration::ZERO)));
        assert!(fault.message.starts_with("container buildkitd: ended with exit code 1: [rootlesskit:parent]"));
        assert!(fault.message.contains("kernel.apparmor_restrict_unprivileged_userns=0"), "{fault}");
    }

    #[test]
    fn a_fault_is_troubling_until_its_patience_ends() {
        let fault = |patience| Fault { reason: "R", message: "m".into(), patience };
        let (five, three) = (Duration::from_secs(5), Duration::from_secs(3));
        assert_eq!(fault(None).judge(Duration::MAX), DaemonState::Troubled(fault(None), None));
        let troubled = DaemonState::Troubled(fault(Some(five)), Some(Duration::from_secs(2)));
        assert_eq!(fault(Some(five)).judge(three), troubled);
        assert_eq!(fault(Some(five)).judge(five), DaemonState::Failed(fault(Some(five))));
    }

    #[test]
    fn a_past_end_is_told_and_is_no_fault() {
        let killed = json!({"terminated": {"exitCode": 137, "reason": "OOMKilled", "containerID": "containerd://a",
            "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:05:00Z"}});
        let runs = pod(json!({"phase": "Running", "containerStatuses": [{
            "name": "buildkitd", "image": "", "imageID": "", "ready": true, "restartCount": 1,
            "state": {"running": {}}, "lastState": killed}]}));
        assert_eq!(find(Some(&runs), &Signs::default(), NODE_WAIT, now()), None);
        let ends = ends(&runs);
        assert_eq!((ends.len(), ends[0].out_of_memory, ends[0].id.as_str()), (1, true, "containerd://a"));
        assert_eq!(ends[0].to_string(), "ended with exit code 137 (out of memory)");
    }
}
