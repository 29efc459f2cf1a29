//! A farm from the export that made it to its removal: the export's own first
//! step runs in the cluster, caches outlive the farm, and in the end nothing is left.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, Pod, Secret};
use kube::api::{DeleteParams, ListParams};
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::harness::{Node, process};
use crate::installation::{BUILDS, FLAGS, Installation, OPERATOR, Route, bko};

const REPO: &str = "github.com/acme/kept";
const SOON: Duration = Duration::from_secs(60);
/// A build that is cut ends with the gateway, and this test with it.
const SHORT_DRAIN: &str = "--set=gateway.drainSeconds=5";
const NAMESPACES: [&str; 3] = [OPERATOR, BUILDS, "buildkit-system"];

pub(crate) async fn from_an_export_to_a_removal(node: Arc<Node>) -> anyhow::Result<()> {
    clean(&node).await?;
    node.own_image().await?;
    timed("an export is applied", an_export_is_applied_as_its_note_says(&node)).await?;
    let farm = Installation::open(&node).await?;
    let route = timed("it builds", it_builds(&farm)).await?;
    timed("it is applied again", applied_again_it_changes_nothing(&farm)).await?;
    timed("init takes it over", init_takes_it_over(&farm, &route)).await?;
    timed("a build keeps it", a_running_build_is_told_and_nothing_removed(&farm, &route)).await?;
    timed("caches stay", caches_stay_and_daemons_end(&farm, &route)).await?;
    drop(farm);
    timed("they are found again", caches_are_found_again(&node)).await?;
    timed("everything goes", everything_goes_under_a_build(&node)).await
}

async fn timed<T>(what: &str, chapter: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let begun = Instant::now();
    let outcome = chapter.await.with_context(|| what.to_owned())?;
    eprintln!("{what} ({:.0?})", begun.elapsed());
    Ok(outcome)
}

/// What other tests have installed or left goes.
async fn clean(node: &Node) -> anyhow::Result<()> {
    let uninstall = ["cluster", "uninstall", "--delete-caches", "--cut-builds", "--timeout=2m"];
    process::combined_output(bko(node, &uninstall)?).await?;
    let namespaces = Api::<Namespace>::all(node.client());
    for name in NAMESPACES {
        if let Some(namespace) = namespaces.get_opt(name).await? {
            namespaces.delete(name, &DeleteParams::default()).await?;
            let uid = namespace.uid().context("no uid")?;
            let gone = conditions::is_deleted(&uid);
            tokio::time::timeout(SOON, await_condition(namespaces.clone(), name, gone)).await.context("it stays")??;
        }
    }
    Ok(())
}

const EXPORT: &str = "/run/bko/export";

async fn an_export_is_applied_as_its_note_says(node: &Node) -> anyhow::Result<()> {
    let mut export = bko(node, &["export", "--format=plain", "--dir", EXPORT])?;
    // Without the time limit, which is not part of an installation.
    export.args(&FLAGS[..FLAGS.len() - 1]).arg(SHORT_DRAIN);
    process::combined_output(export).await?;
    apply(node).await?;

    let pods = Api::<Pod>::namespaced(node.client(), OPERATOR);
    let steps = pods.list(&ListParams::default().labels("app.kubernetes.io/component=bootstrap")).await?.items;
    ensure!(steps.len() == 1, "{} pods: a step failed", steps.len());
    let name = steps[0].name_any();
    let status = steps[0].status.clone().unwrap_or_default();
    ensure!(status.phase.as_deref() == Some("Succeeded"), "{status:?}");
    let restarts = status.container_statuses.unwrap_or_default();
    ensure!(restarts.iter().all(|container| container.restart_count == 0), "it took several attempts: {restarts:?}");
    let printed = node.logs(OPERATOR, &name).await?;
    let secrets = secrets(node).await?;
    ensure!(printed.matches("written").count() == secrets.len(), "{} secrets:\n{printed}", secrets.len());
    Ok(())
}

/// The commands of the export's note, as they stand there.
async fn apply(node: &Node) -> anyhow::Result<String> {
    let note = std::fs::read_to_string(Path::new(EXPORT).join("README.md"))?;
    let script = note.split("```sh\n").nth(1).and_then(|rest| rest.split("```").next()).context("no commands")?;
    let mut shell = Command::new("sh");
    shell.args(["-euc", script]).current_dir(EXPORT).env("KUBECONFIG", node.kubeconfig());
    process::combined_output(shell).await
}

/// Every Secret of the farm: its identity, its version, what it holds.
async fn secrets(node: &Node) -> anyhow::Result<BTreeMap<String, [Option<String>; 3]>> {
    let mut all = BTreeMap::new();
    for namespace in [OPERATOR, BUILDS] {
        for secret in Api::<Secret>::namespaced(node.client(), namespace).list(&ListParams::default()).await? {
            let data = serde_json::to_string(&secret.data)?;
            let name = format!("{namespace}/{}", secret.name_any());
            all.insert(name, [secret.uid(), secret.resource_version(), Some(data)]);
        }
    }
    ensure!(all.len() > 3, "{:?}", all.keys());
    Ok(all)
}

