//! A wall clock that jumps under a running `up`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::Machine;
use crate::host::{Farm, Who, printed};

const SOON: Duration = Duration::from_secs(30);

/// Longer than what is left of a new certificate when it is renewed, and far longer than any build.
const AHEAD: i64 = 340 * 86_400;

/// The clock of one process: a library that is loaded before the C library, so
/// the executable must be a dynamic one.
struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    fn new(room: &Path) -> anyhow::Result<Self> {
        let clock = Self { library: room.join("clock.so"), file: room.join("clock") };
        let source = room.join("clock.c");
        std::fs::write(&source, include_str!("clock.c"))?;
        let compile = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&clock.library).arg(&source).output()?;
        printed(compile).context("cc")?;
        clock.set(0)?;
        Ok(clock)
    }

    fn set(&self, ahead: i64) -> anyhow::Result<()> {
        // Never half of it.
        let draft = self.file.with_extension("draft");
        std::fs::write(&draft, ahead.to_string())?;
        Ok(std::fs::rename(draft, &self.file)?)
    }
}

pub(crate) async fn a_clock_that_jumps_under_a_running_farm_cuts_nothing_and_loses_nothing(
    machine: Arc<Machine>,
) -> anyhow::Result<()> {
    let flags = ["--idle-seconds=1", "--adaptive-idle-max-seconds=0"];
    let mut farm = Farm::new(&machine.tools, Who::Root, &flags)?;
    let room = farm.state.with_extension("clock");
    std::fs::create_dir_all(&room)?;
    let clock = Clock::new(&room)?;
    farm.use_program(Path::new(env!("CARGO_BIN_EXE_bko-install")));
    farm.set_env(&[("LD_PRELOAD", clock.library.as_path()), ("BKO_CLOCK", clock.file.as_path())]);
    farm.start().await?;
    let certificate = farm.state.join("certs/client/cert.pem");
    let first = std::fs::read(&certificate)?;

    // Forward, under a build: it counts as older than any build may be, but it runs.
    let routed = farm.route("github.com/acme/shop")?;
    let mut build = tokio::process::Command::from(farm.buildctl(&routed.endpoint, "jumped", 20.0)?).spawn()?;
    farm.until("the build runs", SOON, |farm| {
        Ok(farm.project(&routed.key)?.summary.active_builds.is_some_and(|active| !active.is_empty()))
    })
    .await?;
    let before = farm.daemons();
    clock.set(AHEAD)?;
    farm.until("it is told", SOON, |farm| Ok(farm.said().contains("clock of this host went forward by 11months")))
        .await?;
    farm.until("certificates that end by now are renewed", SOON, |_| Ok(std::fs::read(&certificate)? != first)).await?;
    ensure!(build.wait().await?.success(), "the build was cut\n{}", farm.said());
    ensure!(farm.daemons() == before, "its daemon was taken away\n{}", farm.said());
    farm.complete(&routed)?;
    // What is noted now lies ahead of what comes.
    let held = farm.route("github.com/acme/other")?;
    let ahead = std::fs::read(&certificate)?;

    clock.set(0)?;
    farm.until("it is told", SOON, |farm| Ok(farm.said().contains("clock of this host went back by 11months"))).await?;
    farm.until("certificates of the future are made anew", SOON, |_| Ok(std::fs::read(&certificate)? != ahead)).await?;
    ensure!(farm.is_registered(&held)?, "{held:?} is lost");
    farm.until("no daemon is kept for what lay ahead", SOON, |farm| Ok(farm.daemons().is_empty())).await?;
    for repo in ["github.com/acme/shop", "github.com/acme/other"] {
        let routed = farm.route(repo)?;
        farm.build(&routed.endpoint, "after-the-jump").await?;
        farm.complete(&routed)?;
    }
    farm.stop().await
}
