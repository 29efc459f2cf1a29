//! The harness itself: a test that relies on it is worth what it is.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod};
use kube::api::PostParams;
use kube::runtime::wait::await_condition;
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::harness::node::BUILDKIT;
use crate::harness::{Node, process};

const SOON: Duration = Duration::from_secs(30);

async fn create<K>(node: &Node, namespace: &str, object: Value) -> anyhow::Result<()>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize,
{
    let api: Api<K> = Api::namespaced(node.client(), namespace);
    api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
    Ok(())
}

async fn create_claim(node: &Node, namespace: &str, name: &str) -> anyhow::Result<()> {
    let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}});
    create::<PersistentVolumeClaim>(node, namespace, json!({"metadata": {"name": name}, "spec": spec})).await
}

async fn run_pod(node: &Node, namespace: &str, name: &str, spec: Value) -> anyhow::Result<Pod> {
    create::<Pod>(node, namespace, json!({"metadata": {"name": name}, "spec": spec})).await?;
    tokio::time::timeout(SOON, node.wait_ready(namespace, name)).await?
}

/// Runs a pod that succeeds, and returns what it printed.
async fn run_to_end(node: &Node, namespace: &str, name: &str, container: Value) -> anyhow::Result<String> {
    let pod = json!({"metadata": {"name": name}, "spec": {"restartPolicy": "Never", "containers": [container]}});
    create::<Pod>(node, namespace, pod).await?;
    let succeeded = |pod: Option<&Pod>| {
        pod.and_then(|pod| pod.status.as_ref()).is_some_and(|status| status.phase.as_deref() == Some("Succeeded"))
    };
    let pods = Api::namespaced(node.client(), namespace);
    tokio::time::timeout(SOON, await_condition(pods, name, succeeded)).await??;
    node.logs(namespace, name).await
}

