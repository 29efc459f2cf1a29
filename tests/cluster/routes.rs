//! Routing and lifecycle of daemons.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::{BuildProject, Phase};
use bko_install::names::CONTROLLER_MANAGER;
use bko_install::provisioner::BuildId;
use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Api;
use serde_json::json;

use crate::farm::{self, KEY, REPO, Server};
use crate::harness::Cluster;
use crate::harness::control_plane;
use crate::harness::fault_proxy::{At, FaultProxy};
use crate::harness::play::Play;

pub(crate) const POD: &str = "buildkitd-p41bd34a2227aca39-0";

/// The player notes that a pod is ready a moment after it has said so.
pub(crate) const SOON: Duration = Duration::from_millis(200);

pub(crate) struct Farm {
    pub(crate) namespace: String,
    pub(crate) operator: String,
    pub(crate) play: Play,
}

/// Namespaces of the test's own, the type defined, pods played.
pub(crate) async fn farm(cluster: &Cluster, prefix: &str) -> anyhow::Result<Farm> {
    farm::define(cluster).await?;
    let namespaces = cluster.namespaces(prefix);
    namespaces.create(&cluster.client()).await?;
    let play = Play::start(cluster.client(), &namespaces.builds, Duration::from_millis(100));
    Ok(Farm { namespace: namespaces.builds, operator: namespaces.operator, play })
}

impl Farm {
    pub(crate) fn flags<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let mut flags = vec!["--namespace", &self.namespace, "--pod-namespace", &self.operator];
        flags.extend(more);
        flags
    }
}

/// The reference needs 2.0 s, because it polls.
pub(crate) async fn a_cold_route_is_answered_within_250_ms_of_ready(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "cold").await?;
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    let mut waits = Vec::new();
    for i in 0..10 {
        let answer = server.route(&format!("acme/cold{i}")).await?;
        let answered = Instant::now();
        let pod = format!("buildkitd-{}-0", answer["key"].as_str().context("no key")?);
        let ready = farm.play.wait_ready(&pod, SOON).await?;
        waits.push(answered.duration_since(ready.at));
    }
    eprintln!("cold routes answered after Ready: {waits:?}");
    ensure!(waits.iter().all(|wait| *wait < Duration::from_millis(250)), "{waits:?}");
    Ok(())
}

pub(crate) async fn concurrent_routes_share_their_writes(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "burst").await?;
    let server = Server::start(&cluster, &farm.flags(&["--api-rate-limit=0"])).await?;
    server.complete(&server.route(REPO).await?).await?;
    farm::until(&cluster, &farm.namespace, KEY, "warm", |p| phase(p) == Some(Phase::Warm)).await?;
    let since = Timestamp::now();
    let answers = try_join_all((0..200).map(|_| server.route(REPO))).await?;
    let ids: BTreeSet<_> = answers.iter().map(|answer| answer["buildId"].to_string()).collect();
    ensure!(ids.len() == 200, "{} distinct ids", ids.len());
    let status = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;
    ensure!(status.inflight.len() == 200 && status.inflight_builds == 200, "{} entries", status.inflight.len());
    let writes = cluster.audit().writes_by(CONTROLLER_MANAGER, since).await?;
    let writes: Vec<_> = writes.iter().filter(|w| w.namespace == farm.namespace).collect();
    ensure!(writes.len() <= 8, "{} writes: {writes:?}", writes.len());
    try_join_all(answers.iter().map(|answer| server.complete(answer))).await?;
    let status = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;
    ensure!(status.inflight.is_empty(), "{} entries left", status.inflight.len());
    Ok(())
}

