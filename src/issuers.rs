//! The keys of CI providers, kept fresh in the background; and what they say of
//! a token.
//!
//! In go tokens; out come verified identities or why not. A request waits for
//! no issuer, except one that carries a key id nobody has seen: at most once a
//! minute it has the keys looked up again, and waits a moment for them. Keys of
//! an issuer that cannot be reached stay good for a day; while there are none
//! at all, its tokens can be neither accepted nor refused.
#![expect(clippy::disallowed_methods, reason = "shell: tokens and keys have an age")]

mod fetch;
mod metrics;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::join_all;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::identity::config::Config;
use crate::identity::keys::KeySet;
use crate::identity::provider::Provider;
use crate::identity::token::Token;
use crate::identity::{Refused, Verified, verify};
use fetch::Fetcher;
pub use fetch::{FetchError, RootsError};
pub use metrics::Metrics;

/// How often keys are looked up.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// From one successful look-up to the next.
    pub refresh: Duration,
    /// From a failed look-up to the next: at first, doubled each time.
    pub retry: Duration,
    /// The longest that this becomes.
    pub retry_most: Duration,
    /// Least time from a look-up to one that an unknown key id causes.
    pub ask_again: Duration,
    /// How long keys are good that could not be looked up again.
    pub stale: Duration,
    /// How long one look-up may take.
    pub budget: Duration,
    /// How long a request with an unknown key id waits for a look-up.
    pub patience: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            refresh: seconds(600),
            retry: seconds(1),
            retry_most: seconds(60),
            ask_again: seconds(60),
            stale: seconds(24 * 3600),
            budget: seconds(10),
            patience: seconds(5),
        }
    }
}

/// Why a token gives no identity now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// It never will.
    Refused(Refused),
    /// Its issuer's keys are not known yet.
    Unavailable {
        /// When to try again.
        retry_after: Duration,
    },
}

/// Every issuer whose tokens are accepted; cheap to clone.
#[derive(Clone)]
pub struct Issuers(Arc<Inner>);

struct Inner {
    config: Config,
    timing: Timing,
    /// As `config.providers`: one each, never mixed.
    issuers: Vec<Issuer>,
    metrics: Metrics,
}

/// What is known of one issuer.
struct Issuer {
    fetcher: Fetcher,
    state: watch::Sender<State>,
    wake: Notify,
}

#[derive(Clone, Debug, Default)]
struct State {
    keys: Option<(Arc<KeySet>, Instant)>,
    /// Look-ups that have ended.
    looked: u64,
    /// When the last one began.
    last: Option<Instant>,
    running: bool,
    failing: bool,
}

/// When a token of an issuer that is not known yet may be tried again.
const RETRY_AFTER: Duration = Duration::from_secs(5);

impl std::fmt::Debug for Issuers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.config.providers.iter().map(|p| p.issuer.as_str())).finish()
    }
}

impl Issuers {
    /// Prepares to look up the keys of every provider; [`keep_fresh`](Self::keep_fresh) does.
    /// `ca_file` holds authorities in PEM that are believed beside the public ones.
    ///
    /// # Errors
    /// When a file of authorities cannot be read or holds none.
    pub fn new(config: Config, ca_file: Option<&Path>, timing: Timing) -> Result<Self, RootsError> {
        let fetcher = |provider: &Provider| {
            let own: Option<&PathBuf> = provider.ca_file.as_ref();
            own.map_or_else(|| Fetcher::public(ca_file), |own| Fetcher::private(own))
        };
        let issuer =
            |provider| Ok(Issuer { fetcher: fetcher(provider)?, state: watch::Sender::default(), wake: Notify::new() });
        let issuers = config.providers.iter().map(issuer).collect::<Result<_, _>>()?;
        Ok(Self(Arc::new(Inner { metrics: Metrics::default(), config, timing, issuers })))
    }

    /// What is counted of them.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Says who a token's holder is.
    ///
    /// # Errors
    /// [`Rejected`].
    pub async fn verify(&self, token: &str) -> Result<Verified, Rejected> {
        let (issuer, result) = self.check(token).await;
        let outcome = match &result {
            Ok(_) => "accepted",
            Err(Rejected::Refused(refused)) => refused.as_str(),
            Err(Rejected::Unavailable { .. }) => "unavailable",
        };
        self.0.metrics.verified(issuer, outcome);
        result
    }

