//! Everything that serves while the farm is up, and its end.
#![expect(clippy::disallowed_methods, reason = "shell: judges entries as of now")]

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use jiff::Timestamp;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::UpError;
use super::prepare::Prepared;
use crate::families::build_farm::ledger::{Operation, Outcome};
use crate::families::build_farm::lifecycle::{self, Want};
use crate::gateway::directory::{API, Backend, Directory};
use crate::gateway::rules::Rules;
use crate::gateway::streams::Streams;
use crate::gateway::wake::{Ask, Verdict, Waker};
use crate::gateway::{self, Links};
use crate::local::args::UpArgs;
use crate::local::control::{self, Control, Info};
use crate::local::core::Core;
use crate::local::farm::{Farm, Terms};
use crate::local::keeper::Keepers;
use crate::local::process::Process;
use crate::local::writer::{Change, WriteError};
use crate::local::{budget, clock, storage};
use crate::router::{self, Router, Timeouts};
use crate::runtime::admin::{self, Readiness};
use crate::runtime::tls::{Certificate, Files};
use crate::sni::Domains;

pub(super) async fn serve(
    args: &UpArgs,
    core: Arc<Core>,
    prepared: Prepared,
    found: HashMap<String, Process>,
    changes: UnboundedReceiver<String>,
    info: Info,
    greet: impl FnOnce(&Info, Arc<Farm>),
) -> Result<(), UpError> {
    let Prepared { layout, lock, gateway, api, admin, route, .. } = prepared;
    let mut signals = Signals::new().map_err(|error| UpError::System("handle signals", error))?;
    let control =
        control::bind(&layout.control()).map_err(|error| UpError::System("make the control socket", error))?;
    let (closing, tasks, readiness) = (CancellationToken::new(), TaskTracker::new(), Readiness::default());
    let mut registry = Registry::default();
    core.counters.register(&mut registry);
    let terms = Terms {
        unisolated_forks: args.daemons.allow_unisolated_forks,
        snapshot_every: args.daemons.snapshot_every_seconds,
    };
    let farm = Arc::new(Farm::new(core.clone(), terms));
    let keepers = tokio::spawn(Keepers::new(core.clone(), found).run(changes));

    tasks.spawn(clock::watch(core.clone()));
    tasks.spawn(sweep(core.clone()));
    if let Some(budget) = args.daemons.cache_budget {
        tasks.spawn(budget::keep(core.clone(), budget, args.daemons.cache_budget_every));
    }
    let timeouts = Timeouts::new(route.route_wait);
    route.auth.register_metrics(&mut registry);
    tasks.spawn(route.auth.clone().keep_fresh(closing.clone()));
    let router = Router::new(route, farm.clone(), router::Metrics::register(&mut registry));
    api_over_tls(&core, &router, timeouts, &tasks, &closing).await?;
    tasks.spawn(router::run(api, router, timeouts, None, closing.clone()));
    serve_gateway(args, &core, gateway, &mut registry, &tasks, &closing)?;
    let calls = control::router(Control { core: core.clone(), farm: farm.clone(), info: info.clone() });
    tokio::spawn(axum::serve(control, calls).into_future());
    let admin = admin::serve(admin, Arc::new(registry), readiness.clone(), axum::Router::new(), closing.clone());
    tokio::spawn(admin);
    tracing::info!(state = %layout.root().display(), api = info.api, version = crate::VERSION, "serving");
    greet(&info, farm);

    signals.next().await;
    readiness.set("ending", false);
    tracing::info!("ending when the builds have ended; once more ends them");
    tell_what_is_waited_for(&core, &info);
    core.draining.cancel();
    let cutting = core.cutting.clone();
    let drain = args.drain;
    tokio::spawn(async move {
        tokio::select! {
            () = signals.next() => tracing::warn!("ending builds, on a second signal"),
            () = tokio::time::sleep(drain) => tracing::warn!("ending builds, for their time is up"),
        }
        cutting.cancel();
    });
    let kept = keepers.await;
    closing.cancel();
    tasks.close();
    tasks.wait().await;
    drop(lock);
    tracing::info!("ended");
    kept.map_err(|error| UpError::System("keep daemons", io::Error::other(error)))
}

