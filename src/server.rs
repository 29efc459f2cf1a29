//! `bko-install server`: the roles of the control plane, in one process or in
//! several, over one set of caches and one admin listener.
#![expect(clippy::disallowed_methods, reason = "shell: a process has an identity of its own")]

mod api;
mod relay;
mod renewal;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::families::build_farm::args::{FarmArgs, FarmError};
use crate::families::build_farm::controller::{Controller, Seen};
use crate::families::build_farm::directory;
use crate::families::build_farm::figures::Figures;
use crate::families::build_farm::metrics::{DaemonMetrics, Metrics as ControllerMetrics};
use crate::families::build_farm::provisioner::Farm;
use crate::families::build_farm::settings::Settings;
use crate::families::build_farm::truth::ask::{Truth, Witnesses};
use crate::families::build_farm::view::View;
use crate::families::build_farm::wake;
use crate::families::build_farm::writer::Writer;
use crate::gateway::directory::{API, Directory};
use crate::gateway::reload::ReloadError;
use crate::gateway::rules::Rules;
use crate::gateway::streams::{self, Streams};
use crate::gateway::wake::Waker;
use crate::gateway::{self, Links, args::GatewayArgs};
use crate::names::{GROUP, OPERATOR_NAMESPACE};
use crate::router::{self, RouteArgs};
use crate::runtime::admin::{self, Readiness};
use crate::runtime::clock::Clock;
use crate::runtime::internal::{self, InternalToken};
use crate::runtime::lease;
use crate::runtime::listen::ListenAddress;
use crate::runtime::shutdown::{Shutdown, on_signal};
use crate::runtime::tls::TlsError;
use crate::sni::{Domains, DomainsError};
use api::Api;
use relay::{Relay, Told};

/// What a process can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Role {
    /// Reconciles projects, on one replica at a time.
    Controller,
    /// Serves the routing API.
    Route,
    /// Relays builds to daemons by their TLS server name.
    Gateway,
}

/// Flags of `bko-install server`.
#[derive(Clone, Debug, Args)]
pub struct ServerArgs {
    /// What this process does, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "controller,route,gateway")]
    pub roles: Vec<Role>,
    /// Address of /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDRESS", default_value_t = ListenAddress::Any(8081))]
    pub metrics_addr: ListenAddress,
    /// Address of the routing API
    #[arg(long, value_name = "ADDRESS", default_value_t = ListenAddress::Any(8080))]
    pub api_listen: ListenAddress,
    /// Address of the routing API over TLS, which the gateway relays `api.<domain>` to
    #[arg(long, value_name = "ADDRESS", requires = "api_tls_cert", requires = "api_tls_key")]
    pub api_tls_listen: Option<ListenAddress>,
    /// Its certificate in PEM, with the chain; read again when it changes
    #[arg(long, value_name = "FILE", requires = "api_tls_listen")]
    pub api_tls_cert: Option<PathBuf>,
    /// The certificate's private key in PEM; read again when it changes
    #[arg(long, value_name = "FILE", requires = "api_tls_listen")]
    pub api_tls_key: Option<PathBuf>,
    /// Reconcile on one replica only; switch off for a single process
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = true, action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// Namespace of the leader's Lease
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME", default_value = OPERATOR_NAMESPACE)]
    pub pod_namespace: String,
    /// Token that our own processes know one another by
    #[arg(long, env = "BUILDKIT_OPERATOR_INTERNAL_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub internal_token: Option<InternalToken>,
    /// Port of /internal/streams on the gateways' pods
    #[arg(long, value_name = "PORT", default_value_t = 8081)]
    pub gateway_metrics_port: u16,
    /// Port of /internal/wake on the servers' pods
    #[arg(long, value_name = "PORT", default_value_t = 8081)]
    pub server_metrics_port: u16,
    /// File that declares the certificates which the leader renews before they end; without it none is
    #[arg(long, value_name = "FILE")]
    pub renew_certificates: Option<PathBuf>,
    /// Seconds that listeners go on accepting after SIGTERM, while the address is still being given out
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    pub shutdown_delay_seconds: u64,
    /// Flags of the build farm.
    #[command(flatten)]
    pub farm: FarmArgs,
    /// Flags of the routing API.
    #[command(flatten)]
    pub route: RouteArgs,
    /// Flags of the gateway.
    #[command(flatten)]
    pub gateway: GatewayArgs,
}

