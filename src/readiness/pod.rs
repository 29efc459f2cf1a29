//! Pods: their own readiness, and what keeps them from it.

use serde_json::Value;

use super::{State, condition, text};

/// What is wrong with a pod, down to the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Name of the container; `None` when the pod as a whole is concerned.
    pub container: Option<String>,
    /// What kind of trouble.
    pub why: Why,
    /// The cluster's own words.
    pub detail: String,
}

/// Kinds of trouble that need different help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The image cannot be had; holds its reference.
    Image(String),
    /// The container's configuration is wrong: a missing Secret, for example.
    Config,
    /// The container ends again and again; holds the last exit code.
    Crash(Option<i64>),
    /// No node takes it. May pass when a node comes.
    Unschedulable,
    /// The pod has failed for good.
    Failed,
    /// The image is being fetched with errors that may pass.
    ImagePending(String),
    /// It starts, or runs and does not say that it is ready. May pass.
    Unready,
}

impl Trouble {
    /// Whether waiting is of no use.
    pub fn is_fatal(&self) -> bool {
        !matches!(self.why, Why::Unschedulable | Why::ImagePending(_) | Why::Unready)
    }

    /// The same, of a pod that nobody will replace by itself.
    pub(super) fn stuck(self, namespace: &str, pod: &str) -> Self {
        let detail = format!(
            "{}; it is of an earlier revision, and a StatefulSet that goes in order never replaces a broken pod: \
             `kubectl -n {namespace} delete pod {pod}` lets it go on",
            self.detail
        );
        Self { detail, ..self }
    }

    /// `container "buildd": CrashLoopBackOff, exit code 1: …`.
    pub fn describe(&self) -> String {
        match &self.container {
            Some(container) => format!("container \"{container}\": {}", self.detail),
            None => self.detail.clone(),
        }
    }
}

pub(super) fn pod(object: &Value) -> State {
    match (trouble(object), text(object, "/status/phase")) {
        (_, Some("Succeeded")) => State::Ready,
        (Some(trouble), _) if trouble.is_fatal() => State::Failed(trouble.describe()),
        (Some(trouble), _) => State::Pending(trouble.describe()),
        (None, None) => State::Pending("no status yet".into()),
        (None, Some(phase)) => match condition(object, "Ready") {
            Some(("True", _)) => State::Ready,
            Some((_, why)) if !why.is_empty() => State::Pending(why),
            _ => State::Pending(phase.to_owned()),
        },
    }
}

/// The first trouble that explains why a pod is not ready; init containers first.
pub fn trouble(pod: &Value) -> Option<Trouble> {
    let statuses = ["/status/initContainerStatuses", "/status/containerStatuses"];
    let containers = statuses.iter().filter_map(|p| pod.pointer(p)?.as_array()).flatten();
    if let Some(trouble) = containers.filter_map(container_trouble).next() {
        return Some(trouble);
    }
    if text(pod, "/status/phase") == Some("Failed") {
        return Some(Trouble { container: None, why: Why::Failed, detail: failed_detail(pod) });
    }
    match condition(pod, "PodScheduled") {
        Some(("False", why)) if why.starts_with("Unschedulable") => {
            Some(Trouble { container: None, why: Why::Unschedulable, detail: why })
        }
        _ => unready(pod),
    }
}

/// The first container that is not ready, of a pod that starts or runs.
fn unready(pod: &Value) -> Option<Trouble> {
    let is_ready = condition(pod, "Ready").is_some_and(|(status, _)| status == "True");
    if is_ready || !matches!(text(pod, "/status/phase"), Some("Pending" | "Running")) {
        return None;
    }
    let container = pod.pointer("/status/containerStatuses")?.as_array()?.iter().find(|c| c["ready"] == false)?;
    let detail = match (container.pointer("/state/waiting"), container.pointer("/state/terminated/exitCode")) {
        (Some(waiting), _) => super::reason_and_message(waiting),
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "runs, and is not ready".into(),
    };
    Some(Trouble { container: text(container, "/name").map(str::to_owned), why: Why::Unready, detail })
}

/// What a pod waits for that tells nothing of its containers yet. No trouble in
/// itself: every pod begins so. It is what there is to say of a workload that
/// is late.
pub(super) fn waiting(pod: &Value) -> Option<Trouble> {
    let has_statuses = |pointer| pod.pointer(pointer).and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    if !matches!(text(pod, "/status/phase"), None | Some("Pending")) || has_statuses("/status/containerStatuses") {
        return None;
    }
    let (why, detail) = match (condition(pod, "PodScheduled"), text(pod, "/spec/nodeName")) {
        (Some(("False", said)), _) if !said.is_empty() => (Why::Unschedulable, format!("is not scheduled: {said}")),
        (Some(("False", _)), _) | (None, None) => {
            (Why::Unschedulable, "is not scheduled to a node yet; does a scheduler run?".to_owned())
        }
        (_, Some(node)) => (Why::Unready, format!("is not started yet by the kubelet of node \"{node}\"")),
        (Some(_), None) => (Why::Unready, "is scheduled, and not started yet".to_owned()),
    };
    Some(Trouble { container: None, why, detail })
}

fn failed_detail(pod: &Value) -> String {
    let said = super::reason_and_message(&pod["status"]);
    let ended = pod.pointer("/status/containerStatuses").and_then(Value::as_array).into_iter().flatten();
    let codes: Vec<String> = ended
        .filter_map(|c| {
            let code = c.pointer("/state/terminated/exitCode")?.as_i64().filter(|code| *code != 0)?;
            Some(format!("container \"{}\" ended with exit code {code}", text(c, "/name")?))
        })
        .collect();
    match (said.is_empty(), codes.is_empty()) {
        (_, false) => codes.join(", "),
        (false, true) => said,
        (true, true) => "the pod has failed".into(),
    }
}

fn container_trouble(status: &Value) -> Option<Trouble> {
    let waiting = status.pointer("/state/waiting")?;
    let reason = text(waiting, "/reason")?;
    let image = || text(status, "/image").unwrap_or_default().to_owned();
    let why = match reason {
        "ErrImageNeverPull" | "ImagePullBackOff" | "InvalidImageName" | "ImageInspectError" => Why::Image(image()),
        "ErrImagePull" | "RegistryUnavailable" => Why::ImagePending(image()),
        "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" => Why::Config,
        "CrashLoopBackOff" => Why::Crash(status.pointer("/lastState/terminated/exitCode").and_then(Value::as_i64)),
        _ => return None,
    };
    let detail = match &why {
        // The message of a crash loop tells the length of the pause and the
        // pod's UID; the exit code is what helps.
        Why::Crash(Some(code)) => match text(status, "/lastState/terminated/reason") {
            Some(last) if last != "Error" => format!("{reason}, exit code {code} ({last})"),
            _ => format!("{reason}, exit code {code}"),
        },
        Why::Crash(None) => reason.to_owned(),
        _ => super::reason_and_message(waiting),
    };
    Some(Trouble { container: text(status, "/name").map(str::to_owned), why, detail })
}
