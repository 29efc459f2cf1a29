//! One token bucket for all callers. Reads tokio's clock.
#![expect(clippy::disallowed_methods, reason = "a rate is measured against the clock")]

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use tokio::time::Instant;

/// At most so many calls a second, after a burst; or no limit.
pub struct RateLimit(Option<Limiter>);

type Limiter = RateLimiter<NotKeyed, InMemoryState, RunTime, NoOpMiddleware<Duration>>;

/// Why a rate is none.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum RateError {
    /// Negative, infinite or not a number.
    #[error("a rate of {0} per second is not a rate: want 0 for no limit, or more")]
    Rate(f64),
    /// Nothing could ever pass.
    #[error("a burst of 0 lets nothing pass: want 1 or more, or a rate of 0 for no limit")]
    Burst,
    /// The bucket would take centuries to fill.
    #[error("a burst of {burst} at {per_second} per second takes more than a century to refill")]
    TooSlow {
        /// Calls per second.
        per_second: f64,
        /// Calls at once.
        burst: u32,
    },
}

const CENTURY: f64 = 100.0 * 365.25 * 86_400.0;

impl RateLimit {
    /// `per_second` may be a fraction; 0 lifts the limit. The bucket starts full.
    ///
    /// # Errors
    /// See [`RateError`].
    pub fn new(per_second: f64, burst: u32) -> Result<Self, RateError> {
        if per_second == 0.0 {
            return Ok(Self(None));
        }
        if !per_second.is_finite() || per_second < 0.0 {
            return Err(RateError::Rate(per_second));
        }
        let calls = NonZeroU32::new(burst).ok_or(RateError::Burst)?;
        let period = 1.0 / per_second;
        if period * f64::from(burst) > CENTURY {
            return Err(RateError::TooSlow { per_second, burst });
        }
        // A billion calls a second and more are as good as one billion.
        let period = Duration::from_secs_f64(period).max(Duration::from_nanos(1));
        let quota = Quota::with_period(period).ok_or(RateError::Rate(per_second))?.allow_burst(calls);
        Ok(Self(Some(RateLimiter::direct_with_clock(quota, RunTime(Instant::now())))))
    }

    /// Takes a token, or says how long until there is one.
    pub(super) fn take(&self) -> Result<(), Duration> {
        let Some(limiter) = &self.0 else { return Ok(()) };
        limiter.check().map_err(|until| until.wait_time_from(limiter.clock().now()))
    }
}

impl fmt::Debug for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "RateLimit(on)" } else { "RateLimit(off)" })
    }
}

/// Time since the bucket was made.
#[derive(Clone)]
struct RunTime(Instant);

impl Clock for RunTime {
    type Instant = Duration;

    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_thousandth_per_second_refills_after_a_thousand_seconds() {
        let limit = RateLimit::new(0.001, 2).unwrap();
        assert!(limit.take().is_ok() && limit.take().is_ok());
        assert_eq!(limit.take().unwrap_err(), Duration::from_secs(1000));
        tokio::time::advance(Duration::from_secs(999)).await;
        assert_eq!(limit.take().unwrap_err(), Duration::from_secs(1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(limit.take().is_ok());
        assert!(limit.take().is_err());
        tokio::time::advance(Duration::from_secs(5000)).await;
        assert!(limit.take().is_ok() && limit.take().is_ok(), "the bucket fills to the burst");
        assert!(limit.take().is_err(), "and no further");
    }

    #[tokio::test(start_paused = true)]
    async fn nought_lifts_the_limit_and_a_huge_rate_is_a_rate() {
        let off = RateLimit::new(0.0, 0).unwrap();
        assert!((0..10_000).all(|_| off.take().is_ok()));
        assert!(RateLimit::new(1e300, u32::MAX).unwrap().take().is_ok());
    }

    #[test]
    fn what_is_no_rate_is_refused() {
        for rate in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(RateLimit::new(rate, 1), Err(RateError::Rate(_))), "{rate}");
        }
        assert_eq!(RateLimit::new(1.0, 0).unwrap_err(), RateError::Burst);
        assert!(matches!(RateLimit::new(1e-9, 100), Err(RateError::TooSlow { .. })));
        assert!(matches!(RateLimit::new(f64::MIN_POSITIVE, 1), Err(RateError::TooSlow { .. })));
    }
}
