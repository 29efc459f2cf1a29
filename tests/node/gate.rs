//! The gateway beside a real cluster: it wakes what is dialled, serves the
//! routing API over TLS, and is neither missed while it is rolled nor silent
//! when a daemon dies or is cut off.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bko_install::families::build_farm::api::{BuildProject, Phase};
use futures::future::try_join_all;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod};
use kube::api::{Patch, PatchParams};
use kube::runtime::wait::await_condition;
use kube::{Api, ResourceExt};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::builds::servers::{own_pods, restart};
use crate::harness::{Node, node, process};
use crate::installation::{BUILDS, DOMAIN, Installation, Route};

const SOON: Duration = Duration::from_secs(60);

/// A client that is refused at 18 s, or that gives up by itself at 20 s.
const ONE_ATTEMPT: Duration = Duration::from_secs(23);

pub(crate) async fn what_is_dialled_wakes(node: Arc<Node>) -> anyhow::Result<()> {
    let farm = Installation::install(&node).await?;
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| format!("wake-{name}"));
    let mut routes = try_join_all(names.iter().map(|name| asleep(&farm, name))).await?;
    told("a dial during a scale-down", a_dial_during_a_scale_down(&farm)).await?;
    told("a project that was routed long ago", a_project_of_long_ago_stays_asleep(&farm)).await?;
    for seconds in [5, 15, 30, 60] {
        let pair = (routes.pop().context("no project")?, routes.pop().context("no project")?);
        told(&format!("ready after {seconds} s"), ready_after(&farm, seconds, pair)).await?;
    }
    let woken = farm.gateway_metric("buildkit_operator_gateway_wakes_total{verdict=\"starting\"}").await?;
    ensure!(woken >= 9.0, "{woken} wakes");
    Ok(())
}

pub(crate) async fn the_gateway_serves_the_api_and_is_not_missed(node: Arc<Node>) -> anyhow::Result<()> {
    let farm = Installation::install(&node).await?;
    told("the routing API over TLS", the_routing_api(&farm)).await?;
    told("a rolling update", nobody_is_refused_during_a_rolling_update(&farm)).await?;
    told("a killed daemon", a_killed_daemon_is_told_within_two_seconds(&farm)).await?;
    told("a black hole", a_black_hole_is_found_within_the_user_timeout(&farm)).await
}

async fn told(what: &str, story: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    let begun = Instant::now();
    story.await.with_context(|| what.to_owned())?;
    eprintln!("gateway: {what} ({:.0?})", begun.elapsed());
    Ok(())
}

fn phase(project: &BuildProject) -> Option<Phase> {
    project.status.as_ref().and_then(|status| status.phase)
}

async fn route(farm: &Installation<'_>, repo: &str) -> anyhow::Result<Route> {
    farm.route(&json!({"repo": format!("github.com/acme/{repo}"), "arch": "amd64"})).await
}

/// A project that was routed a moment ago, and whose daemon is at zero.
async fn asleep(farm: &Installation<'_>, repo: &str) -> anyhow::Result<Route> {
    let route = route(farm, repo).await?;
    farm.complete(&route).await?;
    farm.until(&route.key, "idle", SOON, |p| phase(p) == Some(Phase::Idle)).await?;
    Ok(route)
}

fn pods(farm: &Installation<'_>) -> Api<Pod> {
    Api::namespaced(farm.node.client(), BUILDS)
}

fn pod_name(route: &Route) -> String {
    format!("buildkitd-{}-0", route.key)
}

/// How a client that tries until it succeeds fared.
#[derive(Debug)]
struct Fared {
    /// Of the attempts that failed.
    failed: Vec<Duration>,
    took: Duration,
}

