//! What a gateway asks of a server when a client dials a daemon at zero.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::families::build_farm::api::Phase;
use bko_install::gateway::wake::{Dialled, PATH, Told, Verdict};
use bko_install::runtime::internal::{AskError, tell};
use futures::future::try_join_all;
use jiff::Timestamp;

use crate::farm::{self, KEY, REPO, Server};
use crate::harness::Cluster;
use crate::routes::{POD, SOON, farm, phase};

const TOKEN: &str = "between us";
const ENVIRONMENT: [(&str, &str); 2] =
    [("BUILDKIT_OPERATOR_INTERNAL_TOKEN", TOKEN), ("BUILDKIT_OPERATOR_AUTH_TOKEN", "for callers")];

async fn dial(server: &Server, daemon: &str, token: &str) -> Result<Verdict, AskError> {
    let said = Dialled { daemon: daemon.parse().unwrap() };
    let token = token.parse().unwrap();
    let told = tell::<Told>(server.admin, PATH, &said, Some(&token), Duration::from_secs(5)).await?;
    Ok(told.verdict)
}

pub(crate) async fn a_dial_wakes_what_was_routed_lately(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "dialled").await?;
    let daemon = format!("buildkitd-{KEY}");
    let server = Server::with(&cluster, &farm.flags(&["--idle-seconds=1"]), &ENVIRONMENT).await?;
    let stranger = dial(&server, &daemon, "something else").await;
    ensure!(matches!(stranger, Err(AskError::Status(_, status)) if status == 401), "{stranger:?}");
    ensure!(dial(&server, &daemon, TOKEN).await? == Verdict::Unknown, "nobody has routed it");
    let answer = server.route(REPO).await?;
    server.complete(&answer).await?;
    farm::until(&cluster, &farm.namespace, KEY, "idle", |p| phase(p) == Some(Phase::Idle)).await?;
    let before = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;

    let since = Timestamp::now();
    let dials = (0..50).map(|_| dial(&server, &daemon, TOKEN));
    let verdicts = try_join_all(dials).await?;
    ensure!(verdicts.iter().all(|verdict| *verdict == Verdict::Starting), "{verdicts:?}");
    farm::until(&cluster, &farm.namespace, KEY, "warm", |p| phase(p) == Some(Phase::Warm)).await?;
    let woken = farm::status(&cluster, &farm.namespace, KEY).await.context("no project")?;
    ensure!(woken.wake_until.as_ref().is_some_and(|until| until.0 > since + Duration::from_secs(120)), "{woken:?}");
    ensure!(
        woken.last_build_time == before.last_build_time && woken.inflight.is_empty(),
        "a wake is no route: {woken:?}"
    );
    let writes = cluster.audit().writes_by("bko-install", since).await?;
    let statuses =
        writes.iter().filter(|w| w.namespace == farm.namespace && w.resource == "buildprojects/status").count();
    ensure!(statuses <= 6, "{statuses} writes of the status for 50 dials: {writes:?}");
    // Beyond the idle time and several looks: the wake keeps it.
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(farm::replicas(&cluster, &farm.namespace, KEY).await? == 1, "taken down in spite of the wake");

    let strict = Server::with(&cluster, &farm.flags(&["--idle-seconds=1", "--wake-window=0s"]), &ENVIRONMENT).await?;
    let other = strict.route("acme/other").await?;
    strict.complete(&other).await?;
    let key = other["key"].as_str().context("no key")?;
    farm::until(&cluster, &farm.namespace, key, "idle", |p| phase(p) == Some(Phase::Idle)).await?;
    ensure!(dial(&strict, &format!("buildkitd-{key}"), TOKEN).await? == Verdict::Asleep);
    ensure!(farm::replicas(&cluster, &farm.namespace, key).await? == 0);
    Ok(())
}

pub(crate) async fn a_dial_ends_a_scale_down_at_once(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let farm = farm(&cluster, "dialled-late").await?;
    let daemon = format!("buildkitd-{KEY}");
    let server =
        Server::with(&cluster, &farm.flags(&["--idle-seconds=0", "--gateway-host=builds.example.test"]), &ENVIRONMENT)
            .await?;
    let answer = server.route(REPO).await?;
    server.complete(&answer).await?;
    farm::until(&cluster, &farm.namespace, KEY, "asked", |p| p.status_or_default().gate.closed).await?;
    let pod = farm.play.wait_ready(POD, SOON).await?;
    // In the middle of the two seconds that it must be quiet for.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let begun = Instant::now();
    ensure!(dial(&server, &daemon, TOKEN).await? == Verdict::Starting);
    farm::until(&cluster, &farm.namespace, KEY, "open", |p| !p.status_or_default().gate.closed).await?;
    ensure!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    ensure!(farm.play.ready(POD).as_ref() == Some(&pod), "another pod");
    tokio::time::sleep(Duration::from_secs(4)).await;
    ensure!(farm::replicas(&cluster, &farm.namespace, KEY).await? == 1, "taken down in spite of the wake");
    Ok(())
}
