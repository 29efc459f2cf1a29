//! Removing an installation: custom resources while their controller still
//! runs, then everything in reverse, then definitions and namespaces. Caches
//! stay unless they are asked for; a namespace that holds anything else stays.

use std::collections::BTreeSet;
use std::fmt;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;
use serde_json::Value;

use super::{InstallError, leftovers, locked, now, permissions, prune};
use crate::cluster::record::{self, NAME};
use crate::cluster::{Cluster, Event, PlannedKept, PlannedStep, RequestError, remains};
use crate::manifest::{ObjectId, Runlevel};
use crate::plan::{self, Deletion, Entry, Progress, Record, Wave};

/// What goes with an installation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scope {
    /// The caches, too.
    pub delete_caches: bool,
    /// Even while builds run.
    pub cut_builds: bool,
}

/// What an uninstallation does, in order.
#[derive(Debug, Serialize)]
pub struct Removal {
    /// The steps; each is over before the next begins.
    pub steps: Vec<Step>,
    /// What stays, and why.
    pub kept: Vec<Kept>,
    #[serde(skip)]
    record: Record,
    /// The operator's namespace goes last, with record and lock.
    #[serde(skip)]
    last: Option<Deletion>,
}

/// Objects that go together.
#[derive(Debug, Serialize)]
pub struct Step {
    /// `custom resources`.
    pub title: &'static str,
    /// What goes, in order.
    pub deletions: Vec<Deletion>,
}

/// Something that stays.
#[derive(Debug, Serialize)]
pub struct Kept {
    /// What.
    #[serde(flatten)]
    pub id: ObjectId,
    /// Why.
    pub why: String,
}

/// The step that goes last.
const LAST: &str = "namespace of the record";

impl Removal {
    fn event(&self) -> Event {
        let steps = self.steps.iter().filter_map(|step| PlannedStep::of(step.title, &step.deletions)).collect();
        let kept = self.kept.iter().map(|kept| PlannedKept { object: kept.id.clone(), why: kept.why.clone() });
        Event::Removing { steps, kept: kept.collect() }
    }
}

impl fmt::Display for Removal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for step in self.steps.iter().filter(|step| !step.deletions.is_empty()) {
            writeln!(f, "{}", step.title)?;
            step.deletions.iter().try_for_each(|deletion| writeln!(f, "  delete  {}", deletion.id))?;
        }
        if !self.kept.is_empty() {
            writeln!(f, "kept")?;
        }
        self.kept.iter().try_for_each(|kept| writeln!(f, "  keep    {}: {}", kept.id, kept.why))
    }
}

/// Decides what goes. Writes nothing.
///
/// # Errors
/// When nothing is installed, when builds run, when the cluster cannot be looked at.
pub async fn prepare_uninstall(cluster: &Cluster, namespace: &str, scope: Scope) -> Result<Removal, InstallError> {
    let look = Look::new(cluster, namespace, scope).await?;
    permissions::to_uninstall(cluster, &look.record, namespace, scope.delete_caches).await?;
    look.decide().await
}

/// Volumes of daemons.
#[derive(Default)]
struct Caches {
    /// Asked for.
    deletions: Vec<Deletion>,
    kept: Vec<Kept>,
    /// Forks' own: the garbage collector takes them with their daemon.
    going: Vec<ObjectId>,
}

struct Look<'a> {
    cluster: &'a Cluster,
    scope: Scope,
    namespace: &'a str,
    record: Record,
}

impl<'a> Look<'a> {
    async fn new(cluster: &'a Cluster, namespace: &'a str, scope: Scope) -> Result<Self, InstallError> {
        let record = record::load(cluster, namespace).await.map_err(InstallError::Record)?;
        let record = record.ok_or_else(|| InstallError::Nothing("nothing is installed in this cluster".into()))?;
        Ok(Self { cluster, scope, namespace, record })
    }

