//! What the cluster's Events say of a daemon that does not start: some faults
//! show nowhere else. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Event;

use super::lifecycle::age;
use crate::names::DAEMON_PREFIX;

/// Controllers repeat themselves at least this often while a fault lasts: the
/// longest pause of their queues is 1,000 s. What is older was mended since.
const CURRENT: Duration = Duration::from_secs(1200);

/// Events that never matter here, as a field selector: most of them.
pub const SELECTOR: &str = "involvedObject.kind!=BuildProject,reason!=Scheduled,reason!=Pulling,reason!=Pulled,\
                            reason!=Created,reason!=Started,reason!=Killing,reason!=SuccessfulCreate,reason!=Unhealthy";

/// One thing that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sign {
    kind: Kind,
    /// In the cluster's words.
    pub message: String,
    at: Timestamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    CreateFailed,
    ClaimFailed,
    ScalingUp,
    AttachFailed,
    MountFailed,
}

impl Sign {
    /// What an Event says, and of which project; `None` for most Events.
    pub fn read(event: &Event) -> Option<(String, Self)> {
        let about = &event.involved_object;
        let name = about.name.as_deref()?;
        let (kind, daemon) = match (about.kind.as_deref()?, event.reason.as_deref()?) {
            ("StatefulSet", "FailedCreate") => (Kind::CreateFailed, name),
            ("PersistentVolumeClaim", "ProvisioningFailed" | "FailedBinding") => {
                (Kind::ClaimFailed, name.strip_prefix("cache-")?.strip_suffix("-0")?)
            }
            // The cluster autoscaler, and Karpenter.
            ("Pod", "TriggeredScaleUp" | "Nominated") => (Kind::ScalingUp, name.strip_suffix("-0")?),
            ("Pod", "FailedAttachVolume") => (Kind::AttachFailed, name.strip_suffix("-0")?),
            ("Pod", "FailedMount") => (Kind::MountFailed, name.strip_suffix("-0")?),
            _ => return None,
        };
        let key = daemon.strip_prefix(DAEMON_PREFIX)?.to_owned();
        let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref());
        let at = (series.map(|t| t.0))
            .or_else(|| event.last_timestamp.as_ref().map(|t| t.0))
            .or_else(|| event.event_time.as_ref().map(|t| t.0))
            .or_else(|| event.metadata.creation_timestamp.as_ref().map(|t| t.0))?;
        Some((key, Self { kind, message: event.message.clone().unwrap_or_default(), at }))
    }
}

/// The newest of each kind about one daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signs([Option<Sign>; 5]);

impl Signs {
    /// Takes over a sign, unless a newer one is known. Whether it was.
    pub fn note(&mut self, sign: Sign) -> bool {
        let slot = &mut self.0[sign.kind as usize];
        let newer = slot.as_ref().is_none_or(|known| known.at < sign.at);
        if newer {
            *slot = Some(sign);
        }
        newer
    }

    /// Whether everything in it is of the past.
    pub fn is_stale(&self, now: Timestamp) -> bool {
        self.0.iter().flatten().all(|sign| age(sign.at, now) >= CURRENT)
    }

    /// Why the pod was not created.
    pub fn create_failed(&self, now: Timestamp) -> Option<&Sign> {
        self.current(Kind::CreateFailed, now)
    }

    /// Why the cache's volume was not made.
    pub fn claim_failed(&self, now: Timestamp) -> Option<&Sign> {
        self.current(Kind::ClaimFailed, now)
    }

    /// Whether an autoscaler is making a node for the pod born at `born`.
    pub fn scaling_up(&self, born: Timestamp, now: Timestamp) -> bool {
        self.current(Kind::ScalingUp, now).is_some_and(|sign| sign.at >= born)
    }

    /// Why the volume of the pod born at `born` is not attached to its node.
    pub fn attach_failed(&self, born: Timestamp, now: Timestamp) -> Option<&Sign> {
        self.current(Kind::AttachFailed, now).filter(|sign| sign.at >= born)
    }

    /// Why a volume of the pod born at `born` is not mounted.
    pub fn mount_failed(&self, born: Timestamp, now: Timestamp) -> Option<&Sign> {
        self.current(Kind::MountFailed, now).filter(|sign| sign.at >= born)
    }

    fn current(&self, kind: Kind, now: Timestamp) -> Option<&Sign> {
        self.0[kind as usize].as_ref().filter(|sign| age(sign.at, now) < CURRENT)
    }
}
