//! The `BuildProject` custom resource, field for field the reference's, so that
//! existing objects keep working. The manifest under `manifests/crd` is
//! generated from these types.
#![allow(unreachable_pub, reason = "the derived schema repeats the type within a function")]

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::key::Arch;

/// Ended builds that a status remembers.
pub const LAST_BUILDS: usize = 5;

/// Builds that may be in flight at once on one project: the list's limit.
pub const MAX_INFLIGHT: usize = 2000;

// A rule on an optional field alone would not see it come or go.
const STORAGE_CLASS_STAYS: &str = "has(self.storageClass) == has(oldSelf.storageClass) && \
     (!has(self.storageClass) || self.storageClass == oldSelf.storageClass)";
const SNAPSHOT_STAYS: &str = "has(self.restoreFromSnapshot) == has(oldSelf.restoreFromSnapshot) && \
     (!has(self.restoreFromSnapshot) || self.restoreFromSnapshot == oldSelf.restoreFromSnapshot)";

/// One project of the farm: which builds share a cache, and how its daemon is kept.
// What cannot take effect any more once a cache exists, the API server refuses
// to change: a value that is accepted and does nothing misleads.
#[derive(CustomResource, Clone, Debug, PartialEq, Deserialize, Serialize, KubeSchema)]
#[kube(
    group = "buildkit-operator.socialgouv.github.io",
    version = "v1alpha1",
    kind = "BuildProject",
    plural = "buildprojects",
    shortname = "bp",
    shortname = "buildproj",
    namespaced,
    status = "BuildProjectStatus",
    derive = "PartialEq",
    validation = Rule::new("self.metadata.name == self.spec.key").message("spec.key must equal metadata.name: routes find the object by it"),
    printcolumn = r#"{"name":"Arch","type":"string","jsonPath":".spec.arch"}"#,
    printcolumn = r#"{"name":"Tier","type":"string","jsonPath":".spec.tier"}"#,
    printcolumn = r#"{"name":"Phase","type":"string","jsonPath":".status.phase"}"#,
    printcolumn = r#"{"name":"Replicas","type":"integer","jsonPath":".status.replicas"}"#,
    printcolumn = r#"{"name":"Endpoint","type":"string","jsonPath":".status.endpoint"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new(STORAGE_CLASS_STAYS).message("storageClass cannot change: the cache volume is made once"),
    validation = Rule::new(SNAPSHOT_STAYS)
        .message("restoreFromSnapshot cannot change: the cache volume is made once")
)]
pub struct BuildProjectSpec {
    /// Routing key; also the object's name. Never changes.
    #[schemars(length(min = 1, max = 53))]
    #[x_kube(validation = Rule::new("self == oldSelf").message("key cannot change: it names the daemon and its cache"))]
    pub key: String,
    /// Normalised repository reference, for people and for identity checks.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub repo: String,
    /// Component of a monorepo; empty when the repository makes one image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Dockerfile target.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub target: String,
    /// Architecture that the daemon builds natively. Never changes.
    #[x_kube(validation = Rule::new("self == oldSelf").message("arch cannot change: the cache holds its binaries"))]
    pub arch: Arch,
    /// StorageClass of the cache volume, at creation only; the cluster's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_class: Option<String>,
    /// Size of the cache volume, in GiB.
    #[serde(default = "default_cache_volume_gi")]
    #[schemars(range(min = 1, max = 65536))]
    pub cache_volume_gi: i32,
    /// `hot` never scales to zero.
    #[serde(default)]
    pub tier: Tier,
    /// Seconds without a build after which a warm daemon goes to zero.
    #[serde(default = "default_idle_timeout_sec")]
    #[schemars(range(min = 0))]
    pub idle_timeout_sec: i32,
    /// Seconds between snapshots of the cache volume; 0 takes none.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub snapshot_every_sec: i32,
    /// VolumeSnapshot that the cache volume is made from, at creation only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore_from_snapshot: Option<String>,
    /// Number of copy-on-write clones kept beside the daemon.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0, max = 64))]
    pub fanout: i32,
    /// When builds export to the cold cache in object storage.
    #[serde(default)]
    pub s3_cache_policy: S3CachePolicy,
    /// How the daemon is confined.
    #[serde(default)]
    pub security_profile: SecurityProfile,
    /// Requests and limits of the daemon's container.
    #[serde(default)]
    pub resources: ResourceRequirements,
}

