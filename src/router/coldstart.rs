//! How many routes wait for a daemon at once, and who is next.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::pin::pin;
use std::sync::{Mutex, PoisonError};

use tokio::sync::Semaphore;

use super::metrics::Metrics;
use crate::provisioner::ProvisionError;

/// The slots, and the queue before them: first come, first served.
pub(super) struct ColdStarts {
    slots: Semaphore,
    limit: usize,
    queue: Mutex<Queue>,
    metrics: Metrics,
}

#[derive(Default)]
struct Queue {
    issued: u64,
    waiting: BTreeSet<u64>,
}

/// Why a cold start did not end in a ready daemon.
#[derive(Debug)]
pub(super) enum ColdStartError {
    /// The budget ended in the queue.
    Queued(Position),
    /// The budget ended, or the start failed, beyond the queue.
    Provision(ProvisionError),
}

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    /// Counted from 1.
    pub(super) place: usize,
    /// How many start at once.
    pub(super) slots: usize,
}

impl ColdStarts {
    pub(super) fn new(limit: NonZeroUsize, metrics: Metrics) -> Self {
        let limit = limit.get().min(Semaphore::MAX_PERMITS);
        Self { slots: Semaphore::new(limit), limit, queue: Mutex::default(), metrics }
    }

    /// Queues for a slot, then waits in it. `ready` carries the budget of both.
    ///
    /// Whoever queues listens already: a daemon that another route woke, or one
    /// that cannot start, is answered at once, not after strangers' cold starts.
    pub(super) async fn wait(
        &self,
        ready: impl Future<Output = Result<(), ProvisionError>>,
    ) -> Result<(), ColdStartError> {
        let mut ready = pin!(ready);
        let slot = match self.slots.try_acquire() {
            Ok(slot) => slot,
            Err(_) => {
                let ticket = Ticket::draw(self);
                tokio::select! {
                    biased;
                    done = &mut ready => return done.map_err(|error| match error {
                        ProvisionError::NotReady { .. } => ColdStartError::Queued(ticket.position()),
                        error => ColdStartError::Provision(error),
                    }),
                    // Fair: a slot that is given back goes to who queued first.
                    Ok(slot) = self.slots.acquire() => slot,
                }
            }
        };
        let _starting = self.metrics.cold_start();
        let done = ready.await.map_err(ColdStartError::Provision);
        drop(slot);
        done
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the queue, given up when dropped.
struct Ticket<'a> {
    number: u64,
    cold_starts: &'a ColdStarts,
}

impl<'a> Ticket<'a> {
    fn draw(cold_starts: &'a ColdStarts) -> Self {
        let mut queue = cold_starts.queue();
        queue.issued += 1;
        let number = queue.issued;
        queue.waiting.insert(number);
        drop(queue);
        Self { number, cold_starts }
    }

    fn position(&self) -> Position {
        let place = self.cold_starts.queue().waiting.range(..=self.number).count();
        Position { place, slots: self.cold_starts.limit }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.cold_starts.queue().waiting.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::Notify;
    use tokio::time::sleep;

    use super::*;

    fn one_slot() -> Arc<ColdStarts> {
        Arc::new(ColdStarts::new(NonZeroUsize::MIN, Metrics::default()))
    }

    async fn budget(seconds: u64) -> Result<(), ProvisionError> {
        sleep(Duration::from_secs(seconds)).await;
        Err(ProvisionError::NotReady { last: None })
    }

    #[tokio::test(start_paused = true)]
    async fn who_ends_in_the_queue_is_told_the_place() {
        let starts = one_slot();
        let (holder, second, third) =
            tokio::join!(starts.wait(budget(9)), starts.wait(budget(5)), starts.wait(budget(3)));
        assert!(matches!(holder, Err(ColdStartError::Provision(ProvisionError::NotReady { .. }))));
        assert!(matches!(third, Err(ColdStartError::Queued(Position { place: 2, slots: 1 }))), "{third:?}");
        assert!(matches!(second, Err(ColdStartError::Queued(Position { place: 1, slots: 1 }))), "{second:?}");
        assert!(starts.queue().waiting.is_empty() && starts.slots.available_permits() == 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slot_goes_to_who_came_first() {
        let starts = one_slot();
        // The holder leaves after 1 s. The second then has the slot, so its
        // budget ends beyond the queue, and the third's within it.
        let (_, second, third) = tokio::join!(starts.wait(budget(1)), starts.wait(budget(4)), starts.wait(budget(3)));
        assert!(matches!(second, Err(ColdStartError::Provision(ProvisionError::NotReady { .. }))), "{second:?}");
        assert!(matches!(third, Err(ColdStartError::Queued(Position { place: 1, slots: 1 }))), "{third:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_queued_route_is_answered_as_soon_as_its_daemon_is_ready_or_failed() {
        let starts = one_slot();
        let woken = Arc::new(Notify::new());
        let holder = tokio::spawn({
            let starts = Arc::clone(&starts);
            async move { starts.wait(budget(60)).await }
        });
        tokio::task::yield_now().await;
        let queued = tokio::spawn({
            let (starts, woken) = (Arc::clone(&starts), Arc::clone(&woken));
            async move {
                starts
                    .wait(async {
                        woken.notified().await;
                        Ok(())
                    })
                    .await
            }
        });
        woken.notify_one();
        assert!(queued.await.unwrap().is_ok() && !holder.is_finished());
        let failed = starts.wait(async { Err(ProvisionError::Failed { reason: "no image".into() }) }).await;
        assert!(matches!(failed, Err(ColdStartError::Provision(ProvisionError::Failed { .. }))));
    }

    #[tokio::test(start_paused = true)]
    async fn who_leaves_gives_up_place_and_slot() {
        let starts = one_slot();
        let gone = tokio::time::timeout(Duration::from_secs(1), starts.wait(budget(60))).await;
        assert!(gone.is_err());
        let next = starts.wait(async {
            sleep(Duration::from_secs(1)).await;
            Ok(())
        });
        assert!(next.await.is_ok());
        assert_eq!(starts.slots.available_permits(), 1);
    }
}
