//! A program of the cluster: started, waited for, killed, started again. It
//! ends with the sandbox, so nothing is ended by hand.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use super::ROOT;

/// How often a program is asked whether it is ready.
const INTERVAL: Duration = Duration::from_millis(20);

/// A running program, its output in a log.
#[derive(Debug)]
pub(crate) struct Process {
    name: &'static str,
    log: PathBuf,
    command: Mutex<Command>,
    child: Mutex<Child>,
}

impl Process {
    /// Starts a program.
    ///
    /// # Errors
    /// It cannot be executed.
    pub(crate) fn spawn(name: &'static str, mut command: Command) -> anyhow::Result<Self> {
        let log = PathBuf::from(format!("{ROOT}/logs/{name}.log"));
        let output = OpenOptions::new().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let child = command.spawn().with_context(|| format!("starting \"{name}\""))?;
        Ok(Self { name, log, command: Mutex::new(command), child: Mutex::new(child) })
    }

    /// Polls until `ready`.
    ///
    /// # Errors
    /// The program died or is not ready in time; with the end of its log.
    pub(crate) async fn wait_until(&self, limit: Duration, mut ready: impl AsyncFnMut() -> bool) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + limit;
        while !ready().await {
            if let Some(status) = self.child.lock().unwrap_or_else(PoisonError::into_inner).try_wait()? {
                bail!("\"{}\" ended with {status}:\n{}", self.name, self.tail());
            }
            if tokio::time::Instant::now() > deadline {
                bail!("\"{}\" is not ready within {limit:?}:\n{}", self.name, self.tail());
            }
            tokio::time::sleep(INTERVAL).await;
        }
        Ok(())
    }

    /// Ends it by SIGKILL, as a crash would.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn kill(&self) -> anyhow::Result<()> {
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Starts it again after [`kill`](Self::kill).
    ///
    /// # Errors
    /// It cannot be executed.
    pub(crate) fn start_again(&self) -> anyhow::Result<()> {
        let mut command = self.command.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.spawn().with_context(|| format!("starting \"{}\"", self.name))?;
        *self.child.lock().unwrap_or_else(PoisonError::into_inner) = child;
        Ok(())
    }

    fn tail(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// It cannot be executed or fails; with all that it printed.
pub(crate) async fn output(command: Command) -> anyhow::Result<String> {
    Ok(String::from_utf8_lossy(&finish(command).await?.stdout).into_owned())
}

/// Runs a command to its end and returns its standard output, then its standard error.
///
/// # Errors
/// It cannot be executed or fails; with all that it printed.
pub(crate) async fn combined_output(command: Command) -> anyhow::Result<String> {
    let Output { stdout, stderr, .. } = finish(command).await?;
    Ok(String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

async fn finish(command: Command) -> anyhow::Result<Output> {
    let what = format!("{command:?}");
    let mut command = tokio::process::Command::from(command);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await.with_context(|| what.clone())?;
    if !output.status.success() {
        let printed = [output.stdout, output.stderr].concat();
        bail!("{what} ended with {}:\n{}", output.status, String::from_utf8_lossy(&printed));
    }
    Ok(output)
}

/// Whether a plain HTTP URL answers with success.
pub(crate) async fn answers(url: &str) -> bool {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let Ok(url) = url.parse() else { return false };
    client.get(url).await.is_ok_and(|response| response.status().is_success())
}

/// The body that a plain HTTP URL answers with.
///
/// # Errors
/// It does not answer, or not with text.
pub(crate) async fn get(url: &str) -> anyhow::Result<String> {
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let body = client.get(url.parse()?).await?.into_body().collect().await?;
    Ok(String::from_utf8(body.to_bytes().to_vec())?)
}