fn as_user() -> Value {
    let seccomp = json!({"type": "Unconfined"});
    json!({"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "seccompProfile": seccomp})
}

pub(crate) async fn pod_runs_resolves_names_and_keeps_its_volume(node: Arc<Node>) -> anyhow::Result<()> {
    let (client, namespaces) = (node.client(), node.namespaces("pod"));
    namespaces.create(&client).await?;
    let namespace = &namespaces.builds;
    create_claim(&node, namespace, "cache").await?;
    let spec = json!({
        "terminationGracePeriodSeconds": 0,
        "securityContext": as_user(),
        "containers": [{
            "name": "main",
            "image": node.archive("busybox.tar")?.reference(),
            "command": ["sh", "-c", "id -u >/cache/user; exec sleep 1000"],
            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        }],
        "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
    });
    run_pod(&node, namespace, "one", spec).await?;
    assert_eq!(node.exec(namespace, "one", ["cat", "/cache/user"]).await?, "1000\n");
    let kubernetes = "kubernetes.default.svc.cluster.local";
    let found = node.exec(namespace, "one", ["nslookup", kubernetes]).await?;
    assert!(found.contains("10.96.0.1"), "{found}");
    // By its cluster address, which only kube-proxy knows the way from.
    node.exec(namespace, "one", ["nc", "-w", "5", kubernetes, "443"]).await?;
    namespaces.delete(&client).await
}

pub(crate) async fn pushed_image_is_pulled(node: Arc<Node>) -> anyhow::Result<()> {
    let (client, namespaces) = (node.client(), node.namespaces("pull"));
    namespaces.create(&client).await?;
    let image = node.push(&node.archive("busybox.tar")?, "pulled/busybox:1").await?;
    let container = json!({"name": "main", "image": image, "imagePullPolicy": "Always", "command": ["sleep", "1000"]});
    let spec = json!({"terminationGracePeriodSeconds": 0, "containers": [container]});
    run_pod(&node, &namespaces.builds, "one", spec).await?;
    namespaces.delete(&client).await
}

pub(crate) async fn own_image_runs(node: Arc<Node>) -> anyhow::Result<()> {
    let (client, namespaces) = (node.client(), node.namespaces("own"));
    namespaces.create(&client).await?;
    let image = node.own_image().await?;
    let container = json!({"name": "main", "image": image, "imagePullPolicy": "Never", "args": ["--version"]});
    let printed = run_to_end(&node, &namespaces.builds, "version", container).await?;
    assert_eq!(printed.trim(), concat!("bko-install ", env!("CARGO_PKG_VERSION")));
    namespaces.delete(&client).await
}

pub(crate) async fn rootless_buildkit_builds_the_example(node: Arc<Node>) -> anyhow::Result<()> {
    let (client, namespaces) = (node.client(), node.namespaces("buildkit"));
    namespaces.create(&client).await?;
    let namespace = &namespaces.builds;
    let daemon = run_buildkit(&node, namespace).await?;
    let address = daemon.status.and_then(|status| status.pod_ip).unwrap_or_default();
    let base = node.push(&node.archive("busybox.tar")?, "library/busybox:1").await?;
    let image = format!("{}/hello:1", node.registry_address());

    let mut workers = node.tools().command("buildctl");
    workers.args(["--addr", &format!("tcp://{address}:1234"), "debug", "workers", "--verbose"]);
    let workers = process::output(workers).await?;
    assert!(workers.contains("overlayfs"), "not the snapshotter that real nodes have:\n{workers}");

    let first = build_example(&node, &address, &base, &image).await?;
    assert!(first.contains("Built in step 1 of this cache"), "{first}");
    let second = build_example(&node, &address, &base, &image).await?;
    assert!(second.contains("CACHED") && !second.contains("Built in step"), "{second}");

    let printed = run_to_end(&node, namespace, "hello", json!({"name": "main", "image": image})).await?;
    assert!(printed.starts_with("Hello from a build farm"), "{printed}");
    namespaces.delete(&client).await
}

/// Upstream's daemon as an ordinary user, its cache on a volume.
async fn run_buildkit(node: &Node, namespace: &str) -> anyhow::Result<Pod> {
    create_claim(node, namespace, "cache").await?;
    let config = json!({"metadata": {"name": "config"}, "data": {"buildkitd.toml": node.buildkitd_toml()}});
    create::<ConfigMap>(node, namespace, config).await?;
    let spec = json!({
        "terminationGracePeriodSeconds": 0,
        "securityContext": as_user(),
        "containers": [{
            "name": "buildkitd",
            "image": BUILDKIT,
            "args": [
                "--config=/etc/buildkit/buildkitd.toml",
                "--addr=tcp://0.0.0.0:1234",
                "--oci-worker-no-process-sandbox",
                "--oci-worker-binary=buildkit-runc",
            ],
            "readinessProbe": {"tcpSocket": {"port": 1234}, "periodSeconds": 1},
            "volumeMounts": [
                {"name": "cache", "mountPath": "/home/user/.local/share/buildkit"},
                {"name": "config", "mountPath": "/etc/buildkit"},
            ],
        }],
        "volumes": [
            {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}},
            {"name": "config", "configMap": {"name": "config"}},
        ],
    });
    run_pod(node, namespace, "buildkitd", spec).await
}

/// Builds `examples/hello`, pushes it, and returns what was printed.
async fn build_example(node: &Node, daemon: &str, base: &str, image: &str) -> anyhow::Result<String> {
    let example = std::path::absolute("examples/hello")?.display().to_string();
    let mut buildctl = node.tools().command("buildctl");
    buildctl.args(["--addr", &format!("tcp://{daemon}:1234"), "build", "--progress=plain"]);
    buildctl.args(["--frontend=dockerfile.v0", "--local", &format!("context={example}")]);
    buildctl.args(["--local", &format!("dockerfile={example}"), "--opt", &format!("build-arg:BASE={base}")]);
    buildctl.args(["--output", &format!("type=image,name={image},push=true")]);
    process::combined_output(buildctl).await
}
