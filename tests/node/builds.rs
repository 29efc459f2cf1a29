//! Nothing takes a daemon away from a running build: real builds, with a step
//! that takes its time, while everything that can happen to a daemon happens.

mod daemon;
mod killed;
mod leader;
mod limits;
pub(crate) mod servers;
mod upgrades;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::{BuildProject, Phase};
use bko_install::families::build_farm::lifecycle::WAKE;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use serde_json::json;

use crate::harness::{Node, repetitions};
use crate::installation::{BUILDS, Installation, Route};

const SOON: Duration = Duration::from_secs(60);

/// Beyond the idle time of 8 s and several looks.
const BEYOND_IDLE: u32 = 24;

pub(crate) async fn nothing_takes_a_daemon_from_a_running_build(node: Arc<Node>) -> anyhow::Result<()> {
    let farm = Installation::install(&node).await?;
    // Each has a project, and so a daemon, of its own. Only what kills servers,
    // shares one link, or is in a hurry, runs by itself.
    tokio::try_join!(
        told("its entry deleted by hand", daemon::an_entry_that_is_deleted_by_hand(&farm)),
        told("unregistered through the gateway", daemon::an_unregistered_build_through_the_gateway(&farm)),
        told("unregistered past the gateway", daemon::an_unregistered_build_past_the_gateway(&farm)),
        told("SIGTERM", daemon::the_end_of_its_pod(&farm)),
        told("an eviction of its pod", daemon::an_eviction_of_its_pod(&farm)),
        told("a changed template", daemon::a_changed_template(&farm)),
        told("its project deleted", daemon::the_deletion_of_its_project(&farm)),
        told("the leader killed in mid scale-down", leader::the_leader_killed_in_mid_scale_down(&farm)),
        told("5 % of a CPU", limits::a_twentieth_of_a_cpu(&farm)),
        told("a cache filled to its ceiling", limits::a_cache_that_is_filled(&farm)),
    )?;
    told("kill -9 of buildkitd", killed::a_killed_daemon_comes_back_warm(&farm)).await?;
    told("many builds over a slow link", limits::many_builds_over_a_slow_link(&farm)).await?;
    told("servers killed and rolled", servers::servers_and_gateways_that_come_and_go(&farm)).await
}

/// The installer at work under a running build.
pub(crate) async fn the_installer_takes_no_daemon_from_a_running_build(node: Arc<Node>) -> anyhow::Result<()> {
    let farm = Installation::install(&node).await?;
    told("another image and back", upgrades::another_image_and_back(&farm)).await?;
    told("an adoption", upgrades::an_adoption(&farm)).await
}

/// Seconds that something lasts when tests run in full, and when they do not.
pub(crate) fn lasting(full: u32, short: u32) -> u32 {
    if repetitions(10) == 10 { full } else { short }
}

async fn told(what: &str, story: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let begun = Instant::now();
    story.await.with_context(|| what.to_owned())?;
    eprintln!("kept: {what} ({:.0?})", begun.elapsed());
    Ok(())
}

/// A project, and the uid of the pod that serves it.
async fn daemon(farm: &Installation<'_>, repo: &str) -> anyhow::Result<(Route, String)> {
    let route = farm.route(&json!({"repo": format!("github.com/acme/{repo}"), "arch": "amd64"})).await?;
    let uid = pod(farm, &route).await?.uid().context("no uid")?;
    Ok((route, uid))
}

async fn pod(farm: &Installation<'_>, route: &Route) -> anyhow::Result<Pod> {
    Ok(pods(farm).get(&pod_name(route)).await?)
}

fn pods(farm: &Installation<'_>) -> Api<Pod> {
    Api::namespaced(farm.node.client(), BUILDS)
}

fn pod_name(route: &Route) -> String {
    format!("buildkitd-{}-0", route.key)
}

fn projects(farm: &Installation<'_>) -> Api<BuildProject> {
    Api::namespaced(farm.node.client(), BUILDS)
}

async fn same_pod(farm: &Installation<'_>, route: &Route, uid: &str) -> anyhow::Result<()> {
    let now = pod(farm, route).await?;
    ensure!(now.uid().as_deref() == Some(uid), "it has another pod");
    let restarts = now.status.and_then(|status| status.container_statuses).unwrap_or_default();
    ensure!(restarts.iter().all(|container| container.restart_count == 0), "its container was restarted");
    Ok(())
}

fn phase(project: &BuildProject) -> Option<Phase> {
    project.status.as_ref().and_then(|status| status.phase)
}

/// A dial in the moment in which the daemon becomes ready wakes it, and keeps it for that long.
async fn goes_idle(farm: &Installation<'_>, route: &Route) -> anyhow::Result<()> {
    farm.until(&route.key, "idle", SOON + WAKE, |p| phase(p) == Some(Phase::Idle)).await
}
