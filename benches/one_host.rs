//! `bko-install up` on this host with real daemons: `make bench`.
//!
//! A warm /route, a daemon from zero to serving, and what projects at zero cost.
//! Prints a table for `docs/performance.md`.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "speaks to a person")]
#![allow(dead_code, reason = "a part of what tests of one host have")]

#[path = "../tests/cluster"]
mod shared {
    pub(crate) mod harness;
}

#[path = "../tests/local/host.rs"]
mod host;

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use axum::body::Body;
use bko_install::key::ProjectKey;
use bko_install::local::layout::Layout;
use bko_install::local::record::Record;
use bko_install::local::store::Store;
use host::{Farm, Who};
use http::Request;
use http_body_util::BodyExt as _;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use serde_json::{Value, json};
use shared::harness::{self, tools::Tools};
use tokio::net::TcpStream;

const REPO: &str = "github.com/acme/shop";

/// Pairs on a warm project, and wakes of one at zero.
const PAIRS: usize = 3000;
const WAKES: usize = 10;

/// Projects at zero.
const IDLE: usize = 200;

struct Machine {
    tools: Arc<Tools>,
}

impl harness::Tier for Machine {
    const NAME: &'static str = "local";
    const PROGRAMS: &'static [&'static str] =
        &["buildkitd", "buildctl", "buildx", "rootlesskit", "runc", "newuidmap", "busybox", "setpriv"];

    async fn start(tools: Arc<Tools>) -> anyhow::Result<Self> {
        host::furnish(&tools)?;
        Ok(Self { tools })
    }
}

/// A connection that stays.
struct Api {
    sender: SendRequest<Body>,
    token: String,
}

impl Api {
    async fn connect(farm: &Farm) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", farm.ports.api)).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let token = std::fs::read_to_string(farm.state.join("token"))?.trim().to_owned();
        Ok(Self { sender, token })
    }

    async fn post(&mut self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let request = Request::post(path).header("host", "x").header("authorization", format!("Bearer {}", self.token));
        self.sender.ready().await?;
        let answer = self.sender.send_request(request.body(Body::from(body.to_string()))?).await?;
        let status = answer.status();
        let body = answer.into_body().collect().await?.to_bytes();
        ensure!(status.is_success(), "{path} answers {status}: {}", String::from_utf8_lossy(&body));
        Ok(if body.is_empty() { Value::Null } else { serde_json::from_slice(&body)? })
    }

    async fn route(&mut self) -> anyhow::Result<Value> {
        let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        self.post("/route", &json!({"repo": REPO, "arch": arch})).await
    }

    async fn complete(&mut self, routed: &Value) -> anyhow::Result<()> {
        self.post("/complete", &json!({"key": routed["key"], "buildId": routed["buildId"]})).await.map(drop)
    }
}

fn row(what: &str, mut took: Vec<f64>) {
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    println!("| {what} | {:.2} | {:.2} | {:.2} | {} |", at(0.5), at(0.99), at(1.0), took.len());
}

async fn routes(machine: &Machine, who: Who) -> anyhow::Result<()> {
    let flags = ["--api-rate-limit=0", "--idle-seconds=1", "--adaptive-idle-max-seconds=0", "--log=warn"];
    let mut farm = Farm::up(&machine.tools, who, &flags).await?;
    let mut api = Api::connect(&farm).await?;
    let held = api.route().await?;
    let mut took = Vec::new();
    for _ in 0..PAIRS {
        let begun = Instant::now();
        let routed = api.route().await?;
        took.push(begun.elapsed().as_secs_f64() * 1e3);
        api.complete(&routed).await?;
    }
    row(&format!("warm /route, {who:?}"), took);
    let endpoint = held["endpoint"].as_str().context("no endpoint")?.to_owned();
    farm.build(&endpoint, "bench").await?;
    api.complete(&held).await?;
    let (mut routed, mut served) = (Vec::new(), Vec::new());
    for _ in 0..WAKES {
        farm.until("the daemon goes to zero", Duration::from_secs(60), |farm| Ok(farm.daemons().is_empty())).await?;
        let begun = Instant::now();
        let held = api.route().await?;
        routed.push(begun.elapsed().as_secs_f64() * 1e3);
        farm.build(&endpoint, "bench").await?;
        served.push(begun.elapsed().as_secs_f64() * 1e3);
        api.complete(&held).await?;
    }
    row(&format!("/route from zero: the daemon serves, {who:?}"), routed);
    row(&format!("the same, and a cached build by `buildctl` through the gateway, {who:?}"), served);
    farm.stop().await
}

