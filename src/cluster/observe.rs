//! What there is, and what each apply would make of it: lists and dry runs,
//! many at once. What an apply would not change is not asked for. Nothing is
//! written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::{StreamExt as _, stream};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::apply::Mode;
use super::bulk::{self, Group};
use super::{Cluster, RequestError, definition};
use crate::manifest::{Object, ObjectId, Policy};
use crate::plan::{self, Action, Consent, Loss, Means, Observation, Observations, Plan};
use crate::readiness::Pin;

/// Observes every desired object, and resolves conflicts as policies and
/// consent have it. What has been rehearsed, and still does not exist, is not
/// rehearsed again.
///
/// # Errors
/// Everything that the API server refuses, so that all of it can be mended at once.
pub async fn observe(
    cluster: &Cluster,
    desired: &[Object],
    policies: &Policies,
    consent: Consent,
    rehearsed: &Rehearsed,
) -> Result<Observations, Vec<RequestError>> {
    let bundle = Bundle::new(cluster, desired, policies, consent, rehearsed).await.map_err(|error| vec![error])?;
    let bundle = &bundle;
    let mut seen = see(cluster, bundle, desired).await;
    let results: Vec<_> = stream::iter(desired)
        .map(|object| {
            let seen = seen.remove(&object.id);
            async move { (object.id.clone(), observe_one(cluster, bundle, object, seen).await) }
        })
        .buffer_unordered(cluster.limits.concurrency)
        .collect()
        .await;
    let (mut observations, mut errors) = (Observations::new(), BTreeMap::new());
    for (id, result) in results {
        match result {
            Ok(observation) => drop(observations.insert(id, observation)),
            // The same permission may be lacking for many objects.
            Err(error) => drop(errors.entry(error.to_string()).or_insert(error)),
        }
    }
    if errors.is_empty() { Ok(observations) } else { Err(errors.into_values().collect()) }
}

/// What each component declares.
pub type Policies = BTreeMap<String, Policy>;

/// Creations whose dry run has passed in this run.
#[derive(Debug, Default)]
pub struct Rehearsed {
    bodies: BTreeMap<ObjectId, [u8; 32]>,
    /// Namespaces that did not exist before.
    namespaces: BTreeSet<String>,
}

impl Rehearsed {
    /// Those of a plan.
    pub fn of(plan: &Plan) -> Self {
        let mut rehearsed = Self::default();
        for change in plan.changes().filter(|change| change.action == Action::Create) {
            if change.id.kind == "Namespace" && change.id.group.is_empty() {
                rehearsed.namespaces.insert(change.id.name.clone());
            }
            rehearsed.bodies.insert(change.id.clone(), fingerprint(change.body.expose()));
        }
        rehearsed
    }

    fn has(&self, object: &Object) -> bool {
        self.bodies.get(&object.id).is_some_and(|known| *known == fingerprint(&object.body))
    }
}

fn fingerprint(body: &Value) -> [u8; 32] {
    Sha256::digest(body.to_string().as_bytes()).into()
}

/// What a list has shown of an object.
enum Seen {
    Absent,
    Live(Value),
    Settled(Pin),
}

/// Looks at objects of whose kind there are many. What it does not return is
/// looked at one by one.
async fn see(cluster: &Cluster, bundle: &Bundle<'_>, desired: &[Object]) -> BTreeMap<ObjectId, Seen> {
    let groups = stream::iter(bulk::groups(desired)).map(|group| see_group(cluster, bundle, group));
    groups.buffer_unordered(cluster.limits.concurrency).flat_map(stream::iter).collect().await
}

