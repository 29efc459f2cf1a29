//! A project and its daemon as people and programs see them: what every
//! [`Provisioner`](super::Provisioner) answers, and what the HTTP API sends.
//! Plain values; no IO.

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::key::{Arch, ProjectKey, Repo};

/// Where a daemon is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Phase {
    /// Known, not looked at yet.
    #[default]
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

impl Phase {
    /// All of them, in the order of a daemon's life.
    pub const ALL: [Self; 5] = [Self::Pending, Self::Idle, Self::Scaling, Self::Warm, Self::Failed];

    /// As the API spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Idle => "Idle",
            Self::Scaling => "Scaling",
            Self::Warm => "Warm",
            Self::Failed => "Failed",
        }
    }
}

/// Not a phase.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("phase is not one of Pending, Idle, Scaling, Warm, Failed")]
pub struct UnknownPhase;

impl std::str::FromStr for Phase {
    type Err = UnknownPhase;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|phase| phase.as_str().eq_ignore_ascii_case(s)).ok_or(UnknownPhase)
    }
}

/// What keeps a daemon from going to zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum KeptBy {
    /// Its tier: it never goes to zero.
    Hot,
    /// Builds in flight.
    InFlight,
    /// It was used less than one idle period ago.
    RecentUse,
    /// A client dialled it through the gateway a moment ago.
    Dial,
}

/// A value that this version knows: a newer server may say others.
fn known<'de, D: Deserializer<'de>, T: DeserializeOwned + Default>(from: D) -> Result<T, D::Error> {
    let value = serde_json::Value::deserialize(from)?;
    Ok(serde_json::from_value(value).unwrap_or_default())
}

/// One project and its daemon, in a few lines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Routing key.
    pub key: String,
    /// Normalised repository; empty where nobody has noted it.
    pub repo: String,
    /// Component of a monorepo; empty when the repository makes one image.
    pub name: String,
    /// Target of the Dockerfile.
    pub target: String,
    /// Architecture that the daemon builds natively.
    pub arch: Arch,
    /// Whether this is the daemon of the project's untrusted builds.
    pub fork: bool,
    /// Where clients reach the daemon.
    pub endpoint: String,
    /// Where the daemon is in its life.
    #[serde(deserialize_with = "known")]
    pub phase: Phase,
    /// When it came there, as far as that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Why, in one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether a route would be answered at once.
    pub ready: bool,
    /// Builds that were routed here and not released.
    pub in_flight: InFlight,
    /// Builds that BuildKit runs; absent when it does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_builds: Option<Vec<ActiveBuild>>,
    /// The build that ended last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_build: Option<FinishedBuild>,
    /// When a build or a prewarm last asked for the daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used: Option<Timestamp>,
    /// What keeps it from going to zero; absent when nothing does.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "known")]
    pub kept_by: Option<KeptBy>,
    /// When it goes to zero if nobody asks for it; absent while a build or its tier keeps it, and at zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_at: Option<Timestamp>,
    /// Room on the cache volume; absent until a build has ended there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheRoom>,
}

/// One project and its daemon, with all that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Detail {
    /// In a few lines.
    #[serde(flatten)]
    pub summary: Summary,
    /// Object that clients' TLS names: the daemon's name.
    pub daemon: String,
    /// Namespace of the daemon.
    pub namespace: String,
    /// `hot` never goes to zero.
    pub tier: String,
    /// How the daemon is confined: `rootless`, `userns` or `privileged`.
    pub security_profile: String,
    /// Seconds without a build after which it goes to zero at present.
    pub idle_seconds: u64,
    /// Size that was asked for the cache volume, in GiB.
    pub cache_volume_gi: u32,
    /// Name of the newest complete snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_snapshot: Option<String>,
    /// What serves; absent at zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub buildkit: Option<BuildKit>,
    /// `Ready`, `Progressing`, `Degraded` and others.
    pub conditions: Vec<Condition>,
    /// Builds that ended, newest first, at most 50.
    pub builds: Vec<FinishedBuild>,
}

