//! Daemons come and go.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::provisioner::project::Phase;
use rustix::process::Signal;

use crate::Machine;
use crate::host::{Farm, Who, cached};

const REPO: &str = "github.com/acme/shop";

/// Daemons go as soon as nobody uses them.
const HASTY: [&str; 2] = ["--idle-seconds=1", "--adaptive-idle-max-seconds=0"];

const SOON: Duration = Duration::from_secs(30);

pub(crate) async fn two_first_routes_start_one_daemon(machine: Arc<Machine>) -> anyhow::Result<()> {
    let farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed: Vec<_> = std::thread::scope(|scope| {
        let routes: Vec<_> = (0..20).map(|_| scope.spawn(|| farm.route(REPO))).collect();
        routes.into_iter().map(|route| route.join().unwrap()).collect::<anyhow::Result<_>>()
    })?;
    let mut ids: Vec<_> = routed.iter().map(|routed| &routed.build).collect();
    ids.sort();
    ids.dedup();
    ensure!(ids.len() == 20 && routed.iter().all(|r| r.endpoint == routed[0].endpoint));
    ensure!(farm.daemons().len() == 1, "{:?}", farm.daemons());
    let project = farm.project(&routed[0].key)?;
    ensure!(project.summary.in_flight.count == 20, "{:?}", project.summary.in_flight);
    Ok(())
}

pub(crate) async fn an_idle_daemon_goes_to_zero_and_a_dial_wakes_it(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &HASTY).await?;
    let routed = farm.route(REPO)?;
    farm.build(&routed.endpoint, "idle").await?;
    tokio::time::sleep(Duration::from_secs(5)).await;
    ensure!(farm.daemons().len() == 1, "a build in flight does not hold its daemon");
    farm.complete(&routed)?;
    farm.until("the daemon goes to zero", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
    farm.until("zero is told", SOON, |farm| Ok(farm.project(&routed.key)?.summary.phase == Phase::Idle)).await?;
    let begun = Instant::now();
    let woken = farm.build(&routed.endpoint, "idle").await?;
    let took = begun.elapsed();
    eprintln!("from zero to the end of a cached build: {} ms", took.as_millis());
    ensure!(cached(&woken), "the cache did not outlive its daemon:\n{woken}");
    ensure!(took < Duration::from_millis(4500), "{took:?}");
    Ok(())
}

pub(crate) async fn a_build_that_nobody_registered_keeps_its_daemon(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &HASTY).await?;
    let routed = farm.route(REPO)?;
    let build = tokio::process::Command::from(farm.buildctl(&routed.endpoint, "unregistered", 8.0)?).spawn()?;
    farm.until("the build runs", SOON, |farm| {
        Ok(farm.project(&routed.key)?.summary.active_builds.is_some_and(|active| !active.is_empty()))
    })
    .await?;
    farm.complete(&routed)?;
    let output = build.wait_with_output().await?;
    crate::host::printed(output).with_context(|| farm.said())?;
    ensure!(farm.said().contains("not scaled to zero"), "{}", farm.said());
    farm.until("the daemon goes to zero", SOON, |farm| Ok(farm.daemons().is_empty())).await
}

pub(crate) async fn ctrl_c_lets_builds_end_first(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed = farm.route(REPO)?;
    let idle = farm.route("github.com/acme/idle")?;
    farm.complete(&idle)?;
    let build = tokio::process::Command::from(farm.buildctl(&routed.endpoint, "drained", 5.0)?).spawn()?;
    farm.until("the build runs", SOON, |farm| {
        Ok(farm.project(&routed.key)?.summary.active_builds.is_some_and(|active| !active.is_empty()))
    })
    .await?;
    farm.signal(Signal::INT)?;
    farm.until("the idle daemon goes", SOON, |farm| Ok(farm.daemons().len() == 1)).await?;
    let (status, said) = farm.post("/route", &serde_json::json!({"repo": REPO, "arch": "amd64"}))?;
    ensure!(status == 503 && said.contains("ending"), "{status} {said}");
    crate::host::printed(build.wait_with_output().await?).context("the build was cut")?;
    ensure!(farm.ended()?.is_none(), "it ended before its build was released");
    farm.complete(&routed)?;
    farm.until("up ends", SOON, |farm| Ok(farm.ended()?.is_some())).await?;
    ensure!(farm.daemons().is_empty());

    // The second signal ends builds.
    farm.start().await?;
    let routed = farm.route(REPO)?;
    let mut command = tokio::process::Command::from(farm.buildctl(&routed.endpoint, "cut", 60.0)?);
    let mut build = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    farm.until("the build runs", SOON, |farm| {
        Ok(farm.project(&routed.key)?.summary.active_builds.is_some_and(|active| !active.is_empty()))
    })
    .await?;
    let told = |farm: &Farm| farm.said().matches("once more ends them").count();
    let before = told(&farm);
    farm.signal(Signal::INT)?;
    farm.until("it says how to end at once", SOON, |farm| Ok(told(farm) > before)).await?;
    farm.signal(Signal::INT)?;
    farm.until("up ends", Duration::from_secs(15), |farm| Ok(farm.ended()?.is_some())).await?;
    ensure!(farm.daemons().is_empty() && !build.wait().await?.success());
    Ok(())
}

