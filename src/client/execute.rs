//! Runs a builder: in the foreground with its own output and our signals, or
//! in the background with its words kept for an error.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, ChildStderr, Command as Process};
use tokio::time::sleep_until;

use super::builder::Command;
use super::output::Progress;
use super::platform::{self, Stop, Stops};
use super::{now, shell};

/// How long a builder that was asked to end may take.
const GRACE: Duration = Duration::from_secs(15);
/// How long a command that only writes a file may take.
const SHORT: Duration = Duration::from_secs(60);

/// Why a builder did not run.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// It does not start.
    #[error("cannot run `{command}`")]
    Start {
        /// The command line.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// It cannot be waited for.
    #[error("cannot wait for the builder")]
    Wait(#[source] io::Error),
    /// It refuses.
    #[error("`{command}` failed: {said}")]
    Failed {
        /// The command line.
        command: String,
        /// Its last words.
        said: String,
    },
}

/// A builder that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) code: u8,
    /// Who asked it to end.
    pub(super) stopped: Option<Stop>,
    /// What it said, if that passed through here.
    pub(super) progress: Option<Progress>,
}

fn process(command: &Command, hidden: &[&str]) -> Process {
    let mut words = command.iter();
    let mut process = Process::new(words.next().cloned().unwrap_or_default());
    process.args(words).kill_on_drop(true);
    for name in hidden {
        process.env_remove(name);
    }
    process
}

/// Runs a builder to its end. Off a terminal its messages pass through here,
/// byte for byte; on one they must not, or they would not be drawn.
pub(super) async fn attached(
    command: &Command,
    hidden: &[&str],
    watched: bool,
    stops: &mut Stops,
) -> Result<Ended, ExecuteError> {
    let mut process = process(command, hidden);
    if watched {
        process.stderr(Stdio::piped());
    }
    let mut child =
        process.spawn().map_err(|source| ExecuteError::Start { command: shell::command_line(command), source })?;
    let passing = child.stderr.take().map(|stderr| tokio::spawn(pass_through(stderr)));
    let (code, stopped) = wait(&mut child, stops).await.map_err(ExecuteError::Wait)?;
    let progress = match passing {
        // Whoever the builder started may keep its end of the pipe.
        Some(task) => tokio::time::timeout(Duration::from_secs(2), task).await.ok().and_then(Result::ok),
        None => None,
    };
    Ok(Ended { code, stopped, progress })
}

async fn wait(child: &mut Child, stops: &mut Stops) -> io::Result<(u8, Option<Stop>)> {
    let mut stopped = None;
    let mut deadline = None;
    loop {
        let late = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => {
                let code = platform::code(status?);
                return Ok((stopped.map_or(code, Stop::code), stopped));
            }
            stop = stops.next() => {
                platform::forward(child, stop);
                stopped.get_or_insert(stop);
                deadline.get_or_insert(now() + GRACE);
            }
            () = late => {
                child.start_kill()?;
                deadline = Some(now() + GRACE);
            }
        }
    }
}

async fn pass_through(mut stderr: ChildStderr) -> Progress {
    let mut progress = Progress::default();
    let mut buffer = vec![0; 16 * 1024];
    let mut ours = tokio::io::stderr();
    while let Ok(n @ 1..) = stderr.read(&mut buffer).await {
        let bytes = buffer.get(..n).unwrap_or_default();
        progress.read(bytes);
        // Who has closed it does not want to know; the builder goes on.
        let _ = ours.write_all(bytes).await;
        let _ = ours.flush().await;
    }
    progress.end();
    progress
}

/// Runs a short command whose output nobody needs if it succeeds.
pub(super) async fn quietly(command: &Command, hidden: &[&str]) -> Result<(), ExecuteError> {
    let shown = || shell::command_line(command);
    let mut process = process(command, hidden);
    let output = tokio::time::timeout(SHORT, process.stdin(Stdio::null()).output())
        .await
        .map_err(|_| ExecuteError::Failed { command: shown(), said: "it does not end".into() })?
        .map_err(|source| ExecuteError::Start { command: shown(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("without a word").trim().to_owned();
    Err(ExecuteError::Failed { command: shown(), said })
}