async fn until_built(farm: &Installation<'_>, route: &Route, buildx: bool) -> anyhow::Result<Fared> {
    let (begun, mut failed) = (Instant::now(), Vec::new());
    let image = format!("{}/{}:1", farm.node.registry_address(), route.key);
    loop {
        let attempt = Instant::now();
        let built = if buildx { farm.buildx(route, &image).await } else { farm.buildctl(route, &image).await };
        match built {
            Ok(_) => return Ok(Fared { failed, took: begun.elapsed() }),
            Err(error) if begun.elapsed() > Duration::from_secs(120) => return Err(error),
            Err(error) => {
                eprintln!("{} after {:.1?}: {error:#}", if buildx { "buildx" } else { "buildctl" }, attempt.elapsed());
                failed.push(attempt.elapsed());
            }
        }
    }
}

/// Whether new pods may run on the node.
async fn cordon(farm: &Installation<'_>, closed: bool) -> anyhow::Result<()> {
    let nodes = Api::<NodeObject>::all(farm.node.client());
    let patch = Patch::Merge(json!({"spec": {"unschedulable": closed}}));
    nodes.patch(node::NAME, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// buildx and buildctl dial daemons at zero, which no node takes for a while.
async fn ready_after(farm: &Installation<'_>, seconds: u64, pair: (Route, Route)) -> anyhow::Result<()> {
    // About what a daemon takes from a node to its readiness here.
    const START: u64 = 5;
    cordon(farm, true).await?;
    let begun = Instant::now();
    let opening = async {
        tokio::time::sleep(Duration::from_secs(seconds.saturating_sub(START))).await;
        cordon(farm, false).await
    };
    let all = tokio::try_join!(
        until_built(farm, &pair.0, true),
        until_built(farm, &pair.1, false),
        ready_at(farm, &pair.0, begun),
        ready_at(farm, &pair.1, begun),
        opening
    );
    cordon(farm, false).await?;
    let (buildx, buildctl, ready_x, ready_ctl, ()) = all?;
    for (client, ready, fared) in [("buildx", ready_x, buildx), ("buildctl", ready_ctl, buildctl)] {
        eprintln!("{client}, ready after {ready:.1?}: {fared:.1?}");
        // Attempts of 18 to 20 s each end unserved before the daemon is ready.
        let most = ready.as_secs() / 18;
        // buildx dials again by itself, and may be held three times within one attempt.
        let held = if client == "buildx" { 3 } else { 1 };
        let least = ready.saturating_sub(Duration::from_secs(2)).as_secs() / (22 * held);
        ensure!((least..=most).contains(&(fared.failed.len() as u64)), "{client}: {fared:?}, ready after {ready:?}");
        ensure!(
            fared.failed.iter().all(|took| *took < ONE_ATTEMPT * u32::try_from(held).unwrap_or(1)),
            "{client}: {fared:?}"
        );
        // The attempt that is under way when it is ready succeeds, or the next.
        ensure!(fared.took < ready + Duration::from_secs(25), "{client}: {fared:?}, ready after {ready:?}");
    }
    Ok(())
}

/// How long after `begun` the daemon was ready.
async fn ready_at(farm: &Installation<'_>, route: &Route, begun: Instant) -> anyhow::Result<Duration> {
    let ready = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        status.iter().flat_map(|s| s.conditions.iter().flatten()).any(|c| c.type_ == "Ready" && c.status == "True")
    };
    tokio::time::timeout(2 * SOON, await_condition(pods(farm), &pod_name(route), ready))
        .await
        .context("never ready")??;
    Ok(begun.elapsed())
}

async fn a_dial_during_a_scale_down(farm: &Installation<'_>) -> anyhow::Result<()> {
    let route = route(farm, "going").await?;
    let uid = pods(farm).get(&pod_name(&route)).await?.uid();
    farm.complete(&route).await?;
    let ending = |pod: Option<&Pod>| pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some());
    tokio::time::timeout(SOON, await_condition(pods(farm), &pod_name(&route), ending)).await.context("it stays")??;
    let fared = until_built(farm, &route, false).await?;
    ensure!(fared.failed.is_empty(), "{fared:?}");
    let next = pods(farm).get(&pod_name(&route)).await?.uid();
    ensure!(next.is_some() && next != uid, "the same pod");
    let wake = Api::<BuildProject>::namespaced(farm.node.client(), BUILDS).get(&route.key).await?;
    ensure!(wake.status_or_default().wake_until.is_some(), "not woken: {:?}", wake.status);
    Ok(())
}