async fn see_group(cluster: &Cluster, bundle: &Bundle<'_>, mut group: Group<'_>) -> Vec<(ObjectId, Seen)> {
    let mut seen = Vec::new();
    let Some(id) = group.values().next().map(|object| object.id.clone()) else { return seen };
    if id.namespace.as_ref().is_some_and(|namespace| bundle.namespaces.contains(namespace)) {
        return seen;
    }
    let Ok(Some(resource)) = cluster.find_resource(&id).await else { return seen };
    // A namespace of this run's own holds little else: what a whole list does not show is not there.
    let fresh = id.namespace.as_ref().is_some_and(|namespace| bundle.rehearsed.namespaces.contains(namespace));
    let listed = cluster.each(&id, &resource, !fresh, |live| {
        let name = live.pointer("/metadata/name").and_then(Value::as_str).unwrap_or_default();
        let Some(object) = group.remove(name) else { return };
        let state = if bundle.settled(object, &live) { Seen::Settled(Pin::of(&live)) } else { Seen::Live(live) };
        seen.push((object.id.clone(), state));
    });
    if listed.await.is_ok() && fresh {
        seen.extend(group.into_values().map(|object| (object.id.clone(), Seen::Absent)));
    }
    seen
}

/// What comes with the bundle and is not there yet, and what is allowed.
struct Bundle<'a> {
    policies: &'a Policies,
    rehearsed: &'a Rehearsed,
    consent: Consent,
    namespaces: BTreeSet<String>,
    kinds: BTreeSet<(String, String)>,
    roles: BTreeSet<String>,
}

impl<'a> Bundle<'a> {
    async fn new(
        cluster: &Cluster,
        desired: &[Object],
        policies: &'a Policies,
        consent: Consent,
        rehearsed: &'a Rehearsed,
    ) -> Result<Self, RequestError> {
        let mut namespaces = BTreeSet::new();
        for object in desired.iter().filter(|o| o.id.kind == "Namespace" && o.id.group.is_empty()) {
            if cluster.get(&object.id).await?.is_none() {
                namespaces.insert(object.id.name.clone());
            }
        }
        let definitions = desired.iter().filter(|object| object.id.kind == "CustomResourceDefinition");
        let kinds = definitions.filter_map(|object| {
            let text = |pointer| object.body.pointer(pointer)?.as_str().map(str::to_owned);
            Some((text("/spec/group")?, text("/spec/names/kind")?))
        });
        let roles = desired.iter().filter(|o| matches!(o.id.kind.as_str(), "Role" | "ClusterRole"));
        let roles = roles.map(|o| o.id.name.clone()).collect();
        Ok(Self { policies, rehearsed, consent, namespaces, kinds: kinds.collect(), roles })
    }

    /// Whether nothing is to be done, or to be asked, about a live object.
    fn settled(&self, object: &Object, live: &Value) -> bool {
        let adopts = self.consent.adopt || plan::is_ours(live);
        let inherits = adopts && !plan::predecessors(live).is_empty();
        let others = plan::tracker(&object.id, live).is_some() || plan::helm_release(live).is_some();
        !self.consent.look && !inherits && !others && plan::is_settled(live, &object.body)
    }

    /// Whether this creation has passed a dry run already.
    fn has_rehearsed(&self, object: &Object) -> bool {
        !self.brings_kind(&object.id) && self.rehearsed.has(object)
    }

    fn brings_kind(&self, id: &ObjectId) -> bool {
        self.kinds.contains(&(id.group.clone(), id.kind.clone()))
    }

    /// A binding cannot be checked as long as its role is not there.
    fn brings_role_of(&self, object: &Object) -> bool {
        let role = object.body.pointer("/roleRef/name").and_then(Value::as_str);
        role.is_some_and(|role| self.roles.contains(role))
    }
}

async fn observe_one(
    cluster: &Cluster,
    bundle: &Bundle<'_>,
    object: &Object,
    seen: Option<Seen>,
) -> Result<Observation, RequestError> {
    if cluster.find_resource(&object.id).await?.is_none() {
        return if bundle.brings_kind(&object.id) {
            Ok(Observation::Unserved)
        } else {
            Err(RequestError::NotServed { object: Box::new(object.id.clone()) })
        };
    }
    if object.id.namespace.as_ref().is_some_and(|namespace| bundle.namespaces.contains(namespace)) {
        if !bundle.has_rehearsed(object) {
            rehearse(cluster, object).await?;
        }
        return Ok(Observation::Absent);
    }
    let live = match seen {
        Some(Seen::Settled(live)) => return Ok(Observation::Settled { live }),
        Some(Seen::Live(live)) => Some(live),
        Some(Seen::Absent) => None,
        None => cluster.get(&object.id).await?,
    };
    match live {
        Some(live) if bundle.settled(object, &live) => Ok(Observation::Settled { live: Pin::of(&live) }),
        Some(live) => predict(cluster, bundle, object, live).await,
        None if bundle.has_rehearsed(object) => Ok(Observation::Absent),
        None => match cluster.apply(&object.id, &object.body, Mode::DryRun { force: false }).await {
            Ok(_) => Ok(Observation::Absent),
            Err(RequestError::Refused { code: 404, .. }) if bundle.brings_role_of(object) => Ok(Observation::Absent),
            Err(error) => Err(error),
        },
    }
}

