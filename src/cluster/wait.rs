//! Waiting until objects are ready: many of a kind by one watch for a moment,
//! then one watch an object, and for workloads one on their pods, so that the
//! cause is known the moment it appears.

mod follow;
mod together;
mod webhook;

use std::time::Duration;

use futures::TryStreamExt as _;
use futures::stream::FuturesUnordered;

use super::apply::Applied;
use super::observe::Policies;
use super::{Cluster, Event, RequestError, retry};
use crate::manifest::ObjectId;
use crate::plan::Change;
use crate::readiness::{self, Culprit, Declared, State, Why};

/// How long something is waited for that an installation can do without: an
/// address of a load balancer may never come.
const PATIENCE: Duration = Duration::from_secs(15);

/// Why waiting ended without success.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// An object is not ready.
    #[error("{0}")]
    NotReady(Box<NotReady>),
    /// A request failed.
    #[error("cannot wait for {object}")]
    Watch {
        /// The object.
        object: Box<ObjectId>,
        /// Why.
        source: Box<kube::runtime::watcher::Error>,
    },
    /// The kind cannot be looked up.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The run was interrupted.
    #[error("interrupted")]
    Interrupted,
}

/// An object that is not ready, down to the root cause.
#[derive(Debug)]
pub struct NotReady {
    /// The object.
    pub object: ObjectId,
    /// What its rule says.
    pub why: String,
    /// The pod that explains it.
    pub culprit: Option<Culprit>,
    /// The last lines that the pod wrote.
    pub lines: Vec<String>,
    /// The last warnings about it.
    pub events: Vec<String>,
    /// Whether the deadline passed; otherwise waiting is of no use.
    pub timed_out: bool,
}

impl NotReady {
    /// The image that cannot be had, if that is the cause.
    pub fn missing_image(&self) -> Option<&str> {
        match &self.culprit.as_ref()?.trouble.why {
            Why::Image(image) | Why::ImagePending(image) => Some(image),
            _ => None,
        }
    }

    /// The command that shows more of what is to blame.
    pub fn next_command(&self) -> String {
        let ObjectId { kind, group, namespace, name, .. } = &self.object;
        let kind = kind.to_lowercase();
        match (&self.culprit, namespace) {
            (Some(Culprit { namespace, pod, .. }), _) => format!("kubectl -n {namespace} describe pod {pod}"),
            (None, Some(namespace)) if group.is_empty() => format!("kubectl -n {namespace} describe {kind} {name}"),
            (None, Some(namespace)) => format!("kubectl -n {namespace} describe {kind}.{group} {name}"),
            (None, None) if group.is_empty() => format!("kubectl describe {kind} {name}"),
            (None, None) => format!("kubectl describe {kind}.{group} {name}"),
        }
    }
}

/// Object → pod → container → last events → last lines.
impl std::fmt::Display for NotReady {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let how = if self.timed_out { "is not ready in time" } else { "will not become ready" };
        write!(f, "{} {how}: {}", self.object, self.why)?;
        if let Some(culprit) = &self.culprit {
            write!(f, "\n  pod \"{}\": {}", culprit.pod, culprit.trouble.describe())?;
            culprit.others.iter().try_for_each(|pod| write!(f, "\n  pod \"{pod}\" is not ready either"))?;
        }
        self.events.iter().try_for_each(|event| write!(f, "\n  event: {event}"))?;
        self.lines.iter().try_for_each(|line| write!(f, "\n  log: {line}"))
    }
}

/// Waits until every object of a level is ready.
///
/// # Errors
/// The first object that will not become ready, or any that is not when the
/// deadline passes.
pub async fn level(cluster: &Cluster, applied: &[Applied], policies: &Policies) -> Result<(), WaitError> {
    let waiting = applied.iter().map(|object| (object, declared(policies, &object.component, &object.id))).filter(
        |(object, declared)| {
            readiness::has_rule(&object.id.group, &object.id.kind)
                || declared.is_some_and(|declared| !declared.ready.is_empty() || !declared.failed.is_empty())
        },
    );
    let left = together::together(cluster, waiting).await;
    let waiting: FuturesUnordered<_> =
        left.into_iter().map(|(object, declared)| one(cluster, object, declared)).collect();
    waiting.try_collect::<()>().await?;
    webhook::level(cluster, applied, policies).await
}

/// What a component declares of a kind's readiness.
pub fn declared<'a>(policies: &'a Policies, component: &str, id: &ObjectId) -> Option<&'a Declared> {
    policies.get(component)?.readiness.iter().find(|declared| declared.is_of(&id.group, &id.kind))
}

/// Whether the installation can do without an object.
pub fn is_optional(declared: Option<&Declared>, id: &ObjectId) -> bool {
    let by_kind = || readiness::is_optional(&id.group, &id.kind);
    declared.and_then(|declared| declared.optional).unwrap_or_else(by_kind)
}

/// Why an object that is not ready is not, as far as it can be told at once;
/// nothing when it is ready after all.
pub async fn explain(cluster: &Cluster, object: Applied, policies: &Policies) -> Option<NotReady> {
    let cluster = cluster.until(super::request::now() + Duration::from_secs(1));
    match one(&cluster, &object, declared(policies, &object.component, &object.id)).await {
        Err(WaitError::NotReady(why)) => Some(*why),
        _ => None,
    }
}