/// Resident memory in KiB, threads, open files, and processes of daemons.
fn cost(farm: &Farm) -> anyhow::Result<[u64; 4]> {
    let pid = farm.pid().context("it does not run")?;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)).context("no such field")?;
        anyhow::Ok(value.trim().trim_end_matches(" kB").parse::<u64>()?)
    };
    let files = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64;
    Ok([field("VmRSS:")?, field("Threads:")?, files, farm.daemons().len() as u64])
}

async fn idle(machine: &Machine) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &["--log=warn"]).await?;
    // One real project tells what all of them look like.
    let routed = farm.route(REPO)?;
    farm.complete(&routed)?;
    ensure!(farm.run("stop", &[&routed.key])?.status.success());
    farm.until("the daemon goes to zero", Duration::from_secs(60), |farm| Ok(farm.daemons().is_empty())).await?;
    println!(
        "\n| projects at zero | memory, MiB | threads | open files | daemons | state file, KiB |\n|---|---|---|---|---|---|"
    );
    for count in [1, IDLE, 10 * IDLE] {
        farm.stop().await?;
        let (mut store, records) = Store::open(&Layout::new(farm.state.clone())?)?;
        let (_, model) = records.iter().find(|(key, _)| **key == routed.key).context("no record")?;
        let copy = |n: usize| -> anyhow::Result<(String, Option<Arc<Record>>)> {
            let mut record = (**model).clone();
            let key = format!("p{n:016x}").parse::<ProjectKey>().map_err(|error| anyhow::anyhow!("{error}"))?;
            record.project.spec.key = key.to_string();
            record.project.spec.repo = format!("github.com/acme/idle-{n}");
            record.address = std::net::Ipv4Addr::from(0x7f40_0001 + u32::try_from(n)? * 2);
            record.project.metadata.creation_timestamp.iter_mut().for_each(|time| time.0 = Timestamp::now());
            Ok((key.to_string(), Some(Arc::new(record))))
        };
        let known = records.len();
        store.write(&(known..count).map(copy).collect::<anyhow::Result<Vec<_>>>()?)?;
        store.fold()?;
        drop(store);
        farm.start().await?;
        ensure!(farm.projects()?.projects.len() == count.min(500), "{} projects", farm.projects()?.projects.len());
        tokio::time::sleep(Duration::from_secs(3)).await;
        let [memory, threads, files, daemons] = cost(&farm)?;
        let state = std::fs::metadata(farm.state.join("state.redb"))?.len() >> 10;
        println!("| {count} | {:.1} | {threads} | {files} | {daemons} | {state} |", memory as f64 / 1024.0);
    }
    farm.stop().await
}

async fn measure(machine: Arc<Machine>) -> anyhow::Result<()> {
    let loads = Command::new("cat").arg("/proc/loadavg").output()?;
    eprintln!("load before: {}", String::from_utf8_lossy(&loads.stdout).trim());
    println!("| milliseconds | p50 | p99 | max | of |\n|---|---|---|---|---|");
    for who in [Who::Root, Who::Ordinary] {
        routes(&machine, who).await?;
    }
    idle(&machine).await
}

fn main() -> ExitCode {
    harness::enter::<Machine>(|machine, runtime| match runtime.block_on(measure(machine)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    })
}