/// Dry-runs a creation whose namespace does not exist yet in `default`.
async fn rehearse(cluster: &Cluster, object: &Object) -> Result<(), RequestError> {
    let mut id = object.id.clone();
    id.namespace = Some("default".into());
    let mut body = Value::clone(&object.body);
    body["metadata"]["namespace"] = "default".into();
    let cluster = &cluster.standing_for(&id, &object.id);
    match cluster.apply(&id, &body, Mode::DryRun { force: true }).await {
        Ok(_) => Ok(()),
        Err(RequestError::Deadline { last, .. }) => {
            Err(RequestError::Deadline { request: format!("check {}", object.id), last })
        }
        Err(RequestError::Refused { code: 404, .. }) if object.body.get("roleRef").is_some() => Ok(()),
        // An object of that name in `default` has nothing to do with ours, and
        // may well not become it.
        Err(RequestError::Refused { .. }) if cluster.get(&id).await?.is_some() => Ok(()),
        Err(RequestError::Refused { message, code, causes, .. }) => {
            Err(RequestError::Refused { object: Box::new(object.id.clone()), message, code, causes })
        }
        Err(RequestError::Malformed { why, .. }) => {
            Err(RequestError::Malformed { object: Box::new(object.id.clone()), why })
        }
        Err(error) => Err(error),
    }
}

async fn predict(
    cluster: &Cluster,
    bundle: &Bundle<'_>,
    object: &Object,
    live: Value,
) -> Result<Observation, RequestError> {
    let boxed = || Box::new(object.id.clone());
    let look = bundle.consent.look;
    if let Some(owner) = plan::tracker(&object.id, &live).filter(|_| !look) {
        return Err(RequestError::Tracked { object: boxed(), owner });
    }
    let adoption = bundle.consent.adopt || plan::is_ours(&live);
    if let Some(release) = plan::helm_release(&live).filter(|_| !adoption && !look) {
        return Err(RequestError::Inherited { object: boxed(), release });
    }
    let mut means = Means::default();
    if object.id.kind == "CustomResourceDefinition" && !look {
        means.migrates = definition::examine(cluster, object, &live).await?;
    }
    // What a predecessor still owned when we first applied is its own from then on.
    let first = !plan::is_applied(&live);
    means.predecessors =
        if bundle.consent.adopt || (first && plan::is_ours(&live)) { plan::predecessors(&live) } else { Vec::new() };
    if !means.migrates.is_empty() {
        // Refused until the objects are moved: what it becomes is what is asked
        // for. Conflicts come before that, and are as they will be.
        if let Err(error) = apply_as_allowed(cluster, bundle, object, &live, &mut means).await
            && !is_stored(&error)
        {
            return Err(error);
        }
        let mut predicted = live.clone();
        predicted["spec"]["versions"] = object.body["spec"]["versions"].clone();
        return Ok(Observation::Present { live, predicted, means });
    }
    let predicted = match apply_as_allowed(cluster, bundle, object, &live, &mut means).await {
        Ok(predicted) => predicted,
        // What a predecessor has set, and goes, may be what makes it invalid:
        // then it becomes what it would be if it were new.
        Err(RequestError::Refused { code: 422, causes, .. })
            if !means.predecessors.is_empty() && plan::immutable(422, &causes).is_none() =>
        {
            let mut predicted = anew(cluster, object).await?;
            let kept = ["uid", "resourceVersion", "generation", "creationTimestamp"];
            for key in kept {
                predicted["metadata"][key] = live["metadata"][key].clone();
            }
            return Ok(Observation::Present { live, predicted, means });
        }
        Err(error) => return replace(cluster, bundle, object, live, error).await,
    };
    if means.predecessors.is_empty() {
        return Ok(Observation::Present { live, predicted, means });
    }
    // What the predecessors had set, and nobody wants any more, goes with the
    // apply that follows: the API server says what is left then.
    let mut left = plan::without_predecessors(&live, &predicted);
    let managed = left["metadata"].as_object_mut().and_then(|metadata| metadata.remove("managedFields"));
    left["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"].clone();
    match cluster.rehearse_update(&object.id, &left).await {
        Ok(mut predicted) => {
            predicted["metadata"]["managedFields"] = managed.unwrap_or_default();
            Ok(Observation::Present { live, predicted, means })
        }
        // Applying takes less: what is known without defaults will do.
        Err(RequestError::Forbidden { .. }) => {
            left["metadata"]["managedFields"] = managed.unwrap_or_default();
            Ok(Observation::Present { live, predicted: left, means })
        }
        Err(error) => replace(cluster, bundle, object, live, error).await,
    }
}

