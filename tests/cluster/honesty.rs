//! The simulation's API server answers as the real one does: random traces of
//! what the control plane asks for, on both, compared answer by answer.

use std::sync::Arc;

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use http::{Method, Request};
use kube::Client;
use serde_json::{Value, json};

use crate::farm;
use crate::harness::{Cluster, repetitions};
use crate::model::{Kind, Model, Preconditions, Refused, Stored, text};

const TRACES: usize = 10_000;
const STEPS: usize = 10;

/// Which version or uid a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Current,
    /// An earlier version; a uid that nobody has.
    Other,
    None,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Create,
    Get,
    /// Writes a number, and the status beside it, which does not count.
    Replace(Named, u8),
    Status(Named, u8),
    Merge(Option<u8>),
    Delete {
        uid: Named,
        version: Named,
    },
}

/// What can be compared of an answer.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    code: u16,
    reason: String,
    generation: Value,
    number: Value,
    status: Value,
    changed: bool,
    /// Whether it says in which namespace it is.
    placed: bool,
}

/// One side: what it holds, and what it held before.
struct Side {
    live: Option<Value>,
    earlier: Option<String>,
}

pub(crate) async fn the_model_answers_as_the_api_server_does(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    farm::define(&cluster).await?;
    let namespaces = cluster.namespaces("honest");
    namespaces.create(&cluster.client()).await?;
    let (client, namespace) = (cluster.client(), &namespaces.builds);
    stream::iter(0..repetitions(TRACES))
        .map(|seed| trace(client.clone(), namespace, seed))
        .buffer_unordered(16)
        .try_for_each(|()| async { Ok(()) })
        .await
}

async fn trace(client: Client, namespace: &str, seed: usize) -> anyhow::Result<()> {
    let mut chance = fastrand::Rng::with_seed(seed as u64);
    let kind = [Kind::Project, Kind::StatefulSet, Kind::Lease, Kind::Service][seed % 4];
    let name = format!("p{seed:016x}");
    let real = Real { client, path: path(kind, namespace), kind, name: name.clone() };
    let mut model = Model::default();
    let (mut there, mut here) = (Side { live: None, earlier: None }, Side { live: None, earlier: None });
    let mut told = Vec::new();
    for _ in 0..STEPS {
        let step = draw(kind, &mut chance);
        let wanted = real.step(step, &there).await?;
        let found = modelled(&mut model, kind, &name, step, &here);
        let live = real.settled().await?;
        let wanted = seen(wanted, kind, &mut there, live);
        settle(&mut model, kind, &name);
        let live = model.get(kind, &name).map(|stored| (*stored.value).clone());
        let found = seen(found, kind, &mut here, live);
        told.push(format!("{step:?}: {wanted:?}"));
        ensure!(wanted == found, "{kind:?}, seed {seed}:\n{}\nthe model says {found:?}", told.join("\n"));
    }
    Ok(())
}

fn draw(kind: Kind, chance: &mut fastrand::Rng) -> Step {
    let named = |chance: &mut fastrand::Rng| match chance.u8(0..6) {
        0..=3 => Named::Current,
        4 => Named::Other,
        _ => Named::None,
    };
    match chance.u8(0..12) {
        0..=2 => Step::Create,
        3 => Step::Get,
        4..=6 => Step::Replace(named(chance), chance.u8(0..3)),
        7..=8 if kind == Kind::Project => Step::Status(named(chance), chance.u8(0..3)),
        7..=9 if kind == Kind::Service => Step::Merge(Some(chance.u8(0..4)).filter(|n| *n < 3)),
        10..=11 => Step::Delete { uid: named(chance), version: named(chance) },
        _ => Step::Replace(Named::Current, chance.u8(0..3)),
    }
}

fn path(kind: Kind, namespace: &str) -> String {
    let (version, _) = kind.type_meta();
    let root = if version.contains('/') { "/apis" } else { "/api" };
    format!("{root}/{version}/namespaces/{namespace}/{}", kind.plural())
}

/// The object with a number in the place that the control plane writes.
fn object(kind: Kind, name: &str, number: u8) -> Value {
    let (version, word) = kind.type_meta();
    let spec = match kind {
        Kind::Project => json!({"key": name, "arch": "amd64", "idleTimeoutSec": number}),
        Kind::Lease => json!({"holderIdentity": format!("h{number}")}),
        Kind::Service => json!({"clusterIP": "None", "ports": [{"port": 1000 + u16::from(number)}]}),
        _ => json!({
            // More than none would bring pods.
            "replicas": 0, "serviceName": name, "selector": {"matchLabels": {"a": "b"}}, "minReadySeconds": number,
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        }),
    };
    let status = if kind == Kind::Project { json!({"replicas": 7}) } else { Value::Null };
    let mut object = json!({"apiVersion": version, "kind": word, "spec": spec,
        "metadata": {"name": name}});
    if !status.is_null() {
        object["status"] = status;
    }
    object
}

fn number(kind: Kind, object: &Value) -> Value {
    let path = match kind {
        Kind::Project => "/spec/idleTimeoutSec",
        Kind::Lease => "/spec/holderIdentity",
        Kind::Service => "/metadata/annotations/number",
        _ => "/spec/minReadySeconds",
    };
    match object.pointer(path) {
        // The server leaves out what is zero.
        Some(zero) if *zero == json!(0) => Value::Null,
        found => found.cloned().unwrap_or_default(),
    }
}

impl Side {
    fn version(&self, named: Named) -> Option<String> {
        let current = self.live.as_ref().map(|live| text(live, "/metadata/resourceVersion").to_owned());
        match named {
            Named::Current => current,
            Named::Other => self.earlier.clone(),
            Named::None => None,
        }
    }