fn project() -> Value {
    json!({"repo": REPO, "arch": "amd64"})
}

async fn it_builds(farm: &Installation<'_>) -> anyhow::Result<Route> {
    let image = format!("{}/kept:1", farm.node.registry_address());
    let route = farm.route(&project()).await?;
    let first = farm.buildx(&route, &image).await?;
    ensure!(first.printed.contains("Built in step 1 of this cache"), "{}", first.printed);
    Ok(route)
}

async fn applied_again_it_changes_nothing(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (keys, objects, pods) = (secrets(farm.node).await?, exported(farm.node).await?, pods(farm.node).await?);
    apply(farm.node).await?;
    ensure!(secrets(farm.node).await? == keys, "a secret was written");
    let now = exported(farm.node).await?;
    ensure!(now == objects, "{objects:?}\n{now:?}");
    ensure!(self::pods(farm.node).await? == pods, "a pod was made anew");
    Ok(())
}

/// What the export's files name, as it lives: what of it was asked for, by its version.
async fn exported(node: &Node) -> anyhow::Result<BTreeMap<String, [Option<String>; 2]>> {
    let mut kubectl = node.tools().command("kubectl");
    kubectl.arg("--kubeconfig").arg(node.kubeconfig()).args(["get", "--output=json", "--filename", EXPORT]);
    let list: Value = serde_json::from_str(&process::output(kubectl).await?)?;
    let mut all = BTreeMap::new();
    for object in list["items"].as_array().context("no items")? {
        let metadata = &object["metadata"];
        let text = |field: &str| metadata.get(field).map(Value::to_string);
        let name = format!("{} {} {}", object["kind"], metadata["namespace"], metadata["name"]);
        all.insert(name, [text("uid"), text("generation").or_else(|| text("resourceVersion"))]);
    }
    ensure!(all.len() > 25, "{all:?}");
    Ok(all)
}

/// Pods of the farm and of its daemons, by name and identity.
async fn pods(node: &Node) -> anyhow::Result<BTreeMap<String, Option<String>>> {
    let mut all = BTreeMap::new();
    for namespace in [OPERATOR, BUILDS] {
        let pods = Api::<Pod>::namespaced(node.client(), namespace).list(&ListParams::default()).await?;
        all.extend(pods.iter().map(|pod| (pod.name_any(), pod.uid())));
    }
    Ok(all)
}

async fn init_takes_it_over(farm: &Installation<'_>, route: &Route) -> anyhow::Result<()> {
    let (keys, pods) = (secrets(farm.node).await?, pods(farm.node).await?);
    init(farm.node).await?;
    ensure!(secrets(farm.node).await? == keys, "a secret was written");
    ensure!(self::pods(farm.node).await? == pods, "a pod was made anew");
    let mut plan = bko(farm.node, &["cluster", "plan"])?;
    plan.args(&FLAGS[..FLAGS.len() - 1]).arg(SHORT_DRAIN);
    process::combined_output(plan).await?;
    let again = farm.buildctl(route, &format!("{}/kept:2", farm.node.registry_address())).await?;
    ensure!(again.cached(), "{}", again.printed);
    Ok(())
}

async fn init(node: &Node) -> anyhow::Result<()> {
    let mut init = bko(node, &["cluster", "init"])?;
    init.args(FLAGS).arg(SHORT_DRAIN);
    process::combined_output(init).await.map(|_| ())
}

/// What `cluster uninstall` answers: its exit code, and all that it printed.
async fn uninstall(node: &Node, flags: &[&str]) -> anyhow::Result<(Option<i32>, String)> {
    let mut command = bko(node, &["cluster", "uninstall", "--timeout=2m"])?;
    command.args(flags);
    let Output { status, stdout, stderr } = tokio::process::Command::from(command).kill_on_drop(true).output().await?;
    Ok((status.code(), String::from_utf8([stdout, stderr].concat())?))
}

async fn a_running_build_is_told_and_nothing_removed(farm: &Installation<'_>, route: &Route) -> anyhow::Result<()> {
    let build = farm.begin(&route.endpoint, "stays", 6).await?;
    let (pods, since) = (pods(farm.node).await?, Timestamp::now());
    let (code, said) = uninstall(farm.node, &[]).await?;
    ensure!(code == Some(5) && said.contains(&format!("1 builds run: BuildProject {BUILDS}/{}", route.key)), "{said}");
    ensure!(said.contains("--cut-builds"), "{said}");
    let writes = farm.node.audit().writes_by("bko-install", since).await?;
    ensure!(writes.is_empty(), "{writes:?}");
    build.succeeds("an uninstall that was refused").await?;
    ensure!(self::pods(farm.node).await? == pods, "a pod has ended");
    Ok(())
}