    async fn decide(self) -> Result<Removal, InstallError> {
        let (mut ours, mut kept, mut tracked) = (Vec::new(), Vec::new(), Vec::new());
        let mut all = self.live().await?;
        all.extend(leftovers::find(self.cluster, &self.record).await.map_err(InstallError::Apply)?);
        for (entry, live) in all {
            match (why_kept(&entry, &live), plan::tracker(&entry.id, &live)) {
                (Some(why), _) => kept.push(Kept { id: entry.id, why }),
                (None, Some(owner)) => tracked.push(RequestError::Tracked { object: Box::new(entry.id), owner }),
                (None, None) => ours.push((deletion(&entry.id, &live, &entry.component, entry.runlevel), live)),
            }
        }
        if !tracked.is_empty() {
            return Err(InstallError::Observe(tracked));
        }
        let resources = self.resources(&ours).await?;
        let is = |deletion: &Deletion, kind: &str| deletion.id.kind == kind;
        let (definitions, rest): (Vec<_>, Vec<_>) =
            ours.into_iter().map(|(deletion, _)| deletion).partition(|d| is(d, "CustomResourceDefinition"));
        let (namespaces, mut rest): (Vec<_>, Vec<_>) = rest.into_iter().partition(|d| is(d, "Namespace"));
        let place = |deletion: &Deletion| (deletion.runlevel, Wave::of(&deletion.id), deletion.id.clone());
        rest.sort_by_key(|deletion| std::cmp::Reverse(place(deletion)));
        let Caches { deletions: caches, kept: kept_caches, going } = self.caches().await?;
        kept.extend(kept_caches);
        let gone = resources.iter().chain(&rest).chain(&caches).map(|deletion| deletion.id.clone());
        let gone: BTreeSet<ObjectId> = gone.chain(going).collect();
        let (namespaces, last) = self.namespaces(namespaces, &gone, &mut kept).await?;
        let steps = vec![
            Step { title: "custom resources, while their controller runs", deletions: resources },
            Step { title: "everything that was applied, in reverse", deletions: rest },
            Step { title: "caches", deletions: caches },
            Step { title: "definitions", deletions: definitions },
            Step { title: "namespaces", deletions: namespaces },
            Step { title: LAST, deletions: last.iter().cloned().collect() },
        ];
        Ok(Removal { steps, kept, record: self.record, last })
    }

    /// What is recorded and still there.
    async fn live(&self) -> Result<Vec<(Entry, Value)>, InstallError> {
        let look = |entry: Entry| async move {
            if self.cluster.find_resource(&entry.id).await?.is_none() {
                return Ok(None);
            }
            Ok::<_, RequestError>(self.cluster.get(&entry.id).await?.map(|live| (entry, live)))
        };
        let all = stream::iter(self.record.inventory.clone()).map(look).buffered(16);
        all.try_filter_map(|found| async { Ok(found) }).try_collect().await.map_err(InstallError::Apply)
    }

    /// Objects of the definitions that go.
    async fn resources(&self, ours: &[(Deletion, Value)]) -> Result<Vec<Deletion>, InstallError> {
        let mut deletions = Vec::new();
        let mut builds = Vec::new();
        for (definition, live) in ours.iter().filter(|(d, _)| d.id.kind == "CustomResourceDefinition") {
            for (id, object) in self.cluster.instances(live).await.map_err(InstallError::Apply)? {
                let running = object.data.pointer("/status/inflight").and_then(Value::as_array);
                if running.is_some_and(|running| !running.is_empty()) {
                    builds.push(id.to_string());
                }
                let uid = object.metadata.uid.unwrap_or_default();
                let component = definition.component.clone();
                deletions.push(Deletion { id, uid, component, runlevel: Runlevel::Rc0, brakes: Vec::new() });
            }
        }
        if builds.is_empty() || self.scope.cut_builds { Ok(deletions) } else { Err(InstallError::Builds(builds)) }
    }

