//! Feeds the gateway's directory from watched Services and EndpointSlices.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio_util::sync::CancellationToken;

use super::build::DAEMON_SELECTOR;
use super::view::next;
use crate::gateway::directory::{Backend, Directory};
use crate::names::DAEMON_PREFIX;
use crate::runtime::admin::Readiness;

const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// What is known so far: which daemons exist, and their slices.
#[derive(Default)]
struct Table {
    services: BTreeSet<String>,
    slices: HashMap<String, BTreeMap<String, EndpointSlice>>,
    /// During a relist: what it has not named yet.
    gone_services: BTreeSet<String>,
    gone_slices: BTreeSet<(String, String)>,
}

impl Table {
    /// The daemon as the gateway should see it; `None` when it has no Service.
    fn backend(&self, daemon: &str) -> Option<Backend> {
        self.services.contains(daemon).then(|| {
            let mut backend = Backend::default();
            for slice in self.slices.get(daemon).into_iter().flat_map(BTreeMap::values) {
                add_endpoints(&mut backend, slice);
            }
            backend
        })
    }

    /// Addresses that a newer copy of a slice lacks, and no other slice has: the
    /// pods there have left the API. A slice that goes as a whole says nothing,
    /// since it goes with its Service, under a pod that may still finish a build.
    fn lost(&self, daemon: &str, newer: &EndpointSlice) -> Vec<SocketAddr> {
        let Some(slices) = self.slices.get(daemon) else { return Vec::new() };
        let others = slices.iter().filter(|(name, _)| **name != newer.name_any()).map(|(_, slice)| slice);
        let kept: Vec<SocketAddr> = others.chain([newer]).flat_map(all_addresses).collect();
        let before = slices.get(&newer.name_any()).into_iter().flat_map(all_addresses);
        before.filter(|address| !kept.contains(address)).collect()
    }

    fn remove_slice(&mut self, daemon: &str, name: &str) {
        if let Some(slices) = self.slices.get_mut(daemon) {
            slices.remove(name);
            if slices.is_empty() {
                self.slices.remove(daemon);
            }
        }
    }
}

/// Keeps the directory until `shutdown`. Reports `directory` ready once both
/// watches have been filled.
pub async fn feed(
    client: Client,
    namespace: String,
    directory: Arc<Directory>,
    readiness: Readiness,
    shutdown: CancellationToken,
) {
    readiness.set("directory", false);
    let config = || watcher::Config::default().labels(DAEMON_SELECTOR);
    let services = Api::<Service>::namespaced(client.clone(), &namespace);
    let slices = Api::<EndpointSlice>::namespaced(client, &namespace);
    let mut services = Box::pin(watcher(services, config()).default_backoff());
    let mut slices = Box::pin(watcher(slices, config()).default_backoff());
    let mut table = Table::default();
    let (mut have_services, mut have_slices) = (false, false);
    loop {
        let changed = tokio::select! {
            event = next(&mut services, "Service", &shutdown) => match event {
                Some(event) => {
                    have_services |= matches!(event, Event::InitDone);
                    on_service(&mut table, event)
                }
                None => return,
            },
            event = next(&mut slices, "EndpointSlice", &shutdown) => match event {
                Some(event) => {
                    have_slices |= matches!(event, Event::InitDone);
                    if let Event::Apply(slice) | Event::InitApply(slice) = &event {
                        let daemon = daemon_of(slice);
                        table.lost(&daemon, slice).into_iter().for_each(|lost| directory.lose(&daemon, lost));
                    }
                    on_slice(&mut table, event)
                }
                None => return,
            },
        };
        for daemon in changed {
            directory.set(&daemon, table.backend(&daemon));
        }
        readiness.set("directory", have_services && have_slices);
    }
}

fn on_service(table: &mut Table, event: Event<Service>) -> Vec<String> {
    match event {
        Event::Apply(s) | Event::InitApply(s) => {
            let name = s.name_any();
            table.gone_services.remove(&name);
            if name.starts_with(DAEMON_PREFIX) {
                table.services.insert(name.clone());
            }
            vec![name]
        }
        Event::Delete(s) => {
            table.services.remove(&s.name_any());
            vec![s.name_any()]
        }
        // A relist tells what there is; what it leaves out has gone.
        Event::Init => {
            table.gone_services.clone_from(&table.services);
            Vec::new()
        }
        Event::InitDone => {
            let gone = std::mem::take(&mut table.gone_services);
            table.services.retain(|name| !gone.contains(name));
            gone.into_iter().collect()
        }
    }
}

fn daemon_of(slice: &EndpointSlice) -> String {
    slice.labels().get(SERVICE_NAME).cloned().unwrap_or_default()
}

fn on_slice(table: &mut Table, event: Event<EndpointSlice>) -> Vec<String> {
    match event {
        Event::Apply(slice) | Event::InitApply(slice) => {
            let daemon = daemon_of(&slice);
            table.gone_slices.remove(&(daemon.clone(), slice.name_any()));
            table.slices.entry(daemon.clone()).or_default().insert(slice.name_any(), slice);
            vec![daemon]
        }
        Event::Delete(slice) => {
            table.remove_slice(&daemon_of(&slice), &slice.name_any());
            vec![daemon_of(&slice)]
        }
        Event::Init => {
            let all = table.slices.iter().flat_map(|(daemon, s)| s.keys().map(|name| (daemon.clone(), name.clone())));
            table.gone_slices = all.collect();
            Vec::new()
        }
        Event::InitDone => {
            let gone = std::mem::take(&mut table.gone_slices);
            for (daemon, name) in &gone {
                table.remove_slice(daemon, name);
            }
            gone.into_iter().map(|(daemon, _)| daemon).collect()
        }
    }
}