pub(crate) async fn the_least_recently_used_cache_makes_room(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &HASTY).await?;
    let (mut routed, mut sizes) = (Vec::new(), Vec::new());
    for name in ["old", "new"] {
        let one = farm.route(&format!("github.com/acme/{name}"))?;
        farm.build(&one.endpoint, name).await?;
        farm.complete(&one)?;
        farm.until("the size of its cache is told", SOON, |farm| {
            Ok(farm.project(&one.key)?.summary.cache.is_some_and(|room| room.bytes_used > 0))
        })
        .await?;
        sizes.push(farm.project(&one.key)?.summary.cache.context("no cache")?.bytes_used);
        routed.push(one);
        farm.until("the daemon goes to zero", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
    }
    farm.stop().await?;
    // One of them fits, both do not.
    let budget = format!("--cache-budget={}", sizes[1] + sizes[0] / 2);
    farm.set_flags(&[HASTY[0], HASTY[1], &budget, "--cache-budget-every=1s"]);
    farm.start().await?;
    let (old, new) = (&routed[0], farm.route("github.com/acme/new")?);
    let pruned = |key: &str| format!("pruned for the cache budget project.key=\"{key}\"");
    let told = pruned(&old.key);
    farm.until("the old cache is pruned", SOON, |farm| Ok(farm.said().contains(&told))).await?;
    ensure!(!farm.said().contains(&pruned(&new.key)), "{}", farm.said());
    ensure!(cached(&farm.build(&new.endpoint, "new").await?), "the cache of a build in flight was pruned");
    let left = |farm: &Farm| anyhow::Ok(farm.project(&old.key)?.summary.cache.context("no cache")?.bytes_used);
    farm.until("the old cache has given half of it", SOON, |farm| Ok(left(farm)? <= sizes[0] / 2)).await
}

pub(crate) async fn cut_builds_end_at_once_and_stay_away(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    for (verb, name) in [("stop", "cut-by-stop"), ("rm", "cut-by-rm")] {
        let routed = farm.route(REPO)?;
        let key = routed.key.as_str();
        let mut command = tokio::process::Command::from(farm.buildctl(&routed.endpoint, name, 100.0)?);
        let mut build = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        farm.until("the build runs", SOON, |farm| {
            Ok(farm.project(key)?.summary.active_builds.is_some_and(|active| !active.is_empty()))
        })
        .await?;
        let refused = farm.run(verb, &[key])?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(refused.status.code() == Some(5) && said.contains("1 build is in flight"), "{refused:?}");
        let begun = Instant::now();
        crate::host::printed(farm.run(verb, &["--cut-builds", key])?)?;
        ensure!(begun.elapsed() < Duration::from_secs(6), "{verb} took {:?}", begun.elapsed());
        ensure!(farm.daemons().is_empty(), "{verb} returned before the daemon had ended");
        ensure!(!farm.is_registered(&routed)?, "the entry of a build that was cut is kept");
        ensure!(!build.wait().await?.success());
        // Who was cut dials again.
        let mut dialled = farm.buildctl(&routed.endpoint, name, 0.1)?.spawn()?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        ensure!(farm.daemons().is_empty(), "a dial after {verb} woke it\n{}", farm.said());
        dialled.kill()?;
        dialled.wait()?;
    }
    // Another project is not held up by that.
    let routed = farm.route("github.com/acme/other")?;
    farm.build(&routed.endpoint, "after-the-cut").await.map(drop)
}

