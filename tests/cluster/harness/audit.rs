//! What the API server was asked, and by whom: to count our own writes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use http::Request;
use jiff::Timestamp;
use kube::Client;
use serde::Deserialize;

/// Where the API server writes its audit log.
pub(crate) const LOG: &str = "/run/bko/logs/audit.json";

/// The audit log of the cluster.
#[derive(Clone)]
pub(crate) struct Audit {
    client: Client,
}

/// A write request that the API server answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    /// `create`, `update`, `patch`, `delete` or `deletecollection`.
    pub(crate) verb: String,
    /// Plural name, with `/` and the subresource when there is one.
    pub(crate) resource: String,
    /// Of the object; empty when it has none.
    pub(crate) namespace: String,
    /// Of the object; empty for a collection.
    pub(crate) name: String,
    /// HTTP status of the answer.
    pub(crate) status: u16,
    /// Who wrote, in its own words.
    pub(crate) user_agent: String,
}

impl fmt::Display for Write {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, resource, namespace, name, status, user_agent } = self;
        write!(f, "{verb} {resource} {namespace}/{name} → {status} ({user_agent})")
    }
}

/// One line of the log, as far as it matters here.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Event {
    verb: String,
    #[serde(rename = "requestURI")]
    uri: String,
    #[serde(default)]
    user_agent: String,
    #[serde(default)]
    object_ref: Reference,
    #[serde(default)]
    response_status: Status,
    request_received_timestamp: Timestamp,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Reference {
    resource: String,
    subresource: String,
    namespace: String,
    name: String,
    api_group: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Status {
    code: u16,
}

impl Audit {
    /// The audit log of the cluster that `client` talks to.
    pub(crate) fn new(client: Client) -> Self {
        Self { client }
    }

    /// The writes since `since` of everyone whose user agent contains
    /// `user_agent`. What only looks like a write is left out: dry runs, and
    /// reviews of access and tokens.
    ///
    /// # Errors
    /// The log cannot be read.
    pub(crate) async fn writes_by(&self, user_agent: &str, since: Timestamp) -> anyhow::Result<Vec<Write>> {
        let log = self.settled().await?;
        let mut writes = Vec::new();
        for line in log.lines().filter(|line| line.contains(user_agent)) {
            let event: Event = serde_json::from_str(line).with_context(|| format!("reading audit event {line}"))?;
            let recent = event.request_received_timestamp >= since;
            if recent && event.user_agent.contains(user_agent) && event.is_write() {
                writes.push(event.into_write());
            }
        }
        Ok(writes)
    }

    /// How many requests of each verb everyone whose user agent contains
    /// `user_agent` has sent since `since`; dry runs count as `dry run`.
    ///
    /// # Errors
    /// The log cannot be read.
    pub(crate) async fn requests_by(
        &self,
        user_agent: &str,
        since: Timestamp,
    ) -> anyhow::Result<BTreeMap<String, usize>> {
        let log = self.settled().await?;
        let mut counts = BTreeMap::new();
        for line in log.lines().filter(|line| line.contains(user_agent)) {
            let event: Event = serde_json::from_str(line).with_context(|| format!("reading audit event {line}"))?;
            if event.request_received_timestamp >= since && event.user_agent.contains(user_agent) {
                let verb = if event.is_dry_run() { "dry run".to_owned() } else { event.verb };
                *counts.entry(verb).or_default() += 1;
            }
        }
        Ok(counts)
    }

    /// The log, when it holds all that was answered before: an event is written
    /// after its answer, so the log is complete once a later request of ours is
    /// in it.
    async fn settled(&self) -> anyhow::Result<String> {
        static COUNT: AtomicUsize = AtomicUsize::new(1);
        let marker = format!("/version?settled={}", COUNT.fetch_add(1, Ordering::Relaxed));
        self.client.request_text(Request::get(&marker).body(Vec::new())?).await?;
        let quoted = format!("\"{marker}\"");
        for _ in 0..200 {
            let log = tokio::fs::read_to_string(LOG).await?;
            if log.contains(&quoted) {
                // Up to the last whole line: the next may be half written.
                return Ok(log[..log.rfind('\n').unwrap_or(0)].to_owned());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        bail!("the audit log does not show {marker}")
    }
}

impl Event {
    fn is_write(&self) -> bool {
        let writes = matches!(self.verb.as_str(), "create" | "update" | "patch" | "delete" | "deletecollection");
        let Reference { api_group, resource, subresource, .. } = &self.object_ref;
        let review = api_group == "authorization.k8s.io" || api_group == "authentication.k8s.io";
        // Opening a stream to a pod is a `create` too, but changes no object.
        let stream = resource == "pods" && matches!(subresource.as_str(), "exec" | "attach" | "portforward" | "proxy");
        writes && !review && !stream && !self.is_dry_run()
    }

    fn is_dry_run(&self) -> bool {
        self.uri.split_once('?').is_some_and(|(_, query)| query.split('&').any(|p| p == "dryRun=All"))
    }

    fn into_write(self) -> Write {
        let Reference { resource, subresource, namespace, name, .. } = self.object_ref;
        let resource = if subresource.is_empty() { resource } else { format!("{resource}/{subresource}") };
        let (verb, status) = (self.verb, self.response_status.code);
        Write { verb, resource, namespace, name, status, user_agent: self.user_agent }
    }
}