fn port_of(slice: &EndpointSlice) -> Option<u16> {
    slice.ports.iter().flatten().find_map(|p| p.port).and_then(|p| u16::try_from(p).ok())
}

/// Of every pod, in whatever condition.
fn all_addresses(slice: &EndpointSlice) -> Vec<SocketAddr> {
    let Some(port) = port_of(slice) else { return Vec::new() };
    let ips = slice.endpoints.iter().flatten().flat_map(|endpoint| &endpoint.addresses);
    ips.filter_map(|ip| ip.parse::<IpAddr>().ok()).map(|ip| SocketAddr::new(ip, port)).collect()
}

fn add_endpoints(backend: &mut Backend, slice: &EndpointSlice) {
    let Some(port) = port_of(slice) else { return };
    for endpoint in slice.endpoints.iter().flatten() {
        let conditions = endpoint.conditions.clone().unwrap_or_default();
        let terminating = conditions.terminating.unwrap_or(false);
        // Absent means unknown, which consumers should take for ready.
        let ready = conditions.ready.unwrap_or(true);
        let serving = conditions.serving.unwrap_or(ready);
        let addresses = endpoint.addresses.iter().filter_map(|a| a.parse::<IpAddr>().ok());
        let addresses = addresses.map(|ip| SocketAddr::new(ip, port));
        match (terminating, ready, serving) {
            (false, true, _) => backend.ready.extend(addresses),
            (true, _, true) => backend.terminating.extend(addresses),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn service(name: &str) -> Service {
        serde_json::from_value(json!({"metadata": {"name": name}})).unwrap()
    }

    fn slice(name: &str, daemon: &str, endpoints: serde_json::Value) -> EndpointSlice {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {SERVICE_NAME: daemon}},
            "addressType": "IPv4", "ports": [{"port": 1234}], "endpoints": endpoints,
        }))
        .unwrap()
    }

    fn address(text: &str) -> Vec<SocketAddr> {
        vec![text.parse().unwrap()]
    }

    #[test]
    fn ready_and_terminating_endpoints_are_told_apart() {
        let mut table = Table::default();
        on_service(&mut table, Event::Apply(service("buildkitd-p1")));
        let endpoints = json!([
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true, "serving": true, "terminating": false}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "serving": true, "terminating": true}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": false, "serving": false, "terminating": false}},
            {"addresses": ["10.0.0.4"], "conditions": {"ready": false, "serving": false, "terminating": true}},
        ]);
        assert_eq!(on_slice(&mut table, Event::Apply(slice("s", "buildkitd-p1", endpoints))), ["buildkitd-p1"]);
        let backend = table.backend("buildkitd-p1").unwrap();
        assert_eq!((backend.ready, backend.terminating), (address("10.0.0.1:1234"), address("10.0.0.2:1234")));
        assert_eq!(table.backend("buildkitd-p2"), None);
    }

    #[test]
    fn a_pod_is_lost_when_its_slice_goes_on_without_it() {
        let mut table = Table::default();
        let pods = |ips: &[&str]| {
            let pods =
                ips.iter().map(|ip| json!({"addresses": [ip], "conditions": {"ready": false, "serving": false}}));
            slice("s", "buildkitd-p1", pods.collect())
        };
        assert!(table.lost("buildkitd-p1", &pods(&["10.0.0.1"])).is_empty());
        on_slice(&mut table, Event::Apply(pods(&["10.0.0.1", "10.0.0.2"])));
        assert!(table.lost("buildkitd-p1", &pods(&["10.0.0.2", "10.0.0.1"])).is_empty(), "not ready is not gone");
        assert_eq!(table.lost("buildkitd-p1", &pods(&["10.0.0.2"])), address("10.0.0.1:1234"));
        let mut other = pods(&["10.0.0.1"]);
        other.metadata.name = Some("t".into());
        on_slice(&mut table, Event::Apply(other));
        assert!(table.lost("buildkitd-p1", &pods(&["10.0.0.2"])).is_empty(), "it moved to another slice");
        on_slice(&mut table, Event::Delete(pods(&[])));
        assert!(table.lost("buildkitd-p1", &pods(&[])).is_empty(), "the slice as a whole has gone");
    }

    #[test]
    fn what_a_relist_leaves_out_has_gone() {
        let mut table = Table::default();
        let ready = json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}}]);
        for daemon in ["buildkitd-p1", "buildkitd-p2"] {
            on_service(&mut table, Event::Apply(service(daemon)));
            on_slice(&mut table, Event::Apply(slice(daemon, daemon, ready.clone())));
        }
        on_service(&mut table, Event::Init);
        on_service(&mut table, Event::InitApply(service("buildkitd-p1")));
        assert_eq!(on_service(&mut table, Event::InitDone), ["buildkitd-p2"]);
        on_slice(&mut table, Event::Init);
        assert_eq!(on_slice(&mut table, Event::InitDone).len(), 2);
        assert_eq!(table.backend("buildkitd-p1"), Some(Backend::default()));
        assert_eq!(table.backend("buildkitd-p2"), None);
    }
}
