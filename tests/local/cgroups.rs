//! Daemons in cgroups of their own.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::Machine;
use crate::harness::sandbox;
use crate::host::{Farm, USER, Who};

const REPO: &str = "github.com/acme/shop";
const SOON: Duration = Duration::from_secs(30);

/// Mount points of what a farm uses.
fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return vec![root];
    }
    let entries = std::fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| !path.ends_with("systemd") && !path.ends_with("cpuset")).collect()
}

/// The cgroups of the daemon of a project, with what is in them and below.
fn groups(farm: &Farm, key: &str) -> Vec<PathBuf> {
    let parents = hierarchies().into_iter().map(|mount| mount.join(farm.cgroup()));
    let farms = parents.flat_map(|parent| std::fs::read_dir(parent).into_iter().flatten().flatten());
    farms.map(|entry| entry.path().join(key)).filter(|path| path.is_dir()).collect()
}

fn members(folder: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    let mut pids: Vec<_> = text.lines().filter_map(|line| line.parse().ok()).collect();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            pids.extend(members(&entry.path()));
        }
    }
    pids
}

fn end(pid: u32) -> anyhow::Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("no process id")?;
    Ok(kill_process(pid, Signal::KILL)?)
}

/// Starts a build that runs on, and returns when its step is in the cgroup of its daemon.
async fn building(farm: &mut Farm, who: Who) -> anyhow::Result<(String, tokio::process::Child)> {
    let routed = farm.route(REPO)?;
    let command = farm.buildctl(&routed.endpoint, &format!("grouped-{who:?}"), 60.0)?;
    let build = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
    let key = routed.key.clone();
    farm.until("the step runs in the cgroup", SOON, |farm| {
        let found = groups(farm, &key);
        let sleeps = |pid: &u32| {
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"sleep\x0060\x00"))
        };
        Ok(!found.is_empty() && found.iter().all(|group| members(group).iter().any(sleeps)))
    })
    .await?;
    Ok((routed.key, build))
}

async fn ends_with_its_cgroup(farm: &mut Farm, who: Who) -> anyhow::Result<()> {
    farm.start().await?;
    let (key, _build) = building(farm, who).await?;
    // The daemon dies, and its steps with it; another comes into the same cgroup.
    let [(daemon, _)] = farm.daemons()[..] else { anyhow::bail!("{:?}", farm.daemons()) };
    let before = members(&groups(farm, &key)[0]);
    end(daemon)?;
    farm.until("everything of before has ended", SOON, |_| {
        Ok(before.iter().all(|pid| !Path::new(&format!("/proc/{pid}/exe")).exists()))
    })
    .await?;
    // Both die: the next `up` ends what they left.
    farm.until("it is started again", SOON, |farm| Ok(farm.daemons().len() == 1)).await?;
    let (key, _build) = building(farm, who).await?;
    farm.kill()?;
    let [(daemon, _)] = farm.daemons()[..] else { anyhow::bail!("{:?}", farm.daemons()) };
    let before = members(&groups(farm, &key)[0]);
    end(daemon)?;
    farm.start().await?;
    farm.until("what the dead daemon left has ended", SOON, |_| {
        Ok(before.iter().all(|pid| !Path::new(&format!("/proc/{pid}/exe")).exists()))
    })
    .await?;
    farm.run("stop", &["--cut-builds", &key])?;
    farm.until("its cgroups go with it", SOON, |farm| Ok(groups(farm, &key).is_empty())).await
}

pub(crate) async fn each_daemon_has_its_own_and_ends_with_all_that_is_in_it(
    machine: Arc<Machine>,
) -> anyhow::Result<()> {
    let mut farm = Farm::new(&machine.tools, Who::Root, &[])?;
    ends_with_its_cgroup(&mut farm, Who::Root).await?;
    farm.stop().await?;
    let left = hierarchies().into_iter().map(|mount| mount.join(farm.cgroup()));
    let left: Vec<_> = left.filter(|path| path.exists()).flat_map(std::fs::read_dir).flatten().flatten().collect();
    ensure!(left.iter().all(|entry| !entry.path().is_dir()), "{left:?}");
    Ok(())
}

pub(crate) async fn v2_alone_will_do(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::new(&machine.tools, Who::Root, &[])?;
    farm.see_only_v2();
    ends_with_its_cgroup(&mut farm, Who::Root).await?;
    // It is that hierarchy which the daemon is in, and no other.
    let routed = farm.route(REPO)?;
    let [(daemon, _)] = farm.daemons()[..] else { anyhow::bail!("{:?}", farm.daemons()) };
    let own = std::fs::read_to_string(format!("/proc/{daemon}/cgroup"))?;
    let within: Vec<_> = own.lines().filter(|line| line.contains(farm.cgroup())).collect();
    let end = format!("/{}/daemon", routed.key);
    ensure!(matches!(within[..], [line] if line.starts_with("0::") && line.ends_with(&end)), "{own}");
    farm.complete(&routed)?;
    farm.stop().await
}

pub(crate) async fn an_ordinary_user_has_some_where_it_may_make_them(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::new(&machine.tools, Who::Ordinary, &[])?;
    // As systemd delegates: the folder and the files that move processes are the user's, and it begins within.
    let mine = format!("{}/user", sandbox::cgroup());
    for mount in hierarchies() {
        let folder = mount.join(&mine);
        std::fs::create_dir_all(&folder)?;
        for path in [folder.clone(), folder.join("cgroup.procs"), folder.join("tasks")] {
            if path.exists() {
                std::os::unix::fs::chown(&path, Some(USER), Some(USER))?;
            }
        }
    }
    farm.begin_in(&mine);
    ends_with_its_cgroup(&mut farm, Who::Ordinary).await
}