async fn caches_stay_and_daemons_end(farm: &Installation<'_>, route: &Route) -> anyhow::Result<()> {
    // A fork's cache ends with its daemon, whatever else stays.
    let fork = farm.route(&json!({"repo": REPO, "arch": "amd64", "untrusted": true})).await?;
    for route in [route, &fork] {
        farm.complete(route).await?;
    }
    let claims = Api::<PersistentVolumeClaim>::namespaced(farm.node.client(), BUILDS);
    let claim = format!("cache-buildkitd-{}-0", route.key);
    let before = claims.get(&claim).await?.uid();
    // The build before is told to the operator a moment after its client has heard of it.
    farm.until(&route.key, "free", SOON, |p| p.status.as_ref().is_some_and(|s| s.inflight.is_empty())).await?;
    farm.until(&fork.key, "free", SOON, |p| p.status.as_ref().is_some_and(|s| s.inflight.is_empty())).await?;

    let (code, said) = uninstall(farm.node, &[]).await?;
    ensure!(code == Some(0), "{said}");
    ensure!(said.contains(&format!("kept PersistentVolumeClaim {BUILDS}/{claim}: ")), "{said}");
    ensure!(!said.contains(&format!("kept PersistentVolumeClaim {BUILDS}/cache-buildkitd-{}", fork.key)), "{said}");
    ensure!(said.contains(&format!("kept Namespace {BUILDS}: it holds ConfigMap buildkitd-config, ")), "{said}");
    let pods = Api::<Pod>::namespaced(farm.node.client(), BUILDS);
    for pod in pods.list(&ListParams::default()).await? {
        let (name, uid) = (pod.name_any(), pod.uid().context("no uid")?);
        let gone = await_condition(pods.clone(), &name, conditions::is_deleted(&uid));
        tokio::time::timeout(SOON, gone).await.with_context(|| format!("{name} stays"))??;
    }
    let left = claims.list(&ListParams::default()).await?;
    let left: Vec<_> = left.iter().map(|claim| (claim.name_any(), claim.uid())).collect();
    ensure!(left == [(claim, before)], "{left:?}");
    let namespaces = Api::<Namespace>::all(farm.node.client());
    for (name, there) in NAMESPACES.into_iter().zip([false, true, false]) {
        ensure!(namespaces.get_opt(name).await?.is_some() == there, "namespace {name}, expected: {there}");
    }
    nothing_cluster_wide(farm.node).await
}

/// Nothing that belongs to no namespace is left.
async fn nothing_cluster_wide(node: &Node) -> anyhow::Result<()> {
    let mut kinds = node.tools().command("kubectl");
    kinds.arg("--kubeconfig").arg(node.kubeconfig());
    kinds.args(["api-resources", "--namespaced=false", "--verbs=list,delete", "--output=name"]);
    let kinds = process::output(kinds).await?;
    let kinds: Vec<&str> = kinds.lines().filter(|kind| *kind != "namespaces").collect();
    ensure!(kinds.contains(&"customresourcedefinitions.apiextensions.k8s.io"), "{kinds:?}");
    let mut left = node.tools().command("kubectl");
    left.arg("--kubeconfig").arg(node.kubeconfig()).args(["get", &kinds.join(","), "--output=name"]);
    left.arg("--selector=app.kubernetes.io/managed-by=bko-install");
    let left = process::output(left).await?;
    ensure!(left.trim().is_empty(), "{left}");
    Ok(())
}

async fn caches_are_found_again(node: &Node) -> anyhow::Result<()> {
    init(node).await?;
    let farm = Installation::open(node).await?;
    let route = farm.route(&project()).await?;
    let image = format!("{}/kept:3", farm.node.registry_address());
    let built = farm.buildx(&route, &image).await?;
    ensure!(built.cached(), "the cache was lost:\n{}", built.printed);
    farm.complete(&route).await
}

async fn everything_goes_under_a_build(node: &Node) -> anyhow::Result<()> {
    let farm = Installation::open(node).await?;
    let route = farm.route(&project()).await?;
    // One process: a child of a step's shell would outlive it in a rootless daemon, and hold that until its grace ends.
    let build = farm.step(&route.endpoint, None, "cut", "exec sleep 600")?.has_printed("begun cut").await?;
    let maps = Api::<ConfigMap>::namespaced(node.client(), BUILDS);
    maps.delete("buildkitd-config", &DeleteParams::default()).await?;
    let (code, said) = uninstall(node, &["--delete-caches", "--cut-builds"]).await?;
    ensure!(code == Some(0) && !said.contains("kept "), "{said}");
    let (code, printed) = build.ends().await?;
    ensure!(code != Some(0), "it was to be cut:\n{printed}");
    let namespaces = Api::<Namespace>::all(node.client());
    for name in NAMESPACES {
        ensure!(namespaces.get_opt(name).await?.is_none(), "namespace {name} is still there");
    }
    nothing_cluster_wide(node).await
}
