//! The control plane on a real API server without a node: `make bench`.
//!
//! Size of the executable, start and idle memory of each role, and the routing
//! API on one warm project. Prints a table for `docs/performance.md`.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "speaks to a person")]

#[path = "../tests/cluster"]
mod shared {
    pub(crate) mod harness;
}

#[path = "../tests/cluster/farm.rs"]
mod farm;

use std::net::SocketAddr;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use bko_install::names::CONTROLLER_MANAGER;
use farm::{KEY, REPO, Server};
use futures::StreamExt;
use jiff::Timestamp;
use shared::harness::play::Play;
use shared::harness::{self, Cluster, executable, process};

const LOAD: Duration = Duration::from_secs(6);

async fn measure(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    let size = std::fs::metadata(executable::executable()?)?.len();
    println!("executable: {size} bytes");
    farm::define(&cluster).await?;
    let namespaces = cluster.namespaces("bench");
    namespaces.create(&cluster.client()).await?;
    println!("\n| role | start → ready, ms (5 runs) | memory after 5 s, MiB |\n|---|---|---|");
    for (role, flags) in [
        ("controller,route", &["--auth-open", "--companion=false"][..]),
        ("gateway", &["--domain=builds.example.test", "--listen=127.0.0.1:20802"]),
        (
            "controller,route,gateway",
            &["--auth-open", "--companion=false", "--domain=builds.example.test", "--listen=127.0.0.1:20802"],
        ),
    ] {
        role_row(&cluster, &namespaces.builds, &namespaces.operator, role, flags).await?;
    }
    let _play = Play::start(cluster.client(), &namespaces.builds, Duration::ZERO);
    let flags = ["--namespace", &namespaces.builds, "--pod-namespace", &namespaces.operator, "--api-rate-limit=0"];
    let server = Server::start(&cluster, &flags).await?;
    server.complete(&server.route(REPO).await?).await?;
    println!(
        "\n| load on one warm project | pairs/s | /route p50, ms | p99, ms | status writes per pair | entries left |\n|---|---|---|---|---|---|"
    );
    for concurrency in [1, 16, 64, 256] {
        load_row(&cluster, &namespaces.builds, &server, concurrency).await?;
    }
    Ok(())
}

async fn role_row(cluster: &Cluster, builds: &str, operator: &str, role: &str, flags: &[&str]) -> anyhow::Result<()> {
    let mut starts = Vec::new();
    let mut memory = 0.0;
    for run in 0..5 {
        let admin: SocketAddr = "127.0.0.1:20801".parse()?;
        let mut command = Command::new(executable::executable()?);
        command
            .args(["server", "--roles", role, "--kubeconfig", &cluster.kubeconfig().display().to_string()])
            .args(["--namespace", builds, "--pod-namespace", operator, "--api-listen=127.0.0.1:20800"])
            .args(["--metrics-addr", &admin.to_string(), "--quiet"])
            .args(flags)
            .stdin(Stdio::null());
        let begun = Instant::now();
        let mut child = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
        while !process::answers(&format!("http://{admin}/readyz")).await {
            ensure!(begun.elapsed() < Duration::from_secs(10), "{role} is not ready");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        starts.push(begun.elapsed().as_secs_f64() * 1000.0);
        if run == 4 {
            tokio::time::sleep(Duration::from_secs(5)).await;
            memory = resident_mib(child.id().context("it ended")?)?;
        }
        child.kill().await?;
    }
    starts.sort_by(f64::total_cmp);
    println!("| {role} | {:.0}–{:.0} | {memory:.1} |", starts[0], starts[4]);
    Ok(())
}

/// A closed loop of pairs, /complete at once after /route.
async fn load_row(cluster: &Cluster, namespace: &str, server: &Server, concurrency: usize) -> anyhow::Result<()> {
    let since = Timestamp::now();
    let begun = Instant::now();
    let clients = futures::stream::iter(0..concurrency).map(|_| async {
        let mut took = Vec::new();
        while begun.elapsed() < LOAD {
            let routed = Instant::now();
            let answer = server.route(REPO).await?;
            took.push(routed.elapsed().as_secs_f64() * 1000.0);
            server.complete(&answer).await?;
        }
        anyhow::Ok(took)
    });
    let took: Vec<Vec<f64>> =
        clients.buffer_unordered(concurrency).collect::<Vec<_>>().await.into_iter().collect::<Result<_, _>>()?;
    let elapsed = begun.elapsed().as_secs_f64();
    let mut took: Vec<f64> = took.into_iter().flatten().collect();
    took.sort_by(f64::total_cmp);
    let writes = cluster.audit().writes_by(CONTROLLER_MANAGER, since).await?;
    let writes = writes.iter().filter(|w| w.namespace == namespace && w.resource == "buildprojects/status").count();
    let left = farm::status(cluster, namespace, KEY).await.context("no project")?.inflight.len();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    println!(
        "| c={concurrency} | {:.0} | {:.1} | {:.1} | {:.2} | {left} |",
        took.len() as f64 / elapsed,
        at(0.5),
        at(0.99),
        writes as f64 / took.len() as f64
    );
    Ok(())
}

fn resident_mib(pid: u32) -> anyhow::Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}

fn main() -> ExitCode {
    harness::enter::<Cluster>(|cluster, runtime| match runtime.block_on(measure(cluster)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    })
}
