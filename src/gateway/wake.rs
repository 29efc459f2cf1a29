//! Asks the control plane to wake a daemon that a client has dialled. Many
//! clients of one daemon ask once; what is asked goes on when they leave.
#![expect(clippy::disallowed_methods, reason = "answers grow old")]

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout};

use super::metrics::Metrics;
use super::source::Prefix;
use crate::names::DaemonName;

/// Path of wakes on the servers' admin listeners.
pub const PATH: &str = "/internal/wake";

/// An answer serves all clients of a daemon for this long.
const FRESH: Duration = Duration::from_secs(10);

/// One that lets nobody wait is asked for again sooner: a route may have come.
const REFUSED_FRESH: Duration = Duration::from_secs(1);

/// When to ask again that nobody answered.
const AGAIN: Duration = Duration::from_secs(1);

/// How long to go on asking: as long as a client may be held.
const PATIENCE: Duration = Duration::from_secs(18);

/// Sources remembered before those that have been quiet are forgotten.
const MANY_SOURCES: usize = 4096;

/// What a gateway says: this daemon was dialled.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Dialled {
    /// The daemon.
    pub daemon: DaemonName,
}

/// The answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// What comes of it.
    pub verdict: Verdict,
}

/// What comes of a dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The daemon is starting, or runs: wait for it.
    Starting,
    /// It stays asleep: nobody who may route has asked for it lately.
    Asleep,
    /// No such project.
    Unknown,
    /// Nobody answered: wait all the same.
    Unanswered,
}

impl Verdict {
    /// As an answer.
    pub fn told(self) -> Told {
        Told { verdict: self }
    }

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Asleep => "asleep",
            Self::Unknown => "unknown",
            Self::Unanswered => "unanswered",
        }
    }

    fn fresh(self) -> Duration {
        if self == Self::Starting { FRESH } else { REFUSED_FRESH }
    }
}

/// Asks the control plane once.
pub type Ask = Arc<dyn Fn(DaemonName) -> BoxFuture<'static, Result<Verdict, String>> + Send + Sync>;

/// A verdict that many wait for.
pub(super) type Pending = Shared<BoxFuture<'static, Verdict>>;

/// One source asks too often.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooOften;

/// The way to the control plane. Without one, clients just wait.
pub struct Waker {
    ask: Option<Ask>,
    sources: Option<DefaultKeyedRateLimiter<Prefix>>,
    asked: Mutex<HashMap<DaemonName, Asked>>,
}

struct Asked {
    at: Instant,
    pending: Pending,
}

impl Asked {
    fn serves(&self, now: Instant) -> bool {
        let age = now.duration_since(self.at);
        self.pending.peek().is_none_or(|verdict| age < verdict.fresh())
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").field("ask", &self.ask.is_some()).finish_non_exhaustive()
    }
}

impl Waker {
    /// Asks by `ask`, at most so often a minute for one source; 0 for no limit.
    pub fn new(ask: Option<Ask>, per_source: u32) -> Self {
        let sources = NonZeroU32::new(per_source).map(|n| RateLimiter::keyed(Quota::per_minute(n)));
        Self { ask, sources, asked: Mutex::default() }
    }

    /// What comes of a dial of `daemon`; `None` when nobody can be asked.
    pub(super) fn wake(
        &self,
        daemon: &DaemonName,
        source: Prefix,
        metrics: &Arc<Metrics>,
    ) -> Result<Option<Pending>, TooOften> {
        let Some(ask) = &self.ask else { return Ok(None) };
        let now = Instant::now();
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.retain(|_, asked| asked.serves(now));
        if let Some(asked) = asked.get(daemon) {
            return Ok(Some(asked.pending.clone()));
        }
        self.admit(source)?;
        let (ask, name, metrics) = (ask.clone(), daemon.clone(), metrics.clone());
        // A task of its own: the client may leave, and the daemon wakes all the same.
        let answered = tokio::spawn(async move {
            let verdict = timeout(PATIENCE, until_answered(&ask, &name)).await.unwrap_or(Verdict::Unanswered);
            metrics.wake_asked(verdict);
            verdict
        });
        let pending = answered.map(|verdict| verdict.unwrap_or(Verdict::Unanswered)).boxed().shared();
        asked.insert(daemon.clone(), Asked { at: now, pending: pending.clone() });
        Ok(Some(pending))
    }

    fn admit(&self, source: Prefix) -> Result<(), TooOften> {
        let Some(sources) = &self.sources else { return Ok(()) };
        if sources.len() > MANY_SOURCES {
            sources.retain_recent();
        }
        sources.check_key(&source).map_err(|_| TooOften)
    }
}

