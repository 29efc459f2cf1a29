//! Whether we may do what a command takes: found out before its first write.

use std::collections::BTreeSet;

use super::{InstallError, Refusal, adopt, leftovers};
use crate::cluster::record;
use crate::cluster::{Cluster, RequestError};
use crate::manifest::{Declarations, Object, ObjectId, Rendered};
use crate::plan::{self, Record};
use crate::preflight::access::{self, Besides, Needs, Plurals, Purpose};
use crate::preflight::{Report, ask};

/// What it takes to do these things with this bundle and the installation that
/// is there, in namespaces that are made with the roles.
///
/// # Errors
/// When the cluster cannot be looked at.
pub async fn needs(
    cluster: &Cluster,
    rendered: &Rendered,
    record: Option<&Record>,
    purposes: &[Purpose],
) -> Result<Needs, InstallError> {
    let mut needs = Needs::default();
    for purpose in purposes {
        needs.extend(one(cluster, rendered, record, *purpose).await?);
    }
    Ok(needs)
}

async fn one(
    cluster: &Cluster,
    rendered: &Rendered,
    record: Option<&Record>,
    purpose: Purpose,
) -> Result<Needs, InstallError> {
    let namespace = &rendered.operator_namespace;
    let recorded: BTreeSet<ObjectId> = inventory(record).collect();
    Ok(match purpose {
        Purpose::Init => to_apply(cluster, rendered, record, true).await?,
        Purpose::Rollback => {
            let mut needs = Needs::default();
            let revisions = record.into_iter().flat_map(|record| &record.history);
            for revision in revisions.filter(|revision| !revision.objects.is_empty()) {
                let objects = record::objects(cluster, namespace, revision).await.map_err(InstallError::Record)?;
                needs.extend(to_apply(cluster, &earlier(rendered, objects), record, true).await?);
            }
            needs
        }
        Purpose::Uninstall | Purpose::DeleteCaches => {
            let left = leftovers(cluster, record).await?;
            let all = access::identities(rendered).into_iter().chain(recorded).chain(left);
            let objects: BTreeSet<ObjectId> = all.collect();
            let plurals = ask::known_plurals(cluster, rendered, objects.iter()).await;
            Needs::of(access::uninstall(&objects, namespace, purpose == Purpose::DeleteCaches, &plurals))
        }
        Purpose::Rotate => Needs::of(access::rotation(&rendered.declarations(), namespace)),
        Purpose::Adopt => {
            let retired = adopt::retiring(cluster, rendered).await.map_err(InstallError::Adopt)?;
            let plurals = ask::known_plurals(cluster, rendered, retired.iter()).await;
            Needs::of(access::adoption(namespace, &retired, &plurals))
        }
    })
}

/// To apply these objects, and to prune what is recorded beside them.
async fn to_apply(
    cluster: &Cluster,
    rendered: &Rendered,
    record: Option<&Record>,
    made: bool,
) -> Result<Needs, InstallError> {
    let besides = besides(cluster, rendered, record).await.map_err(observe)?;
    ask::needs(cluster, rendered, &besides, made).await.map_err(observe)
}

/// What an installation of these objects does beside, as far as it is known
/// without a plan.
///
/// # Errors
/// When a definition cannot be looked at.
pub async fn besides(cluster: &Cluster, rendered: &Rendered, record: Option<&Record>) -> Result<Besides, RequestError> {
    let wanted: BTreeSet<_> = access::identities(rendered).iter().map(place).collect();
    let going = inventory(record).filter(|id| !wanted.contains(&place(id))).collect();
    let mut besides = Besides { going, ..Besides::default() };
    for definition in rendered.objects.iter().filter(|object| object.id.kind == "CustomResourceDefinition") {
        let live = match cluster.get(&definition.id).await {
            Ok(live) => live,
            // That it may not be looked at is told with all the rest.
            Err(RequestError::Forbidden { .. }) => None,
            Err(error) => return Err(error),
        };
        if live.is_some_and(|live| !plan::dropped_stored(&live, &definition.body).is_empty()) {
            besides.migrated.insert(definition.id.clone());
        }
    }
    Ok(besides)
}

async fn leftovers(cluster: &Cluster, record: Option<&Record>) -> Result<Vec<ObjectId>, InstallError> {
    let Some(record) = record else { return Ok(Vec::new()) };
    let left = leftovers::find(cluster, record).await.map_err(observe)?;
    Ok(left.into_iter().map(|(entry, _)| entry.id).collect())
}

fn inventory(record: Option<&Record>) -> impl Iterator<Item = ObjectId> {
    record.into_iter().flat_map(|record| &record.inventory).map(|entry| entry.id.clone())
}

/// An object's place, whatever its version.
fn place(id: &ObjectId) -> (String, String, Option<String>, String) {
    (id.group.clone(), id.kind.clone(), id.namespace.clone(), id.name.clone())
}

/// What was rendered once.
fn earlier(rendered: &Rendered, objects: Vec<Object>) -> Rendered {
    Rendered { objects, certificates: Vec::new(), generated: Vec::new(), expected: Vec::new(), ..rendered.clone() }
}

/// Refuses to go back to these objects without the permissions for it.
pub(super) async fn to_roll_back(
    cluster: &Cluster,
    rendered: &Rendered,
    objects: Vec<Object>,
    record: &Record,
) -> Result<(), InstallError> {
    let needs = to_apply(cluster, &earlier(rendered, objects), Some(record), false).await?;
    review(cluster, &needs, Purpose::Rollback).await
}

/// Refuses to remove what is recorded without the permissions for it.
pub(super) async fn to_uninstall(
    cluster: &Cluster,
    record: &Record,
    namespace: &str,
    delete_caches: bool,
) -> Result<(), InstallError> {
    let left = leftovers(cluster, Some(record)).await?;
    let objects: BTreeSet<ObjectId> = inventory(Some(record)).chain(left).collect();
    let plurals = ask::served_plurals(cluster, objects.iter()).await;
    let needs = Needs::of(access::uninstall(&objects, namespace, delete_caches, &plurals));
    review(cluster, &needs, if delete_caches { Purpose::DeleteCaches } else { Purpose::Uninstall }).await
}

/// Refuses to replace an authority without the permissions for it.
///
/// # Errors
/// [`InstallError::Preflight`] with all that is lacking.
pub async fn to_rotate(cluster: &Cluster, declared: &Declarations, namespace: &str) -> Result<(), InstallError> {
    review(cluster, &Needs::of(access::rotation(declared, namespace)), Purpose::Rotate).await
}

/// Refuses to give a release back without the permissions for it.
pub(super) async fn to_give_back(cluster: &Cluster, namespace: &str) -> Result<(), InstallError> {
    let needs = access::adoption(namespace, &BTreeSet::new(), &Plurals::new());
    review(cluster, &Needs::of(needs), Purpose::Adopt).await
}

async fn review(cluster: &Cluster, needs: &Needs, purpose: Purpose) -> Result<(), InstallError> {
    let findings = ask::permissions(cluster, needs, &[purpose]).await.map_err(observe)?;
    match Refusal::of(&Report::new(findings)) {
        Some(refusal) => Err(InstallError::Preflight(Box::new(refusal))),
        None => Ok(()),
    }
}

fn observe(error: RequestError) -> InstallError {
    InstallError::Observe(vec![error])
}
