//! A run of the harness that is there to be ended.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::traces::{Traces, descendants};

/// Which tier a victim starts.
pub(crate) const TIER: &str = "BKO_VICTIM_TIER";
const ENDING: &str = "BKO_VICTIM_ENDING";
const TOLD: &str = "BKO_VICTIM_TOLD";
const UP: &str = "the victim is up";

/// How long the last process may take to go: the kernel frees its memory first.
const LIMIT: Duration = Duration::from_secs(15);

/// The other side: says that it is up, waits to be told, and ends as asked.
pub(crate) fn live() -> ExitCode {
    println!("{UP}");
    let told = PathBuf::from(std::env::var_os(TOLD).unwrap());
    while !told.exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(std::env::var(ENDING).as_deref(), Ok(crate::PASSES), "panics as asked");
    ExitCode::SUCCESS
}

/// This side: a running victim.
pub(crate) struct Victim {
    child: Child,
    before: Traces,
    started: Vec<PathBuf>,
    /// Outside of the folders that a sandbox covers with its own.
    folder: tempfile::TempDir,
}

impl Victim {
    /// Starts one, and returns when its cluster is up.
    pub(crate) fn start(tier: &str, ending: &str) -> anyhow::Result<Self> {
        let mut victim = Self::start_only(tier, ending)?;
        let output = victim.child.stdout.take().context("no output")?;
        let up = BufReader::new(output).lines().any(|line| line.is_ok_and(|line| line == UP));
        let errors = || std::fs::read_to_string(victim.folder.path().join("errors")).unwrap_or_default();
        ensure!(up, "the victim did not come up:\n{}", errors());
        victim.started = descendants(victim.child.id());
        // etcd, API server, controller manager, and the four roles around them.
        ensure!(victim.started.len() >= 7, "too few processes: {:?}", victim.started);
        Ok(victim)
    }

    /// Starts one, and does not wait.
    pub(crate) fn start_only(tier: &str, ending: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let before = Traces::of_machine();
        let child = Command::new(std::env::current_exe()?)
            .env(TIER, tier)
            .env(ENDING, ending)
            .env(TOLD, folder.path().join("told"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(folder.path().join("errors"))?)
            .process_group(0)
            .spawn()?;
        Ok(Self { child, before, started: Vec::new(), folder })
    }

    /// Lets it go on to its end.
    pub(crate) fn tell(&self) -> anyhow::Result<()> {
        Ok(std::fs::write(self.folder.path().join("told"), "")?)
    }

    /// As Ctrl-C does.
    pub(crate) fn interrupt_group(&self) -> anyhow::Result<()> {
        Ok(kill_process_group(pid(self.child.id())?, Signal::INT)?)
    }

    /// As the kernel does when memory is short.
    pub(crate) fn kill(&self) -> anyhow::Result<()> {
        Ok(kill_process(pid(self.child.id())?, Signal::KILL)?)
    }

    /// Kills the process that would clean up.
    pub(crate) fn kill_keeper(&self) -> anyhow::Result<()> {
        let keeper = self.started.first().and_then(|process| process.file_name()?.to_str()?.parse().ok());
        Ok(kill_process(pid(keeper.context("no keeper")?)?, Signal::KILL)?)
    }

    /// Waits for its end and returns its exit code, none after a signal.
    ///
    /// # Errors
    /// Something is left of it.
    pub(crate) fn end(mut self) -> anyhow::Result<Option<i32>> {
        let code = self.child.wait()?.code();
        let deadline = Instant::now() + LIMIT;
        loop {
            let alive: Vec<_> = self.started.iter().filter(|process| process.exists()).collect();
            let left = Traces::of_machine().beyond(&self.before);
            if alive.is_empty() && left.is_empty() {
                return Ok(code);
            }
            ensure!(Instant::now() < deadline, "left behind: processes {alive:?}, {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn pid(id: u32) -> anyhow::Result<Pid> {
    i32::try_from(id).ok().and_then(Pid::from_raw).context("no process id")
}
