//! Which gateways there are: the endpoints of their Service, watched. One that
//! went without having been seen to end is remembered, since its streams may
//! live on where we cannot see them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{GATEWAY_GONE, Moment};
use crate::families::build_farm::view::next;

/// The gateway's Service.
const SERVICE: &str = "buildkit-operator-gateway";

/// One gateway pod that may have streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Name of the pod.
    pub name: String,
    /// Its admin listener.
    pub address: SocketAddr,
    /// When it went without having been seen to end.
    pub gone: Option<Moment>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Endpoint {
    ip: IpAddr,
    ending: bool,
}

/// By the pod's name.
type Endpoints = BTreeMap<String, Endpoint>;

/// What the slices say.
#[derive(Debug, Default)]
struct Roster {
    slices: BTreeMap<String, Endpoints>,
    gone: BTreeMap<String, (IpAddr, Moment)>,
}

impl Roster {
    /// Takes over one slice; `None` when it has gone.
    fn set(&mut self, slice: String, endpoints: Option<Endpoints>, now: Moment) {
        let before = match endpoints {
            Some(endpoints) => self.slices.insert(slice, endpoints),
            None => self.slices.remove(&slice),
        };
        for (name, endpoint) in before.unwrap_or_default() {
            let listed = self.slices.values().any(|endpoints| endpoints.contains_key(&name));
            if !listed && !endpoint.ending {
                self.gone.insert(name, (endpoint.ip, now));
            }
        }
        let slices = &self.slices;
        self.gone.retain(|name, (_, since)| {
            now.saturating_sub(*since) < GATEWAY_GONE && !slices.values().any(|e| e.contains_key(name))
        });
    }

    fn list(&self, port: u16) -> Vec<Listed> {
        let there = self.slices.values().flatten().map(|(name, endpoint)| (name, endpoint.ip, None));
        let gone = self.gone.iter().map(|(name, (ip, since))| (name, *ip, Some(*since)));
        let listed = there.chain(gone);
        let one =
            listed.map(|(name, ip, gone)| (name, Listed { name: name.clone(), address: (ip, port).into(), gone }));
        // Dual-stack pods are in two slices.
        one.collect::<BTreeMap<_, _>>().into_values().collect()
    }
}

fn endpoints(slice: &EndpointSlice) -> Endpoints {
    let endpoints = slice.endpoints.iter().flatten().filter_map(|endpoint| {
        let ip: IpAddr = endpoint.addresses.first()?.parse().ok()?;
        let name = endpoint.target_ref.as_ref().and_then(|pod| pod.name.clone()).unwrap_or_else(|| ip.to_string());
        let ending = endpoint.conditions.as_ref().and_then(|conditions| conditions.terminating).unwrap_or(false);
        Some((name, Endpoint { ip, ending }))
    });
    endpoints.collect()
}

/// The gateways, kept by a watch.
pub struct Gateways {
    port: u16,
    began: Instant,
    /// `None` until the watch has been filled once.
    roster: Mutex<(Roster, bool)>,
}

impl Gateways {
    /// Starts to watch the gateways of the operator's namespace, whose admin
    /// listeners are on `port`.
    pub fn start(client: Client, namespace: &str, port: u16, began: Instant, shutdown: CancellationToken) -> Arc<Self> {
        let gateways = Arc::new(Self { port, began, roster: Mutex::default() });
        let api = Api::<EndpointSlice>::namespaced(client, namespace);
        tokio::spawn(gateways.clone().follow(api, shutdown));
        gateways
    }

    /// Those that may have streams; `None` while that is not known.
    pub fn list(&self) -> Option<Vec<Listed>> {
        let roster = self.roster.lock().unwrap_or_else(PoisonError::into_inner);
        roster.1.then(|| roster.0.list(self.port))
    }

    async fn follow(self: Arc<Self>, api: Api<EndpointSlice>, shutdown: CancellationToken) {
        let config = watcher::Config::default().labels(&format!("kubernetes.io/service-name={SERVICE}"));
        let mut events = Box::pin(watcher(api, config).default_backoff());
        let mut relisted = BTreeSet::new();
        while let Some(event) = next(&mut events, "EndpointSlice", &shutdown).await {
            let now = self.began.elapsed();
            let (roster, filled) = &mut *self.roster.lock().unwrap_or_else(PoisonError::into_inner);
            match event {
                Event::Init => relisted.clear(),
                Event::InitApply(slice) => {
                    relisted.insert(slice.name_any());
                    roster.set(slice.name_any(), Some(endpoints(&slice)), now);
                }
                Event::Apply(slice) => roster.set(slice.name_any(), Some(endpoints(&slice)), now),
                Event::Delete(slice) => roster.set(slice.name_any(), None, now),
                Event::InitDone => {
                    let lost: Vec<_> = roster.slices.keys().filter(|name| !relisted.contains(*name)).cloned().collect();
                    lost.into_iter().for_each(|name| roster.set(name, None, now));
                    *filled = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn slice(pods: &[(&str, bool)]) -> Endpoints {
        let endpoints = pods.iter().map(|(name, ending)| {
            json!({"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": name},
                   "conditions": {"ready": false, "terminating": ending}})
        });
        let slice = json!({"metadata": {}, "addressType": "IPv4", "endpoints": endpoints.collect::<Vec<_>>()});
        endpoints_of(slice)
    }

    fn endpoints_of(slice: serde_json::Value) -> Endpoints {
        endpoints(&serde_json::from_value(slice).unwrap())
    }

    fn names(roster: &Roster) -> Vec<(String, Option<Duration>)> {
        roster.list(8081).into_iter().map(|listed| (listed.name, listed.gone)).collect()
    }

    #[test]
    fn one_that_went_without_an_end_is_remembered_for_ten_minutes() {
        let mut roster = Roster::default();
        roster.set("s".into(), Some(slice(&[("a", false), ("b", false)])), S(0));
        assert_eq!(names(&roster), [("a".into(), None), ("b".into(), None)]);
        assert_eq!(roster.list(8081)[0].address, "10.0.0.1:8081".parse().unwrap());
        roster.set("s".into(), Some(slice(&[("a", false), ("b", true)])), S(1));
        roster.set("s".into(), Some(slice(&[])), S(2));
        assert_eq!(names(&roster), [("a".into(), Some(S(2)))], "b was seen to end");
        roster.set("s".into(), Some(slice(&[("c", false)])), S(601));
        assert_eq!(names(&roster), [("a".into(), Some(S(2))), ("c".into(), None)]);
        roster.set("s".into(), Some(slice(&[("c", false)])), S(602));
        assert_eq!(names(&roster), [("c".into(), None)]);
    }

    #[test]
    fn one_that_comes_back_or_moves_to_another_slice_is_not_gone() {
        let mut roster = Roster::default();
        roster.set("s".into(), Some(slice(&[("a", false)])), S(0));
        roster.set("t".into(), Some(slice(&[("a", false)])), S(1));
        roster.set("s".into(), None, S(2));
        assert_eq!(names(&roster), [("a".into(), None)]);
        roster.set("t".into(), None, S(3));
        roster.set("t".into(), Some(slice(&[("a", false)])), S(4));
        assert_eq!(names(&roster), [("a".into(), None)]);
    }
}
