//! How much at once: counts of what was admitted, and seats for sockets without
//! a server name. The limits themselves may change meanwhile.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Deserialize;
use tokio::sync::Notify;

use super::source::Prefix;
use crate::names::DaemonName;

/// How many connections at once; 0 stands for no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// That have shown a server name, as in the reference.
    pub connections: usize,
    /// Of these, from one source: an IPv4 address, or 64 bits of an IPv6 address.
    pub per_source: usize,
    /// Of these, for one daemon.
    pub per_daemon: usize,
    /// That have shown no server name yet; a newcomer takes the place of the oldest.
    pub unidentified: usize,
    /// That wait for their daemon.
    pub held: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 0, per_source: 0, per_daemon: 0, unidentified: 4096, held: 1024 }
    }
}

/// Limits as a file gives them: what is absent is not changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct SomeLimits {
    connections: Option<usize>,
    per_source: Option<usize>,
    per_daemon: Option<usize>,
    unidentified: Option<usize>,
    held: Option<usize>,
}

impl SomeLimits {
    /// These, and for what is absent `others`.
    pub(super) fn or(self, others: Limits) -> Limits {
        Limits {
            connections: self.connections.unwrap_or(others.connections),
            per_source: self.per_source.unwrap_or(others.per_source),
            per_daemon: self.per_daemon.unwrap_or(others.per_daemon),
            unidentified: self.unidentified.unwrap_or(others.unidentified),
            held: self.held.unwrap_or(others.held),
        }
    }
}

/// Which limit keeps a connection out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Full {
    /// In all.
    Connections,
    /// From its source.
    Source,
    /// For its daemon.
    Daemon,
    /// Without a server name.
    Unidentified,
    /// Waiting for their daemon.
    Held,
    /// Wakes of one source.
    Wakes,
}

impl Full {
    /// As logs name it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Source => "per source",
            Self::Daemon => "per daemon",
            Self::Unidentified => "unidentified",
            Self::Held => "held",
            Self::Wakes => "wakes per source",
        }
    }
}

/// What is there now.
#[derive(Debug, Default)]
pub(super) struct Tally(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    sources: HashMap<Prefix, usize>,
    daemons: HashMap<DaemonName, usize>,
    held: usize,
}

impl Tally {
    /// Admits one connection, for as long as the ticket lives.
    pub(super) fn admit(
        &self,
        source: Prefix,
        daemon: Option<&DaemonName>,
        limits: &Limits,
    ) -> Result<Ticket<'_>, Full> {
        let mut counts = self.lock();
        let of_source = counts.sources.get(&source).copied().unwrap_or(0);
        let of_daemon = daemon.and_then(|daemon| counts.daemons.get(daemon)).copied().unwrap_or(0);
        if reached(counts.all, limits.connections) {
            return Err(Full::Connections);
        }
        if reached(of_source, limits.per_source) {
            return Err(Full::Source);
        }
        if daemon.is_some() && reached(of_daemon, limits.per_daemon) {
            return Err(Full::Daemon);
        }
        counts.all += 1;
        *counts.sources.entry(source).or_default() += 1;
        if let Some(daemon) = daemon {
            *counts.daemons.entry(daemon.clone()).or_default() += 1;
        }
        Ok(Ticket { tally: self, source, daemon: daemon.cloned() })
    }

    /// Lets one connection wait, for as long as the answer lives. They are
    /// limited in number, and so in bytes, since none holds more than a hello.
    pub(super) fn hold(&self, limits: &Limits) -> Result<Held<'_>, Full> {
        let mut counts = self.lock();
        if reached(counts.held, limits.held) {
            return Err(Full::Held);
        }
        counts.held += 1;
        Ok(Held(self))
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn reached(count: usize, limit: usize) -> bool {
    limit != 0 && count >= limit
}

/// One admitted connection.
#[derive(Debug)]
pub(super) struct Ticket<'a> {
    tally: &'a Tally,
    source: Prefix,
    daemon: Option<DaemonName>,
}

impl Ticket<'_> {
    /// The daemon that it is for.
    pub(super) fn daemon(&self) -> Option<&DaemonName> {
        self.daemon.as_ref()
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut counts = self.tally.lock();
        counts.all = counts.all.saturating_sub(1);
        leave(&mut counts.sources, &self.source);
        if let Some(daemon) = &self.daemon {
            leave(&mut counts.daemons, daemon);
        }
    }
}

fn leave<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count = count.saturating_sub(1);
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// One waiting connection.
#[derive(Debug)]
pub(super) struct Held<'a>(&'a Tally);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut counts = self.0.lock();
        counts.held = counts.held.saturating_sub(1);
    }
}

