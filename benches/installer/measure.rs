//! One process: how long it takes, its memory, and what it asks.

use std::collections::BTreeMap;
use std::fmt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use jiff::Timestamp;

use crate::shared::harness::Cluster;

/// What a run took.
pub(crate) struct Measured {
    seconds: f64,
    /// Processor time of the process, and of the control plane meanwhile.
    processor: f64,
    server: f64,
    mebibytes: f64,
    requests: BTreeMap<String, usize>,
}

impl Measured {
    /// Runs a command whose user agent begins with `agent`.
    pub(crate) async fn of(cluster: &Cluster, mut command: Command, agent: &str) -> anyhow::Result<Self> {
        let since = Timestamp::now();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let (begun, before) = (Instant::now(), spent()?);
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
        let pid = child.id().context("it has ended")?;
        let mut said = child.stderr.take().context("no standard error")?;
        let words = tokio::spawn(async move {
            let mut text = String::new();
            tokio::io::AsyncReadExt::read_to_string(&mut said, &mut text).await.map(|_| text)
        });
        let (mut mebibytes, mut processor) = (0.0, 0.0);
        let status = loop {
            // The peak only rises: what is missed is what the last moment added.
            mebibytes = peak(pid).unwrap_or(mebibytes);
            processor = ticks(&pid.to_string()).map_or(processor, |(_, ticks)| seconds(ticks));
            tokio::select! {
                status = child.wait() => break status?,
                () = tokio::time::sleep(Duration::from_millis(5)) => {}
            }
        };
        let (elapsed, server) = (begun.elapsed().as_secs_f64(), seconds(spent()?.saturating_sub(before)));
        let words = words.await??;
        ensure!(status.success(), "{agent} ended with {status}: {words}");
        Ok(Self {
            seconds: elapsed,
            processor,
            server,
            mebibytes,
            requests: cluster.audit().requests_by(agent, since).await?,
        })
    }
}

/// `1.23 | 0.40 | 0.90 | 45 | 6 get, 7 patch`.
impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests: Vec<String> = self.requests.iter().map(|(verb, count)| format!("{count} {verb}")).collect();
        let Self { seconds, processor, server, mebibytes, .. } = self;
        write!(f, "{seconds:.2} | {processor:.2} | {server:.2} | {mebibytes:.0} | {}", requests.join(", "))
    }
}

/// The most memory that a process has had so far.
fn peak(pid: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<f64>().ok()? / 1024.0)
}

/// Waits until the control plane has nothing to do any more, for a minute at most.
pub(crate) async fn settle() -> anyhow::Result<()> {
    let mut before = spent()?;
    for _ in 0..120 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = spent()?;
        // Hundredths of a second of half a second.
        if now.saturating_sub(before) <= 5 {
            break;
        }
        before = now;
    }
    Ok(())
}

/// Processor time of the control plane, in ticks of the kernel.
fn spent() -> anyhow::Result<u64> {
    let mut all = 0;
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some((name, ticks)) = ticks(&entry.file_name().to_string_lossy()) else { continue };
        if ["kube-apiserver", "kube-controller", "etcd"].iter().any(|part| name.starts_with(part)) {
            all += ticks;
        }
    }
    Ok(all)
}

/// Name and processor time of a process.
fn ticks(pid: &str) -> Option<(String, u64)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (head, rest) = stat.rsplit_once(") ")?;
    let fields = rest.split_whitespace().skip(11).take(2);
    Some((head.split_once('(')?.1.to_owned(), fields.filter_map(|field| field.parse::<u64>().ok()).sum()))
}

/// The kernel counts in hundredths.
#[expect(clippy::cast_precision_loss, reason = "hours of processor time are exact")]
fn seconds(ticks: u64) -> f64 {
    ticks as f64 / 100.0
}
