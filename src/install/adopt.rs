//! Taking over what Helm installed: what of it has to end, and making Helm
//! forget the release, so that no `helm uninstall` can end what is ours now.
//!
//! Helm finds a release by its Secrets. They are copied aside and deleted;
//! [`unadopt`] puts them back.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flate2::read::GzDecoder;
use kube::core::DynamicObject;
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::desired::secret_id;
use super::{InstallError, permissions};
use crate::cluster::apply::Mode;
use crate::cluster::{Cluster, Event, RequestError};
use crate::manifest::{ObjectId, Rendered, Runlevel};
use crate::names::INSTALLER_MANAGER;
use crate::plan::{self, Deletion, HelmRelease, Observation, Observations, Plan};
use crate::preflight::access;

/// The chart of the reference.
const CHART: &str = "buildkit-operator";

/// Label of the copies: the release's name.
const COPY: &str = "bko-install/helm-release";

/// Annotation of the copies: name and labels of the original, as JSON.
const ORIGINAL: &str = "bko-install/helm-original";

/// Why a release cannot be taken over, or given back.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A request failed.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A release's Secret is not as Helm writes it.
    #[error("Secret {secret} is no release of Helm: {why}")]
    Malformed {
        /// `namespace/name`.
        secret: String,
        /// Why.
        why: String,
    },
    /// No release was moved aside here.
    #[error("no release of Helm was moved aside in namespace \"{0}\"")]
    NoCopy(String),
}

/// Adds to a plan what adoption does beside applying: which releases Helm is
/// made to forget, and what of them must not go on.
pub(super) async fn extend(
    cluster: &Cluster,
    plan: &mut Plan,
    observed: &Observations,
    namespace: &str,
) -> Result<(), InstallError> {
    for Release { release, manifest, .. } in
        releases(cluster, observed, namespace).await.map_err(InstallError::Adopt)?
    {
        let retired = retired(cluster, plan, &release, &manifest).await;
        let retired = retired.map_err(|error| InstallError::Observe(vec![error]))?;
        // They act on the same objects as what is installed: they go first.
        plan.deletions.splice(0..0, retired);
        plan.releases.push(release);
    }
    if plan.record.is_none() && !plan.releases.is_empty() {
        plan.record = Some("a release is taken over".into());
    }
    Ok(())
}

/// The last version of a release.
struct Release {
    release: HelmRelease,
    manifest: String,
    /// What the user had set.
    config: Value,
}

/// What users had set of the releases of the reference in this namespace.
///
/// # Errors
/// When they cannot be read.
pub async fn release_values(cluster: &Cluster, namespace: &str) -> Result<Vec<(HelmRelease, Value)>, InstallError> {
    let releases = releases(cluster, &Observations::new(), namespace).await.map_err(InstallError::Adopt)?;
    Ok(releases.into_iter().map(|Release { release, config, .. }| (release, config)).collect())
}

/// Releases that Helm still knows, in their last version:
/// those that observed objects belong to, and the reference's in our namespace.
async fn releases(cluster: &Cluster, observed: &Observations, namespace: &str) -> Result<Vec<Release>, AdoptError> {
    let live = observed.values().filter_map(|observation| match observation {
        Observation::Present { live, .. } | Observation::Immutable { live, .. } => Some(live),
        // What is settled belongs to no release.
        Observation::Absent | Observation::Unserved | Observation::Settled { .. } => None,
    });
    let named: BTreeSet<HelmRelease> = live.filter_map(plan::helm_release).collect();
    let mut namespaces: BTreeSet<&str> = named.iter().map(|release| release.namespace.as_str()).collect();
    namespaces.insert(namespace);
    let mut found = Vec::new();
    for namespace in namespaces {
        let mut last: BTreeMap<String, (u64, DynamicObject)> = BTreeMap::new();
        for secret in cluster.labelled(&secret_id(namespace, ""), "owner=helm").await? {
            let (Some(name), Some(version)) = (label(&secret, "name"), label(&secret, "version")) else { continue };
            let version = version.parse().unwrap_or_default();
            if last.get(&name).is_none_or(|(known, _)| *known < version) {
                last.insert(name, (version, secret));
            }
        }
        for (name, (_, secret)) in last {
            let release = HelmRelease { name, namespace: namespace.to_owned() };
            let mut content = content(namespace, &secret)?;
            let text = |pointer: &str| content.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
            if named.contains(&release) || text("/chart/metadata/name") == CHART {
                let manifest = text("/manifest");
                found.push(Release { release, manifest, config: content["config"].take() });
            }
        }
    }
    Ok(found)
}

