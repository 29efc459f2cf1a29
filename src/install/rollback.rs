//! Going back to an earlier revision: its objects as they were rendered then.
//! Key material and tokens stay as they are.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::Value;

use super::{InstallError, Installation, Prepared, decide, locked, permissions, run};
use crate::cluster::observe::Rehearsed;
use crate::cluster::record;
use crate::cluster::{Cluster, Event};
use crate::manifest::Object;
use crate::plan::{Desired, Origin, Plan, Record, Revision};

/// Decides what a rollback would do. Writes nothing. `wanted` is what the
/// present executable would install: of it, policies and options count.
///
/// # Errors
/// See [`InstallError`].
pub async fn prepare_rollback(
    cluster: &Cluster,
    wanted: &Installation,
    number: Option<u32>,
) -> Result<(Installation, Prepared, u32), InstallError> {
    let goal = Goal::find(cluster, wanted, number).await?;
    permissions::to_roll_back(cluster, &wanted.rendered, goal.objects.clone(), &goal.record).await?;
    goal.prepare(cluster, wanted).await
}

/// A revision to go back to.
struct Goal {
    record: Record,
    revision: Revision,
    /// Without Secret data.
    objects: Vec<Object>,
}

impl Goal {
    async fn find(cluster: &Cluster, wanted: &Installation, number: Option<u32>) -> Result<Self, InstallError> {
        let namespace = &wanted.rendered.operator_namespace;
        let installed = record::load(cluster, namespace).await.map_err(InstallError::Record)?;
        let record = installed.ok_or_else(|| InstallError::Nothing("nothing is installed in this cluster".into()))?;
        let revision = choose(&record, number)?.clone();
        let objects = record::objects(cluster, namespace, &revision).await.map_err(InstallError::Record)?;
        Ok(Self { record, revision, objects })
    }

    async fn prepare(
        self,
        cluster: &Cluster,
        wanted: &Installation,
    ) -> Result<(Installation, Prepared, u32), InstallError> {
        let Self { record, revision, objects } = self;
        let objects: Vec<Object> = stream::iter(objects)
            .map(|object| async move { with_live_data(cluster, object).await })
            .buffered(16)
            .try_collect()
            .await?;
        let desired = Desired { objects, ..Desired::default() };
        let earlier = Installation { settings: revision.run.settings.clone(), ..wanted.clone() };
        let prepared = decide(cluster, &earlier, desired, Some(record), &Rehearsed::default()).await?;
        Ok((earlier, prepared, revision.revision))
    }
}

/// Goes back to an earlier revision.
///
/// # Errors
/// See [`InstallError`].
pub async fn rollback(cluster: &Cluster, wanted: &Installation, number: Option<u32>) -> Result<Plan, InstallError> {
    let (earlier, prepared, revision) = prepare_rollback(cluster, wanted, number).await?;
    if prepared.plan.is_empty() {
        cluster.report(Event::planned(&prepared.plan));
        cluster.report(Event::UpToDate);
        return Ok(prepared.plan);
    }
    run::brake(&prepared.plan, &earlier.options)?;
    locked(cluster, &wanted.rendered.operator_namespace, async {
        let goal = Goal::find(cluster, wanted, Some(revision)).await?;
        let (earlier, prepared, _) = goal.prepare(cluster, wanted).await?;
        run::carry_out(cluster, &earlier, prepared, Origin::Rollback(revision)).await
    })
    .await
}

fn choose(record: &Record, number: Option<u32>) -> Result<&Revision, InstallError> {
    let known: Vec<String> = record.history.iter().map(|revision| revision.revision.to_string()).collect();
    let chosen = record.revision(number).filter(|revision| !revision.objects.is_empty());
    chosen.ok_or_else(|| {
        InstallError::Nothing(match number {
            Some(number) => format!("there is no revision {number}: the recorded ones are {}", known.join(", ")),
            None => "there is no earlier revision that succeeded".into(),
        })
    })
}

/// A Secret of a revision is remembered without its data: what lives now counts.
async fn with_live_data(cluster: &Cluster, mut object: Object) -> Result<Object, InstallError> {
    if object.id.kind != "Secret" || !object.id.group.is_empty() {
        return Ok(object);
    }
    let shown = format!("{}/{}", object.id.namespace.as_deref().unwrap_or_default(), object.id.name);
    let live = cluster.get(&object.id).await.map_err(|error| InstallError::Observe(vec![error]))?;
    let Some(live) = live else { return Err(InstallError::LostSecret(shown)) };
    for (field, name) in [("data", "data"), ("stringData", "data")] {
        let Some(Value::Object(wanted)) = Arc::make_mut(&mut object.body).get_mut(field) else { continue };
        for (key, value) in wanted {
            let Some(known) = live.get(name).and_then(|data| data.get(key)) else {
                return Err(InstallError::LostSecret(format!("{shown}, key \"{key}\"")));
            };
            *value = match field {
                "stringData" => plain(known).into(),
                _ => known.clone(),
            };
        }
    }
    let body = Arc::make_mut(&mut object.body);
    if let Some(Value::Object(annotations)) = body["metadata"].get_mut("annotations") {
        for (name, value) in annotations {
            *value = live["metadata"]["annotations"].get(name).cloned().unwrap_or_default();
        }
    }
    Ok(object)
}

fn plain(value: &Value) -> String {
    let bytes = STANDARD.decode(value.as_str().unwrap_or_default()).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