/// Whether a definition is refused for nothing but a version that objects are stored in.
fn is_stored(error: &RequestError) -> bool {
    let RequestError::Refused { code: 422, causes, .. } = error else { return false };
    !causes.is_empty() && causes.iter().all(|cause| cause.field.starts_with("status.storedVersions"))
}

/// What our apply would make of an object, with conflicts resolved.
async fn apply_as_allowed(
    cluster: &Cluster,
    bundle: &Bundle<'_>,
    object: &Object,
    live: &Value,
    means: &mut Means,
) -> Result<Value, RequestError> {
    let none = Policy::default();
    let policy = bundle.policies.get(&object.component).unwrap_or(&none);
    // What is left to its owner may make room for the next conflict.
    for _ in 0..4 {
        let body = plan::without(&object.body, &means.yields);
        let conflicts = match cluster.apply(&object.id, &body, Mode::DryRun { force: means.force }).await {
            Err(RequestError::Conflict { conflicts, .. }) => conflicts,
            other => return other,
        };
        let resolution = plan::resolve(live, &body, &conflicts, &policy.conflicts, bundle.consent)
            .map_err(|fields| RequestError::Contested { object: Box::new(object.id.clone()), fields })?;
        means.force |= resolution.force;
        means.yields.extend(resolution.yields);
    }
    Err(RequestError::Conflict { object: Box::new(object.id.clone()), conflicts: Vec::new() })
}

/// When the API server says that a field is immutable: may the object be made
/// anew, and would the new one be accepted?
async fn replace(
    cluster: &Cluster,
    bundle: &Bundle<'_>,
    object: &Object,
    live: Value,
    error: RequestError,
) -> Result<Observation, RequestError> {
    let RequestError::Refused { code, causes, .. } = &error else { return Err(error) };
    let Some(why) = plan::immutable(*code, causes) else { return Err(error) };
    let loss = plan::loss(&object.id, &live);
    let allowed = bundle.policies.get(&object.component).map(|policy| policy.recreate).unwrap_or_default();
    if loss > allowed || loss == Loss::Data {
        return Err(RequestError::Immutable { object: Box::new(object.id.clone()), why, loss });
    }
    let predicted = anew(cluster, object).await?;
    Ok(Observation::Immutable { live, predicted, why, loss })
}

/// What the object would be if it were new: made under another name, because
/// the old one is still there.
async fn anew(cluster: &Cluster, object: &Object) -> Result<Value, RequestError> {
    let mut new = object.clone();
    new.id.name = format!("{}-anew", object.id.name.chars().take(50).collect::<String>());
    Arc::make_mut(&mut new.body)["metadata"]["name"] = new.id.name.as_str().into();
    let mut predicted = cluster.apply(&new.id, &new.body, Mode::DryRun { force: false }).await?;
    predicted["metadata"]["name"] = object.id.name.as_str().into();
    Ok(predicted)
}
