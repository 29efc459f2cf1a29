//! A daemon that dies.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::Phase;
use futures::StreamExt;
use kube::ResourceExt;
use kube::runtime::watcher::watch_object;

use super::{SOON, daemon, phase, pod, pod_name, projects};
use crate::harness::repetitions;
use crate::installation::{BUILDS, Installation, Route};

const KILL: [&str; 3] = ["sh", "-c", "kill -9 $(pidof buildkitd)"];

/// This one does cut the build. What matters is how soon everybody knows.
pub(super) async fn a_killed_daemon_comes_back_warm(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "killed").await?;
    farm.begin(&route.endpoint, "first", 0).await?.succeeds("nothing").await?;
    let build = farm.begin(&route.endpoint, "second", 120).await?;
    let mut phases = watch_object(projects(farm), &route.key)
        .filter_map(|seen| std::future::ready(seen.ok().flatten().as_ref().and_then(phase)))
        .boxed();
    let warm = phases.next().await;
    ensure!(warm == Some(Phase::Warm), "{warm:?}");
    let story = tokio::spawn(async move {
        let mut told = Vec::new();
        while let Some(phase) = phases.next().await {
            if told.last().unwrap_or(&Phase::Warm) != &phase {
                told.push(phase);
            }
            if told.last() == Some(&Phase::Warm) {
                break;
            }
        }
        told
    });
    farm.node.exec(BUILDS, &pod_name(&route), KILL).await?;
    let killed = Instant::now();
    let (code, printed) = build.ends().await?;
    let took = killed.elapsed();
    ensure!(
        code != Some(0) && took < Duration::from_secs(5),
        "the client ended with {code:?} after {took:?}:\n{printed}"
    );
    let told = tokio::time::timeout(SOON, story).await.context("the status does not tell of it")??;
    eprintln!("the client knew after {took:.1?}, the daemon was back after {:.1?}: {told:?}", killed.elapsed());
    let now = pod(farm, &route).await?;
    ensure!(now.uid().as_deref() == Some(uid.as_str()), "another pod");
    let (code, printed) = farm.build(&route.endpoint, "first", 0)?.ends().await?;
    ensure!(code == Some(0) && printed.contains("CACHED"), "the cache was lost, exit code {code:?}:\n{printed}");
    for round in 0..repetitions(50) {
        a_build_cut_by_a_kill(farm, &route, round).await.with_context(|| format!("kill {round}"))?;
    }
    farm.complete(&route).await
}

/// Its databases are not synced at every write: it must come back whatever was half-written.
async fn a_build_cut_by_a_kill(farm: &Installation<'_>, route: &Route, round: usize) -> anyhow::Result<()> {
    let build = farm.begin(&route.endpoint, &format!("solve-{round}"), 120).await?;
    farm.node.exec(BUILDS, &pod_name(route), KILL).await?;
    let killed = Instant::now();
    let (code, printed) = build.ends().await?;
    let took = killed.elapsed();
    ensure!(code != Some(0) && took < Duration::from_secs(5), "ended with {code:?} after {took:?}:\n{printed}");
    // A route waits until it serves again.
    let again = farm.route(&serde_json::json!({"repo": "github.com/acme/killed", "arch": "amd64"})).await?;
    let (code, printed) = farm.build(&again.endpoint, &format!("after-{round}"), 0)?.ends().await?;
    ensure!(code == Some(0), "it does not build any more, exit code {code:?}:\n{printed}");
    farm.complete(&again).await
}
