//! The gateway as a role: its rules, and whom it asks to wake daemons.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{ServerArgs, ServerError, listen};
use crate::families::build_farm::servers::Servers;
use crate::families::build_farm::wake;
use crate::families::build_farm::writer::Writer;
use crate::gateway::directory::Directory;
use crate::gateway::reload::{self, ReloadError};
use crate::gateway::rules::Rules;
use crate::gateway::wake::Ask;
use crate::gateway::{self, Links, args::GatewayArgs};
use crate::runtime::shutdown::Shutdown;

/// The gateway, its address bound and its file read.
pub(super) struct Relay {
    listener: TcpListener,
    config: gateway::Config,
    /// The rules of the flags, the file, its text, and where changes go.
    file: Option<(Rules, PathBuf, String, watch::Sender<Rules>)>,
}

/// What the gateway is told: by its flags, and by a file that was read.
pub(super) struct Told {
    flags: Rules,
    file: Option<(PathBuf, Rules, String)>,
}

impl Told {
    pub(super) fn read(flags: Rules, args: &GatewayArgs) -> Result<Self, ReloadError> {
        let read = |path: &PathBuf| reload::read(&flags, path).map(|(rules, text)| (path.clone(), rules, text));
        let file = args.config.as_ref().map(read).transpose()?;
        Ok(Self { flags, file })
    }
}

impl Relay {
    pub(super) fn bind(Told { flags, file }: Told, args: &GatewayArgs) -> Result<Self, ServerError> {
        let listener = listen(args.listen, "--listen")?;
        let (rules, file) = match file {
            Some((path, rules, text)) => {
                let (sender, rules) = watch::channel(rules);
                (rules, Some((flags, path, text, sender)))
            }
            None => (flags.fixed(), None),
        };
        let config = gateway::Config {
            rules,
            drain: Duration::from_secs(args.drain_seconds),
            idle: Some(args.stream_idle).filter(|idle| !idle.is_zero()),
            ..gateway::Config::default()
        };
        Ok(Self { listener, config, file })
    }

    pub(super) fn serve(self, links: Links, tasks: &TaskTracker, shutdown: &Shutdown) {
        if let Some((flags, path, text, sender)) = self.file {
            let metrics = links.metrics.clone();
            tokio::spawn(reload::follow((flags, path), text, sender, metrics, shutdown.closing.clone()));
        }
        tasks.spawn(gateway::run(self.listener, self.config, links, shutdown.closing.clone()));
    }
}

/// Wakes are decided in this very process.
pub(super) fn ask_here(writer: Arc<Writer>) -> Ask {
    Arc::new(move |daemon| {
        let writer = writer.clone();
        async move { wake::wake(&writer, &daemon).await.map_err(|error| error.to_string()) }.boxed()
    })
}

/// Wakes are decided by the servers.
pub(super) fn ask_servers(client: Client, args: &ServerArgs, directory: Arc<Directory>) -> Ask {
    let (namespace, port, token) = (&args.pod_namespace, args.server_metrics_port, args.internal_token.clone());
    let servers = Servers::start(client, namespace, port, token, directory, CancellationToken::new());
    Arc::new(move |daemon| {
        let servers = servers.clone();
        async move { servers.wake(daemon).await }.boxed()
    })
}
