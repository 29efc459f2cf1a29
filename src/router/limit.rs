//! One token bucket for each caller. Reads tokio's clock.
#![expect(clippy::disallowed_methods, reason = "a rate is measured against the clock")]

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use governor::clock::{Clock, ReasonablyRealtime};
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};
use tokio::time::Instant;

use super::identity::Identity;

/// At most so many calls a second of one caller, after a burst; or no limit.
pub struct RateLimit(Option<Limiter>);

struct Limiter {
    buckets: RateLimiter<Caller, DashMapStateStore<Caller>, RunTime, NoOpMiddleware<Duration>>,
    /// Callers that have come since full buckets were last thrown away.
    calls: AtomicUsize,
}

/// So many calls are between two times of throwing full buckets away.
const SWEEP: usize = 4096;

/// Whose bucket it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Caller {
    /// Whoever holds the admin token.
    Admin,
    /// Whoever holds the shared token.
    Bearer,
    /// The jobs of one repository. Those of unreviewed code have their own, so
    /// that they cannot lock the others out.
    Repo { repo: String, untrusted: bool },
    /// A network that one party has: one IPv4 address, or an IPv6 /64.
    Source(IpAddr),
    /// Somebody of whom not even the address is known.
    Unknown,
}

impl Caller {
    /// Of an identity.
    pub(super) fn of(identity: &Identity, source: Option<IpAddr>) -> Self {
        match identity {
            Identity::Admin => Self::Admin,
            Identity::Bearer => Self::Bearer,
            Identity::Open => Self::source(source),
            Identity::Verified(who) => Self::Repo { repo: who.repo.to_string(), untrusted: who.untrusted },
        }
    }

    /// Of an address.
    pub(super) fn source(address: Option<IpAddr>) -> Self {
        match address.map(|address| address.to_canonical()) {
            None => Self::Unknown,
            Some(IpAddr::V4(address)) => Self::Source(address.into()),
            Some(IpAddr::V6(address)) => Self::Source(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into()),
        }
    }
}

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
        let buckets = RateLimiter::new(quota, DashMapStateStore::default(), RunTime(Instant::now()));
        Ok(Self(Some(Limiter { buckets, calls: AtomicUsize::new(0) })))
    }

    /// Takes a token out of the caller's bucket, or says how long until there is one.
    pub(super) fn take(&self, caller: &Caller) -> Result<(), Duration> {
        let Some(Limiter { buckets, calls }) = &self.0 else { return Ok(()) };
        // A full bucket is as good as none; else anybody could fill the memory.
        if calls.fetch_add(1, Ordering::Relaxed) % SWEEP == SWEEP - 1 {
            buckets.retain_recent();
        }
        buckets.check_key(caller).map_err(|until| until.wait_time_from(buckets.clock().now()))
    }
}

impl fmt::Debug for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "RateLimit(on)" } else { "RateLimit(off)" })
    }
}

impl ReasonablyRealtime for RunTime {}

/// Time since the buckets were made.
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
        assert!(limit.take(&Caller::Bearer).is_ok() && limit.take(&Caller::Bearer).is_ok());
        assert_eq!(limit.take(&Caller::Bearer).unwrap_err(), Duration::from_secs(1000));
        tokio::time::advance(Duration::from_secs(999)).await;
        assert_eq!(limit.take(&Caller::Bearer).unwrap_err(), Duration::from_secs(1));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(limit.take(&Caller::Bearer).is_ok());
        assert!(limit.take(&Caller::Bearer).is_err());
        tokio::time::advance(Duration::from_secs(5000)).await;
        assert!(
            limit.take(&Caller::Bearer).is_ok() && limit.take(&Caller::Bearer).is_ok(),
            "the bucket fills to the burst"
        );
        assert!(limit.take(&Caller::Bearer).is_err(), "and no further");
    }

    #[tokio::test(start_paused = true)]
    async fn nought_lifts_the_limit_and_a_huge_rate_is_a_rate() {
        let off = RateLimit::new(0.0, 0).unwrap();
        assert!((0..10_000).all(|_| off.take(&Caller::Bearer).is_ok()));
        assert!(RateLimit::new(1e300, u32::MAX).unwrap().take(&Caller::Bearer).is_ok());
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

    #[tokio::test(start_paused = true)]
    async fn each_caller_has_a_bucket_of_its_own() {
        let limit = RateLimit::new(1.0, 1).unwrap();
        let source = |text: &str| Caller::source(Some(text.parse().unwrap()));
        let repo = |repo: &str, untrusted| Caller::Repo { repo: repo.to_owned(), untrusted };
        for (caller, free) in [
            (Caller::Bearer, true),
            (Caller::Bearer, false),
            (Caller::Admin, true),
            (repo("a/b", false), true),
            (repo("a/b", true), true),
            (repo("a/b", false), false),
            (repo("a/c", false), true),
            (source("192.0.2.1"), true),
            (source("::ffff:192.0.2.1"), false),
            (source("192.0.2.2"), true),
            (source("2001:db8::1"), true),
            (source("2001:db8::ffff:1"), false),
            (source("2001:db8:0:1::1"), true),
            (Caller::source(None), true),
        ] {
            assert_eq!(limit.take(&caller).is_ok(), free, "{caller:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn strangers_do_not_fill_the_memory() {
        let limit = RateLimit::new(10.0, 10).unwrap();
        for n in 0..50_000u32 {
            let address = std::net::Ipv4Addr::from_bits(n);
            assert!(limit.take(&Caller::source(Some(address.into()))).is_ok());
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(limit.0.unwrap().buckets.len() < 2 * SWEEP);
    }
}