async fn a_project_of_long_ago_stays_asleep(farm: &Installation<'_>) -> anyhow::Result<()> {
    let route = asleep(farm, "forgotten").await?;
    let long_ago = (Timestamp::now() - SignedDuration::from_hours(25)).to_string();
    let long_ago = Patch::Merge(json!({"status": {"lastBuildTime": long_ago, "recentBuildTimes": [long_ago]}}));
    let projects = Api::<BuildProject>::namespaced(farm.node.client(), BUILDS);
    projects.patch_status(&route.key, &PatchParams::default(), &long_ago).await?;
    let begun = Instant::now();
    let refused = farm.buildctl(&route, "unused").await;
    let error = format!("{:#}", refused.err().context("it was woken")?);
    ensure!(error.contains("remote error: tls: internal error"), "{error}");
    ensure!(begun.elapsed() < Duration::from_secs(10), "it was held for {:?}", begun.elapsed());
    let status = projects.get(&route.key).await?.status_or_default();
    ensure!(status.phase == Some(Phase::Idle) && status.wake_until.is_none(), "{status:?}");
    Ok(())
}

async fn the_routing_api(farm: &Installation<'_>) -> anyhow::Result<()> {
    let name = format!("api.{DOMAIN}");
    farm.node.add_host(farm.gateway, &[&name])?;
    let curl = |path: &str, options: &[&str]| {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail", "--max-time", "60", "--cacert"]);
        curl.arg(farm.certificates.join("ca.pem")).args(options).arg(format!("https://{name}:1234{path}"));
        process::output(curl)
    };
    curl("/healthz", &[]).await?;
    let token = format!("authorization: Bearer {}", farm.token);
    let body = json!({"repo": "github.com/acme/over-tls", "arch": "amd64"}).to_string();
    let answer = curl("/route", &["--header", &token, "--data", &body]).await?;
    let answer: serde_json::Value = serde_json::from_str(&answer)?;
    ensure!(answer["endpoint"].as_str().is_some_and(|e| e.ends_with(&format!(".{DOMAIN}:1234"))), "{answer}");
    let refused = curl("/route", &["--data", &body]).await;
    ensure!(format!("{:#}", refused.err().context("without a token")?).contains("401"));
    Ok(())
}

async fn nobody_is_refused_during_a_rolling_update(farm: &Installation<'_>) -> anyhow::Result<()> {
    let route = route(farm, "rolled-gateway").await?;
    let build = farm.begin(&route.endpoint, "rolled-gateway", 20).await?;
    let (stop, dials) = (AtomicBool::new(false), AtomicU32::new(0));
    let before = own_pods(farm, "gateway").await?;
    let dialling = async {
        while !stop.load(Ordering::Relaxed) {
            answered((farm.gateway, 1234).into())
                .await
                .with_context(|| format!("dial {}", dials.load(Ordering::Relaxed)))?;
            dials.fetch_add(1, Ordering::Relaxed);
        }
        anyhow::Ok(())
    };
    let rolling = async {
        restart(farm, "buildkit-operator-gateway").await?;
        build.succeeds("a rolling update of the gateway").await?;
        // Beyond the accept window of the old pod.
        tokio::time::sleep(Duration::from_secs(5)).await;
        stop.store(true, Ordering::Relaxed);
        Ok(())
    };
    tokio::try_join!(dialling, rolling)?;
    ensure!(own_pods(farm, "gateway").await?.iter().all(|pod| !before.contains(pod)), "not rolled");
    eprintln!("{} dials, none refused", dials.load(Ordering::Relaxed));
    farm.complete(&route).await
}