/// Whoever was answered is registered, whatever happened to the server since;
/// whoever was not comes again, as its client would.
pub(crate) async fn no_answered_route_is_lost_with_its_server(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "lost").await?;
    let flags = farm.flags(&["--api-rate-limit=0"]);
    for at in At::ALL {
        let proxy = FaultProxy::start(cluster.client()).await?;
        let first = Server::through(proxy.kubeconfig(), &flags, &[]).await?;
        first.complete(&first.route(REPO).await?).await?;
        let second = Server::start(&cluster, &flags).await?;
        proxy.arm(|parts, _| writes_status(parts), 2, at, first.killer()?);
        let route = async || match first.route(REPO).await {
            Ok(answer) => Ok((answer, true)),
            Err(_) => second.route(REPO).await.map(|answer| (answer, false)),
        };
        // 200 at once, and as many behind them, so that there is a third write.
        let answers: Vec<_> = stream::iter((0..400).map(|_| route())).buffer_unordered(200).try_collect().await?;
        proxy.hit(1).await;
        let before = answers.iter().filter(|(_, before)| *before).count();
        ensure!(before < 400, "{at:?}: it had answered all before its third write");
        let status = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;
        let entries: BTreeSet<_> = status.inflight.iter().map(|entry| entry.id.clone()).collect();
        let mut ids = BTreeSet::new();
        for (answer, _) in &answers {
            ids.insert(BuildId::parse(answer["buildId"].as_str().context("no buildId")?)?.digest());
        }
        ensure!(ids.len() == 400, "{at:?}: {} distinct ids", ids.len());
        let lost = ids.difference(&entries).count();
        ensure!(lost == 0, "{at:?}: {lost} lost of {} entries, {before} answered before", entries.len());
        eprintln!("killed {at:?}: {before} were answered before, {} entries", entries.len());
        try_join_all(answers.iter().map(|(answer, _)| second.complete(answer))).await?;
        second.terminate().await?;
    }
    Ok(())
}

fn writes_status(parts: &axum::http::request::Parts) -> bool {
    parts.method != axum::http::Method::GET && parts.uri.path().ends_with("/status")
}

/// Also on another replica, whose cache has not seen the entry yet.
pub(crate) async fn a_release_right_after_its_route_finds_its_entry(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "quick").await?;
    let first = Server::start(&cluster, &farm.flags(&[])).await?;
    let second = Server::start(&cluster, &farm.flags(&[])).await?;
    for i in 0..40 {
        let answer = first.route(REPO).await?;
        if i % 2 == 0 { &first } else { &second }.complete(&answer).await?;
        let status = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;
        ensure!(status.inflight.is_empty(), "pair {i}: {:?}", status.inflight);
    }
    Ok(())
}

/// Rules seed new projects only, and daemons are pulled as our own pods are.
pub(crate) async fn a_new_project_begins_with_what_the_first_rule_says(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "rules").await?;
    let rules = tempfile::NamedTempFile::new()?;
    let file = format!("--project-defaults-config={}", rules.path().display());
    let flags = farm.flags(&[&file, "--daemon-pull-secrets=registry,mirror.example"]);
    std::fs::write(
        rules.path(),
        "rules:\n- match: {repo: github.com/acme/*}\n  tier: hot\n  idleTimeoutSec: 60\n  cacheVolumeGi: 7\n  \
         s3Cache: never\n  resources: {requests: {memory: 3Gi}}\n",
    )?;
    let server = Server::start(&cluster, &flags).await?;
    server.route(REPO).await?;
    let projects: Api<BuildProject> = Api::namespaced(cluster.client(), &farm.namespace);
    let spec = serde_json::to_value(&projects.get(KEY).await?.spec)?;
    let seeded = json!({"tier": "hot", "idleTimeoutSec": 60, "cacheVolumeGi": 7, "s3CachePolicy": "never",
        "resources": {"requests": {"memory": "3Gi"}}});
    for (field, value) in seeded.as_object().into_iter().flatten() {
        ensure!(&spec[field] == value, "{field} of {spec}");
    }
    let sets: Api<StatefulSet> = Api::namespaced(cluster.client(), &farm.namespace);
    let set = serde_json::to_value(sets.get("buildkitd-p41bd34a2227aca39").await?)?;
    let pod = &set["spec"]["template"]["spec"];
    ensure!(pod["imagePullSecrets"] == json!([{"name": "registry"}, {"name": "mirror.example"}]), "{pod}");
    let requests = &pod["containers"][0]["resources"]["requests"];
    ensure!(*requests == json!({"cpu": "500m", "memory": "3Gi"}), "{requests}");
    drop(server);

    std::fs::write(rules.path(), "[{cacheVolumeGi: 9}]")?;
    let server = Server::start(&cluster, &flags).await?;
    server.route(REPO).await?;
    ensure!(projects.get(KEY).await?.spec.cache_volume_gi == 7, "a project that exists was changed");
    Ok(())
}

