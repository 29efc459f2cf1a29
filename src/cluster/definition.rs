//! Upgrades of custom resource definitions: what they would do to live
//! objects, and moving those out of a version that goes.

use kube::api::{Patch, PatchParams, PostParams};
use kube::core::DynamicObject;
use serde_json::{Value, json};

use super::request::Target;
use super::{Cluster, Event, RequestError};
use crate::manifest::{Object, ObjectId};
use crate::names::INSTALLER_MANAGER;
use crate::plan;

/// Looks at what an upgrade would do to live objects: an error when one of them
/// would no longer be accepted, and the stored versions that objects have to be
/// moved out of first.
pub(super) async fn examine(cluster: &Cluster, object: &Object, live: &Value) -> Result<Vec<String>, RequestError> {
    let refused = |message: String| RequestError::Refused {
        object: Box::new(object.id.clone()),
        message,
        code: 422,
        causes: Vec::new(),
    };
    let stored = plan::dropped_stored(live, &object.body);
    if let Some(storage) = plan::storage(live)
        && stored.iter().any(|version| version == storage)
    {
        return Err(refused(format!(
            "version {storage} is the one that is stored, and is missing from the new definition: \
             install a version of it first that has both"
        )));
    }
    let tightened = plan::tightened(live, &object.body);
    if !tightened.is_empty() {
        let instances = cluster.instances(live).await?;
        for (id, instance) in &instances {
            let value = serde_json::to_value(instance).unwrap_or_default();
            if let Some(broken) = tightened.iter().find(|tightening| plan::violates(&value, tightening)) {
                return Err(refused(format!("the new schema does not accept {id}: {broken}")));
            }
        }
        let places: Vec<String> = tightened.iter().map(ToString::to_string).collect();
        let message = format!(
            "{}: its schema becomes tighter ({}); all {} live objects are accepted",
            object.id,
            places.join(", "),
            instances.len()
        );
        cluster.report(Event::Warning { message });
    }
    for version in plan::dropped_served(live, &object.body) {
        let message = format!("{}: version {version} is no longer served; who still asks for it gets a 404", object.id);
        cluster.report(Event::Warning { message });
    }
    Ok(stored)
}

impl Cluster {
    /// Moves every live object into the version that is stored, by writing it
    /// as it is, and notes that the others are not stored any more.
    pub(super) async fn migrate(&self, definition: &ObjectId) -> Result<(), RequestError> {
        let Some(live) = self.get(definition).await? else { return Ok(()) };
        let instances = self.instances(&live).await?;
        let count = instances.len();
        for (id, instance) in instances {
            self.rewrite(&id, instance).await?;
        }
        let resource = self.resource(definition).await?;
        let target = Target { verb: "update", object: definition, resource: &resource };
        let stored: Vec<&str> = plan::storage(&live).into_iter().collect();
        let patch = json!({"status": {"storedVersions": stored}});
        let params = PatchParams { field_manager: Some(INSTALLER_MANAGER.into()), ..PatchParams::default() };
        let built = target.collection().patch_subresource("status", &definition.name, &params, &Patch::Merge(patch));
        self.send(&target, built).await?;
        let message = format!("{definition}: {count} objects were moved to version {}", stored.join(""));
        self.report(Event::Warning { message });
        Ok(())
    }

    async fn rewrite(&self, id: &ObjectId, mut instance: DynamicObject) -> Result<(), RequestError> {
        let resource = self.resource(id).await?;
        let target = Target { verb: "rewrite", object: id, resource: &resource };
        instance.types = Some(kube::core::TypeMeta { api_version: id.api_version(), kind: id.kind.clone() });
        for _ in 0..5 {
            let bytes = serde_json::to_vec(&instance).unwrap_or_default();
            let params = PostParams { field_manager: Some(INSTALLER_MANAGER.into()), ..PostParams::default() };
            match self.send(&target, target.collection().replace(&id.name, &params, bytes)).await {
                Ok(_) | Err(RequestError::Refused { code: 404, .. }) => return Ok(()),
                // Somebody has written it since, in the stored version or not: once more.
                Err(RequestError::Refused { code: 409, .. }) => {}
                Err(error) => return Err(error),
            }
            let Some(live) = self.get(id).await? else { return Ok(()) };
            let Ok(live) = serde_json::from_value(live) else { return Ok(()) };
            instance = live;
        }
        Ok(())
    }
}
