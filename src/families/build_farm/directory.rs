//! Feeds the gateway's directory from watched Services, EndpointSlices and Pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, Service};
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

/// The daemons' pods: what is left of a stream when its pod has gone without a
/// word. Endpoints would not tell, since they also go while a gate is closed.
#[derive(Default)]
struct Pods {
    known: HashMap<String, (Option<String>, Vec<IpAddr>)>,
    /// During a relist: what it has not named yet.
    gone: BTreeSet<String>,
}

impl Pods {
    /// Takes over an event; daemon and address of every pod that has left the API.
    fn on(&mut self, event: Event<Pod>) -> Vec<(String, IpAddr)> {
        match event {
            Event::Apply(pod) | Event::InitApply(pod) => {
                let name = pod.name_any();
                self.gone.remove(&name);
                let ips = pod.status.iter().flat_map(|status| status.pod_ips.iter().flatten());
                let ips = ips.filter_map(|ip| ip.ip.parse().ok()).collect();
                match self.known.insert(name.clone(), (pod.uid(), ips)) {
                    Some((uid, ips)) if uid != pod.uid() => lost(&name, ips),
                    _ => Vec::new(),
                }
            }
            Event::Delete(pod) => self.forget(&pod.name_any()),
            Event::Init => {
                self.gone = self.known.keys().cloned().collect();
                Vec::new()
            }
            Event::InitDone => std::mem::take(&mut self.gone).iter().flat_map(|name| self.forget(name)).collect(),
        }
    }

    fn forget(&mut self, name: &str) -> Vec<(String, IpAddr)> {
        self.known.remove(name).map_or_else(Vec::new, |(_, ips)| lost(name, ips))
    }
}

fn lost(pod: &str, ips: Vec<IpAddr>) -> Vec<(String, IpAddr)> {
    // Each daemon is a StatefulSet of one.
    let daemon = pod.strip_suffix("-0").unwrap_or(pod);
    ips.into_iter().map(|ip| (daemon.to_owned(), ip)).collect()
}

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
    let slices = Api::<EndpointSlice>::namespaced(client.clone(), &namespace);
    let pods = Api::<Pod>::namespaced(client, &namespace);
    let mut services = Box::pin(watcher(services, config()).default_backoff());
    let mut slices = Box::pin(watcher(slices, config()).default_backoff());
    let mut pods = Box::pin(watcher(pods, config()).default_backoff());
    let (mut table, mut lives) = (Table::default(), Pods::default());
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
                    on_slice(&mut table, event)
                }
                None => return,
            },
            event = next(&mut pods, "Pod", &shutdown) => match event {
                Some(event) => {
                    lives.on(event).iter().for_each(|(daemon, ip)| directory.lose(daemon, *ip));
                    continue;
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

    fn pod(name: &str, uid: &str, ip: &str) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": name, "uid": uid}, "status": {"podIPs": [{"ip": ip}]}}))
            .unwrap()
    }

    #[test]
    fn a_pod_is_lost_when_its_uid_has_left_the_api() {
        let mut pods = Pods::default();
        let lost = |daemon: &str, ip: &str| vec![(daemon.to_owned(), ip.parse::<IpAddr>().unwrap())];
        assert!(pods.on(Event::Apply(pod("buildkitd-p1-0", "a", "10.0.0.1"))).is_empty());
        assert!(pods.on(Event::Apply(pod("buildkitd-p2-0", "b", "10.0.0.2"))).is_empty());
        assert!(pods.on(Event::Apply(pod("buildkitd-p1-0", "a", "10.0.0.1"))).is_empty(), "it only changed");
        assert_eq!(pods.on(Event::Apply(pod("buildkitd-p1-0", "c", "10.0.0.3"))), lost("buildkitd-p1", "10.0.0.1"));
        assert_eq!(pods.on(Event::Delete(pod("buildkitd-p1-0", "c", "10.0.0.3"))), lost("buildkitd-p1", "10.0.0.3"));
        assert!(pods.on(Event::Init).is_empty());
        assert_eq!(pods.on(Event::InitDone), lost("buildkitd-p2", "10.0.0.2"), "a relist leaves it out");
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