    /// Volumes of daemons.
    async fn caches(&self) -> Result<Caches, InstallError> {
        let namespaces = self.record.inventory.iter().filter_map(|entry| entry.id.namespace.clone());
        let namespaces: BTreeSet<String> = namespaces.collect();
        let mut found = Caches::default();
        for namespace in namespaces {
            let kind = ObjectId {
                group: String::new(),
                version: "v1".into(),
                kind: "PersistentVolumeClaim".into(),
                namespace: Some(namespace),
                name: String::new(),
            };
            let claims = self.cluster.labelled(&kind, DAEMONS).await.map_err(InstallError::Apply)?;
            for claim in claims {
                let id = ObjectId { name: claim.metadata.name.clone().unwrap_or_default(), ..kind.clone() };
                if self.scope.delete_caches {
                    let uid = claim.metadata.uid.unwrap_or_default();
                    let component = "caches".to_owned();
                    found.deletions.push(Deletion { id, uid, component, runlevel: Runlevel::Rc0, brakes: Vec::new() });
                } else if claim.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "StatefulSet") {
                    found.going.push(id);
                } else {
                    found.kept.push(Kept { id, why: "it is a cache; --delete-caches deletes it".into() });
                }
            }
        }
        Ok(found)
    }

    /// Namespaces that hold nothing else go; that of the record goes last.
    async fn namespaces(
        &self,
        candidates: Vec<Deletion>,
        gone: &BTreeSet<ObjectId>,
        kept: &mut Vec<Kept>,
    ) -> Result<(Vec<Deletion>, Option<Deletion>), InstallError> {
        let (mut namespaces, mut last) = (Vec::new(), None);
        for candidate in candidates {
            let strangers = self.cluster.strangers(&candidate.id.name, &self.record.inventory).await;
            let strangers = strangers.map_err(InstallError::Apply)?;
            let same = |a: &ObjectId, b: &ObjectId| {
                (&a.group, &a.kind, &a.namespace, &a.name) == (&b.group, &b.kind, &b.namespace, &b.name)
            };
            let mut staying: Vec<String> = strangers
                .iter()
                .filter(|id| !gone.iter().any(|other| same(id, other)))
                .map(|id| format!("{} {}", id.kind, id.name))
                .collect();
            staying.extend(
                kept.iter()
                    .filter(|k| k.id.namespace.as_ref() == Some(&candidate.id.name))
                    .map(|k| format!("{} {}", k.id.kind, k.id.name)),
            );
            staying.sort();
            staying.dedup();
            if staying.is_empty() {
                if candidate.id.name == self.namespace {
                    last = Some(candidate);
                } else {
                    namespaces.push(candidate);
                }
            } else {
                let more = if staying.len() > 3 { format!(" and {} more", staying.len() - 3) } else { String::new() };
                staying.truncate(3);
                kept.push(Kept { id: candidate.id, why: format!("it holds {}{more}", staying.join(", ")) });
            }
        }
        Ok((namespaces, last))
    }
}

/// Labels of the daemons' volumes.
const DAEMONS: &str = "app.kubernetes.io/name=buildkit-operator,app.kubernetes.io/component=buildkitd";

fn deletion(id: &ObjectId, live: &Value, component: &str, runlevel: Runlevel) -> Deletion {
    let uid = live.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default().to_owned();
    Deletion { id: id.clone(), uid, component: component.to_owned(), runlevel, brakes: Vec::new() }
}

fn why_kept(entry: &Entry, live: &Value) -> Option<String> {
    let uid = live.pointer("/metadata/uid").and_then(Value::as_str);
    if entry.uid.as_deref().is_some_and(|recorded| Some(recorded) != uid) {
        return Some("it is another object of that name by now".into());
    }
    if !plan::is_ours(live) {
        return Some("it is no longer labelled as ours".into());
    }
    let keep = live.pointer("/metadata/annotations").and_then(|all| all.get(remains::KEEP));
    keep.is_some_and(|keep| keep == "true").then(|| format!("annotation {} asks for it", remains::KEEP))
}