/// Tries again, until the farm ends, to remove what could not be removed.
async fn sweep(core: Arc<Core>) {
    while core.draining.run_until_cancelled(tokio::time::sleep(storage::AGAIN)).await.is_some() {
        core.storage.again().await;
    }
}

/// Under `api.<domain>`, through the gateway.
async fn api_over_tls(
    core: &Arc<Core>,
    router: &Router,
    timeouts: Timeouts,
    tasks: &TaskTracker,
    closing: &CancellationToken,
) -> Result<(), UpError> {
    let Some(folder) = core.certificates.api()? else { return Ok(()) };
    let files = Files { certificate: folder.join("cert.pem"), key: folder.join("key.pem") };
    let certificate = Certificate::read(files)?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
    let listener = listener.map_err(|error| UpError::System("listen for the gateway", error))?;
    let address = listener.local_addr().map_err(|error| UpError::System("tell an address", error))?;
    let acceptor = certificate.acceptor().map_err(|error| UpError::System("use TLS", io::Error::other(error)))?;
    tasks.spawn(router::run(listener, router.clone(), timeouts, Some(acceptor), closing.clone()));
    tokio::spawn(certificate.follow(closing.clone()));
    core.directory.set(API, Some(Backend { ready: vec![address], terminating: vec![] }));
    Ok(())
}

fn serve_gateway(
    args: &UpArgs,
    core: &Arc<Core>,
    listener: TcpListener,
    registry: &mut Registry,
    tasks: &TaskTracker,
    closing: &CancellationToken,
) -> Result<(), UpError> {
    let domains = args.domain().map(|domain| Domains::new(vec![domain])).transpose()?.unwrap_or_default();
    let config = gateway::Config {
        rules: Rules { domains, ..Rules::default() }.fixed(),
        // Nothing runs any more when it is closed.
        drain: Duration::from_secs(2),
        ..gateway::Config::default()
    };
    let (directory, streams): (Arc<Directory>, Arc<Streams>) = (core.directory.clone(), core.streams.clone());
    let metrics = Arc::new(gateway::metrics::Metrics::register(registry));
    let waker = Arc::new(Waker::new(Some(ask(core.clone())), 0));
    tasks.spawn(gateway::run(listener, config, Links { directory, streams, metrics, waker }, closing.clone()));
    Ok(())
}

/// Wakes are decided here.
fn ask(core: Arc<Core>) -> Ask {
    Arc::new(move |daemon| {
        let core = core.clone();
        async move {
            if core.draining.is_cancelled() || refused(&core, daemon.key()) {
                return Ok(Verdict::Asleep);
            }
            match core.writer.submit(daemon.key(), Change::Apply(Operation::Wake)).await {
                Ok(Outcome::Forgotten) => Ok(Verdict::Asleep),
                Ok(_) => Ok(Verdict::Starting),
                Err(WriteError::Gone) => Ok(Verdict::Unknown),
                Err(error) => Err(error.to_string()),
            }
        }
        .boxed()
    })
}

/// Whether a dial does not wake a daemon: that of a client whose build was cut, and of untrusted builds where none run.
fn refused(core: &Core, key: &str) -> bool {
    let Some(record) = core.index.get(key) else { return false };
    let wanted = lifecycle::want(&record.project, &core.settings, Timestamp::now()) != Want::Zero;
    (core.was_cut(key) && !wanted) || (lifecycle::is_fork(&record.project) && !core.takes_forks())
}

/// What an end waits for, and how not to.
fn tell_what_is_waited_for(core: &Core, info: &Info) {
    for record in core.index.all() {
        let (key, status) = (&record.project.spec.key, record.project.status_or_default());
        let entries = lifecycle::live_entries(&status, core.settings.max_build, Timestamp::now());
        let since: Vec<_> = entries.map(|entry| entry.since.0).collect();
        let running =
            core.index.live(key).and_then(|live| live.observation).map_or(0, |seen| seen.borrow().active.len());
        if since.is_empty() && running == 0 {
            continue;
        }
        let oldest = since.iter().min().map(|since| since.strftime("%H:%M:%SZ").to_string()).unwrap_or_default();
        tracing::info!(
            project.key = key,
            repo = record.project.spec.repo,
            builds = since.len().max(running),
            since = oldest,
            "waiting for builds: `bko-install stop {key} --cut-builds{}` ends these, Ctrl-C again ends all",
            info.state_flag()
        );
    }
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
