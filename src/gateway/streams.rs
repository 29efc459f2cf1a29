//! Which streams each daemon has through this gateway, and when the last byte
//! of each moved. The controller asks before it takes a daemon down.
#![expect(clippy::disallowed_methods, reason = "when a byte moved is a point on the monotonic clock")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{Query, State};
use axum::routing::get;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::names::DaemonName;

/// Path of the streams on the admin listener.
pub const PATH: &str = "/internal/streams";

/// The streams of each daemon.
#[derive(Debug)]
pub struct Streams {
    began: Instant,
    open: Mutex<HashMap<DaemonName, Vec<Arc<Moved>>>>,
}

/// When the last byte of a stream moved: milliseconds since `Streams::began`.
#[derive(Debug)]
struct Moved(AtomicU64);

/// All streams of one daemon through one gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// How many are open.
    pub open: usize,
    /// Since a byte moved in any of them.
    pub idle_ms: u64,
}

impl Default for Streams {
    fn default() -> Self {
        Self { began: Instant::now(), open: Mutex::default() }
    }
}

impl Streams {
    /// Counts one more, for as long as the answer lives.
    pub(super) fn open(&self, daemon: &DaemonName) -> Stream<'_> {
        let moved = Arc::new(Moved(AtomicU64::new(self.now())));
        self.lock().entry(daemon.clone()).or_default().push(moved.clone());
        Stream { streams: self, daemon: daemon.clone(), moved }
    }

    /// Whether a daemon has any.
    pub(super) fn any(&self, daemon: &DaemonName) -> bool {
        self.lock().contains_key(daemon)
    }

    /// The streams of one daemon.
    pub fn of(&self, daemon: &str) -> Summary {
        let Ok(daemon) = daemon.parse::<DaemonName>() else { return Summary::default() };
        self.lock().get(&daemon).map_or_else(Summary::default, |streams| self.summary(streams))
    }

    fn all(&self) -> HashMap<String, Summary> {
        self.lock().iter().map(|(daemon, streams)| (daemon.to_string(), self.summary(streams))).collect()
    }

    fn summary(&self, streams: &[Arc<Moved>]) -> Summary {
        let last = streams.iter().map(|moved| moved.0.load(Ordering::Relaxed)).max();
        Summary { open: streams.len(), idle_ms: last.map_or(0, |last| self.now().saturating_sub(last)) }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DaemonName, Vec<Arc<Moved>>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One stream in [`Streams`].
#[derive(Debug)]
pub(super) struct Stream<'a> {
    streams: &'a Streams,
    daemon: DaemonName,
    moved: Arc<Moved>,
}

impl Stream<'_> {
    /// A byte moves now.
    pub(super) fn moves(&self) {
        self.moved.0.store(self.streams.now(), Ordering::Relaxed);
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        let mut open = self.streams.lock();
        if let Some(streams) = open.get_mut(&self.daemon) {
            streams.retain(|moved| !Arc::ptr_eq(moved, &self.moved));
            if streams.is_empty() {
                open.remove(&self.daemon);
            }
        }
    }
}

/// Which daemon is asked about; all without it.
#[derive(Debug, Deserialize)]
struct About {
    daemon: Option<DaemonName>,
}

/// Tells the streams over HTTP: `{"buildkitd-p…": {"open": 2, "idleMs": 40}}`.
/// With `?daemon=NAME` of that one alone, which is named even without streams.
pub fn router(streams: Arc<Streams>) -> Router {
    Router::new().route(PATH, get(tell)).with_state(streams)
}

async fn tell(State(streams): State<Arc<Streams>>, Query(about): Query<About>) -> Json<HashMap<String, Summary>> {
    Json(match about.daemon {
        Some(daemon) => HashMap::from([(daemon.to_string(), streams.of(daemon.as_str()))]),
        None => streams.all(),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn streams_are_told_by_daemon_with_the_time_of_their_last_byte() {
        let (streams, daemon): (_, DaemonName) = (Streams::default(), "buildkitd-a".parse().unwrap());
        let (one, two) = (streams.open(&daemon), streams.open(&daemon));
        tokio::time::advance(Duration::from_secs(90)).await;
        assert_eq!(streams.of("buildkitd-a"), Summary { open: 2, idle_ms: 90_000 });
        two.moves();
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(streams.of("buildkitd-a"), Summary { open: 2, idle_ms: 1000 });
        drop(two);
        assert_eq!(streams.of("buildkitd-a"), Summary { open: 1, idle_ms: 91_000 });
        assert!(streams.any(&daemon));
        assert!(!streams.any(&"buildkitd-b".parse().unwrap()));
        drop(one);
        assert!(!streams.any(&daemon));
        assert_eq!(streams.of("buildkitd-a"), Summary::default());
    }
}
