//! From a valid project to the objects that serve it: a StatefulSet of one
//! daemon with its cache volume, and its Service. Pure and deterministic.

pub mod config;
pub mod disruption;
pub mod pod;
pub mod profile;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::{
    StatefulSet, StatefulSetPersistentVolumeClaimRetentionPolicy, StatefulSetSpec, StatefulSetUpdateStrategy,
};
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimSpec, PodTemplateSpec, Service, ServicePort, ServiceSpec,
    TypedLocalObjectReference, VolumeResourceRequirements,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Resource;
use sha2::{Digest, Sha256};

use super::settings::{CacheKind, Settings};
use super::validate::Valid;
use crate::names::GROUP;
use config::Base;

/// Objects of one project.
#[derive(Clone, Debug)]
pub struct Resources {
    /// The daemon.
    pub stateful_set: StatefulSet,
    /// Its address.
    pub service: Service,
}

/// Annotation with the hash of the pod template that was last asked for.
pub const TEMPLATE_HASH: &str = "buildkit-operator.socialgouv.github.io/template-hash";

/// Annotation with the time since when a changed template waits for builds.
pub const ROLL_HELD_SINCE: &str = "buildkit-operator.socialgouv.github.io/roll-held-since";

/// Annotation with the gate's epoch under which the replicas were last set. It
/// changes the object's resourceVersion, so that a write decided under an older
/// epoch is refused by the API server.
pub const GATE_EPOCH: &str = "buildkit-operator.socialgouv.github.io/gate-epoch";

/// The gate's epoch under which a StatefulSet or a Service was last written.
pub fn epoch(object: &impl Resource) -> i64 {
    let annotation = object.meta().annotations.as_ref().and_then(|annotations| annotations.get(GATE_EPOCH));
    annotation.and_then(|epoch| epoch.parse().ok()).unwrap_or(0)
}

/// Notes the epoch under which a daemon comes up, on the StatefulSet and on its
/// pods to be. So each start is a revision of its own, and a pod of an earlier
/// one is known as such, even by who has not yet seen it end.
pub fn stamp(set: &mut StatefulSet, epoch: i64) {
    set.metadata.annotations.get_or_insert_default().insert(GATE_EPOCH.to_owned(), epoch.to_string());
    if let Some(spec) = &mut set.spec {
        let metadata = spec.template.metadata.get_or_insert_default();
        metadata.annotations.get_or_insert_default().insert(GATE_EPOCH.to_owned(), epoch.to_string());
    }
}

/// In the selector of a Service whose daemon's gate is closed: no pod has it.
pub const GATE: &str = "buildkit-operator.socialgouv.github.io/gate";

/// Whether a Service selects nothing because its gate was closed.
pub fn is_shut(service: &Service) -> bool {
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.as_ref());
    selector.is_some_and(|selector| selector.contains_key(GATE))
}

/// Label with the project key.
pub const PROJECT_KEY: &str = "buildkit-operator.socialgouv.github.io/project-key";

/// Label of a fork's pod.
pub const UNTRUSTED: &str = "buildkit-operator.socialgouv.github.io/untrusted";

/// Selects every daemon object: StatefulSets, Services, pods, endpoint slices.
pub const DAEMON_SELECTOR: &str = "app.kubernetes.io/component=buildkitd";

/// Builds the objects of one project.
pub fn build(project: &Valid<'_>, settings: &Settings, base: &Base) -> Resources {
    Resources { stateful_set: stateful_set(project, settings, base), service: service(project, settings) }
}

/// The settings for a daemon that may exist already: it keeps its cache where
/// it was made, since the claims of a StatefulSet can never be changed.
pub fn as_made(settings: &Arc<Settings>, live: Option<&StatefulSet>) -> Arc<Settings> {
    let claims = live.and_then(|set| set.spec.as_ref()).map(|spec| spec.volume_claim_templates.is_some());
    let made = match claims {
        None => return settings.clone(),
        Some(true) => CacheKind::Pvc,
        Some(false) => CacheKind::EmptyDir,
    };
    if made == settings.cache_kind {
        return settings.clone();
    }
    Arc::new(Settings { cache_kind: made, ..Settings::clone(settings) })
}