/// Whether a daemon ever scales to zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Always running.
    Hot,
    /// At zero when idle.
    #[default]
    Warm,
}

/// When builds export to the cold cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum S3CachePolicy {
    /// One build per interval.
    #[default]
    Cadence,
    /// Every build.
    Always,
    /// No build.
    Never,
}

/// How a daemon is confined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SecurityProfile {
    /// An ordinary user with its own user namespace inside the container.
    #[default]
    Rootless,
    /// Root within a user namespace that the kubelet makes.
    Userns,
    /// Root with all privileges.
    Privileged,
}

/// What the farm observed and decided.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuildProjectStatus {
    /// Where the daemon is in its life.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Replicas that the daemon's StatefulSet is asked for.
    #[serde(default)]
    pub replicas: i32,
    /// Where clients reach the daemon.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub endpoint: String,
    /// When a build or a prewarm last asked for the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_build_time: Option<Time>,
    /// Routes of the last 24 hours, oldest first, at most 30; of those in one
    /// quarter of an hour the oldest give way first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recent_build_times: Vec<Time>,
    /// Name of the newest complete snapshot.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub last_snapshot: String,
    /// Builds that hold the daemon, one entry each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2000), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["id"]))]
    pub inflight: Vec<InflightEntry>,
    /// Number of `inflight` entries, for printing.
    #[serde(default)]
    pub inflight_builds: i32,
    /// Until when a client that dialled the gateway keeps the daemon, though nobody routed a build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake_until: Option<Time>,
    /// When a build was last granted the export to the cold cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_cache_export_grant: Option<Time>,
    /// The builds that ended last, newest first, as BuildKit's history tells them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 5))]
    pub last_builds: Vec<EndedBuild>,
    /// Room on the cache volume when the last build ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheRoom>,
    /// Whether builds may be sent to the daemon, decided in one place.
    #[serde(default, skip_serializing_if = "Gate::is_initial")]
    pub gate: Gate,
    /// Standard conditions; `Ready` is always there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
}

/// A build that ended.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EndedBuild {
    /// BuildKit's id of the build.
    #[serde(rename = "ref")]
    pub reference: String,
    /// When it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<MicroTime>,
    /// When it ended.
    pub completed: MicroTime,
    /// Steps in all; 0 where the daemon does not count them.
    #[serde(default)]
    pub steps_total: i32,
    /// Of these, answered by the cache.
    #[serde(default)]
    pub steps_cached: i32,
    /// Of these, done.
    #[serde(default)]
    pub steps_completed: i32,
    /// How it failed: `exit code: 137`, or the name of a status code; empty when it did not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// Room on a cache volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CacheRoom {
    /// Bytes in use.
    pub bytes_used: i64,
    /// Bytes in all.
    pub bytes_total: i64,
}

/// A build that holds its daemon until it is released or expires.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
pub struct InflightEntry {
    /// SHA-256 of the build's identifier.
    pub id: String,
    /// When the build was routed.
    pub since: Time,
}

/// The one place where "may builds go there" is decided: closing it fails if an
/// entry arrived in between, and no write decided under an older epoch counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct Gate {
    /// Whether the daemon is being taken down.
    #[serde(default)]
    pub closed: bool,
    /// Grows by one whenever the gate opens or closes.
    #[serde(default)]
    pub epoch: i64,
}

impl Gate {
    fn is_initial(&self) -> bool {
        *self == Self::default()
    }
}

/// Where a daemon is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum Phase {
    /// Known, not reconciled yet.
    Pending,
    /// At zero, cache kept.
    Idle,
    /// Wanted, not ready yet; or going to zero.
    Scaling,
    /// Ready for builds.
    Warm,
    /// Cannot start until somebody mends something.
    Failed,
}

impl JsonSchema for Arch {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Arch".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "enum": ["amd64", "arm64"] })
    }
}

fn default_cache_volume_gi() -> i32 {
    60
}

fn default_idle_timeout_sec() -> i32 {
    900
}

fn is_zero(n: &i32) -> bool {
    *n == 0
}

impl BuildProject {
    /// The status, or what a newborn project has.
    pub fn status_or_default(&self) -> BuildProjectStatus {
        self.status.clone().unwrap_or_default()
    }

    /// The resource version as a number, by which copies of one object are
    /// ordered; API servers since 1.35 guarantee the order.
    pub fn version(&self) -> u64 {
        self.metadata.resource_version.as_deref().and_then(|v| v.parse().ok()).unwrap_or(0)
    }
}