/// Why flags make no server.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The routing API.
    #[error(transparent)]
    Route(router::ConfigError),
    /// The build farm.
    #[error(transparent)]
    Farm(#[from] FarmError),
    /// The gateway's domains.
    #[error("--domain: {0}")]
    Domains(DomainsError),
    /// The gateway's configuration.
    #[error("--config")]
    Config(#[source] ReloadError),
    /// Nothing would know of builds that nobody registered.
    #[error(
        "--companion-image: the role controller needs the image of the companion, which is this executable's own; \
         --companion=false runs daemons without it, and then only registered builds keep them"
    )]
    NoCompanionImage,
    /// The gateway without a domain would refuse every name.
    #[error(
        "the role gateway needs at least one --domain, or a --config; without a gateway, run --roles controller,route"
    )]
    NoDomain,
}

/// Why a server ended early.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address could not be bound.
    #[error("listen on {address} ({flag})")]
    Listen {
        /// The address.
        address: ListenAddress,
        /// The flag that sets it.
        flag: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// Signal handlers could not be installed.
    #[error("install signal handlers")]
    Signals(#[source] std::io::Error),
    /// The routing API's certificate.
    #[error("--api-tls-cert, --api-tls-key")]
    Tls(#[source] TlsError),
    /// No randomness for the process's identity.
    #[error("read randomness")]
    Randomness(#[source] getrandom::Error),
}

/// Checked flags: what is left to do is IO.
pub struct Plan {
    roles: BTreeSet<Role>,
    args: ServerArgs,
    settings: Arc<Settings>,
    route: Option<router::Config>,
    gateway: Option<Told>,
}

/// Name of the leader's Lease: the reference's, so that an old and a new
/// controller never work at once.
const LEASE: &str = "buildkit-operator-buildd";

impl TryFrom<ServerArgs> for Plan {
    type Error = PlanError;

    fn try_from(args: ServerArgs) -> Result<Self, PlanError> {
        let roles: BTreeSet<Role> = args.roles.iter().copied().collect();
        let route = roles.contains(&Role::Route).then(|| router::Config::try_from(args.route.clone()));
        if roles.contains(&Role::Controller) && args.farm.companion && args.farm.companion_image.is_empty() {
            return Err(PlanError::NoCompanionImage);
        }
        let gateway = roles.contains(&Role::Gateway).then(|| told(&args.gateway));
        Ok(Self {
            settings: Arc::new(Settings::try_from(&args.farm)?),
            route: route.transpose().map_err(PlanError::Route)?,
            gateway: gateway.transpose()?,
            roles,
            args,
        })
    }
}

fn told(args: &GatewayArgs) -> Result<Told, PlanError> {
    Told::read(rules(args)?, args).map_err(PlanError::Config)
}

/// What the flags say; a file may say otherwise.
fn rules(args: &GatewayArgs) -> Result<Rules, PlanError> {
    let domains: Vec<String> = args.domain.iter().filter(|d| !d.is_empty()).cloned().collect();
    let domains = match (domains.is_empty(), &args.config) {
        (true, None) => return Err(PlanError::NoDomain),
        (true, Some(_)) => Domains::default(),
        (false, _) => Domains::new(domains).map_err(PlanError::Domains)?,
    };
    Ok(Rules { domains, limits: args.limits(), proxy_from: args.proxy_from.clone() })
}

/// Runs the roles until a signal, then drains.
///
/// # Errors
/// When an address cannot be bound.
pub async fn run(plan: Plan, client: Client) -> Result<(), ServerError> {
    let Plan { roles, args, settings, route, gateway } = plan;
    let (shutdown, readiness, tasks) = (Shutdown::default(), Readiness::default(), TaskTracker::new());
    let mut registry = Registry::default();
    // Bind everything first: a taken port is known before anything has begun.
    let admin_listener = listen(args.metrics_addr, "--metrics-addr")?;
    let api = route.map(|config| Api::bind(config, &args)).transpose()?;
    let relay = gateway.map(|rules| Relay::bind(rules, &args.gateway)).transpose()?;

    let streams = relay.is_some().then(Arc::<Streams>::default);
    let own_api = api.as_ref().and_then(Api::backend);
    let mut internal = axum::Router::new();
    let mut own_writer = None;
    if roles.contains(&Role::Controller) || roles.contains(&Role::Route) {
        let view = View::start(&client, &settings, &args.farm.buildkitd_configmap, &shutdown.closing);
        let writer = Writer::new(client.clone(), view.clone(), settings.clone());
        let daemons = DaemonMetrics::register(&mut registry);
        let figures = Figures::start(view.clone(), daemons, shutdown.leaving.clone());
        readiness.set("caches", false);
        tasks.spawn(synced(view.clone(), readiness.clone(), shutdown.closing.clone()));
        internal = internal.merge(wake::router(writer.clone()));
        own_writer = Some(writer.clone());
        if let Some(api) = api {
            let wait = api.config.route_wait;
            let farm = Farm::new(client.clone(), view.clone(), writer.clone(), figures.clone(), settings.clone(), wait);
            api.serve(Arc::new(farm), &mut registry, &tasks, &shutdown);
        }
        if roles.contains(&Role::Controller) {
            let metrics = Arc::new(ControllerMetrics::default());
            metrics.register(&mut registry);
            let leading = elect(&client, &args, &shutdown, &tasks)?;
            if let Some(file) = &args.renew_certificates {
                let leaving = shutdown.leaving.clone();
                tasks.spawn(renewal::run(client.clone(), file.clone(), leading.clone(), leaving));
            }
            let witnesses = Witnesses {
                namespace: args.pod_namespace.clone(),
                port: args.gateway_metrics_port,
                token: args.internal_token.clone(),
                own: streams.clone(),
            };
            let truth = Truth::start(client.clone(), view.clone(), witnesses, shutdown.leaving.clone());
            let witnesses = Seen { truth, figures };
            let controller = Controller::new(client.clone(), view, writer, settings.clone(), metrics, witnesses);
            tasks.spawn(controller.run(leading, shutdown.leaving.clone()));
        }
    }
    if let (Some(relay), Some(streams)) = (relay, streams) {
        internal = internal.merge(streams::router(streams.clone()));
        let directory = Arc::new(Directory::default());
        let namespace = settings.namespace.clone();
        // Streams outlive the listener: the table must be kept until they end.
        tokio::spawn(directory::feed(
            client.clone(),
            namespace,
            directory.clone(),
            readiness.clone(),
            CancellationToken::new(),
        ));
        let ask = match own_writer {
            Some(writer) => {
                directory.set(API, own_api);
                relay::ask_here(writer)
            }
            None => relay::ask_servers(client, &args, directory.clone()),
        };
        let metrics = Arc::new(gateway::metrics::Metrics::register(&mut registry));
        let waker = Arc::new(Waker::new(Some(ask), args.gateway.wakes_per_source));
        relay.serve(Links { directory, streams, metrics, waker }, &tasks, &shutdown);
    }
    tokio::spawn(admin::serve(
        admin_listener,
        Arc::new(registry),
        readiness.clone(),
        internal::guarded(args.internal_token, internal),
        CancellationToken::new(),
    ));
    tracing::info!(roles = ?roles, namespace = settings.namespace, version = crate::VERSION, "serving");
    let delay = Duration::from_secs(args.shutdown_delay_seconds);
    on_signal(shutdown, readiness, delay).await.map_err(ServerError::Signals)?;
    tasks.close();
    tasks.wait().await;
    tracing::info!("ended");
    Ok(())
}

fn listen(address: ListenAddress, flag: &'static str) -> Result<TcpListener, ServerError> {
    address.bind().map_err(|source| ServerError::Listen { address, flag, source })
}

/// Caches may never be filled, when the type is not defined: that must not keep
/// the process from ending.
async fn synced(view: Arc<View>, readiness: Readiness, shutdown: CancellationToken) {
    if shutdown.run_until_cancelled(view.synced()).await.is_some() {
        readiness.set("caches", true);
    }
}

/// Whether this process leads, as it changes.
fn elect(
    client: &Client,
    args: &ServerArgs,
    shutdown: &Shutdown,
    tasks: &TaskTracker,
) -> Result<watch::Receiver<bool>, ServerError> {
    let (sender, receiver) = watch::channel(!args.leader_elect);
    if args.leader_elect {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(ServerError::Randomness)?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let config = lease::Config {
            namespace: args.pod_namespace.clone(),
            name: format!("{LEASE}.{GROUP}"),
            identity: format!("{host}_{}", hex::encode(random)),
            clock: Clock::default(),
        };
        tasks.spawn(lease::run(client.clone(), config, sender, shutdown.leaving.clone()));
    }
    Ok(receiver)
}
