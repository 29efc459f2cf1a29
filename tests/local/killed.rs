//! Processes end without warning.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::ensure;
use rustix::process::{Pid, Signal, kill_process};

use crate::Machine;
use crate::harness::repetitions;
use crate::host::{Farm, Routed, Who, cached};

const REPO: &str = "github.com/acme/shop";
const SOON: Duration = Duration::from_secs(30);

/// Different in every round, the same in every run.
fn dither(round: usize) -> Duration {
    Duration::from_millis(u64::try_from((round * 7919 + 13) % 240).unwrap())
}

/// Routes and releases until told to stop; what was answered and not released.
fn load(farm: &Farm, worker: usize, round: usize, stop: &AtomicBool) -> Vec<Routed> {
    let mut held = Vec::new();
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        let repo = format!("github.com/acme/r{}", (worker + n) % 4);
        if let Ok(routed) = farm.route(&repo) {
            // Whether a release that was not answered took effect is open: only what
            // was never released must be there.
            if (n + round).is_multiple_of(3) { held.push(routed) } else { drop(farm.complete(&routed)) }
        }
        n += 1;
    }
    held
}

pub(crate) async fn whoever_is_killed_nothing_is_lost(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &["--max-inflight=2000", "--api-rate-limit=0"]).await?;
    let mut held: Vec<Routed> = Vec::new();
    let mut endpoints = std::collections::HashMap::new();
    let first = farm.route("github.com/acme/r0")?;
    farm.build(&first.endpoint, "killed").await?;
    held.push(first);
    for round in 0..repetitions(100) {
        let stop = AtomicBool::new(false);
        let shared = &farm;
        let more: Vec<Routed> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..3)
                .map(|worker| {
                    scope.spawn({
                        let stop = &stop;
                        move || load(shared, worker, round, stop)
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(150) + dither(round));
            shared.signal(Signal::KILL).unwrap();
            stop.store(true, Ordering::Relaxed);
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        });
        held.extend(more);
        let before = farm.daemons();
        drop(farm.kill());
        ensure!(before == farm.daemons(), "round {round}: daemons went with the process that started them");
        farm.start().await?;
        // Every daemon is the same process as before, and none is there twice.
        let keys: HashSet<_> = farm.daemons().into_iter().map(|(_, key)| key).collect();
        ensure!(keys.len() == farm.daemons().len(), "round {round}: {:?}", farm.daemons());
        for daemon in &before {
            ensure!(farm.daemons().contains(daemon), "round {round}: {daemon:?} was restarted\n{}", farm.said());
        }
        let projects = farm.projects()?.projects;
        for routed in &held {
            let known = endpoints.entry(routed.key.clone()).or_insert_with(|| routed.endpoint.clone());
            ensure!(*known == routed.endpoint, "round {round}: {} moved from {known}", routed.key);
            let project = projects.iter().find(|project| project.key == routed.key);
            let Some(project) = project else { anyhow::bail!("round {round}: project {} is lost", routed.key) };
            let answered = held.iter().filter(|held| held.key == routed.key).count();
            ensure!(project.in_flight.count >= answered, "round {round}: {} of {answered}", project.in_flight.count);
        }
    }
    let rounds = repetitions(100);
    eprintln!("killed {rounds} times with {} builds in flight", held.len());
    // Each of them is really there: a release finds it.
    for routed in &held {
        ensure!(farm.is_registered(routed)?, "{routed:?} is lost");
    }
    let again = farm.route("github.com/acme/r0")?;
    ensure!(cached(&farm.build(&again.endpoint, "killed").await?), "the cache is lost");
    farm.complete(&again)?;
    Ok(())
}

pub(crate) async fn a_daemon_that_no_project_knows_of_is_ended(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed = farm.route(REPO)?;
    ensure!(farm.daemons().len() == 1);
    farm.kill()?;
    for file in ["state.redb", "journal"] {
        std::fs::remove_file(farm.state.join(file))?;
    }
    farm.start().await?;
    farm.until("the orphan ends", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
    ensure!(farm.projects()?.projects.is_empty());
    let again = farm.route(REPO)?;
    ensure!(again.endpoint == routed.endpoint, "an address follows from its key");
    Ok(())
}

pub(crate) async fn a_daemon_that_dies_is_started_again(machine: Arc<Machine>) -> anyhow::Result<()> {
    for who in [Who::Root, Who::Ordinary] {
        let mut farm = Farm::up(&machine.tools, who, &[]).await?;
        let routed = farm.route(REPO)?;
        farm.build(&routed.endpoint, "dies").await?;
        let [(pid, _)] = farm.daemons()[..] else { anyhow::bail!("{:?}", farm.daemons()) };
        // Long enough for a daemon that ran well.
        tokio::time::sleep(Duration::from_secs(11)).await;
        kill_process(Pid::from_raw(i32::try_from(pid)?).unwrap(), Signal::KILL)?;
        farm.until("another is there", SOON, |farm| {
            Ok(farm.daemons().iter().any(|(other, _)| *other != pid) && farm.project(&routed.key)?.summary.ready)
        })
        .await?;
        let again = farm.build(&routed.endpoint, "dies").await?;
        ensure!(cached(&again), "{who:?}: {again}");
        // Off a terminal there is a line for that, too: the second that it is warm.
        let warm = format!("Z  {REPO}  warm");
        farm.until("a line tells of it", SOON, |farm| Ok(farm.said().matches(&warm).count() >= 2)).await?;
    }
    Ok(())
}