/// Labels of every object of a daemon; also its selector.
pub fn labels(project: &Valid<'_>) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("app.kubernetes.io/name".to_owned(), "buildkit-operator".to_owned()),
        ("app.kubernetes.io/component".to_owned(), "buildkitd".to_owned()),
        (PROJECT_KEY.to_owned(), project.key.to_string()),
        (format!("{GROUP}/arch"), project.spec.arch.to_string()),
    ])
}

/// First 8 bytes of SHA-256 over the template's JSON, as hex.
pub fn template_hash(template: &PodTemplateSpec) -> String {
    let json = serde_json::to_vec(template).unwrap_or_default();
    hex::encode(&Sha256::digest(json)[..8])
}

fn metadata(project: &Valid<'_>, settings: &Settings) -> ObjectMeta {
    let owner = project.project.controller_owner_ref(&());
    ObjectMeta {
        name: Some(project.key.daemon()),
        namespace: Some(settings.namespace.clone()),
        labels: Some(labels(project)),
        owner_references: owner.map(|owner| vec![OwnerReference { block_owner_deletion: Some(true), ..owner }]),
        ..ObjectMeta::default()
    }
}

fn stateful_set(project: &Valid<'_>, settings: &Settings, base: &Base) -> StatefulSet {
    let template = pod::template(project, settings, base);
    let mut metadata = metadata(project, settings);
    metadata.annotations = Some(BTreeMap::from([(TEMPLATE_HASH.to_owned(), template_hash(&template))]));
    let when_deleted = if project.key.is_fork() { "Delete" } else { "Retain" };
    StatefulSet {
        metadata,
        spec: Some(StatefulSetSpec {
            replicas: Some(0),
            service_name: Some(project.key.daemon()),
            pod_management_policy: Some("Parallel".to_owned()),
            selector: LabelSelector { match_labels: Some(labels(project)), ..LabelSelector::default() },
            persistent_volume_claim_retention_policy: Some(StatefulSetPersistentVolumeClaimRetentionPolicy {
                when_deleted: Some(when_deleted.to_owned()),
                when_scaled: Some("Retain".to_owned()),
            }),
            update_strategy: Some(StatefulSetUpdateStrategy {
                type_: Some("RollingUpdate".to_owned()),
                ..StatefulSetUpdateStrategy::default()
            }),
            volume_claim_templates: (settings.cache_kind == CacheKind::Pvc).then(|| vec![cache_claim(project)]),
            template,
            ..StatefulSetSpec::default()
        }),
        status: None,
    }
}

fn cache_claim(project: &Valid<'_>) -> PersistentVolumeClaim {
    let size = Quantity(format!("{}Gi", project.spec.cache_volume_gi));
    PersistentVolumeClaim {
        metadata: ObjectMeta { name: Some("cache".to_owned()), ..ObjectMeta::default() },
        spec: Some(PersistentVolumeClaimSpec {
            access_modes: Some(vec!["ReadWriteOnce".to_owned()]),
            storage_class_name: project.spec.storage_class.clone(),
            resources: Some(VolumeResourceRequirements {
                requests: Some(BTreeMap::from([("storage".to_owned(), size)])),
                ..VolumeResourceRequirements::default()
            }),
            data_source: project.spec.restore_from_snapshot.clone().map(|name| TypedLocalObjectReference {
                api_group: Some("snapshot.storage.k8s.io".to_owned()),
                kind: "VolumeSnapshot".to_owned(),
                name,
            }),
            ..PersistentVolumeClaimSpec::default()
        }),
        status: None,
    }
}

fn service(project: &Valid<'_>, settings: &Settings) -> Service {
    Service {
        metadata: metadata(project, settings),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            ip_family_policy: Some("PreferDualStack".to_owned()),
            selector: Some(labels(project)),
            ports: Some(vec![ServicePort {
                name: Some("buildkit".to_owned()),
                port: i32::from(settings.port),
                target_port: Some(IntOrString::Int(i32::from(settings.port))),
                protocol: Some("TCP".to_owned()),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}
