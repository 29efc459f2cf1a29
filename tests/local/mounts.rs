//! What a daemon that was killed leaves mounted below its cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::Machine;
use crate::host::{Farm, Routed, Who};

const REPO: &str = "github.com/acme/shop";
const SOON: Duration = Duration::from_secs(30);

/// Mount points below the caches of a farm.
fn mounted(farm: &Farm) -> anyhow::Result<Vec<String>> {
    let caches = format!("{}/", farm.state.join("caches").display());
    let text = std::fs::read_to_string("/proc/self/mountinfo")?;
    let points = text.lines().filter_map(|line| line.split(' ').nth(4));
    Ok(points.filter(|point| point.starts_with(&caches)).map(str::to_owned).collect())
}

/// Processes of a step that sleeps for so long.
fn sleeping(seconds: u32) -> Vec<PathBuf> {
    let line = format!("sleep\0{seconds}\0");
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    processes.filter(|path| std::fs::read(path.join("cmdline")).is_ok_and(|l| l.ends_with(line.as_bytes()))).collect()
}

/// A build whose step runs.
async fn building(farm: &mut Farm, seconds: u32) -> anyhow::Result<(Routed, tokio::process::Child)> {
    // A daemon that died young is not started again at once.
    let mut answer = None;
    farm.until("a route is answered", SOON, |farm| {
        answer = farm.route(REPO).ok();
        Ok(answer.is_some())
    })
    .await?;
    let routed = answer.context("no route")?;
    let mut command = tokio::process::Command::from(farm.buildctl(
        &routed.endpoint,
        &format!("mounted-{seconds}"),
        f32::from(u16::try_from(seconds)?),
    )?);
    command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let build = command.spawn()?;
    farm.until("the step runs", SOON, |farm| Ok(!sleeping(seconds).is_empty() && !mounted(farm)?.is_empty())).await?;
    Ok((routed, build))
}

fn signal_daemons(farm: &Farm, signal: Signal) -> anyhow::Result<()> {
    for (pid, _) in farm.daemons() {
        kill_process(Pid::from_raw(i32::try_from(pid)?).context("no process id")?, signal)?;
    }
    Ok(())
}

fn unfinished(farm: &Farm) -> anyhow::Result<Vec<String>> {
    let entries = std::fs::read_dir(farm.state.join("caches"))?.flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    Ok(names.filter(|name| name.starts_with(".unfinished-")).collect())
}

pub(crate) async fn what_a_killed_daemon_left_is_in_nobodys_way(machine: Arc<Machine>) -> anyhow::Result<()> {
    // With cgroups and without, steps end in another way.
    for (flags, seconds) in [(&[][..], 611), (&["--cgroup="][..], 612)] {
        let mut farm = Farm::up(&machine.tools, Who::Root, flags).await?;
        let (routed, _build) = building(&mut farm, seconds).await?;
        // Both die, the daemon before it hears that its client has gone: what is mounted stays, and the next `up`
        // begins all the same.
        signal_daemons(&farm, Signal::STOP)?;
        farm.kill()?;
        signal_daemons(&farm, Signal::KILL)?;
        farm.until("the daemon ends", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
        ensure!(!mounted(&farm)?.is_empty(), "nothing was left: this tests nothing");
        farm.start().await?;
        farm.until("the daemon runs on a cache where nothing is mounted", SOON, |farm| {
            Ok(!farm.daemons().is_empty() && mounted(farm)?.is_empty() && sleeping(seconds).is_empty())
        })
        .await?;
        // The daemon alone dies.
        let (_, _build) = building(&mut farm, seconds + 10).await?;
        signal_daemons(&farm, Signal::KILL)?;
        farm.until("its step ends", SOON, |farm| Ok(mounted(farm)?.is_empty() && sleeping(seconds + 10).is_empty()))
            .await?;
        // `rm` in the midst of a build leaves nothing.
        let (_, _build) = building(&mut farm, seconds + 20).await?;
        signal_daemons(&farm, Signal::KILL)?;
        let removed = farm.run("rm", &["--cut-builds", &routed.key])?;
        ensure!(removed.status.success(), "{removed:?}\n{}", farm.said());
        ensure!(unfinished(&farm)?.is_empty() && mounted(&farm)?.is_empty(), "{:?}", unfinished(&farm)?);
        ensure!(!farm.state.join("caches").join(&routed.key).exists());
        // Nor does the second Ctrl-C.
        let (_, _build) = building(&mut farm, seconds + 30).await?;
        farm.signal(Signal::INT)?;
        farm.until("it says how to end at once", SOON, |farm| Ok(farm.said().contains("once more ends them"))).await?;
        farm.signal(Signal::INT)?;
        farm.until("up ends", SOON, |farm| Ok(farm.ended()?.is_some())).await?;
        ensure!(mounted(&farm)?.is_empty() && sleeping(seconds + 30).is_empty(), "{:?}", mounted(&farm)?);
    }
    Ok(())
}

/// A file system mounted on a folder keeps it from being removed and renamed.
fn pin(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    let mounted = Command::new("mount").args(["-t", "tmpfs", "tmpfs"]).arg(folder).status()?;
    ensure!(mounted.success());
    Ok(())
}

pub(crate) async fn a_cache_that_cannot_be_removed_keeps_nothing_down(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed = farm.route(REPO)?;
    farm.complete(&routed)?;
    farm.stop().await?;
    let caches = farm.state.join("caches");
    pin(&caches.join(format!(".unfinished-{}", routed.key)))?;
    farm.start().await?;
    ensure!(farm.said().contains("what is left cannot be removed, trying again later"), "{}", farm.said());
    let again = farm.route(REPO)?;
    farm.build(&again.endpoint, "pinned").await?;
    farm.complete(&again)?;
    let removed = farm.run("rm", &["--cut-builds", &routed.key])?;
    ensure!(removed.status.success() && !caches.join(&routed.key).exists(), "{removed:?}\n{}", farm.said());
    // And where it cannot be removed at all, that is said.
    let kept = farm.route("github.com/acme/kept")?;
    farm.complete(&kept)?;
    farm.until("the daemon stops", SOON, |farm| Ok(farm.run("stop", &[&kept.key])?.status.success())).await?;
    farm.until("it has gone", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
    pin(&caches.join(&kept.key))?;
    let removed = farm.run("rm", &[&kept.key])?;
    let said = String::from_utf8_lossy(&removed.stderr).into_owned();
    ensure!(removed.status.code() == Some(1) && said.contains("but not all of its cache"), "{removed:?}");
    ensure!(said.contains("busy") && !said.contains("removed p"), "{said}");
    Ok(())
}