/// Removes an installation, and returns what was done.
///
/// # Errors
/// See [`InstallError`]. What could not be deleted stays recorded; the same
/// command goes on from there.
pub async fn uninstall(
    cluster: &Cluster,
    namespace: &str,
    scope: Scope,
    stop_after: Option<super::StopPoint>,
) -> Result<Removal, InstallError> {
    // Whether there is anything, and whether it may go, before the lock.
    prepare_uninstall(cluster, namespace, scope).await?;
    let removal = locked(cluster, namespace, async {
        let mut removal = Look::new(cluster, namespace, scope).await?.decide().await?;
        cluster.report(removal.event());
        removal.record.run.state = Progress::Uninstalling;
        removal.record.run.finished = None;
        record::save(cluster, namespace, &mut removal.record, None).await.map_err(InstallError::Record)?;
        super::fault::stop_at(stop_after, super::StopPoint::Intent);
        let result = remove(cluster, &mut removal, stop_after).await;
        if let Err(error) = result {
            removal.record.run.message = Some(error.to_string());
            removal.record.run.finished = Some(now());
            let saved = record::save(&cluster.last_words(), namespace, &mut removal.record, None).await;
            return Err(saved.map_err(InstallError::Record).err().map_or(error, |later| later));
        }
        if removal.last.is_none() {
            record::delete(cluster, namespace).await.map_err(InstallError::Record)?;
        }
        Ok(removal)
    })
    .await?;
    // With it go record and lock.
    if let Some(last) = &removal.last {
        without_pods(cluster, std::slice::from_ref(last)).await?;
        prune::step(cluster, LAST, std::slice::from_ref(last), |_| {}).await?;
    }
    Ok(removal)
}

async fn remove(
    cluster: &Cluster,
    removal: &mut Removal,
    stop_after: Option<super::StopPoint>,
) -> Result<(), InstallError> {
    let Removal { steps, record, last, .. } = removal;
    let countdown = super::fault::Countdown::new(stop_after);
    for step in steps.iter().filter(|step| last.as_ref().is_none_or(|last| step.deletions != [last.clone()])) {
        if let Some(definition) = step.deletions.iter().find(|d| d.id.kind == "CustomResourceDefinition") {
            latecomers(cluster, &definition.id).await?;
        }
        let gone = |id: &ObjectId| {
            record.removed(id);
            countdown.tick();
        };
        without_pods(cluster, &step.deletions).await?;
        prune::step(cluster, step.title, &step.deletions, gone).await?;
    }
    Ok(())
}

/// Waits for the pods of namespaces that go, before they go.
async fn without_pods(cluster: &Cluster, deletions: &[Deletion]) -> Result<(), InstallError> {
    let namespaces = deletions.iter().filter(|d| d.id.kind == "Namespace" && d.id.group.is_empty());
    for namespace in namespaces {
        cluster.without_pods(&namespace.id.name).await.map_err(InstallError::Apply)?;
    }
    Ok(())
}

/// Custom resources that were made after the plan, by a controller that still ran.
async fn latecomers(cluster: &Cluster, definition: &ObjectId) -> Result<(), InstallError> {
    let Some(live) = cluster.get(definition).await.map_err(InstallError::Apply)? else { return Ok(()) };
    let instances = cluster.instances(&live).await.map_err(InstallError::Apply)?;
    let deletions: Vec<Deletion> = instances
        .into_iter()
        .map(|(id, object)| Deletion {
            id,
            uid: object.metadata.uid.unwrap_or_default(),
            component: NAME.into(),
            runlevel: Runlevel::Rc0,
            brakes: Vec::new(),
        })
        .collect();
    if !deletions.is_empty() {
        let message = format!("{} custom resources were made meanwhile, and go, too", deletions.len());
        cluster.report(Event::Warning { message });
    }
    prune::prune(cluster, &deletions, |_| {}).await
}
