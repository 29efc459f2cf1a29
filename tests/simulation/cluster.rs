//! What else lives in a cluster: the StatefulSet controller, the kubelet and
//! the garbage collector, each with a view that lags.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use crate::check;
use crate::model::{Kind, Preconditions, text};
use crate::world::{CLUSTER, World};

/// Runs all of them.
pub(crate) async fn run(world: Arc<World>) {
    let mut seen = 0;
    loop {
        let mut changed = pin!(world.cluster.notified());
        changed.as_mut().enable();
        let events: Vec<(Kind, String)> = {
            let state = world.state();
            let new = state.model.log[seen..].iter().map(|event| event.id.clone()).collect();
            seen = state.model.log.len();
            new
        };
        for (kind, name) in events {
            let set = match kind {
                Kind::StatefulSet | Kind::Service => name,
                Kind::Pod => name.trim_end_matches("-0").to_owned(),
                Kind::Project => format!("buildkitd-{name}"),
                _ => continue,
            };
            tokio::spawn(look(Arc::clone(&world), set));
        }
        changed.await;
    }
}

/// Looks at one StatefulSet, some time later.
async fn look(world: Arc<World>, set: String) {
    let slow = world.state().stormy && world.percent(5);
    world.pause(1, if slow { 8_000 } else { 80 }).await;
    while step(&world, &set) {
        world.pause(1, 20).await;
    }
}

/// One step towards what the StatefulSet asks for; false when there is none.
fn step(world: &Arc<World>, name: &str) -> bool {
    let pod_name = format!("{name}-0");
    let (set, pod, owned) = {
        let state = world.state();
        let value = |kind, name: &str| state.model.get(kind, name).map(|stored| stored.value.clone());
        let owned = state.model.get(Kind::Project, name.trim_start_matches("buildkitd-")).is_some();
        (value(Kind::StatefulSet, name), value(Kind::Pod, &pod_name), owned)
    };
    let Some(set) = set else {
        // Pods go with their StatefulSet.
        return pod.is_some_and(|pod| take(world, &pod_name, &pod));
    };
    if !owned {
        let id = |kind| (kind, name.to_owned());
        for kind in [Kind::Budget, Kind::Slice, Kind::Service, Kind::StatefulSet] {
            let none = Preconditions::default();
            let _ = world.change(CLUSTER, "collect", &id(kind), &mut |model| model.delete(kind, name, &none));
        }
        return true;
    }
    let revision = revision(&set["spec"]["template"]);
    let wanted = set["spec"]["replicas"].as_i64().unwrap_or(1) > 0;
    let outdated = |pod: &Value| pod["metadata"]["labels"]["controller-revision-hash"] != revision;
    match pod {
        None if wanted => bring(world, &pod_name, &set, &revision),
        Some(pod) if (!wanted || outdated(&pod)) && take(world, &pod_name, &pod) => return true,
        _ => {}
    }
    report(world, name, &set, &revision) || connect(world, name)
}

/// The Service's endpoint: its daemon's pod, once that is ready, unless the
/// Service selects nothing.
fn connect(world: &World, name: &str) -> bool {
    let id = (Kind::Slice, name.to_owned());
    let (addresses, known) = {
        let state = world.state();
        let open = state.model.get(Kind::Service, name).is_some_and(|service| !is_shut(&service.value));
        let pod = state.serving(name.trim_start_matches("buildkitd-"));
        let addresses = if open { pod.into_iter().collect() } else { Vec::new() };
        let known = state.model.get(id.0, name).map(|slice| slice.value["endpoints"][0]["addresses"].clone());
        (json!(addresses), known)
    };
    let slice = json!({"metadata": {"name": name}, "addressType": "IPv4",
        "endpoints": [{"addresses": addresses}]});
    match known {
        Some(known) if known == slice["endpoints"][0]["addresses"] => return false,
        Some(_) => drop(world.change(CLUSTER, "connect", &id, &mut |model| model.replace(id.0, name, slice.clone()))),
        None => drop(world.change(CLUSTER, "connect", &id, &mut |model| model.create(id.0, slice.clone()))),
    }
    true
}

