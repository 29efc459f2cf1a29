//! One server of the control plane, as `server.rs` composes it, without its
//! listeners: controller and routing API over one set of caches.

use std::sync::Arc;
use std::time::Duration;

use crate::product::families::build_farm::controller::{Controller, Seen};
use crate::product::families::build_farm::figures::Figures;
use crate::product::families::build_farm::metrics::{DaemonMetrics, Metrics};
use crate::product::families::build_farm::provisioner::Farm;
use crate::product::families::build_farm::settings::Settings;
use crate::product::families::build_farm::truth::ask::{Truth, Witnesses};
use crate::product::families::build_farm::view::View;
use crate::product::families::build_farm::writer::Writer;
use crate::product::runtime::lease;
use bko_install::router::{self, Auth, Config, RateLimit, Router, TrustedProxies};
use bko_install::runtime::clock::Clock;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::network::{Condition, Link, Node};
use crate::world::World;

/// Idle time after which a daemon goes to zero.
pub(crate) const IDLE: Duration = Duration::from_secs(30);

/// The whole time that one route may take.
const ROUTE_WAIT: Duration = Duration::from_secs(60);

/// A running server.
pub(crate) struct Replica {
    pub(crate) node: Arc<Node>,
    pub(crate) router: Router,
    view: Arc<View>,
    pub(crate) leading: watch::Receiver<bool>,
    leaving: CancellationToken,
    closing: CancellationToken,
}

impl Replica {
    /// Starts the process on a machine.
    pub(crate) fn start(world: &Arc<World>, node: Arc<Node>, identity: String, max_inflight: usize) -> Self {
        let link = Link { world: Arc::clone(world), node: Arc::clone(&node) };
        let client = kube::Client::new(link, "buildkit-builds");
        let clock = {
            let (world, node) = (Arc::clone(world), Arc::clone(&node));
            Clock::new(move || world.wall(node.offset()))
        };
        let settings = Arc::new(Settings {
            idle: IDLE,
            fork_idle: IDLE / 2,
            adaptive_idle_max: Duration::ZERO,
            max_build: world.temper.max_build(),
            max_inflight,
            clock: clock.clone(),
            ..Settings::default()
        });
        let (leaving, closing) = (CancellationToken::new(), CancellationToken::new());
        let view = View::start(&client, &settings, "buildkitd-config", &closing);
        let writer = Writer::new(client.clone(), view.clone(), settings.clone());
        // Daemons here have no companions that could be asked for figures.
        let figures = Figures::new(view.clone(), DaemonMetrics::register(&mut Registry::default()));
        let (known, writes) = (view.clone(), writer.clone());
        let farm = Farm::new(client.clone(), known, writes, figures.clone(), settings.clone(), ROUTE_WAIT);
        let config = Config {
            auth: Auth { open: true, ..Auth::default() },
            rate: RateLimit::new(0.0, 0).unwrap(),
            source_rate: RateLimit::new(0.0, 0).unwrap(),
            max_cold_starts: 8.try_into().unwrap(),
            route_wait: ROUTE_WAIT,
            require_build_id: false,
            trusted_proxies: TrustedProxies::default(),
        };
        let router = Router::new(config, Arc::new(farm), router::Metrics::default());
        let (sender, leading) = watch::channel(false);
        let lease = lease::Config { namespace: "buildkit-operator".into(), name: "leader".into(), identity, clock };
        tokio::spawn(lease::run(client.clone(), lease, sender, leaving.clone()));
        let witnesses = Witnesses { namespace: "buildkit-operator".into(), port: 8081, token: None, own: None };
        let truth = Truth::start(client.clone(), view.clone(), witnesses, leaving.clone());
        let (metrics, seen) = (Arc::new(Metrics::default()), Seen { truth, figures });
        let controller = Controller::new(client, view.clone(), writer, settings, metrics, seen);
        tokio::spawn(controller.run(leading.clone(), leaving.clone()));
        Self { node, router, view, leading, leaving, closing }
    }

    /// Whether clients are sent here.
    pub(crate) fn serves(&self) -> bool {
        use futures::FutureExt;
        self.node.condition() != Condition::Dead && self.view.synced().now_or_never().is_some()
    }

    /// Ends the process at once.
    pub(crate) fn crash(&self) {
        self.node.set(Condition::Dead);
        self.leaving.cancel();
        self.closing.cancel();
    }

    /// Ends the process as a cluster would: the lease is given back first.
    pub(crate) async fn terminate(&self) {
        self.leaving.cancel();
        tokio::time::sleep(Duration::from_secs(15)).await;
        self.crash();
    }
}
