//! Whether a call is made again, and when. Pure: time is an argument.

use std::time::Duration;

use super::api::ApiError;

/// How long nobody at all may answer: an address that is wrong should not cost
/// the patience meant for a daemon that wakes.
const SILENCE: Duration = Duration::from_secs(30);
const LONGEST: Duration = Duration::from_secs(10);

/// One call after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// For how long in all.
    pub(super) budget: Duration,
    /// Calls that failed so far.
    failures: u32,
    /// Since when nobody has answered; none once somebody did.
    silent_since: Option<Duration>,
}

/// What to do after a call that failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Call again after this time.
    Again(Duration),
    /// It will not get better.
    GiveUp,
    /// It might get better, but the time is up.
    TimeIsUp,
}

impl Patience {
    pub(super) fn new(budget: Duration) -> Self {
        Self { budget, failures: 0, silent_since: Some(Duration::ZERO) }
    }

    /// A call failed, this long after the first began.
    pub(super) fn after(&mut self, error: &ApiError, elapsed: Duration) -> Next {
        let asked = match error {
            ApiError::Http(error) if error.is_temporary() => {
                let since = *self.silent_since.get_or_insert(elapsed);
                if elapsed.saturating_sub(since) >= SILENCE.min(self.budget) {
                    return Next::TimeIsUp;
                }
                None
            }
            ApiError::Token(error) if error.is_temporary() => None,
            ApiError::Refused { status, retry_after, .. } if matches!(status.as_u16(), 429 | 502 | 503 | 504) => {
                self.silent_since = None;
                *retry_after
            }
            _ => return Next::GiveUp,
        };
        self.failures += 1;
        let backoff = Duration::from_millis(500).saturating_mul(1 << self.failures.min(6)).min(LONGEST);
        let left = self.budget.saturating_sub(elapsed);
        // Asked to come back later than there is time for, the last moment is the best.
        match asked.unwrap_or(backoff) {
            _ if left.is_zero() => Next::TimeIsUp,
            wait if wait < left => Next::Again(wait),
            _ if left > Duration::from_secs(2) => Next::Again(left - Duration::from_secs(1)),
            _ => Next::TimeIsUp,
        }
    }
}

/// What a caller waits for, in the words of the answer.
pub(super) fn reason(error: &ApiError) -> String {
    match error {
        ApiError::Refused { text, waiting_for: Some(what), .. } => format!("{text}: {what}"),
        ApiError::Refused { text, .. } => text.clone(),
        ApiError::Http(error) => with_cause(error),
        ApiError::Token(error) => with_cause(error),
        ApiError::Foreign(_) => error.to_string(),
    }
}

fn with_cause(error: &dyn std::error::Error) -> String {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::super::http::HttpError;
    use super::*;

    fn refused(status: u16, retry_after: Option<u64>) -> ApiError {
        let status = StatusCode::from_u16(status).unwrap();
        let retry_after = retry_after.map(Duration::from_secs);
        ApiError::Refused { status, text: "why".into(), retry_after, waiting_for: None }
    }

    fn silent() -> ApiError {
        ApiError::Http(HttpError::Resolve { host: "a".into(), source: std::io::ErrorKind::NotFound.into() })
    }

    const fn secs(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn what_waiting_does_not_cure_ends_at_once() {
        for status in [400, 401, 403, 404, 405, 413, 500] {
            assert_eq!(Patience::new(secs(300)).after(&refused(status, Some(1)), secs(0)), Next::GiveUp, "{status}");
        }
        let untrusted = || HttpError::NotTrusted { host: "a".into(), why: "UnknownIssuer".into() };
        let through = HttpError::Through { proxy: "p:1".into(), source: Box::new(untrusted()) };
        for hopeless in [untrusted(), through, HttpError::Tls { host: "a".into(), why: "b".into() }] {
            assert_eq!(Patience::new(secs(300)).after(&ApiError::Http(hopeless), secs(0)), Next::GiveUp);
        }
    }

    #[test]
    fn a_server_that_says_when_is_believed_within_the_budget() {
        for status in [429, 502, 503, 504] {
            let mut patience = Patience::new(secs(300));
            assert_eq!(patience.after(&refused(status, Some(37)), secs(0)), Next::Again(secs(37)), "{status}");
            assert_eq!(patience.after(&refused(status, Some(60)), secs(250)), Next::Again(secs(49)), "{status}");
            assert_eq!(patience.after(&refused(status, Some(60)), secs(299)), Next::TimeIsUp, "{status}");
            assert_eq!(patience.after(&refused(status, None), secs(300)), Next::TimeIsUp, "{status}");
        }
    }

    #[test]
    fn without_a_word_the_waits_grow_to_ten_seconds() {
        let mut patience = Patience::new(secs(300));
        let waits: Vec<_> = (0..6).map(|_| patience.after(&refused(503, None), secs(1))).collect();
        assert_eq!(waits, [1, 2, 4, 8, 10, 10].map(|s| Next::Again(secs(s))));
    }

    #[test]
    fn silence_ends_sooner_than_a_daemon_that_wakes() {
        let mut patience = Patience::new(secs(300));
        assert_eq!(patience.after(&silent(), secs(1)), Next::Again(secs(1)));
        assert_eq!(patience.after(&silent(), secs(30)), Next::TimeIsUp);
        let mut patience = Patience::new(secs(300));
        patience.after(&refused(503, Some(5)), secs(20));
        assert!(matches!(patience.after(&silent(), secs(40)), Next::Again(_)), "the server restarts");
        assert!(matches!(patience.after(&silent(), secs(69)), Next::Again(_)));
        assert_eq!(patience.after(&silent(), secs(70)), Next::TimeIsUp);
    }
}
