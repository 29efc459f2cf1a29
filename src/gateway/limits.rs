//! How much at once: permits, and seats for sockets without a server name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore};

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
}
