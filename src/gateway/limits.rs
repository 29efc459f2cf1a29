//! How much at once: sockets without a server name, and streams of each daemon.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore};

use crate::names::DaemonName;

/// So many permits; 0 stands for no limit.
pub(super) fn permits(limit: usize) -> Arc<Semaphore> {
    let limit = if limit == 0 { Semaphore::MAX_PERMITS } else { limit };
    Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS)))
}

/// Where sockets sit until they have shown a server name. When it is full the
/// one that has been silent longest gives up its seat: clients that speak are
/// let in however many silent ones there are.
#[derive(Debug)]
pub(super) struct Lobby {
    limit: usize,
    seats: Mutex<Seats>,
}

#[derive(Debug, Default)]
struct Seats {
    next: u64,
    taken: BTreeMap<u64, Arc<Notify>>,
}

impl Lobby {
    /// A lobby of `limit` seats; 0 stands for no limit.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: if limit == 0 { usize::MAX } else { limit }, seats: Mutex::default() }
    }

    /// Takes a seat, if need be from whoever sits there longest.
    pub(super) fn enter(&self) -> Seat<'_> {
        let evicted = Arc::new(Notify::new());
        let mut seats = self.lock();
        while seats.taken.len() >= self.limit {
            let Some((_, oldest)) = seats.taken.pop_first() else { break };
            oldest.notify_one();
        }
        let number = seats.next;
        seats.next += 1;
        seats.taken.insert(number, Arc::clone(&evicted));
        Seat { lobby: self, number, evicted }
    }

    fn lock(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
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

/// How many streams each daemon has through this gateway.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<HashMap<DaemonName, usize>>);

impl Streams {
    /// Counts one more, for as long as the answer lives.
    pub(super) fn open(&self, daemon: &DaemonName) -> Stream<'_> {
        *self.lock().entry(daemon.clone()).or_default() += 1;
        Stream { streams: self, daemon: daemon.clone() }
    }

    /// Whether a daemon has any.
    pub(super) fn any(&self, daemon: &DaemonName) -> bool {
        self.lock().contains_key(daemon)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DaemonName, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One stream in [`Streams`].
#[derive(Debug)]
pub(super) struct Stream<'a> {
    streams: &'a Streams,
    daemon: DaemonName,
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        let mut streams = self.streams.lock();
        if let Some(count) = streams.get_mut(&self.daemon) {
            *count -= 1;
            if *count == 0 {
                streams.remove(&self.daemon);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_full_lobby_gives_the_longest_silent_ones_seat_away() {
        let lobby = Lobby::new(2);
        let (first, second) = (lobby.enter(), lobby.enter());
        assert!(first.evicted().now_or_never().is_none());
        let third = lobby.enter();
        assert!(first.evicted().now_or_never().is_some());
        assert!(second.evicted().now_or_never().is_none());
        drop(first);
        assert_eq!(lobby.lock().taken.len(), 2, "an evicted one does not give up a seat twice");
        drop((second, third));
        assert_eq!(lobby.lock().taken.len(), 0);
    }

    #[test]
    fn a_seat_that_was_left_is_free() {
        let lobby = Lobby::new(1);
        drop(lobby.enter());
        let second = lobby.enter();
        assert!(second.evicted().now_or_never().is_none());
    }

    #[test]
    fn streams_are_counted_by_daemon() {
        let (streams, daemon): (_, DaemonName) = (Streams::default(), "buildkitd-a".parse().unwrap());
        let (one, two) = (streams.open(&daemon), streams.open(&daemon));
        drop(one);
        assert!(streams.any(&daemon));
        assert!(!streams.any(&"buildkitd-b".parse().unwrap()));
        drop(two);
        assert!(!streams.any(&daemon));
    }
}
