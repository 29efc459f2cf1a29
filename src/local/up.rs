//! `bko-install up`: store, daemons, gateway, routing API and control socket
//! of one host, composed.

mod buildkit;
mod error;
mod prepare;
mod serve;

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::args::UpArgs;
use super::certificates::Certificates;
use super::control::Info;
use super::core::{Caches, Core};
use super::farm::Farm;
use super::fetch::Progress;
use super::index::Index;
use super::process::Process;
use super::runtime::Runtime;
use super::storage::Storage;
use super::store::Store;
use super::writer::{Change, Writer};
use super::{clock, procfs, recovery};
use crate::companion::metrics::Counters;
use crate::companion::observer::Clock;
pub use error::UpError;
use prepare::prepare;
use serve::serve;

/// Runs the farm until a signal, drains, and returns. `progress` is told of
/// bytes of BuildKit that are fetched, `greet` when the farm is up.
///
/// # Errors
/// See [`UpError`].
pub async fn run(args: UpArgs, progress: Progress<'_>, greet: impl FnOnce(&Info, Arc<Farm>)) -> Result<(), UpError> {
    let uid = rustix::process::geteuid().as_raw();
    let prepared = prepare(&args, uid)?;
    let layout = prepared.layout.clone();
    let (store, records) = Store::open(&layout)?;
    let common = buildkit::common(&args, &layout, uid, progress).await?;
    let version = buildkit::version(&common.programs.buildkitd).await?;
    let storage = Storage::open(args.daemons.storage, layout.clone(), common.programs.rootlesskit.clone()).await?;
    let settings = Arc::new(args.settings(prepared.port));
    let (index, changes) = Index::new(records);
    let writer = Writer::start(store, index.clone(), settings.clone())
        .map_err(|error| UpError::System("start a thread", error))?;
    let core = Arc::new(Core {
        certificates: Certificates::open(layout.clone(), args.domain())?,
        common,
        runtime: Runtime::open(args.daemons.runtime, args.daemons.cgroup.as_deref(), &layout),
        settings,
        index,
        writer,
        storage,
        directory: Arc::default(),
        streams: Arc::default(),
        counters: Counters::default(),
        clock: Clock::start(),
        keep_snapshots: args.daemons.keep_snapshots,
        draining: CancellationToken::new(),
        cutting: CancellationToken::new(),
        caches: Caches::default(),
        cuts: std::sync::Mutex::default(),
        unisolated_forks: args.daemons.allow_unisolated_forks,
    });
    let found = recover(&core).await?;
    let info = Info {
        pid: std::process::id(),
        state: layout.root().to_owned(),
        usual: args.state.state_dir.is_none(),
        api: api_address(&prepared.api),
        port: prepared.port,
        token: prepared.token.clone(),
        certificates: layout.certificate("client"),
        domain: args.domain(),
        gateway: args.domain().map(|_| args.listen.from_here()),
        buildkit: version,
        storage: format!("{:?}", core.storage.kind()).to_lowercase(),
    };
    let ended = serve(&args, core.clone(), prepared, found, changes, info, greet).await;
    core.runtime.close();
    core.writer.end();
    let _ = std::fs::remove_file(layout.control());
    let _ = std::fs::remove_file(layout.run().join("token"));
    ended
}

/// Daemons of an earlier run: those of a project go on, the others end.
async fn recover(core: &Arc<Core>) -> Result<HashMap<String, Process>, UpError> {
    let records = core.index.all();
    let recorded = records.iter().map(|record| (record.project.spec.key.clone(), record.process)).collect();
    let found = recovery::sort(&core.common.layout, &recorded, &procfs::all());
    let orphan = |(key, id): (String, _)| match found.daemons.contains_key(&key) {
        // It may be in the cgroup of the daemon that goes on.
        true => Process::adopt(id, None),
        false => core.runtime.adopt(&key, id),
    };
    let mut orphans: Vec<_> = found.orphans.into_iter().filter_map(orphan).collect();
    futures::future::join_all(orphans.iter_mut().map(|orphan| {
        tracing::warn!(process.pid = orphan.id().pid, "ending a daemon that no project knows of");
        orphan.stop(Duration::from_secs(10))
    }))
    .await;
    let daemons = found.daemons.into_iter();
    let daemons: HashMap<_, _> =
        daemons.filter_map(|(key, id)| Some((key.clone(), core.runtime.adopt(&key, id)?))).collect();
    core.runtime.sweep(&daemons.keys().cloned().collect()).await;
    for (key, process) in &recorded {
        let running = daemons.get(key).map(Process::id);
        if *process != running {
            core.writer.submit(key, Change::Process(running)).await?;
        }
    }
    if clock::rewind(core).await? > 0 {
        tracing::warn!(
            "the state knows of times that are yet to come, so this host's clock was put back, or is wrong now: they \
             are taken for now"
        );
    }
    Ok(daemons)
}

fn api_address(listener: &TcpListener) -> String {
    let address = listener.local_addr().map_or_else(
        |_| String::new(),
        |address| {
            let ip = if address.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { address.ip() };
            SocketAddr::new(ip, address.port()).to_string()
        },
    );
    format!("http://{address}")
}