async fn until_answered(ask: &Ask, daemon: &DaemonName) -> Verdict {
    let mut told = false;
    loop {
        match ask(daemon.clone()).await {
            Ok(verdict) => return verdict,
            Err(error) if !told => {
                told = true;
                tracing::warn!(daemon.name = %daemon, error, "cannot ask for a daemon to be woken, trying again");
            }
            Err(_) => {}
        }
        sleep(AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use prometheus_client::registry::Registry;
    use tokio::time::advance;

    use super::*;

    fn prefix(text: &str) -> Prefix {
        Prefix::of(text.parse().unwrap())
    }

    fn name(text: &str) -> DaemonName {
        text.parse().unwrap()
    }

    struct Asking {
        waker: Waker,
        metrics: Arc<Metrics>,
        count: Arc<AtomicUsize>,
    }

    fn asking(per_source: u32, answers: &'static [Result<Verdict, ()>]) -> Asking {
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let ask: Ask = Arc::new(move |_| {
            let number = counted.fetch_add(1, Ordering::SeqCst);
            async move { answers[number.min(answers.len() - 1)].map_err(|()| "down".to_owned()) }.boxed()
        });
        let metrics = Arc::new(Metrics::register(&mut Registry::default()));
        Asking { waker: Waker::new(Some(ask), per_source), metrics, count }
    }

    impl Asking {
        async fn wake(&self, daemon: &str, source: &str) -> Result<Verdict, TooOften> {
            let pending = self.waker.wake(&name(daemon), prefix(source), &self.metrics)?.unwrap();
            Ok(pending.await)
        }

        fn asked(&self) -> usize {
            self.count.load(Ordering::SeqCst)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn clients_of_one_daemon_ask_once_while_the_answer_is_fresh() {
        let asking = asking(0, &[Ok(Verdict::Starting)]);
        for _ in 0..5 {
            assert_eq!(asking.wake("buildkitd-a", "192.0.2.1").await, Ok(Verdict::Starting));
        }
        assert_eq!(asking.asked(), 1);
        asking.wake("buildkitd-b", "192.0.2.1").await.unwrap();
        assert_eq!(asking.asked(), 2);
        advance(FRESH).await;
        asking.wake("buildkitd-a", "192.0.2.1").await.unwrap();
        assert_eq!(asking.asked(), 3, "the next one renews the wake");
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_soon_asked_for_again() {
        let asking = asking(0, &[Ok(Verdict::Asleep), Ok(Verdict::Starting)]);
        assert_eq!(asking.wake("buildkitd-a", "192.0.2.1").await, Ok(Verdict::Asleep));
        assert_eq!(asking.wake("buildkitd-a", "192.0.2.1").await, Ok(Verdict::Asleep));
        advance(REFUSED_FRESH).await;
        assert_eq!(asking.wake("buildkitd-a", "192.0.2.1").await, Ok(Verdict::Starting));
    }

    #[tokio::test(start_paused = true)]
    async fn a_control_plane_that_does_not_answer_is_asked_again() {
        let asking = asking(0, &[Err(()), Err(()), Ok(Verdict::Starting)]);
        assert_eq!(asking.wake("buildkitd-a", "192.0.2.1").await, Ok(Verdict::Starting));
        assert_eq!(asking.asked(), 3);
        let never = super::tests::asking(0, &[Err(())]);
        assert_eq!(never.wake("buildkitd-a", "192.0.2.1").await, Ok(Verdict::Unanswered));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_asked_goes_on_when_the_client_leaves() {
        let asking = asking(0, &[Err(()), Ok(Verdict::Starting)]);
        drop(asking.waker.wake(&name("buildkitd-a"), prefix("192.0.2.1"), &asking.metrics).unwrap());
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(asking.asked(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn one_source_may_wake_so_many_daemons_a_minute() {
        let asking = asking(2, &[Ok(Verdict::Starting)]);
        asking.wake("buildkitd-a", "2001:db8::1").await.unwrap();
        asking.wake("buildkitd-b", "2001:db8::2").await.unwrap();
        assert_eq!(
            asking.wake("buildkitd-c", "2001:db8::3").await,
            Err(TooOften),
            "a network of 64 bits is one source"
        );
        asking.wake("buildkitd-b", "2001:db8::3").await.unwrap();
        asking.wake("buildkitd-c", "192.0.2.1").await.unwrap();
    }

    #[test]
    fn without_a_way_to_the_control_plane_nobody_is_asked() {
        let asking = asking(1, &[Ok(Verdict::Starting)]);
        let waker = Waker::new(None, 1);
        assert!(waker.wake(&name("buildkitd-a"), prefix("192.0.2.1"), &asking.metrics).unwrap().is_none());
    }
}