    fn uid(&self, named: Named) -> Option<String> {
        match named {
            Named::Current => self.live.as_ref().map(|live| text(live, "/metadata/uid").to_owned()),
            Named::Other => Some("00000000-0000-0000-0000-000000000000".to_owned()),
            Named::None => None,
        }
    }

    /// The body of a write.
    fn body(&self, kind: Kind, name: &str, step: Step) -> Value {
        let (named, number) = match step {
            Step::Replace(named, number) | Step::Status(named, number) => (named, number),
            _ => return object(kind, name, 0),
        };
        let mut body = object(kind, name, number);
        if let Some(version) = self.version(named) {
            body["metadata"]["resourceVersion"] = version.into();
        }
        if matches!(step, Step::Status(..)) {
            body["status"] = json!({"replicas": number, "inflightBuilds": 0});
        }
        body
    }
}

fn patch(number: Option<u8>) -> Value {
    json!({"metadata": {"annotations": {"number": number.map(|n| n.to_string())}}})
}

fn seen(answer: (u16, String), kind: Kind, side: &mut Side, live: Option<Value>) -> Seen {
    let version = |object: &Value| text(object, "/metadata/resourceVersion").to_owned();
    let before = side.live.as_ref().map(version);
    let changed = before != live.as_ref().map(version);
    if changed && before.is_some() {
        side.earlier = before;
    }
    let object = live.clone().unwrap_or_default();
    side.live = live;
    let (code, reason) = answer;
    Seen {
        code,
        reason,
        generation: object["metadata"]["generation"].clone(),
        number: number(kind, &object),
        status: if kind == Kind::Project { object["status"]["replicas"].clone() } else { Value::Null },
        changed,
        placed: !text(&object, "/metadata/namespace").is_empty(),
    }
}

struct Real {
    client: Client,
    path: String,
    kind: Kind,
    name: String,
}

impl Real {
    async fn step(&self, step: Step, side: &Side) -> anyhow::Result<(u16, String)> {
        let named = format!("{}/{}", self.path, self.name);
        let body = side.body(self.kind, &self.name, step);
        match step {
            Step::Create => self.send(Method::POST, &self.path, "application/json", Some(body)).await,
            Step::Get => self.send(Method::GET, &named, "application/json", None).await,
            Step::Replace(..) => self.send(Method::PUT, &named, "application/json", Some(body)).await,
            Step::Status(..) => {
                self.send(Method::PUT, &format!("{named}/status"), "application/json", Some(body)).await
            }
            Step::Merge(number) => {
                self.send(Method::PATCH, &named, "application/merge-patch+json", Some(patch(number))).await
            }
            Step::Delete { uid, version } => {
                let preconditions = json!({"uid": side.uid(uid), "resourceVersion": side.version(version)});
                let body = json!({"preconditions": preconditions, "propagationPolicy": "Background"});
                self.send(Method::DELETE, &named, "application/json", Some(body)).await
            }
        }
        .map(|(code, body)| (code, text(&body, "/reason").to_owned()))
    }

    async fn send(&self, method: Method, path: &str, kind: &str, body: Option<Value>) -> anyhow::Result<(u16, Value)> {
        let body = body.map(|body| body.to_string()).unwrap_or_default().into_bytes();
        let request = Request::builder().method(method).uri(path).header("content-type", kind);
        let response = self.client.send(request.body(body.into())?).await?;
        let code = response.status().as_u16();
        let bytes = http_body_util::BodyExt::collect(response.into_body()).await?.to_bytes();
        // A create is answered with 201; the model has one word for success.
        Ok((if code == 201 { 200 } else { code }, serde_json::from_slice(&bytes)?))
    }

    /// The object, once its controller has seen it.
    async fn settled(&self) -> anyhow::Result<Option<Value>> {
        let named = format!("{}/{}", self.path, self.name);
        for _ in 0..2_000 {
            let (code, object) = self.send(Method::GET, &named, "application/json", None).await?;
            let observed = object["status"]["observedGeneration"] == object["metadata"]["generation"];
            match code {
                404 => return Ok(None),
                _ if self.kind != Kind::StatefulSet || observed => return Ok(Some(object)),
                _ => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
            }
        }
        Err(anyhow::anyhow!("{named} is not observed")).context("is the StatefulSet controller running?")
    }
}

/// The same step on the model.
fn modelled(model: &mut Model, kind: Kind, name: &str, step: Step, side: &Side) -> (u16, String) {
    let body = side.body(kind, name, step);
    let answer: Result<Stored, Refused> = match step {
        Step::Create => model.create(kind, body),
        Step::Get => model.get(kind, name).cloned().ok_or(crate::model::NOT_FOUND),
        Step::Replace(..) => model.replace(kind, name, body),
        Step::Status(..) => model.replace_status(kind, name, &body),
        Step::Merge(number) => model.merge(kind, name, &patch(number)),
        Step::Delete { uid, version } => {
            model.delete(kind, name, &Preconditions { uid: side.uid(uid), version: side.version(version) })
        }
    };
    match answer {
        Ok(_) => (200, String::new()),
        Err(Refused { code, reason }) => (code, reason.to_owned()),
    }
}

/// The StatefulSet controller sees it.
fn settle(model: &mut Model, kind: Kind, name: &str) {
    let Some(stored) = model.get(kind, name).filter(|_| kind == Kind::StatefulSet) else { return };
    let mut next = (*stored.value).clone();
    next["status"]["observedGeneration"] = next["metadata"]["generation"].clone();
    let _ = model.replace_status(kind, name, &next);
}
