//! What `up` shows: on a terminal, and elsewhere.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::Machine;
use crate::host::{Farm, Who};

const REPO: &str = "github.com/acme/shop";
const SOON: Duration = Duration::from_secs(30);

pub(crate) async fn up_draws_on_a_terminal_and_tells_elsewhere(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed = farm.route(REPO)?;
    farm.build(&routed.endpoint, "told").await?;
    farm.complete(&routed)?;
    farm.until("a line tells of the build", SOON, |farm| Ok(farm.said().contains("done in "))).await?;
    ensure!(farm.said().contains(&format!("Z  {REPO}  warm")) && !farm.said().contains('\x1b'), "{}", farm.said());
    farm.stop().await?;
    if Command::new("script").arg("--version").output().is_err() {
        eprintln!("the view of `up`: script is not installed (Debian: bsdutils), left out");
        return Ok(());
    }
    for colour in [true, false] {
        let shown = farm.state.with_extension(format!("shown-{colour}"));
        let words: Vec<_> = farm.up_command().get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let program = farm.up_command().get_program().to_string_lossy().into_owned();
        let line = format!("stty cols 80 rows 24; exec {program} {}", words.join(" "));
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &line]).arg(&shown);
        command.env_clear().env("PATH", "/tmp/hostpath_pv/bin:/usr/bin:/bin:/usr/sbin").env("TERM", "xterm");
        command.env("HOME", "/tmp").env("SHELL", "/bin/sh").stdin(Stdio::null()).stdout(Stdio::null());
        if !colour {
            command.env("NO_COLOR", "1");
        }
        let mut script = command.spawn()?;
        let text = || String::from_utf8_lossy(&std::fs::read(&shown).unwrap_or_default()).into_owned();
        // It was used a moment ago, so its daemon comes up by itself.
        farm.until("the project is drawn", SOON, |_| Ok(text().contains("1 project, 1 up"))).await?;
        farm.until("it is warm", SOON, |_| Ok(text().contains("warm"))).await?;
        let drawn = text();
        ensure!(drawn.contains("\x1b[J") && drawn.contains("The farm is up") && drawn.contains(" INFO "), "{drawn}");
        ensure!(drawn.contains("\x1b[32mwarm") == colour && drawn.contains("\x1b[0m") == colour, "{drawn}");
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", script.id()))?;
        let up = children.split_whitespace().next().context("script has no child")?.parse()?;
        kill_process(Pid::from_raw(up).context("no process id")?, Signal::INT)?;
        farm.until("it ends", SOON, |_| Ok(script.try_wait()?.is_some())).await?;
        ensure!(farm.daemons().is_empty(), "{:?}", farm.daemons());
    }
    Ok(())
}