fn label(object: &DynamicObject, name: &str) -> Option<String> {
    object.metadata.labels.as_ref()?.get(name).cloned()
}

/// What a release's Secret holds: base64 of base64 of compressed JSON.
fn content(namespace: &str, secret: &DynamicObject) -> Result<Value, AdoptError> {
    let name = secret.metadata.name.clone().unwrap_or_default();
    let malformed = |why: &str| AdoptError::Malformed { secret: format!("{namespace}/{name}"), why: why.to_owned() };
    let data = secret.data.pointer("/data/release").and_then(Value::as_str).ok_or_else(|| malformed("no release"))?;
    let inner = STANDARD.decode(data).map_err(|_| malformed("not base64"))?;
    let packed = STANDARD.decode(inner).map_err(|_| malformed("not base64 within"))?;
    let mut text = Vec::new();
    GzDecoder::new(packed.as_slice()).read_to_end(&mut text).map_err(|_| malformed("not compressed"))?;
    serde_json::from_slice(&text).map_err(|_| malformed("not JSON"))
}

/// Objects of a release that would go on beside what is installed: its own
/// controller and gateway, with what they run on. What holds data or
/// configuration stays: daemons that run may still read it.
async fn retired(
    cluster: &Cluster,
    plan: &Plan,
    release: &HelmRelease,
    manifest: &str,
) -> Result<Vec<Deletion>, RequestError> {
    let wanted: BTreeSet<Place> = plan.changes().map(|change| place(&change.id)).collect();
    let mut retired = Vec::new();
    for id in acting(release, manifest).into_iter().filter(|id| !wanted.contains(&place(id))) {
        if cluster.find_resource(&id).await?.is_none() {
            continue;
        }
        let Some(live) = cluster.get(&id).await? else { continue };
        if plan::helm_release(&live).as_ref() != Some(release) {
            continue;
        }
        let uid = live.pointer("/metadata/uid").and_then(Value::as_str).unwrap_or_default().to_owned();
        let component = release.to_string();
        retired.push(Deletion { id, uid, component, runlevel: Runlevel::Rc0, brakes: Vec::new() });
    }
    retired.sort_by_key(|deletion| std::cmp::Reverse(plan::Wave::of(&deletion.id)));
    Ok(retired)
}

/// What of a release's manifest acts by itself.
fn acting(release: &HelmRelease, manifest: &str) -> Vec<ObjectId> {
    let mut acting = Vec::new();
    for document in serde_yaml::Deserializer::from_str(manifest) {
        let Ok(body) = Value::deserialize(document) else { continue };
        let Some(id) = identity(&body, &release.namespace) else { continue };
        let component = body.pointer("/metadata/labels/app.kubernetes.io~1component").and_then(Value::as_str);
        if matches!(component, Some("buildd" | "gateway"))
            && !matches!(id.kind.as_str(), "ConfigMap" | "Secret" | "Ingress" | "Namespace")
        {
            acting.push(id);
        }
    }
    acting
}

/// What of the releases in our namespace may have to go, beside what is installed.
pub(super) async fn retiring(cluster: &Cluster, rendered: &Rendered) -> Result<BTreeSet<ObjectId>, AdoptError> {
    let wanted: BTreeSet<Place> = access::identities(rendered).iter().map(place).collect();
    let releases = releases(cluster, &Observations::new(), &rendered.operator_namespace).await?;
    let all = releases.iter().flat_map(|found| acting(&found.release, &found.manifest));
    Ok(all.filter(|id| !wanted.contains(&place(id))).collect())
}

