//! Which daemon is where, as the gateway sees it: a table with one writer (the
//! watch of Services and EndpointSlices) and many readers.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError, RwLock};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::names::DaemonName;

/// The routing API's entry: no daemon has such a name.
pub const API: &str = "api";

/// One daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Backend {
    /// Addresses that serve and are not terminating. Empty: it is starting, or at zero.
    pub ready: Vec<SocketAddr>,
    /// Addresses that serve but are terminating.
    pub terminating: Vec<SocketAddr>,
}

/// The table, by daemon name (`buildkitd-<key>`). A name that is not in it
/// belongs to no project.
#[derive(Debug)]
pub struct Directory {
    backends: RwLock<HashMap<String, Backend>>,
    /// Whose clients dial an address instead of a name.
    addresses: RwLock<HashMap<IpAddr, DaemonName>>,
    changed: watch::Sender<u64>,
    /// For every address with streams: cancelled when its pod has gone.
    lives: Mutex<HashMap<String, HashMap<SocketAddr, CancellationToken>>>,
}

impl Default for Directory {
    fn default() -> Self {
        Self {
            backends: RwLock::default(),
            addresses: RwLock::default(),
            changed: watch::Sender::new(0),
            lives: Mutex::default(),
        }
    }
}

impl Directory {
    /// Sets or removes one daemon, and wakes those who wait for a change.
    pub fn set(&self, daemon: &str, backend: Option<Backend>) {
        if backend.is_none() {
            // Its pod may still finish a build: nothing is known of it any more.
            self.lives.lock().unwrap_or_else(PoisonError::into_inner).remove(daemon);
        }
        let changed = {
            let mut backends = self.backends.write().unwrap_or_else(PoisonError::into_inner);
            match backend {
                Some(backend) => backends.insert(daemon.to_owned(), backend.clone()) != Some(backend),
                None => backends.remove(daemon).is_some(),
            }
        };
        if changed {
            self.changed.send_modify(|generation| *generation += 1);
        }
    }

    /// Says that the pod at an address of a daemon has gone, with everything that
    /// was connected to it: no reset will come from there.
    pub fn lose(&self, daemon: &str, ip: IpAddr) {
        let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(addresses) = lives.get_mut(daemon) else { return };
        for (_, life) in addresses.extract_if(|address, _| address.ip() == ip) {
            life.cancel();
        }
        if addresses.is_empty() {
            lives.remove(daemon);
        }
    }

    /// Cancelled once the pod at an address of a daemon has gone, or with `all`.
    pub(super) fn life(&self, daemon: &str, address: SocketAddr, all: &CancellationToken) -> CancellationToken {
        let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
        let addresses = lives.entry(daemon.to_owned()).or_default();
        addresses.entry(address).or_insert_with(|| all.child_token()).clone()
    }

    /// Says which daemon clients mean who dial this address without a name.
    pub fn set_address(&self, address: IpAddr, daemon: Option<DaemonName>) {
        let mut addresses = self.addresses.write().unwrap_or_else(PoisonError::into_inner);
        match daemon {
            Some(daemon) => addresses.insert(address, daemon),
            None => addresses.remove(&address),
        };
    }

    /// The daemon that clients mean who dialled this address.
    pub(super) fn at(&self, address: IpAddr) -> Option<DaemonName> {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner).get(&address.to_canonical()).cloned()
    }

    /// What is known of one daemon.
    pub fn get(&self, daemon: &str) -> Option<Backend> {
        self.backends.read().unwrap_or_else(PoisonError::into_inner).get(daemon).cloned()
    }

    /// Changes whenever the table does.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }
}
