//! What is logged of refused clients: the first of each reason at once, and
//! then no more than one line a minute for each, however many there are.
#![expect(clippy::disallowed_methods, reason = "spaces out its lines")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Rejection;
use super::limits::Full;

/// At most one line of each reason in this time.
const SPACING: Duration = Duration::from_secs(60);

/// When each reason was last told, and how many came since.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<HashMap<(Rejection, Option<&'static str>), Told>>);

#[derive(Debug)]
struct Told {
    at: Instant,
    since: u64,
}

/// One refused client.
#[derive(Debug)]
pub(super) struct Refused<'a> {
    pub(super) peer: SocketAddr,
    pub(super) sni: Option<&'a str>,
    pub(super) rejection: Rejection,
    pub(super) full: Option<Full>,
    pub(super) duration_ms: u64,
}

impl Refusals {
    pub(super) fn tell(&self, refused: &Refused<'_>) {
        let Refused { peer, sni, rejection, full, duration_ms } = refused;
        let (reason, limit) = (rejection.as_str(), full.map(Full::as_str));
        match self.count(*rejection, limit) {
            Some(others) => tracing::warn!(sni, peer.addr = %peer, duration_ms, reason, limit, others,
                "connection refused; further ones of this reason are counted for a minute"),
            None => tracing::debug!(sni, peer.addr = %peer, duration_ms, reason, limit, "connection refused"),
        }
    }

    /// How many others of this reason have not been told, when it is time to say so.
    fn count(&self, rejection: Rejection, limit: Option<&'static str>) -> Option<u64> {
        let now = Instant::now();
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match told.get_mut(&(rejection, limit)) {
            Some(told) if now.duration_since(told.at) < SPACING => {
                told.since += 1;
                None
            }
            Some(told) => {
                told.at = now;
                Some(std::mem::take(&mut told.since))
            }
            None => {
                told.insert((rejection, limit), Told { at: now, since: 0 });
                Some(0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_reason_has_one_line_a_minute_that_counts_the_others() {
        let refusals = Refusals::default();
        assert_eq!(refusals.count(Rejection::Unmatched, None), Some(0));
        assert_eq!(refusals.count(Rejection::Timeout, None), Some(0));
        for _ in 0..5 {
            assert_eq!(refusals.count(Rejection::Unmatched, None), None);
        }
        tokio::time::advance(SPACING).await;
        assert_eq!(refusals.count(Rejection::Unmatched, None), Some(5));
        assert_eq!(refusals.count(Rejection::Unmatched, None), None);
        assert_eq!(refusals.count(Rejection::Timeout, None), Some(0));
    }
}