/// An object's place, whatever its version.
type Place = (String, String, Option<String>, String);

fn place(id: &ObjectId) -> Place {
    (id.group.clone(), id.kind.clone(), id.namespace.clone(), id.name.clone())
}

fn identity(body: &Value, namespace: &str) -> Option<ObjectId> {
    let text = |pointer: &str| body.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let api_version = text("/apiVersion")?;
    let (group, version) = api_version.rsplit_once('/').unwrap_or(("", &api_version));
    Some(ObjectId {
        group: group.to_owned(),
        version: version.to_owned(),
        kind: text("/kind")?,
        namespace: Some(text("/metadata/namespace").unwrap_or_else(|| namespace.to_owned())),
        name: text("/metadata/name")?,
    })
}

/// Copies the Secrets of a release aside, and deletes them.
pub(super) async fn forget(cluster: &Cluster, release: &HelmRelease) -> Result<(), AdoptError> {
    let all = secret_id(&release.namespace, "");
    for secret in cluster.labelled(&all, &format!("owner=helm,name={}", release.name)).await? {
        let (Some(name), Some(uid)) = (&secret.metadata.name, &secret.metadata.uid) else { continue };
        let copy = format!("{INSTALLER_MANAGER}.{}", name.trim_start_matches("sh."));
        let original = json!({"name": name, "labels": secret.metadata.labels, "type": secret.data["type"]});
        let body = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": copy,
                "namespace": release.namespace,
                "labels": {COPY: release.name},
                "annotations": {ORIGINAL: original.to_string()},
            },
            "type": COPY,
            "data": secret.data["data"],
        });
        cluster.apply(&secret_id(&release.namespace, &copy), &body, Mode::Write { force: true }).await?;
        cluster.delete(&secret_id(&release.namespace, name), uid).await?;
    }
    let message = format!("Helm no longer knows {release}; `bko-install cluster unadopt` puts it back");
    cluster.report(Event::Warning { message });
    Ok(())
}

/// Puts releases back that were moved aside, and returns their names.
///
/// # Errors
/// When there are none, or when a request fails.
pub async fn unadopt(cluster: &Cluster, namespace: &str) -> Result<Vec<String>, InstallError> {
    permissions::to_give_back(cluster, namespace).await?;
    give_back(cluster, namespace).await.map_err(InstallError::Adopt)
}

async fn give_back(cluster: &Cluster, namespace: &str) -> Result<Vec<String>, AdoptError> {
    let mut names = BTreeSet::new();
    for copy in cluster.labelled(&secret_id(namespace, ""), COPY).await? {
        let annotations = copy.metadata.annotations.as_ref();
        let shown = format!("{namespace}/{}", copy.metadata.name.as_deref().unwrap_or_default());
        let malformed = |why: &str| AdoptError::Malformed { secret: shown.clone(), why: why.to_owned() };
        let original =
            annotations.and_then(|all| all.get(ORIGINAL)).ok_or_else(|| malformed("no original is named"))?;
        let original: Value = serde_json::from_str(original).map_err(|_| malformed("its original is not JSON"))?;
        let name = original["name"].as_str().ok_or_else(|| malformed("its original has no name"))?;
        let body = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace, "labels": original["labels"]},
            "type": original["type"],
            "data": copy.data["data"],
        });
        cluster.apply(&secret_id(namespace, name), &body, Mode::Write { force: true }).await?;
        if let (Some(name), Some(uid)) = (&copy.metadata.name, &copy.metadata.uid) {
            cluster.delete(&secret_id(namespace, name), uid).await?;
        }
        names.extend(label(&copy, COPY));
    }
    if names.is_empty() { Err(AdoptError::NoCopy(namespace.to_owned())) } else { Ok(names.into_iter().collect()) }
}
