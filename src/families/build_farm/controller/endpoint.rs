//! The Service of a daemon while its gate is closed: it selects nothing, so that
//! nobody reaches the daemon by its name any more, the gateway included. Streams
//! that are open stay open; whoever dials waits for the next pod, or for the
//! gate to open again.
#![expect(clippy::disallowed_methods, reason = "shell: waits are measured")]

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::super::build::{self, GATE, GATE_EPOCH};
use super::{Controller, ReconcileError};
use crate::key::ProjectKey;
use crate::names::CONTROLLER_MANAGER;

/// How long the cluster may take to forget an endpoint. Usually some milliseconds.
const FORGETTING: Duration = Duration::from_secs(5);
/// And to list it again.
const LISTING: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);
/// kube-proxy's default `minSyncPeriod`.
const NODES_FOLLOW: Duration = Duration::from_secs(1);

/// Whether a Service selects nothing because its gate was closed.
pub(super) fn is_shut(service: &Service) -> bool {
    selector(service).is_some_and(|selector| selector.contains_key(GATE))
}

fn selector(service: &Service) -> Option<&BTreeMap<String, String>> {
    service.spec.as_ref().and_then(|spec| spec.selector.as_ref())
}

impl Controller {
    /// Has the Service select nothing, and waits until it has no endpoints.
    /// False when they stay.
    ///
    /// The Service is read after the gate was closed and written with the
    /// resourceVersion read: who reopens the gate writes it in any case, so
    /// that a write of before fails.
    pub(super) async fn shut(&self, key: &ProjectKey, epoch: i64) -> Result<bool, ReconcileError> {
        let name = key.daemon();
        let Some(live) = self.services.get_opt(&name).await.map_err(Self::error("get", format!("Service {name}")))?
        else {
            return Ok(true);
        };
        let change = json!({
            "metadata": {"resourceVersion": live.metadata.resource_version, "annotations": epoch_annotation(epoch)},
            "spec": {"selector": {GATE: "closed"}},
        });
        self.patch_service(&name, change).await?;
        self.until_listed(&name, false, FORGETTING).await
    }

    /// Waits until a daemon that stays as it is can be reached by its name
    /// again. The gateway follows the endpoints itself; nodes do so a moment
    /// later, and refuse who dials before.
    pub(super) async fn until_reachable(&self, key: &ProjectKey) -> Result<(), ReconcileError> {
        self.until_listed(&key.daemon(), true, LISTING).await?;
        if self.settings.gateway.is_none() {
            sleep(NODES_FOLLOW).await;
        }
        Ok(())
    }

    /// Waits until there are endpoints, or none; false when that takes too long.
    async fn until_listed(&self, name: &str, wanted: bool, limit: Duration) -> Result<bool, ReconcileError> {
        let slices = ListParams::default().labels(&format!("kubernetes.io/service-name={name}"));
        let begun = Instant::now();
        loop {
            let listed = self.slices.list(&slices).await;
            let listed = listed.map_err(Self::error("list", format!("EndpointSlices of {name}")))?;
            if listed.iter().all(is_empty) != wanted {
                return Ok(true);
            }
            if begun.elapsed() >= limit {
                return Ok(false);
            }
            sleep(PAUSE).await;
        }
    }

    /// Has the Service select its daemon again. It is written even when it does,
    /// so that a [`shut`](Self::shut) still under way fails; and as it was read,
    /// so that this fails when it is held up until the gate is closed anew.
    pub(super) async fn open(&self, key: &ProjectKey, epoch: i64) -> Result<(), ReconcileError> {
        let name = key.daemon();
        let live = self.services.get_opt(&name).await.map_err(Self::error("get", format!("Service {name}")))?;
        // Somebody deleted it, and the next pass makes it anew; or another replica is further.
        let Some(live) = live.filter(|live| build::epoch(live) <= epoch) else { return Ok(()) };
        let change = json!({
            "metadata": {"resourceVersion": live.metadata.resource_version, "annotations": epoch_annotation(epoch)},
            "spec": {"selector": {GATE: Value::Null}},
        });
        self.patch_service(&name, change).await
    }

    pub(super) async fn patch_service(&self, name: &str, change: Value) -> Result<(), ReconcileError> {
        let params = PatchParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PatchParams::default() };
        let patched = self.services.patch(name, &params, &Patch::Merge(change)).await;
        patched.map(|_| ()).map_err(Self::error("patch", format!("Service {name}")))
    }
}

fn epoch_annotation(epoch: i64) -> Value {
    json!({GATE_EPOCH: epoch.to_string()})
}

fn is_empty(slice: &EndpointSlice) -> bool {
    slice.endpoints.iter().flatten().all(|endpoint| endpoint.addresses.is_empty())
}