pub(crate) async fn an_idle_daemon_goes_to_zero_and_comes_back(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "idle").await?;
    let server = Server::start(&cluster, &farm.flags(&["--idle-seconds=2"])).await?;
    let answer = server.route(REPO).await?;
    tokio::time::sleep(Duration::from_secs(4)).await;
    ensure!(farm::replicas(&cluster, &farm.namespace, KEY).await? == 1, "a build in flight was not enough");
    server.complete(&answer).await?;
    let idle = farm::until(&cluster, &farm.namespace, KEY, "idle", |p| phase(p) == Some(Phase::Idle)).await?;
    ensure!(farm::replicas(&cluster, &farm.namespace, KEY).await? == 0, "the daemon still runs");
    let gate = idle.status_or_default().gate;
    ensure!(gate.closed && gate.epoch == 1, "{gate:?}");
    let claims = farm::names::<PersistentVolumeClaim>(&cluster, &farm.namespace).await?;
    ensure!(claims == ["cache-buildkitd-p41bd34a2227aca39-0"], "{claims:?}");

    let first = farm.play.ready(POD);
    let again = server.route(REPO).await?;
    let second = farm.play.wait_ready(POD, SOON).await?;
    ensure!(Some(&second) != first.as_ref(), "answered with the old pod");
    let status = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;
    ensure!(!status.gate.closed && status.gate.epoch == 2, "{:?}", status.gate);
    ensure!(server.metric("buildkit_operator_scale_events_total{direction=\"up\"}").await? >= 1.0);
    server.complete(&again).await
}

/// Routes hammer a daemon whose idle time is over again and again: each answer
/// must name a daemon that stays.
pub(crate) async fn a_route_during_a_scale_down_gets_the_next_daemon(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "race").await?;
    let server = Server::start(&cluster, &farm.flags(&["--idle-seconds=0"])).await?;
    for i in 0..15 {
        let answer = server.route(REPO).await?;
        farm.play.wait_ready(POD, SOON).await?;
        tokio::time::sleep(Duration::from_millis(150)).await;
        ensure!(farm::replicas(&cluster, &farm.namespace, KEY).await? == 1, "round {i}: taken down under a build");
        ensure!(farm.play.ready(POD).is_some(), "round {i}: its pod was deleted");
        server.complete(&answer).await?;
        // From "at once", over "while it is asked whether it is quiet", to "when it is all over".
        tokio::time::sleep(Duration::from_millis(u64::try_from(i * 180)?)).await;
    }
    Ok(())
}

