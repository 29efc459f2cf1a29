//! Caches on the file systems that hosts have.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;

use crate::Machine;
use crate::host::{Farm, Who, cached, printed};

const REPO: &str = "github.com/acme/shop";

/// A file system in a file of this sandbox, gone with it.
fn mount(name: &str, make: &[&str]) -> anyhow::Result<Option<PathBuf>> {
    if Command::new(make[0]).arg("--version").output().is_err() {
        eprintln!("{name}: {} is not installed, left out", make[0]);
        return Ok(None);
    }
    let image = Path::new("/tmp/hostpath_pv").join(format!("{name}.img"));
    let folder = Path::new("/tmp/hostpath_pv").join(name);
    std::fs::File::create(&image)?.set_len(600 << 20)?;
    std::fs::create_dir_all(&folder)?;
    printed(Command::new(make[0]).args(&make[1..]).arg(&image).output()?)?;
    printed(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&folder).output()?)?;
    Ok(Some(folder))
}

pub(crate) async fn every_file_system_keeps_and_copies_caches(machine: Arc<Machine>) -> anyhow::Result<()> {
    let systems = [
        ("ext4", "dir", vec!["mkfs.ext4", "-q"]),
        ("xfs", "reflink", vec!["mkfs.xfs", "-q", "-m", "reflink=1"]),
        ("btrfs", "btrfs", vec!["mkfs.btrfs", "-q"]),
    ];
    for (name, kind, make) in systems {
        let Some(folder) = mount(name, &make)? else { continue };
        let flags = [
            "--allow-unisolated-forks",
            "--idle-seconds=1",
            "--adaptive-idle-max-seconds=0",
            "--snapshot-every-seconds=1",
            "--keep-snapshots=2",
            "--cache-volume-gi=1",
        ];
        let mut farm = Farm::at(&machine.tools, Who::Root, &flags, folder.join("s"))?;
        farm.start().await?;
        let told = format!("caches: {kind}");
        farm.until("it says how caches are kept", Duration::from_secs(5), |farm| Ok(farm.said().contains(&told)))
            .await?;
        let key = {
            let routed = farm.route(REPO)?;
            farm.build(&routed.endpoint, "stored").await?;
            farm.complete(&routed)?;
            routed.key
        };
        let snapshots = farm.state.join("snapshots").join(&key);
        for round in 1..=3 {
            farm.until("the daemon goes to zero", Duration::from_secs(30), |farm| Ok(farm.daemons().is_empty()))
                .await?;
            let count = move |folder: &Path| std::fs::read_dir(folder).map_or(0, |entries| entries.flatten().count());
            let wanted = round.min(2);
            let snapshots = snapshots.clone();
            farm.until("a snapshot is there", Duration::from_secs(30), move |_| Ok(count(&snapshots) == wanted))
                .await?;
            let routed = farm.route(REPO)?;
            ensure!(cached(&farm.build(&routed.endpoint, "stored").await?), "{name}");
            farm.complete(&routed)?;
        }
        // While the project's own daemon runs, too: from a snapshot, or a copy in one go.
        let own = farm.route(REPO)?;
        let fork = farm.route_as(REPO, true)?;
        ensure!(cached(&farm.build(&fork.endpoint, "stored").await?), "{name}: the fork began without a cache");
        farm.complete(&fork)?;
        farm.complete(&own)?;
        printed(farm.run("rm", &["--cut-builds", &key])?)?;
        ensure!(!snapshots.exists() && !farm.state.join("caches").join(&key).exists(), "{name}: rm left a part");
        farm.stop().await?;
        printed(Command::new("umount").arg(&folder).output()?)?;
    }
    Ok(())
}