/// Where sockets sit until they have shown a server name. When it is full the
/// one that has been silent longest gives up its seat: clients that speak are
/// let in however many silent ones there are.
#[derive(Debug, Default)]
pub(super) struct Lobby(Mutex<Seats>);

#[derive(Debug, Default)]
struct Seats {
    next: u64,
    taken: BTreeMap<u64, Arc<Notify>>,
}

impl Lobby {
    /// Takes one of `limit` seats, if need be from whoever sits there longest.
    pub(super) fn enter(&self, limit: usize) -> Seat<'_> {
        let limit = if limit == 0 { usize::MAX } else { limit };
        let evicted = Arc::new(Notify::new());
        let mut seats = self.lock();
        while seats.taken.len() >= limit {
            let Some((_, oldest)) = seats.taken.pop_first() else { break };
            oldest.notify_one();
        }
        let number = seats.next;
        seats.next += 1;
        seats.taken.insert(number, Arc::clone(&evicted));
        Seat { lobby: self, number, evicted }
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A seat in the [`Lobby`], free again when dropped.
#[derive(Debug)]
pub(super) struct Seat<'a> {
    lobby: &'a Lobby,
    number: u64,
    evicted: Arc<Notify>,
}

impl Seat<'_> {
    /// Waits until the seat is given to somebody else.
    pub(super) async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.lobby.lock().taken.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn source(text: &str) -> Prefix {
        Prefix::of(text.parse().unwrap())
    }

    #[test]
    fn connections_are_counted_in_all_by_source_and_by_daemon() {
        let tally = Tally::default();
        let limits = Limits { connections: 4, per_source: 2, per_daemon: 3, ..Limits::default() };
        let (a, b) = ("buildkitd-a".parse().unwrap(), "buildkitd-b".parse().unwrap());
        let admit = |from: &str, daemon| tally.admit(source(from), daemon, &limits);
        let one = admit("192.0.2.1", Some(&a)).unwrap();
        let _two = admit("192.0.2.1", Some(&a)).unwrap();
        assert_eq!(admit("192.0.2.1", Some(&b)).unwrap_err(), Full::Source);
        let _three = admit("192.0.2.2", Some(&a)).unwrap();
        assert_eq!(admit("192.0.2.3", Some(&a)).unwrap_err(), Full::Daemon);
        let _four = admit("192.0.2.3", None).unwrap();
        assert_eq!(admit("192.0.2.4", Some(&b)).unwrap_err(), Full::Connections);
        drop(one);
        let _five = admit("192.0.2.1", Some(&a)).unwrap();
        drop((_two, _three, _four, _five));
        let counts = tally.lock();
        assert!(counts.all == 0 && counts.sources.is_empty() && counts.daemons.is_empty(), "{counts:?}");
    }

    #[test]
    fn zero_is_no_limit_and_a_limit_may_fall_below_what_is_there() {
        let tally = Tally::default();
        let all: Vec<_> = (0..100).map(|_| tally.admit(source("::1"), None, &Limits::default()).unwrap()).collect();
        let fewer = Limits { connections: 10, ..Limits::default() };
        assert_eq!(tally.admit(source("::1"), None, &fewer).unwrap_err(), Full::Connections);
        drop(all);
        tally.admit(source("::1"), None, &fewer).unwrap();
    }

    #[test]
    fn so_many_wait_and_no_more() {
        let (tally, limits) = (Tally::default(), Limits { held: 1, ..Limits::default() });
        let held = tally.hold(&limits).unwrap();
        assert_eq!(tally.hold(&limits).unwrap_err(), Full::Held);
        drop(held);
        tally.hold(&limits).unwrap();
    }

    #[test]
    fn a_full_lobby_gives_the_longest_silent_ones_seat_away() {
        let lobby = Lobby::default();
        let (first, second) = (lobby.enter(2), lobby.enter(2));
        assert!(first.evicted().now_or_never().is_none());
        let third = lobby.enter(2);
        assert!(first.evicted().now_or_never().is_some());
        assert!(second.evicted().now_or_never().is_none());
        drop(first);
        assert_eq!(lobby.lock().taken.len(), 2, "an evicted one does not give up a seat twice");
        drop((second, third));
        assert_eq!(lobby.lock().taken.len(), 0);
    }

    #[test]
    fn a_seat_that_was_left_is_free() {
        let lobby = Lobby::default();
        drop(lobby.enter(1));
        let second = lobby.enter(1);
        assert!(second.evicted().now_or_never().is_none());
    }
}