pub(crate) async fn forks_are_apart_and_reaped_with_their_cache(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "fork").await?;
    let server = Server::start(&cluster, &farm.flags(&["--fork-idle-seconds=3"])).await?;
    let body = json!({"repo": REPO, "arch": "amd64", "untrusted": true});
    let (_, fork) = server.post("/route", &body).await?;
    ensure!(fork["key"] == "forkp41bd34a2227aca39", "{fork}");
    let canonical = server.route(REPO).await?;
    ensure!(canonical["endpoint"] != fork["endpoint"], "{canonical}");
    server.complete(&fork).await?;
    let gone = async {
        while farm::names::<BuildProject>(&cluster, &farm.namespace).await?.len() > 1 {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        while farm::names::<PersistentVolumeClaim>(&cluster, &farm.namespace).await?.len() > 1
            || farm::names::<StatefulSet>(&cluster, &farm.namespace).await?.len() > 1
        {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(110), gone).await.context("the fork is still there")??;
    ensure!(farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?.inflight.len() == 1);
    Ok(())
}

pub(crate) async fn a_steady_farm_causes_no_writes(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "steady").await?;
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    for i in 0..10 {
        server.complete(&server.route(&format!("acme/steady{i}")).await?).await?;
    }
    for project in farm::names::<BuildProject>(&cluster, &farm.namespace).await? {
        farm::until(&cluster, &farm.namespace, &project, "warm", |p| phase(p) == Some(Phase::Warm)).await?;
    }
    // Budgets outlive the last build by some seconds.
    while !farm::names::<PodDisruptionBudget>(&cluster, &farm.namespace).await?.is_empty() {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let since = Timestamp::now();
    tokio::time::sleep(Duration::from_secs(6)).await;
    let writes = cluster.audit().writes_by(CONTROLLER_MANAGER, since).await?;
    let writes: Vec<_> = writes.iter().filter(|w| w.namespace == farm.namespace).collect();
    ensure!(writes.is_empty(), "{writes:?}");
    Ok(())
}

pub(crate) async fn a_follower_takes_over(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "lead").await?;
    let first = Server::start(&cluster, &farm.flags(&["--shutdown-delay-seconds=0"])).await?;
    let leads = async |server: &Server, repo: &str| server.route(repo).await.map(|_| ());
    leads(&first, "acme/one").await?;
    let second = Server::start(&cluster, &farm.flags(&[])).await?;
    let leases = Api::<Lease>::namespaced(cluster.client(), &farm.operator);
    let holder = async || -> anyhow::Result<String> {
        let lease = leases.get("buildkit-operator-buildd.buildkit-operator.socialgouv.github.io").await?;
        Ok(lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default())
    };
    let before = holder().await?;
    let begun = Instant::now();
    ensure!(first.terminate().await?.success(), "the first server did not end well");
    leads(&second, "acme/two").await?;
    ensure!(begun.elapsed() < Duration::from_secs(5), "a lease that was given back took {:?}", begun.elapsed());
    let between = holder().await?;
    ensure!(before != between, "the lease is still {before}");
    let third = Server::start(&cluster, &farm.flags(&[])).await?;
    second.kill().await?;
    let begun = Instant::now();
    leads(&third, "acme/three").await?;
    ensure!(begun.elapsed() < Duration::from_secs(25), "after a crash it took {:?}", begun.elapsed());
    ensure!(holder().await? != between);
    Ok(())
}

/// A build never runs unprotected: without its entry persisted there is no answer.
pub(crate) async fn an_outage_of_the_api_server_is_waited_out_or_said(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "outage").await?;
    let server = Server::start(&cluster, &farm.flags(&["--route-wait=4s"])).await?;
    server.route(REPO).await?;
    let api = &cluster.control_plane().api_server;
    api.kill()?;
    let (status, text) = server.post("/route", &json!({"repo": REPO, "arch": "amd64"})).await?;
    ensure!(status == 503, "{status} {text}");
    let waiting = server.route(REPO);
    let restart = async {
        api.start_again()?;
        anyhow::Ok(())
    };
    let (answer, restarted) = tokio::join!(waiting, restart);
    restarted?;
    let client = cluster.client();
    api.wait_until(Duration::from_secs(30), async || control_plane::is_ready(&client).await).await?;
    let answer = match answer {
        Ok(answer) => answer,
        // The API server may take longer than the budget to come back.
        Err(_) => server.route(REPO).await?,
    };
    let status = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;
    ensure!(!status.inflight.is_empty(), "answered {answer} without an entry");
    Ok(())
}

pub(crate) async fn the_controller_owns_what_it_makes(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "owner").await?;
    let server = Server::start(&cluster, &farm.flags(&[])).await?;
    server.route(REPO).await?;
    let set =
        Api::<StatefulSet>::namespaced(cluster.client(), &farm.namespace).get("buildkitd-p41bd34a2227aca39").await?;
    let managers: BTreeSet<_> =
        set.metadata.managed_fields.iter().flatten().filter_map(|f| f.manager.clone()).collect();
    ensure!(managers.contains(CONTROLLER_MANAGER) && !managers.contains("bko-install"), "{managers:?}");
    let owner = set.metadata.owner_references.context("no owner")?;
    ensure!(owner.len() == 1 && owner[0].kind == "BuildProject" && owner[0].controller == Some(true), "{owner:?}");
    Ok(())
}

pub(crate) fn phase(project: &BuildProject) -> Option<Phase> {
    project.status.as_ref().and_then(|status| status.phase)
}
