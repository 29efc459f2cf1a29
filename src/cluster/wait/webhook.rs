//! A webhook is ready when the API server can call it, and it answers rightly:
//! its Service has an endpoint, and its component's probes, dry runs, pass and
//! are refused as they should be.

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, ListParams};
use serde_json::Value;

use super::super::apply::{Applied, Mode};
use super::super::observe::Policies;
use super::super::{Cluster, Event, RequestError, retry};
use super::{NotReady, WaitError};
use crate::manifest::{Object, ObjectId, Probe};

/// Waits for the webhooks of a level.
pub(super) async fn level(cluster: &Cluster, applied: &[Applied], policies: &Policies) -> Result<(), WaitError> {
    for hook in applied.iter().filter(|object| object.id.group == "admissionregistration.k8s.io") {
        if !hook.id.kind.ends_with("WebhookConfiguration") {
            continue;
        }
        let Some(live) = cluster.get(&hook.id).await? else { continue };
        let webhooks = live.get("webhooks").and_then(Value::as_array).into_iter().flatten();
        for service in webhooks.filter_map(|webhook| webhook.pointer("/clientConfig/service")) {
            until(cluster, &hook.id, || endpoints(cluster, service)).await?;
        }
        let probes = policies.get(&hook.component).into_iter().flat_map(|policy| &policy.probes);
        for probe in probes.filter(|probe| probe.webhook == hook.id.name) {
            until(cluster, &hook.id, || probed(cluster, probe)).await?;
        }
    }
    Ok(())
}

/// Tries until it is so; says once what is waited for.
async fn until<F>(cluster: &Cluster, hook: &ObjectId, is_so: impl Fn() -> F) -> Result<(), WaitError>
where
    F: Future<Output = Result<(), Verdict>>,
{
    let mut said = None;
    for attempt in 1.. {
        let why = match is_so().await {
            Ok(()) => break,
            Err(Verdict::Never(why)) => return Err(not_ready(hook, why, false)),
            Err(Verdict::NotYet(why)) => why,
        };
        if said.as_ref() != Some(&why) {
            cluster.report(Event::Waiting { object: hook.clone(), why: why.clone() });
            said = Some(why.clone());
        }
        let pause = retry::pause(attempt, None);
        if super::super::request::now() + pause >= cluster.limits.deadline {
            return Err(not_ready(hook, why, true));
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = cluster.interrupt.cancelled() => return Err(WaitError::Interrupted),
        }
    }
    if said.is_some() {
        cluster.report(Event::Ready { object: hook.clone() });
    }
    Ok(())
}

enum Verdict {
    NotYet(String),
    Never(String),
}

fn not_ready(hook: &ObjectId, why: String, timed_out: bool) -> WaitError {
    let (culprit, lines, events) = (None, Vec::new(), Vec::new());
    WaitError::NotReady(Box::new(NotReady { object: hook.clone(), why, culprit, lines, events, timed_out }))
}

async fn endpoints(cluster: &Cluster, service: &Value) -> Result<(), Verdict> {
    let text = |key: &str| service[key].as_str().unwrap_or_default();
    let (namespace, name) = (text("namespace"), text("name"));
    let slices: Api<EndpointSlice> = Api::namespaced(cluster.client.clone(), namespace);
    let of_service = ListParams::default().labels(&format!("kubernetes.io/service-name={name}"));
    let list = slices.list(&of_service).await.map_err(|error| Verdict::NotYet(error.to_string()))?;
    let ready = list
        .items
        .iter()
        .flat_map(|slice| slice.endpoints.iter().flatten())
        .any(|endpoint| endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true));
    if ready { Ok(()) } else { Err(Verdict::NotYet(format!("Service {namespace}/{name} has no ready endpoint"))) }
}

async fn probed(cluster: &Cluster, probe: &Probe) -> Result<(), Verdict> {
    if let Some(object) = &probe.accept {
        match dry_run(cluster, object).await {
            Ok(()) => {}
            Err(error @ RequestError::Refused { code: 500.., .. }) => return Err(Verdict::NotYet(error.to_string())),
            Err(error) => return Err(Verdict::Never(format!("what must pass is refused: {error}"))),
        }
    }
    if let Some(object) = &probe.reject {
        match dry_run(cluster, object).await {
            // The API server may not know the configuration yet.
            Ok(()) => return Err(Verdict::NotYet(format!("{} passes, which must be refused", object.id))),
            Err(error @ RequestError::Refused { code: 500.., .. }) => return Err(Verdict::NotYet(error.to_string())),
            Err(RequestError::Refused { .. }) => {}
            Err(error) => return Err(Verdict::Never(error.to_string())),
        }
    }
    Ok(())
}

async fn dry_run(cluster: &Cluster, object: &Object) -> Result<(), RequestError> {
    // A webhook that is not reached yet is a 500, which the caller counts.
    let once = cluster.until(super::super::request::now() + std::time::Duration::from_secs(2));
    let result = once.apply(&object.id, &object.body, Mode::DryRun { force: true }).await;
    match result {
        Err(RequestError::Deadline { last, .. }) => Err(RequestError::Refused {
            object: Box::new(object.id.clone()),
            message: last.unwrap_or_else(|| "no answer".into()),
            code: 503,
            causes: Vec::new(),
        }),
        Err(error @ RequestError::Webhook { .. }) => Err(RequestError::Refused {
            object: Box::new(object.id.clone()),
            message: error.to_string(),
            code: 503,
            causes: Vec::new(),
        }),
        other => other.map(drop),
    }
}
