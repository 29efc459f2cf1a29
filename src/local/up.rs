//! `bko-install up`: store, daemons, gateway, routing API and control socket
//! of one host, composed.
#![expect(clippy::disallowed_methods, reason = "shell: reads and makes what the state folder holds")]

use std::collections::HashMap;
use std::fs::DirBuilder;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use prometheus_client::registry::Registry;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::args::{Buildkit, GatewayListen, UpArgs};
use super::certificates::{Certificates, CertificatesError, replace};
use super::configuration::{Common, Programs};
use super::control::{self, Control, Info};
use super::core::{Caches, Core};
use super::farm::{Farm, Terms};
use super::fetch::{self, FetchError, Progress, Source};
use super::index::Index;
use super::keeper::Keepers;
use super::layout::{Layout, LayoutError};
use super::lock::{Lock, LockError};
use super::process::Process;
use super::programs::{self, ProgramsError, User};
use super::storage::{Storage, StorageError};
use super::store::{Store, StoreError};
use super::writer::{Change, WriteError, Writer};
use super::{budget, procfs, recovery};
use crate::companion::metrics::Counters;
use crate::companion::observer::Clock;
use crate::families::build_farm::build::config::{Base, BaseError};
use crate::families::build_farm::ledger::{Operation, Outcome};
use crate::families::build_farm::settings::DAEMON_IMAGE;
use crate::gateway::directory::{API, Backend, Directory};
use crate::gateway::rules::Rules;
use crate::gateway::streams::Streams;
use crate::gateway::wake::{Ask, Verdict, Waker};
use crate::gateway::{self, Links};
use crate::router::{self, ConfigError, Router, Secret, Timeouts};
use crate::runtime::admin::{self, Readiness};
use crate::runtime::listen::ListenAddress;
use crate::runtime::tls::{Certificate, Files, TlsError};
use crate::sni::{Domains, DomainsError};

