//! `bko-install server`: the roles of the control plane, in one process or in
//! several, over one set of caches and one admin listener.
#![expect(clippy::disallowed_methods, reason = "shell: a process has an identity of its own")]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use kube::Client;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::families::build_farm::args::FarmArgs;
use crate::families::build_farm::controller::{Controller, Seen};
use crate::families::build_farm::directory;
use crate::families::build_farm::figures::Figures;
use crate::families::build_farm::metrics::{DaemonMetrics, Metrics as ControllerMetrics};
use crate::families::build_farm::provisioner::Farm;
use crate::families::build_farm::settings::Settings;
use crate::families::build_farm::truth::ask::{Truth, Witnesses};
use crate::families::build_farm::view::View;
use crate::families::build_farm::writer::Writer;
use crate::gateway::directory::Directory;
use crate::gateway::streams::{self, Streams};
use crate::gateway::{self, args::GatewayArgs};
use crate::names::{GROUP, OPERATOR_NAMESPACE};
use crate::router::{self, RouteArgs, Router, Timeouts};
use crate::runtime::admin::{self, Readiness};
use crate::runtime::internal::{self, InternalToken};
use crate::runtime::lease;
use crate::runtime::listen::ListenAddress;
use crate::runtime::shutdown::{Shutdown, on_signal};
use crate::sni::{Domains, DomainsError};

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
    /// The gateway's domains.
    #[error("--domain: {0}")]
    Domains(DomainsError),
    /// Nothing would know of builds that nobody registered.
    #[error(
        "--companion-image: the role controller needs the image of the companion, which is this executable's own; \
         --companion=false runs daemons without it, and then only registered builds keep them"
    )]
    NoCompanionImage,
    /// The gateway without a domain would refuse every name.
    #[error("the role gateway needs at least one --domain; without a gateway, run --roles controller,route")]
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
    gateway: Option<gateway::Config>,
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
        let gateway = roles.contains(&Role::Gateway).then(|| gateway_config(&args.gateway));
        Ok(Self {
            settings: Arc::new(Settings::from(&args.farm)),
            route: route.transpose().map_err(PlanError::Route)?,
            gateway: gateway.transpose()?,
            roles,
            args,
        })
    }
}

fn gateway_config(args: &GatewayArgs) -> Result<gateway::Config, PlanError> {
    let domains: Vec<String> = args.domain.iter().filter(|d| !d.is_empty()).cloned().collect();
    if domains.is_empty() {
        return Err(PlanError::NoDomain);
    }
    Ok(gateway::Config {
        max_conns: args.max_conns,
        drain: Duration::from_secs(args.drain_seconds),
        domains: Domains::new(domains).map_err(PlanError::Domains)?,
        ..gateway::Config::default()
    })
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
    let api = route.map(|config| listen(args.api_listen, "--api-listen").map(|l| (config, l))).transpose()?;
    let relay = gateway.map(|config| listen(args.gateway.listen, "--listen").map(|l| (config, l))).transpose()?;

    let streams = relay.is_some().then(Arc::<Streams>::default);
    if roles.contains(&Role::Controller) || roles.contains(&Role::Route) {
        let view = View::start(&client, &settings, &args.farm.buildkitd_configmap, &shutdown.closing);
        let writer = Writer::new(client.clone(), view.clone(), settings.clone());
        let daemons = DaemonMetrics::register(&mut registry);
        let figures = Figures::start(view.clone(), daemons, shutdown.leaving.clone());
        readiness.set("caches", false);
        tasks.spawn(synced(view.clone(), readiness.clone(), shutdown.closing.clone()));
        if let Some((config, listener)) = api {
            let timeouts = Timeouts::new(config.route_wait);
            config.auth.register_metrics(&mut registry);
            tasks.spawn(config.auth.clone().keep_fresh(shutdown.closing.clone()));
            let (view, writer) = (view.clone(), writer.clone());
            let farm = Farm::new(client.clone(), view, writer, figures.clone(), settings.clone(), config.route_wait);
            let router = Router::new(config, Arc::new(farm), router::Metrics::register(&mut registry));
            tasks.spawn(router::run(listener, router, timeouts, shutdown.closing.clone()));
        }
        if roles.contains(&Role::Controller) {
            let metrics = Arc::new(ControllerMetrics::default());
            metrics.register(&mut registry);
            let leading = elect(&client, &args, &shutdown, &tasks)?;
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
    let mut internal = axum::Router::new();
    if let (Some((config, listener)), Some(streams)) = (relay, streams) {
        internal = internal.merge(streams::router(streams.clone()));
        let table = Arc::new(Directory::default());
        let namespace = settings.namespace.clone();
        // Streams outlive the listener: the table must be kept until they end.
        tokio::spawn(directory::feed(client, namespace, table.clone(), readiness.clone(), shutdown.closing.clone()));
        let metrics = Arc::new(gateway::metrics::Metrics::register(&mut registry));
        tasks.spawn(gateway::run(listener, config, table, streams, metrics, shutdown.closing.clone()));
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
        };
        tasks.spawn(lease::run(client.clone(), config, sender, shutdown.leaving.clone()));
    }
    Ok(receiver)
}
