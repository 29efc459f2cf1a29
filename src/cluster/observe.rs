//! What there is, and what each apply would make of it: GET and dry run, many
//! at once. Nothing is written.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, stream};
use serde_json::Value;

use super::apply::Mode;
use super::{Cluster, RequestError};
use crate::manifest::{Object, ObjectId};
use crate::names::INSTALLER_MANAGER;
use crate::plan::{Observation, Observations};

/// Observes every desired object. With `force`, fields of other managers are
/// planned to be taken over instead of being a conflict.
///
/// # Errors
/// Everything that the API server refuses, so that all of it can be mended at once.
pub async fn observe(cluster: &Cluster, desired: &[Object], force: bool) -> Result<Observations, Vec<RequestError>> {
    let bundle = Bundle::new(cluster, desired).await.map_err(|error| vec![error])?;
    let bundle = &bundle;
    let results: Vec<_> = stream::iter(desired)
        .map(|object| async move { (object.id.clone(), observe_one(cluster, bundle, object, force).await) })
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

/// What comes with the bundle and is not there yet.
struct Bundle {
    namespaces: BTreeSet<String>,
    kinds: BTreeSet<(String, String)>,
    roles: BTreeSet<String>,
}

impl Bundle {
    async fn new(cluster: &Cluster, desired: &[Object]) -> Result<Self, RequestError> {
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
        Ok(Self { namespaces, kinds: kinds.collect(), roles: roles.map(|o| o.id.name.clone()).collect() })
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
    bundle: &Bundle,
    object: &Object,
    force: bool,
) -> Result<Observation, RequestError> {
    if cluster.find_resource(&object.id).await?.is_none() {
        return if bundle.brings_kind(&object.id) {
            Ok(Observation::Unserved)
        } else {
            Err(RequestError::NotServed { object: Box::new(object.id.clone()) })
        };
    }
    if object.id.namespace.as_ref().is_some_and(|namespace| bundle.namespaces.contains(namespace)) {
        rehearse(cluster, object).await?;
        return Ok(Observation::Absent);
    }
    match cluster.get(&object.id).await? {
        Some(live) => predict(cluster, object, live, force).await,
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
    let mut body = object.body.clone();
    body["metadata"]["namespace"] = "default".into();
    match cluster.apply(&id, &body, Mode::DryRun { force: true }).await {
        Ok(_) => Ok(()),
        Err(RequestError::Refused { code: 404, .. }) if object.body.get("roleRef").is_some() => Ok(()),
        // An object of that name in `default` has nothing to do with ours, and
        // may well not become it.
        Err(RequestError::Refused { .. }) if cluster.get(&id).await?.is_some() => Ok(()),
        Err(RequestError::Refused { message, code, .. }) => {
            Err(RequestError::Refused { object: Box::new(object.id.clone()), message, code })
        }
        Err(RequestError::Malformed { why, .. }) => {
            Err(RequestError::Malformed { object: Box::new(object.id.clone()), why })
        }
        Err(error) => Err(error),
    }
}

async fn predict(cluster: &Cluster, object: &Object, live: Value, force: bool) -> Result<Observation, RequestError> {
    match cluster.apply(&object.id, &object.body, Mode::DryRun { force: false }).await {
        Ok(predicted) => Ok(Observation::Present { live, predicted, force: false }),
        // What an update under our own name owns is ours.
        Err(RequestError::Conflict { conflicts, .. })
            if force || conflicts.iter().all(|conflict| conflict.manager == INSTALLER_MANAGER) =>
        {
            let predicted = cluster.apply(&object.id, &object.body, Mode::DryRun { force: true }).await?;
            Ok(Observation::Present { live, predicted, force: true })
        }
        Err(error) => Err(error),
    }
}