/// Whether a Service selects nothing because its gate was closed.
pub(crate) fn is_shut(service: &Value) -> bool {
    service["spec"]["selector"]["buildkit-operator.socialgouv.github.io/gate"] == "closed"
}

fn report(world: &World, name: &str, set: &Value, revision: &str) -> bool {
    let mut next = set.clone();
    next["status"]["observedGeneration"] = set["metadata"]["generation"].clone();
    next["status"]["updateRevision"] = revision.into();
    let ready = world.state().serving(name.trim_start_matches("buildkitd-")).is_some();
    next["status"]["readyReplicas"] = u8::from(ready).into();
    if next["status"] == set["status"] {
        return false;
    }
    let id = (Kind::StatefulSet, name.to_owned());
    let _ = world.change(CLUSTER, "observe", &id, &mut |model| model.replace_status(id.0, name, &next));
    true
}

fn revision(template: &Value) -> String {
    let text = template.to_string();
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:x}")
}

/// Deletes a pod that is not going away yet. It goes when its grace is over.
fn take(world: &Arc<World>, name: &str, pod: &Value) -> bool {
    if !pod["metadata"]["deletionTimestamp"].is_null() {
        return false;
    }
    check::pod_taken(&mut world.state(), pod);
    end(world, name, pod);
    true
}

/// Somebody else kills a daemon: an eviction, a drained node.
pub(crate) fn kill(world: &Arc<World>, key: &str) {
    let name = format!("buildkitd-{key}-0");
    let pod = world.state().model.get(Kind::Pod, &name).map(|stored| stored.value.clone());
    let Some(pod) = pod.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null()) else { return };
    {
        let mut state = world.state();
        state.disturb(key);
        state.reached("pod killed by others");
        state.builds.lost(text(&pod, "/metadata/uid"));
    }
    end(world, &name, &pod);
}

fn end(world: &Arc<World>, name: &str, pod: &Value) {
    let id = (Kind::Pod, name.to_owned());
    let exactly = Preconditions { uid: Some(text(pod, "/metadata/uid").to_owned()), version: None };
    let _ = world.change(CLUSTER, "end", &id, &mut |model| model.delete(id.0, &id.1, &exactly));
    let world = Arc::clone(world);
    let uid = text(pod, "/metadata/uid").to_owned();
    tokio::spawn(async move {
        // Its hook waits for builds that nobody registered; nothing cuts those.
        let direct = world.state().builds.direct(&uid);
        if direct > world.ms() {
            world.reached("pod that waits for a build it was not told of");
            sleep(Duration::from_millis(direct - world.ms())).await;
        }
        world.pause(50, 4_000).await;
        let _ = world.change(CLUSTER, "forget", &id, &mut |model| {
            model.delete(id.0, &id.1, &exactly)?;
            Ok(crate::model::Stored::default())
        });
    });
}

fn bring(world: &Arc<World>, name: &str, set: &Value, revision: &str) {
    let mut labels = set["spec"]["template"]["metadata"]["labels"].clone();
    labels["controller-revision-hash"] = revision.into();
    let owner = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": set["metadata"]["name"],
        "uid": set["metadata"]["uid"], "controller": true});
    let metadata = json!({"name": name, "labels": labels, "ownerReferences": [owner]});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
        "spec": {"containers": []}});
    let id = (Kind::Pod, name.to_owned());
    let created = world.change(CLUSTER, "start", &id, &mut |model| model.create(id.0, pod.clone()));
    let Ok(created) = created else { return };
    let (world, uid) = (Arc::clone(world), text(&created.value, "/metadata/uid").to_owned());
    tokio::spawn(async move {
        let slow = world.percent(5);
        let ms = 100 + world.below(if slow { 20_000 } else { 2_000 });
        sleep(Duration::from_millis(ms)).await;
        let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        let _ = world.change(CLUSTER, "ready", &id, &mut |model| {
            let pod = model.get(id.0, &id.1).filter(|pod| text(&pod.value, "/metadata/uid") == uid);
            let mut next = (*pod.ok_or(crate::model::NOT_FOUND)?.value).clone();
            next["status"] = ready["status"].clone();
            model.replace_status(id.0, &id.1, &next)
        });
    });
}