/// Whoever speaks no TLS is told so by an alert: somebody accepted and read.
async fn answered(gateway: SocketAddr) -> anyhow::Result<()> {
    let mut stream = tokio::time::timeout(Duration::from_secs(5), TcpStream::connect(gateway)).await??;
    stream.write_all(b"GET / HTTP/1.1\r\n").await?;
    let mut alert = [0; 7];
    tokio::time::timeout(Duration::from_secs(5), stream.read_exact(&mut alert)).await??;
    ensure!(alert == [21, 3, 3, 0, 2, 2, 80], "{alert:?}");
    Ok(())
}

const RESET: &str = "buildkit_operator_gateway_close_total{cause=\"daemon_reset\"}";

/// Waits until the gateway has counted one more, and returns how long that took.
async fn counted(farm: &Installation<'_>, before: f64, limit: Duration) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    while farm.gateway_metric(RESET).await? <= before {
        if begun.elapsed() > limit {
            bail!("the gateway has not reset the stream within {limit:?}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(begun.elapsed())
}

async fn a_killed_daemon_is_told_within_two_seconds(farm: &Installation<'_>) -> anyhow::Result<()> {
    let route = route(farm, "killed-stream").await?;
    let build = farm.begin(&route.endpoint, "killed-stream", 120).await?;
    let before = farm.gateway_metric(RESET).await?;
    farm.node.kill(BUILDS, &pod_name(&route), "buildkitd").await?;
    let took = counted(farm, before, Duration::from_secs(2)).await?;
    let (code, printed) = build.ends().await?;
    ensure!(code != Some(0), "{printed}");
    eprintln!("the stream was reset {took:.1?} after the daemon was killed");
    farm.complete(&route).await
}

/// A client in the middle of its handshake: what it sends is never acknowledged.
async fn a_black_hole_is_found_within_the_user_timeout(farm: &Installation<'_>) -> anyhow::Result<()> {
    let route = route(farm, "black-hole").await?;
    let address =
        pods(farm).get(&pod_name(&route)).await?.status.and_then(|status| status.pod_ip).context("no address")?;
    let mut stream = TcpStream::connect((farm.gateway, 1234)).await?;
    stream.write_all(&hello(&format!("buildkitd-{}.{DOMAIN}", route.key))?).await?;
    ensure!(stream.read(&mut [0; 4096]).await? > 0, "the daemon does not answer");
    let before = farm.gateway_metric(RESET).await?;
    swallow(address.parse()?).await?;
    let begun = Instant::now();
    stream.write_all(&[22; 600]).await?;
    let end = tokio::time::timeout(Duration::from_secs(40), stream.read(&mut [0; 16])).await.context("it hangs")?;
    let took = begun.elapsed();
    ensure!(end.is_err(), "{end:?}");
    ensure!(took > Duration::from_secs(15) && took < Duration::from_secs(28), "found after {took:?}");
    counted(farm, before, Duration::from_secs(2)).await?;
    eprintln!("the black hole was found after {took:.1?}");
    Ok(())
}

/// What a client of these days sends first.
fn hello(name: &str) -> anyhow::Result<Vec<u8>> {
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let mut client = ClientConnection::new(Arc::new(config), ServerName::try_from(name.to_owned())?)?;
    let mut hello = Vec::new();
    client.write_tls(&mut hello)?;
    Ok(hello)
}

/// Drops what comes to the daemon of a pod, and what it says, in the pod's own network.
async fn swallow(pod: IpAddr) -> anyhow::Result<()> {
    for entry in std::fs::read_dir("/run/netns")? {
        let name = entry?.file_name().into_string().unwrap_or_default();
        let mut show = Command::new("ip");
        show.args(["-netns", &name, "-oneline", "-4", "address"]);
        if !process::output(show).await.is_ok_and(|text| text.contains(&format!(" {pod}/"))) {
            continue;
        }
        for (chain, port) in [("INPUT", "--dport"), ("OUTPUT", "--sport")] {
            let mut drop = Command::new("ip");
            drop.args(["netns", "exec", &name, "iptables", "-I", chain, "-p", "tcp", port, "1234", "-j", "DROP"]);
            process::output(drop).await?;
        }
        return Ok(());
    }
    bail!("no network namespace has the address {pod}")
}
