//! Where the servers are, as a gateway sees them: the endpoints of their
//! Service, watched. It asks their admin listeners to wake daemons, and relays
//! `api.<domain>` to their TLS port.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio_util::sync::CancellationToken;

use super::view::next;
use crate::gateway::directory::{API, Backend, Directory};
use crate::gateway::wake::{Dialled, PATH, Told, Verdict};
use crate::names::DaemonName;
use crate::runtime::internal::{InternalToken, tell};

/// The servers' Service, and its port with TLS.
const SERVICE: &str = "buildkit-operator-buildd";
const TLS_PORT: &str = "https";

/// How long one server may take to answer; another is asked then.
const DEADLINE: Duration = Duration::from_secs(4);

/// The servers, kept by a watch.
pub struct Servers {
    port: u16,
    token: Option<InternalToken>,
    /// Addresses of those that are ready.
    ready: Mutex<Vec<IpAddr>>,
}

impl Servers {
    /// Starts to watch the servers of the operator's namespace, whose admin
    /// listeners are on `port`. Their TLS ports go into `directory`.
    pub fn start(
        client: Client,
        namespace: &str,
        port: u16,
        token: Option<InternalToken>,
        directory: Arc<Directory>,
        shutdown: CancellationToken,
    ) -> Arc<Self> {
        let servers = Arc::new(Self { port, token, ready: Mutex::default() });
        let api = Api::<EndpointSlice>::namespaced(client, namespace);
        tokio::spawn(servers.clone().follow(api, directory, shutdown));
        servers
    }

    /// Asks one after the other until one answers.
    ///
    /// # Errors
    /// When none does: what the last one said.
    pub async fn wake(&self, daemon: DaemonName) -> Result<Verdict, String> {
        let mut last = "no server is ready".to_owned();
        for address in self.in_turn() {
            let said = Dialled { daemon: daemon.clone() };
            match tell::<Told>((address, self.port).into(), PATH, &said, self.token.as_ref(), DEADLINE).await {
                Ok(Told { verdict }) => return Ok(verdict),
                Err(error) => last = error.to_string(),
            }
        }
        Err(last)
    }

    /// Those that are ready; each time another comes first.
    fn in_turn(&self) -> Vec<IpAddr> {
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        if !ready.is_empty() {
            ready.rotate_left(1);
        }
        ready.clone()
    }

    async fn follow(self: Arc<Self>, api: Api<EndpointSlice>, directory: Arc<Directory>, shutdown: CancellationToken) {
        let config = watcher::Config::default().labels(&format!("kubernetes.io/service-name={SERVICE}"));
        let mut events = Box::pin(watcher(api, config).default_backoff());
        let mut slices = BTreeMap::new();
        let mut relisted = BTreeSet::new();
        while let Some(event) = next(&mut events, "EndpointSlice", &shutdown).await {
            match event {
                Event::Init => relisted.clear(),
                Event::InitApply(slice) => {
                    relisted.insert(slice.name_any());
                    slices.insert(slice.name_any(), slice);
                }
                Event::Apply(slice) => drop(slices.insert(slice.name_any(), slice)),
                Event::Delete(slice) => drop(slices.remove(&slice.name_any())),
                Event::InitDone => slices.retain(|name, _| relisted.contains(name)),
            }
            let (ready, tls) = addresses(slices.values());
            *self.ready.lock().unwrap_or_else(PoisonError::into_inner) = ready;
            directory.set(API, tls);
        }
    }
}

/// Addresses of the servers that are ready, and, when they serve TLS, where.
fn addresses<'a>(slices: impl Iterator<Item = &'a EndpointSlice>) -> (Vec<IpAddr>, Option<Backend>) {
    let (mut all, mut tls) = (Vec::new(), None);
    for slice in slices {
        let ready = slice.endpoints.iter().flatten().filter(|endpoint| {
            let conditions = endpoint.conditions.clone().unwrap_or_default();
            conditions.ready.unwrap_or(true) && !conditions.terminating.unwrap_or(false)
        });
        let ready: Vec<IpAddr> = ready.flat_map(|e| &e.addresses).filter_map(|a| a.parse().ok()).collect();
        let mut ports = slice.ports.iter().flatten();
        let port = ports.find(|port| port.name.as_deref() == Some(TLS_PORT)).and_then(|port| port.port);
        if let Some(port) = port.and_then(|port| u16::try_from(port).ok()) {
            let backend = tls.get_or_insert_with(Backend::default);
            backend.ready.extend(ready.iter().map(|address| SocketAddr::new(*address, port)));
        }
        all.extend(ready);
    }
    (all, tls)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(ports: serde_json::Value) -> EndpointSlice {
        let endpoints = json!([
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "serving": true, "terminating": true}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": false}},
            {"addresses": ["10.0.0.4"]},
        ]);
        let slice = json!({"metadata": {"name": "s"}, "addressType": "IPv4", "ports": ports, "endpoints": endpoints});
        serde_json::from_value(slice).unwrap()
    }

    #[test]
    fn servers_that_are_ready_are_asked_and_relayed_to_where_they_serve_tls() {
        let ips: Vec<IpAddr> = ["10.0.0.1", "10.0.0.4"].iter().map(|ip| ip.parse().unwrap()).collect();
        let plain = slice(json!([{"name": "http", "port": 8080}]));
        assert_eq!(addresses([&plain].into_iter()), (ips.clone(), None));
        let both = slice(json!([{"name": "http", "port": 8080}, {"name": "https", "port": 8443}]));
        let ready = ips.iter().map(|ip| SocketAddr::new(*ip, 8443)).collect();
        assert_eq!(addresses([&both].into_iter()), (ips, Some(Backend { ready, terminating: vec![] })));
    }
}
