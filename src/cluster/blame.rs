//! Why something is not ready, asked of the cluster once, when it is told:
//! last log lines, last events.

use k8s_openapi::api::core::v1::{Event as CoreEvent, Pod};
use kube::api::{Api, ListParams, LogParams};

use super::Cluster;
use crate::readiness::{Culprit, Why};

const LINES: i64 = 10;
const EVENTS: usize = 3;

impl Cluster {
    /// The last lines that the container of a culprit wrote, those of its last
    /// run if it ends again and again.
    pub(super) async fn last_lines(&self, culprit: &Culprit) -> Vec<String> {
        let (Why::Crash(_) | Why::Failed | Why::Unready) = culprit.trouble.why else { return Vec::new() };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &culprit.namespace);
        for previous in [true, false] {
            let params = LogParams {
                container: culprit.trouble.container.clone(),
                previous,
                tail_lines: Some(LINES),
                ..LogParams::default()
            };
            let lines = within(pods.logs(&culprit.pod, &params)).await.unwrap_or_default();
            if !lines.trim().is_empty() {
                return lines.lines().map(|line| line.chars().take(300).collect()).collect();
            }
        }
        Vec::new()
    }

    /// The last warnings about an object.
    pub(super) async fn last_events(&self, namespace: &str, name: &str) -> Vec<String> {
        let events: Api<CoreEvent> = Api::namespaced(self.client.clone(), namespace);
        let fields = format!("involvedObject.name={name},type=Warning");
        let Some(list) = within(events.list(&ListParams::default().fields(&fields))).await else { return Vec::new() };
        let mut items = list.items;
        items.sort_by_key(|e| e.last_timestamp.as_ref().map(|t| t.0).or(e.event_time.as_ref().map(|t| t.0)));
        let skip = items.len().saturating_sub(EVENTS);
        let text = |e: CoreEvent| format!("{}: {}", e.reason.unwrap_or_default(), e.message.unwrap_or_default());
        items.into_iter().skip(skip).map(text).collect()
    }
}

impl Cluster {
    /// How often ReplicaSets of that name's beginning are known to have failed
    /// to make a pod.
    pub(super) async fn failed_creations(&self, namespace: &str, prefix: &str) -> Option<i64> {
        let events: Api<CoreEvent> = Api::namespaced(self.client.clone(), namespace);
        let fields = "involvedObject.kind=ReplicaSet,reason=FailedCreate";
        let list = within(events.list(&ListParams::default().fields(fields))).await?;
        let ours = list
            .items
            .into_iter()
            .filter(|event| event.involved_object.name.as_deref().is_some_and(|name| name.starts_with(prefix)));
        Some(ours.map(|event| i64::from(event.count.unwrap_or(1))).sum())
    }
}

/// What is told beside an error must not take longer than the error is worth.
async fn within<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Option<T> {
    tokio::time::timeout(std::time::Duration::from_secs(5), request).await.ok()?.ok()
}