    /// Also the issuer, if it is one of ours.
    async fn check(&self, token: &str) -> (&str, Result<Verified, Rejected>) {
        let token = match Token::parse(token) {
            Ok(token) => token,
            Err(refused) => return ("", Err(Rejected::Refused(refused))),
        };
        let Some((index, provider)) = token.unverified_issuer().and_then(|issuer| self.0.config.provider(issuer))
        else {
            return ("", Err(Rejected::Refused(Refused::UnknownIssuer)));
        };
        (provider.issuer.as_str(), self.check_with(&self.0.issuers[index], provider, &token).await)
    }

    async fn check_with(&self, issuer: &Issuer, provider: &Provider, token: &Token<'_>) -> Result<Verified, Rejected> {
        let verify = || {
            let keys = issuer.keys(self.0.timing.stale).ok_or(Rejected::Unavailable { retry_after: RETRY_AFTER })?;
            verify(token, provider, &self.0.config, &keys, now()).map_err(Rejected::Refused)
        };
        match verify() {
            Err(Rejected::Refused(Refused::UnknownKey)) if issuer.look_again(&self.0.timing).await => verify(),
            result => result,
        }
    }

    /// Keeps the keys of all issuers fresh until `shutdown`.
    pub async fn keep_fresh(self, shutdown: CancellationToken) {
        let all = (0..self.0.issuers.len()).map(|index| self.follow(index));
        shutdown.run_until_cancelled(join_all(all)).await;
    }

    async fn follow(&self, index: usize) {
        let Inner { config, timing, issuers, metrics } = &*self.0;
        let (provider, issuer) = (&config.providers[index], &issuers[index]);
        let mut failures = 0u32;
        loop {
            let began = Instant::now();
            issuer.state.send_modify(|state| (state.running, state.last) = (true, Some(began)));
            let looked = timeout(timing.budget, issuer.fetcher.keys(&provider.issuer)).await;
            let looked = looked.unwrap_or(Err(FetchError::TimedOut));
            metrics.refreshed(provider.issuer.as_str(), looked.is_ok().then(now));
            failures = if looked.is_ok() { 0 } else { failures.saturating_add(1) };
            issuer.publish(provider, looked);
            let pause = match failures {
                0 => timing.refresh,
                n => timing.retry.saturating_mul(1 << (n - 1).min(16)).min(timing.retry_most),
            };
            issuer.rest(Instant::now() + pause, began + timing.ask_again).await;
        }
    }
}

impl Issuer {
    fn keys(&self, stale: Duration) -> Option<Arc<KeySet>> {
        let state = self.state.borrow();
        state.keys.as_ref().filter(|(_, at)| at.elapsed() < stale).map(|(keys, _)| keys.clone())
    }

    /// Has the keys looked up because of an unknown key id, unless they just
    /// were; returns whether they were looked up meanwhile.
    async fn look_again(&self, timing: &Timing) -> bool {
        let mut changes = self.state.subscribe();
        let before = {
            let state = changes.borrow_and_update();
            let due = state.last.is_none_or(|last| last.elapsed() >= timing.ask_again);
            if !due && !state.running {
                return false;
            }
            state.looked
        };
        self.wake.notify_one();
        matches!(timeout(timing.patience, changes.wait_for(|state| state.looked > before)).await, Ok(Ok(_)))
    }

    /// Until it is time, or somebody asks and may.
    async fn rest(&self, until: Instant, ask_from: Instant) {
        loop {
            tokio::select! {
                () = sleep_until(until) => return,
                () = self.wake.notified() => {
                    if Instant::now() >= ask_from {
                        return;
                    }
                }
            }
        }
    }

    /// Keys that could not be looked up stay as they are.
    fn publish(&self, provider: &Provider, looked: Result<KeySet, FetchError>) {
        let issuer = provider.issuer.as_str();
        let was_failing = self.state.borrow().failing;
        match &looked {
            Ok(keys) if keys.is_empty() => {
                warn!(oidc.issuer = issuer, unusable = keys.unusable(), "issuer has no key that we can use");
            }
            Ok(keys) if was_failing || self.state.borrow().keys.is_none() => {
                info!(oidc.issuer = issuer, keys = keys.len(), "issuer's keys are known");
            }
            Ok(_) => {}
            Err(error) if !was_failing => {
                warn!(oidc.issuer = issuer, error = describe(error), "cannot look up an issuer's keys, trying on");
            }
            Err(_) => {}
        }
        self.state.send_modify(|state| {
            state.running = false;
            state.failing = looked.is_err();
            state.looked += 1;
            if let Ok(keys) = looked {
                state.keys = Some((Arc::new(keys), Instant::now()));
            }
        });
    }
}

/// An error with its causes, on one line.
fn describe(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
