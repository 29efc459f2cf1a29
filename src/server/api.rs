//! The routing API as a role: plain for the cluster, over TLS for the gateway.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use super::{ServerArgs, ServerError, listen};
use crate::families::build_farm::provisioner::Farm;
use crate::gateway::directory::Backend;
use crate::router::{self, Router, Timeouts};
use crate::runtime::shutdown::Shutdown;
use crate::runtime::tls::{Certificate, Files};

/// The routing API, its addresses bound.
pub(super) struct Api {
    pub(super) config: router::Config,
    plain: TcpListener,
    tls: Option<(TcpListener, Arc<Certificate>)>,
}

impl Api {
    pub(super) fn bind(config: router::Config, args: &ServerArgs) -> Result<Self, ServerError> {
        let plain = listen(args.api_listen, "--api-listen")?;
        let tls = match (args.api_tls_listen, &args.api_tls_cert, &args.api_tls_key) {
            (Some(address), Some(certificate), Some(key)) => {
                let files = Files { certificate: certificate.clone(), key: key.clone() };
                let certificate = Certificate::read(files).map_err(ServerError::Tls)?;
                Some((listen(address, "--api-tls-listen")?, certificate))
            }
            _ => None,
        };
        Ok(Self { config, plain, tls })
    }

    /// Where a gateway in this very process reaches it over TLS.
    pub(super) fn backend(&self) -> Option<Backend> {
        let (listener, _) = self.tls.as_ref()?;
        let listening = listener.local_addr().ok()?;
        let ip = if listening.ip().is_unspecified() { Ipv4Addr::LOCALHOST.into() } else { listening.ip() };
        Some(Backend { ready: vec![SocketAddr::new(ip, listening.port())], terminating: vec![] })
    }

    pub(super) fn serve(self, farm: Arc<Farm>, registry: &mut Registry, tasks: &TaskTracker, shutdown: &Shutdown) {
        let timeouts = Timeouts::new(self.config.route_wait);
        self.config.auth.register_metrics(registry);
        tasks.spawn(self.config.auth.clone().keep_fresh(shutdown.closing.clone()));
        let router = Router::new(self.config, farm, router::Metrics::register(registry));
        let closing = shutdown.closing.clone();
        if let Some((listener, certificate)) = self.tls {
            match certificate.acceptor() {
                Ok(acceptor) => {
                    tasks.spawn(router::run(listener, router.clone(), timeouts, Some(acceptor), closing.clone()));
                    tokio::spawn(certificate.follow(closing.clone()));
                }
                Err(error) => tracing::error!(%error, "cannot serve the routing API over TLS"),
            }
        }
        tasks.spawn(router::run(self.plain, router, timeouts, None, closing));
    }
}