/// Waits until these definitions are established and discovery serves them
/// twice in a row: behind a load balancer, one API server learns it before another.
pub(super) async fn until_served(
    cluster: &Cluster,
    definitions: &[Change],
    applied: &[Applied],
) -> Result<(), RequestError> {
    let fresh = |change: &&Change| applied.iter().any(|a| a.id == change.id && a.written);
    for change in definitions.iter().filter(fresh) {
        let body = change.body.expose();
        let text = |pointer: &str| body.pointer(pointer).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
        let versions = body.pointer("/spec/versions").and_then(|v| v.as_array()).into_iter().flatten();
        for version in versions.filter(|v| v["served"] == true) {
            let kind = ObjectId {
                group: text("/spec/group"),
                version: version["name"].as_str().unwrap_or_default().to_owned(),
                kind: text("/spec/names/kind"),
                namespace: None,
                name: change.id.name.clone(),
            };
            serve(cluster, &kind).await?;
        }
    }
    Ok(())
}

async fn serve(cluster: &Cluster, kind: &ObjectId) -> Result<(), RequestError> {
    let (mut in_a_row, mut attempt) = (0, 0);
    while in_a_row < 2 {
        cluster.kinds.forget(kind);
        if cluster.find_resource(kind).await?.is_some() {
            in_a_row += 1;
            continue;
        }
        (in_a_row, attempt) = (0, attempt + 1);
        let request = format!("find kind {} in {}", kind.kind, kind.api_version());
        if !cluster.pause(&request, "not served yet".into(), retry::pause(attempt, None)).await? {
            return Err(RequestError::NotServed { object: Box::new(kind.clone()) });
        }
    }
    Ok(())
}

async fn one(cluster: &Cluster, applied: &Applied, declared: Option<&Declared>) -> Result<(), WaitError> {
    let mut follow = follow::Follow::new(cluster, applied, declared.cloned()).await?;
    let optional = is_optional(declared, &applied.id);
    if let Some(why) = deferred(cluster, &applied.id).await? {
        cluster.report(Event::Warning { message: format!("{}: {why}", applied.id) });
        return Ok(());
    }
    let deadline = if optional { patience(applied).min(cluster.limits.deadline) } else { cluster.limits.deadline };
    let mut said = None;
    loop {
        let step = tokio::select! {
            step = tokio::time::timeout_at(deadline, follow.next()) => step,
            () = cluster.interrupt.cancelled() => return Err(WaitError::Interrupted),
        };
        let known = match step {
            Ok(known) => known?,
            Err(_) if optional => {
                let why = said.unwrap_or_else(|| "no answer".into());
                let message = format!("{} is not ready yet, and is not waited for: {why}", applied.id);
                cluster.report(Event::Warning { message });
                return Ok(());
            }
            Err(_) => return Err(not_ready(cluster, applied, follow.last(), true).await),
        };
        let Some(why) = pending(&known) else {
            if known.0 != State::Ready {
                return Err(not_ready(cluster, applied, known, false).await);
            }
            if said.is_some() {
                cluster.report(Event::Ready { object: applied.id.clone() });
            }
            return Ok(());
        };
        if said.as_ref() != Some(&why) {
            cluster.report(Event::Waiting { object: applied.id.clone(), why: why.clone() });
            said = Some(why);
        }
    }
}

/// Why a claim is not bound now, and need not be: its class waits for a pod.
async fn deferred(cluster: &Cluster, id: &ObjectId) -> Result<Option<String>, RequestError> {
    if !id.group.is_empty() || id.kind != "PersistentVolumeClaim" {
        return Ok(None);
    }
    let Some(claim) = cluster.get(id).await? else { return Ok(None) };
    let bound = claim.pointer("/status/phase").and_then(|phase| phase.as_str()) == Some("Bound");
    let Some(name) = claim.pointer("/spec/storageClassName").and_then(|name| name.as_str()).filter(|_| !bound) else {
        return Ok(None);
    };
    let class = ObjectId {
        group: "storage.k8s.io".into(),
        version: "v1".into(),
        kind: "StorageClass".into(),
        namespace: None,
        name: name.into(),
    };
    // Who may not look at classes waits as for any other.
    let class = cluster.get(&class).await.ok().flatten();
    let waits = class.is_some_and(|class| class["volumeBindingMode"] == "WaitForFirstConsumer");
    Ok(waits.then(|| format!("is bound when a pod uses it (StorageClass \"{name}\"), and is not waited for")))
}

/// Until when something optional is waited for. What was not written had all
/// the time in the world before.
fn patience(applied: &Applied) -> tokio::time::Instant {
    super::request::now() + if applied.written { PATIENCE } else { Duration::from_millis(200) }
}

/// What is waited for; nothing when it is ready, and when waiting is of no use.
fn pending((state, culprit): &(State, Option<Culprit>)) -> Option<String> {
    match (state, culprit) {
        (State::Ready | State::Failed(_), _) => None,
        (State::Pending(_), Some(culprit)) if culprit.trouble.is_fatal() => None,
        (State::Pending(why), Some(culprit)) => {
            Some(format!("{why}; pod \"{}\": {}", culprit.pod, culprit.trouble.describe()))
        }
        (State::Pending(why), None) => Some(why.clone()),
    }
}

async fn not_ready(
    cluster: &Cluster,
    applied: &Applied,
    (state, culprit): (State, Option<Culprit>),
    timed_out: bool,
) -> WaitError {
    let (State::Pending(why) | State::Failed(why)) = state else {
        return WaitError::Interrupted;
    };
    let (mut lines, mut events) = (Vec::new(), Vec::new());
    match (&culprit, &applied.id.namespace) {
        (Some(culprit), _) => {
            lines = cluster.last_lines(culprit).await;
            if timed_out {
                events = cluster.last_events(&culprit.namespace, &culprit.pod).await;
            }
        }
        (None, Some(namespace)) => events = cluster.last_events(namespace, &applied.id.name).await,
        (None, None) => {}
    }
    WaitError::NotReady(Box::new(NotReady { object: applied.id.clone(), why, culprit, lines, events, timed_out }))
}
