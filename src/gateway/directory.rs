//! Which daemon is where, as the gateway sees it: a table with one writer (the
//! watch of Services and EndpointSlices) and many readers.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{PoisonError, RwLock};

use tokio::sync::watch;

use crate::names::DaemonName;

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
}

impl Default for Directory {
    fn default() -> Self {
        Self { backends: RwLock::default(), addresses: RwLock::default(), changed: watch::Sender::new(0) }
    }
}

impl Directory {
    /// Sets or removes one daemon, and wakes those who wait for a change.
    pub fn set(&self, daemon: &str, backend: Option<Backend>) {
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

    /// Says that clients who dial this address mean this daemon.
    pub fn set_address(&self, address: IpAddr, daemon: DaemonName) {
        self.addresses.write().unwrap_or_else(PoisonError::into_inner).insert(address, daemon);
    }

    /// The daemon that clients mean who dialled this address.
    pub fn at(&self, address: IpAddr) -> Option<DaemonName> {
        self.addresses.read().unwrap_or_else(PoisonError::into_inner).get(&address).cloned()
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
