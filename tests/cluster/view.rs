//! What runs where, as the routing API and `ps` tell it.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::Phase;
use bko_install::names::CONTROLLER_MANAGER;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::farm::{self, KEY, REPO, Server};
use crate::harness::{Cluster, executable, process};
use crate::routes::{POD, farm, phase};

/// Longer than a daemon without builds is left unasked.
const TOLD: Duration = Duration::from_secs(15);

/// Waits until a project is shown as wanted.
async fn shown(server: &Server, what: &str, wanted: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
    let begun = Instant::now();
    loop {
        let (status, project) = server.get(&format!("/projects/{KEY}")).await?;
        if status == 200 && wanted(&project) {
            return Ok(project);
        }
        ensure!(begun.elapsed() < TOLD, "not shown within {TOLD:?}: {what}; but {status} {project}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn ended(reference: &str, second: u32, error: Option<&str>) -> Value {
    json!({
        "ref": reference, "started": "2026-11-30T08:00:00.125Z", "completed": format!("2026-11-30T08:01:{second:02}.5Z"),
        "stepsTotal": 12, "stepsCached": 8, "stepsCompleted": 12, "error": error, "step": null,
    })
}

pub(crate) async fn a_project_tells_what_its_daemon_does_until_it_is_at_zero(
    cluster: Arc<Cluster>,
) -> anyhow::Result<()> {
    let farm = farm(&cluster, "view").await?;
    let server = Server::start(&cluster, &farm.flags(&["--idle-seconds=3"])).await?;
    ensure!(server.get(&format!("/projects/{KEY}")).await?.0 == 404);
    ensure!(server.get("/projects").await? == (200, json!({"projects": []})));

    farm.play.builds().set(&["abc"]);
    let routed = server.route(REPO).await?;
    let project = shown(&server, "the build", |p| p["activeBuilds"][0].is_object() && p["phase"] == "Warm").await?;
    let build = json!({"ref": "abc", "started": "2026-11-30T08:00:00Z", "step": "[build 2/3] RUN",
                       "steps": {"total": 5, "cached": 1, "completed": 2}});
    ensure!(project["activeBuilds"] == json!([build]), "{project}");
    ensure!(project["inFlight"]["count"] == 1 && project["inFlight"]["since"].is_string(), "{project}");
    ensure!(project["keptBy"] == "inFlight" && project["idleAt"].is_null() && project["ready"] == true, "{project}");
    ensure!(project["cache"] == json!({"bytesUsed": 3_u64 << 30, "bytesTotal": 60_u64 << 30}), "{project}");
    ensure!(project["buildkit"] == json!({"version": "v0.34.2", "snapshotter": "overlayfs"}), "{project}");
    ensure!(project["conditions"][0]["type"] == "Ready" && project["conditions"][0]["reason"] == "DaemonReady");
    ensure!(project["endpoint"] == routed["endpoint"] && project["repo"] == REPO && project["tier"] == "warm");
    let secrets = [routed["buildId"].as_str().context("no id")?.to_owned(), digest(&cluster, &farm.namespace).await?];
    ensure!(secrets.iter().all(|secret| !project.to_string().contains(secret)), "an entry's id is shown: {project}");
    let gauge = format!("buildkit_operator_daemon_active_builds{{project=\"{KEY}\"}}");
    ensure!(server.metric(&gauge).await? == 1.0);

    farm.play.builds().set(&[]);
    farm.play.builds().end(ended("abc", 2, None));
    server.complete(&routed).await?;
    let project = shown(&server, "its end", |p| p["lastBuild"]["ref"] == "abc" && p["inFlight"]["count"] == 0).await?;
    let last = &project["lastBuild"];
    ensure!(last["durationMs"] == 62_375 && last["steps"]["cached"] == 8 && last["error"].is_null(), "{project}");
    let project = shown(&server, "at zero", |p| p["phase"] == "Idle").await?;
    ensure!(project["ready"] == false && project["keptBy"].is_null() && project["activeBuilds"].is_null(), "{project}");
    ensure!(project["builds"][0] == *last, "what a daemon built is known when it is at zero: {project}");
    ensure!(project["cache"]["bytesUsed"] == 3_u64 << 30, "{project}");
    // Another replica, and one that never saw the daemon, say the same.
    let fresh = Server::start(&cluster, &farm.flags(&[])).await?;
    ensure!(shown(&fresh, "the same", |p| p["phase"] == "Idle").await?["builds"] == project["builds"]);
    ensure!(server.metric(&gauge).await? == 0.0);
    listed(&cluster, &farm.namespace).await
}

async fn digest(cluster: &Cluster, namespace: &str) -> anyhow::Result<String> {
    let status = farm::status(cluster, namespace, KEY).await.context("no project")?;
    Ok(status.inflight.first().context("no entry")?.id.clone())
}

/// `ps` by the kubeconfig alone.
async fn listed(cluster: &Cluster, namespace: &str) -> anyhow::Result<()> {
    let ps = async |flags: &[&str]| {
        let mut command = Command::new(executable::executable()?);
        command.args(["ps", "--namespace", namespace, "--kubeconfig"]).arg(cluster.kubeconfig()).args(flags);
        command.env_remove("BUILDKIT_OPERATOR_BUILDD_URL");
        process::output(command).await
    };
    let hidden = ps(&[]).await?;
    ensure!(hidden.starts_with("no daemon is up"), "{hidden}");
    let table = ps(&["--all"]).await?;
    let row = table.lines().nth(1).unwrap_or_default();
    for cell in [REPO, KEY, "amd64", "cold", "8/12", "1m02s", "3.0/60Gi"] {
        ensure!(row.contains(cell), "no {cell}:\n{table}");
    }
    let json: Value = serde_json::from_str(&ps(&["--all", "--format=json"]).await?)?;
    ensure!(json[0]["key"] == KEY && json[0]["lastBuild"]["ref"] == "abc", "{json}");
    Ok(())
}

/// However often the history is told: a build that ended is one write.
pub(crate) async fn what_builds_told_is_written_once_each(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "history").await?;
    for i in 0..40 {
        farm.play.builds().end(ended(&format!("old-{i}"), i, None));
    }
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    // In flight all the time, so that the daemon is asked every two seconds.
    server.route(REPO).await?;
    let told = |reference: &'static str| {
        move |p: &bko_install::families::build_farm::api::BuildProject| {
            p.status.as_ref().is_some_and(|s| s.last_builds.first().is_some_and(|b| b.reference == reference))
        }
    };
    let project = farm::until(&cluster, &farm.namespace, KEY, "told", told("old-39")).await?;
    ensure!(project.status_or_default().last_builds.len() == 5, "bounded");
    farm::until(&cluster, &farm.namespace, KEY, "warm", |p| phase(p) == Some(Phase::Warm)).await?;
    let writes = async |since: Timestamp| -> anyhow::Result<usize> {
        let writes = cluster.audit().writes_by(CONTROLLER_MANAGER, since).await?;
        Ok(writes.iter().filter(|write| write.namespace == farm.namespace).count())
    };
    let since = Timestamp::now();
    tokio::time::sleep(Duration::from_secs(6)).await;
    ensure!(writes(since).await? == 0, "a history that does not change was written");
    let since = Timestamp::now();
    farm.play.builds().end(ended("new", 50, Some("exit code: 7")));
    let project = farm::until(&cluster, &farm.namespace, KEY, "told", told("new")).await?;
    ensure!(project.status_or_default().last_builds[0].error == "exit code: 7");
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(writes(since).await? == 1, "{} writes for one build", writes(since).await?);
    let (_, shown) = server.get(&format!("/projects/{KEY}")).await?;
    ensure!(shown["builds"].as_array().map(Vec::len) == Some(41), "{shown}");
    Ok(())
}

pub(crate) async fn a_companion_that_does_not_answer_is_no_reason_to_wait(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "mute").await?;
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    farm.play.builds().set(&["abc"]);
    server.route(REPO).await?;
    shown(&server, "the build", |p| p["activeBuilds"][0].is_object()).await?;
    farm.play.silence(POD);
    let project = shown(&server, "not known", |p| p["activeBuilds"].is_null()).await?;
    ensure!(project["phase"] == "Warm" && project["cache"]["bytesUsed"].is_u64(), "the rest stands: {project}");
    let begun = Instant::now();
    for _ in 0..100 {
        ensure!(server.get("/projects").await?.0 == 200);
    }
    ensure!(begun.elapsed() < Duration::from_secs(2), "100 answers from memory took {:?}", begun.elapsed());
    Ok(())
}