pub(crate) async fn an_entry_that_nobody_uses_does_not_hold_the_end(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed = farm.route(REPO)?;
    farm.signal(Signal::INT)?;
    let told = format!("bko-install stop {} --cut-builds --state-dir", routed.key);
    farm.until("it says what it waits for", SOON, |farm| Ok(farm.said().contains(&told))).await?;
    farm.until("up ends", Duration::from_secs(60), |farm| Ok(farm.ended()?.is_some())).await?;
    ensure!(farm.daemons().is_empty() && farm.said().contains("releasing entries that nobody uses"), "{}", farm.said());
    Ok(())
}

pub(crate) async fn what_is_removed_is_removed_whoever_routes_meanwhile(machine: Arc<Machine>) -> anyhow::Result<()> {
    let farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    for round in 0..10 {
        let routed = farm.route(REPO)?;
        let marker = farm.state.join("caches").join(&routed.key).join("marker");
        std::fs::write(&marker, "")?;
        let (key, mut command) = (routed.key.clone(), farm.prepared("rm", &["--cut-builds", &routed.key]));
        let removing = std::thread::spawn(move || command.output());
        let mut answered = 0;
        while !removing.is_finished() {
            answered += usize::from(farm.route(REPO).is_ok());
        }
        let removed = removing.join().ok().context("a thread died")??;
        ensure!(removed.status.success(), "{removed:?}");
        ensure!(!marker.exists(), "round {round}: \"removed {key}\", and its cache is there; {answered} routes");
    }
    let routed = farm.route(REPO)?;
    farm.build(&routed.endpoint, "removed").await.map(drop)
}

pub(crate) async fn stop_logs_rm_and_prune_do_what_they_say(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed = farm.route(REPO)?;
    farm.build(&routed.endpoint, "verbs").await?;
    let key = routed.key.as_str();
    let refused = farm.run("stop", &[key])?;
    ensure!(refused.status.code() == Some(5), "{refused:?}");
    ensure!(farm.run("rm", &[key])?.status.code() == Some(5));
    farm.complete(&routed)?;
    // Its daemon says a moment after the client that the build has ended: that is waited for.
    crate::host::printed(farm.run("stop", &[key])?)?;
    farm.until("the daemon goes to zero", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
    let logs = farm.run("logs", &[key])?;
    ensure!(String::from_utf8_lossy(&logs.stdout).contains("running server on"), "{logs:?}");
    let again = farm.route(REPO)?;
    ensure!(cached(&farm.build(&again.endpoint, "verbs").await?));
    farm.complete(&again)?;
    // BuildKit prunes where a daemon runs; elsewhere the cache goes whole.
    let pruned = farm.run("prune", &[key])?;
    ensure!(pruned.status.success() && String::from_utf8_lossy(&pruned.stderr).contains("freed"), "{pruned:?}");
    let pruned = farm.build(&routed.endpoint, "verbs").await?;
    ensure!(!cached(&pruned), "{pruned}");
    farm.until("the daemon may stop", SOON, |farm| Ok(farm.run("stop", &[key])?.status.success())).await?;
    farm.until("the daemon goes to zero", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
    ensure!(farm.run("prune", &[key])?.status.success() && !farm.state.join("caches").join(key).exists());
    ensure!(farm.run("prune", &[])?.status.success());
    let again = farm.route(REPO)?;
    farm.complete(&again)?;
    // It is not said to be removed before its daemon and cache have gone, however long that takes.
    let late = farm.run("rm", &["--wait=0s", key])?;
    let said = String::from_utf8_lossy(&late.stderr);
    ensure!(late.status.code() == Some(1) && said.contains("but not yet its cache"), "{late:?}");
    ensure!(!said.contains(&format!("removed {key}")), "{said}");
    farm.until("everything has gone", SOON, |farm| {
        Ok(farm.projects()?.projects.is_empty() && !farm.state.join("daemons").join(key).exists())
    })
    .await?;
    let unknown = farm.run("stop", &[key])?;
    ensure!(String::from_utf8_lossy(&unknown.stderr).contains("there is no project"), "{unknown:?}");
    farm.stop().await?;
    let nobody = farm.run("stop", &[key])?;
    ensure!(String::from_utf8_lossy(&nobody.stderr).contains("no farm runs on"), "{nobody:?}");
    Ok(())
}