/// Builds in flight. Their ids are capabilities, so nothing of them is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InFlight {
    /// How many.
    pub count: usize,
    /// When the oldest was routed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

/// Steps of a build, as BuildKit counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Steps {
    /// In all; of a build that runs, those that are known so far.
    pub total: u32,
    /// That the cache answered.
    pub cached: u32,
    /// That are done.
    pub completed: u32,
}

/// A build that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ActiveBuild {
    /// BuildKit's id of the build.
    #[serde(rename = "ref")]
    pub reference: String,
    /// When it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
    /// The step that has run longest, for example `[build 2/5] RUN`, without its command, which may hold secrets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Steps so far; absent while they are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<Steps>,
}

/// A build that ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FinishedBuild {
    /// BuildKit's id of the build.
    #[serde(rename = "ref")]
    pub reference: String,
    /// When it began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<Timestamp>,
    /// When it ended.
    pub completed: Timestamp,
    /// How long it took, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// Absent where the daemon does not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<Steps>,
    /// How it failed: `exit code: 137`, or the name of a status code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Room on a cache volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CacheRoom {
    /// Bytes in use.
    pub bytes_used: u64,
    /// Bytes in all.
    pub bytes_total: u64,
}

/// What serves builds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BuildKit {
    /// BuildKit's version.
    pub version: String,
    /// Its snapshotter.
    pub snapshotter: String,
}

/// One statement about a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it is about: `Ready`, `Progressing`, `Degraded`.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// Why, in one word.
    pub reason: String,
    /// Why, in one sentence.
    pub message: String,
    /// Since when.
    pub since: Timestamp,
}

/// Projects in the order of their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Page {
    /// At most `limit`.
    pub projects: Vec<Summary>,
    /// There are more: give this as `continue` to go on. Absent on the last page.
    #[serde(default, rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Which projects are asked for.
pub struct Selection<'a> {
    /// Of this repository alone.
    pub repo: Option<Repo>,
    /// In this phase alone.
    pub phase: Option<Phase>,
    /// Only those whose key comes after this one.
    pub after: Option<ProjectKey>,
    /// At most so many.
    pub limit: usize,
    /// Whether the caller may know of projects of a repository.
    pub visible: &'a (dyn Fn(&str) -> bool + Sync),
}

impl Selection<'_> {
    /// Whether a project is asked for.
    pub fn takes(&self, key: &str, repo: &str, phase: Phase) -> bool {
        (self.visible)(repo)
            && self.repo.as_ref().is_none_or(|wanted| wanted.as_str() == repo)
            && self.phase.is_none_or(|wanted| wanted == phase)
            && self.after.as_ref().is_none_or(|after| key > after.as_str())
    }

    /// The page out of all projects that are [taken](Self::takes). Only what is
    /// on the page is summarised.
    pub fn page<T>(&self, mut taken: Vec<T>, key: impl Fn(&T) -> &str, summary: impl Fn(&T) -> Summary) -> Page {
        taken.sort_unstable_by(|a, b| key(a).cmp(key(b)));
        let more = taken.len() > self.limit;
        taken.truncate(self.limit);
        let next = taken.last().filter(|_| more).map(|last| key(last).to_owned());
        Page { projects: taken.iter().map(summary).collect(), next }
    }
}

impl FinishedBuild {
    /// From times and counts; `None` for a build that has not ended.
    pub fn new(
        reference: String,
        started: Option<Timestamp>,
        completed: Option<Timestamp>,
        steps: Steps,
        error: Option<String>,
    ) -> Option<Self> {
        let completed = completed?;
        // A clock that was set back in between makes no negative duration.
        let duration = started.map(|started| completed.duration_since(started).as_millis().max(0));
        Some(Self {
            reference,
            started,
            completed,
            duration_ms: duration.and_then(|ms| u64::try_from(ms).ok()),
            steps: steps.known(),
            error,
        })
    }
}

impl Steps {
    /// `None` where the daemon does not count: every build has a step.
    pub fn known(self) -> Option<Self> {
        (self.total > 0).then_some(self)
    }
}