/// Why the farm does not come up.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// The state folder's path.
    #[error("--state-dir: {0}")]
    Layout(#[from] LayoutError),
    /// The state folder.
    #[error("cannot make the state folder \"{}\"", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    /// Somebody has it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store, later.
    #[error("cannot change the state")]
    Write(#[from] WriteError),
    /// No BuildKit.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// Its image.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// One that cannot be run.
    #[error("\"{file}\" cannot be run: {why}", file = .0.display(), why = .1)]
    Buildkit(PathBuf, String),
    /// The caches.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The certificates.
    #[error(transparent)]
    Certificates(#[from] CertificatesError),
    /// The certificate of the routing API.
    #[error("certificate of the routing API")]
    Tls(#[from] TlsError),
    /// A user's buildkitd.toml cannot be read.
    #[error("--buildkitd-config: cannot read \"{}\"", .0.display())]
    ReadBase(PathBuf, #[source] io::Error),
    /// Or is none.
    #[error("--buildkitd-config: {0}")]
    Base(BaseError),
    /// The routing API's flags.
    #[error(transparent)]
    Route(#[from] ConfigError),
    /// The domain.
    #[error("--domain: {0}")]
    Domain(#[from] DomainsError),
    /// Other hosts cannot use loopback addresses.
    #[error("--listen {0}: other hosts reach daemons by name only, so this needs --domain")]
    NoDomain(GatewayListen),
    /// Two things on one port.
    #[error("--daemon-port {0} is the port that builds connect to, too")]
    SamePort(u16),
    /// A port is taken.
    #[error("listen on {address} ({flag})")]
    Listen {
        /// Where.
        address: String,
        /// The flag that sets it.
        flag: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The token.
    #[error("cannot read or make the token \"{}\"", .0.display())]
    Token(PathBuf, #[source] io::Error),
    /// The system.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}

impl UpError {
    /// How to mend it, where there is a way.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Programs(error) => Some(error.hint()),
            Self::Fetch(error) => error.hint(),
            Self::Store(error) => error.hint(),
            Self::Lock(LockError::Held { .. }) => Some(
                "use that one, or give this one a folder of its own with --state-dir, and its own ports".to_owned(),
            ),
            Self::Listen { flag, source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                Some(format!("another program has that port: choose another with {flag}"))
            }
            Self::Folder(_, error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Some("choose a folder that you may write with --state-dir".to_owned())
            }
            _ => None,
        }
    }
}

/// Everything that must be there before anything begins.
struct Prepared {
    layout: Layout,
    lock: Lock,
    gateway: TcpListener,
    api: TcpListener,
    admin: TcpListener,
    route: router::Config,
    token: Option<PathBuf>,
    port: u16,
}

/// Runs the farm until a signal, drains, and returns. `progress` is told of
/// bytes of BuildKit that are fetched, `greet` when the farm is up.
///
/// # Errors
/// See [`UpError`].
pub async fn run(args: UpArgs, progress: Progress<'_>, greet: impl FnOnce(&Info)) -> Result<(), UpError> {
    let uid = rustix::process::geteuid().as_raw();
    let prepared = prepare(&args, uid)?;
    let layout = prepared.layout.clone();
    let (store, records) = Store::open(&layout)?;
    let common = common(&args, &layout, uid, progress).await?;
    let buildkit = version(&common.programs.buildkitd).await?;
    let storage = Storage::open(args.daemons.storage, layout.clone(), common.programs.rootlesskit.clone()).await?;
    let settings = Arc::new(args.settings(prepared.port));
    let (index, changes) = Index::new(records);
    let writer = Writer::start(store, index.clone(), settings.clone())
        .map_err(|error| UpError::System("start a thread", error))?;
    let core = Arc::new(Core {
        certificates: Certificates::open(layout.clone(), args.domain())?,
        common,
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
    });
    let found = recover(&core).await?;
    let info = Info {
        pid: std::process::id(),
        state: layout.root().to_owned(),
        usual: args.state.state_dir.is_none(),
        api: api_address(&prepared.api),
        token: prepared.token.clone(),
        certificates: layout.certificate("client"),
        domain: args.domain(),
        buildkit,
        storage: format!("{:?}", core.storage.kind()).to_lowercase(),
    };
    let ended = serve(&args, core.clone(), prepared, found, changes, info, greet).await;
    core.writer.end();
    let _ = std::fs::remove_file(layout.control());
    ended
}

/// Flags, folder, lock and ports, in an order in which nothing is done in vain.
fn prepare(args: &UpArgs, uid: u32) -> Result<Prepared, UpError> {
    let layout = Layout::new(args.state.folder(uid))?;
    if args.domain().is_none() && matches!(args.listen, GatewayListen::Address(_)) {
        return Err(UpError::NoDomain(args.listen));
    }
    for folder in [layout.root().to_owned(), layout.run(), layout.caches()] {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| UpError::Folder(folder, error))?;
    }
    let lock = Lock::take(&layout.lock())?;
    let (route, token) = route(args, &layout)?;
    let listen = |address: ListenAddress, flag| {
        address.bind().map_err(|source| UpError::Listen { address: address.to_string(), flag, source })
    };
    let gateway = match args.listen {
        GatewayListen::Address(address) => listen(address, "--listen")?,
        GatewayListen::Loopback(port) => loopback(port).map_err(|source| UpError::Listen {
            address: args.listen.to_string(),
            flag: "--listen",
            source,
        })?,
    };
    let port = gateway.local_addr().map_err(|error| UpError::System("tell an address", error))?.port();
    if port == args.daemons.daemon_port {
        return Err(UpError::SamePort(port));
    }
    let (api, admin) = (listen(args.api_listen, "--api-listen")?, listen(args.metrics_addr, "--metrics-addr")?);
    Ok(Prepared { layout, lock, gateway, api, admin, route, token, port })
}

/// Without any word on who may call: whoever can read the token that is made here.
fn route(args: &UpArgs, layout: &Layout) -> Result<(router::Config, Option<PathBuf>), UpError> {
    let mut flags = args.route.clone();
    let told = flags.auth_token.is_some() || flags.auth_token_dir.is_some() || flags.auth_open;
    let mut path = None;
    if !told {
        let file = layout.token();
        let token = token(&file).map_err(|error| UpError::Token(file.clone(), error))?;
        flags.auth_token = Some(Secret::new(&token));
        path = Some(file);
    }
    Ok((router::Config::try_from(flags)?, path))
}

fn token(path: &Path) -> io::Result<String> {
    match std::fs::read_to_string(path) {
        Ok(token) if !token.trim().is_empty() => return Ok(token),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    let token = hex::encode(bytes);
    replace(path, format!("{token}\n").as_bytes())?;
    Ok(token)
}

/// Every loopback address, and only what comes over the loopback device.
fn loopback(port: u16) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.bind_device(Some(b"lo"))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(4096)?;
    TcpListener::from_std(socket.into())
}

async fn common(args: &UpArgs, layout: &Layout, uid: u32, progress: Progress<'_>) -> Result<Common, UpError> {
    let base = match &args.daemons.buildkitd_config {
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(|error| UpError::ReadBase(path.clone(), error))?;
            Base::parse(&text, None).map_err(UpError::Base)?
        }
        None => Base::default(),
    };
    let user = User { uid, name: user_name(uid) };
    let programs = find_programs(args, layout, &user, progress).await?;
    let beside = programs.buildkitd.parent().map(Path::to_owned);
    let folders = beside.into_iter().chain(std::env::split_paths(&args.daemons.path));
    let folders = folders.chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    let path = std::env::join_paths(folders).unwrap_or_else(|_| args.daemons.path.clone());
    Ok(Common { layout: layout.clone(), programs, base, port: args.daemons.daemon_port, path, user: user.name })
}

/// On this host, else out of an image.
async fn find_programs(
    args: &UpArgs,
    layout: &Layout,
    user: &User,
    progress: Progress<'_>,
) -> Result<Programs, UpError> {
    let (bin, path) = (layout.bin(), &args.daemons.path);
    let find = |named: Option<&Path>| programs::find(named, &bin, path, user);
    let image = match &args.daemons.buildkit {
        Buildkit::Path(path) => return Ok(find(Some(path))?),
        Buildkit::Auto => match find(None) {
            Err(ProgramsError::Missing(..)) => DAEMON_IMAGE.parse().ok(),
            found => return Ok(found?),
        },
        Buildkit::Image(image) => Some(image.clone()),
    };
    if let Some(image) = image {
        let config = args.daemons.docker_config.clone();
        let config = config.or_else(|| Some(args.state.home.as_ref()?.join(".docker")));
        let (mirror, docker_config) =
            (args.daemons.buildkit_mirror.clone(), config.map(|folder| folder.join("config.json")));
        let digest = fetch::fetch(&Source { image, mirror, docker_config }, &bin, progress).await?;
        tracing::info!(image.digest = digest, "using the BuildKit of an image");
    }
    Ok(find(Some(&bin))?)
}

/// As `/etc/subuid` names a user. The environment may be another's.
fn user_name(uid: u32) -> Option<String> {
    let text = std::fs::read_to_string("/etc/passwd").ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == uid.to_string()).then(|| name.to_owned())
    })
}

async fn version(buildkitd: &Path) -> Result<String, UpError> {
    let failed = |why: String| UpError::Buildkit(buildkitd.to_owned(), why);
    let output = Command::new(buildkitd).arg("--version").stdin(Stdio::null()).output().await;
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Daemons of an earlier run: those of a project go on, the others end.
async fn recover(core: &Arc<Core>) -> Result<HashMap<String, Process>, UpError> {
    let records = core.index.all();
    let recorded = records.iter().map(|record| (record.project.spec.key.clone(), record.process)).collect();
    let found = recovery::sort(&core.common.layout, &recorded, &procfs::all());
    let mut orphans: Vec<_> = found.orphans.into_iter().filter_map(Process::adopt).collect();
    futures::future::join_all(orphans.iter_mut().map(|orphan| {
        tracing::warn!(process.pid = orphan.id().pid, "ending a daemon that no project knows of");
        orphan.stop(Duration::from_secs(10))
    }))
    .await;
    let daemons: HashMap<_, _> =
        found.daemons.into_iter().filter_map(|(key, id)| Some((key, Process::adopt(id)?))).collect();
    for (key, process) in &recorded {
        let running = daemons.get(key).map(Process::id);
        if *process != running {
            core.writer.submit(key, Change::Process(running)).await?;
        }
    }
    Ok(daemons)
}

async fn serve(
    args: &UpArgs,
    core: Arc<Core>,
    prepared: Prepared,
    found: HashMap<String, Process>,
    changes: tokio::sync::mpsc::UnboundedReceiver<String>,
    info: Info,
    greet: impl FnOnce(&Info),
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
    let calls = control::router(Control { core: core.clone(), farm, info: info.clone() });
    tokio::spawn(axum::serve(control, calls).into_future());
    let admin = admin::serve(admin, Arc::new(registry), readiness.clone(), axum::Router::new(), closing.clone());
    tokio::spawn(admin);
    tracing::info!(state = %layout.root().display(), api = info.api, version = crate::VERSION, "serving");
    greet(&info);

    signals.next().await;
    readiness.set("ending", false);
    tracing::info!("ending when the builds have ended; once more ends them");
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
            if core.draining.is_cancelled() {
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
