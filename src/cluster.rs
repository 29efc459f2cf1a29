//! The cluster: connect, observe, apply, wait, record, lock.
//!
//! Shell: everything here talks to the API server. Every request has a
//! deadline; what may pass by itself is tried again until then.

mod admission;
pub mod apply;
mod ask;
mod blame;
mod bulk;
pub mod client;
mod definition;
mod delete;
mod error;
mod event;
mod kinds;
pub mod lock;
pub mod observe;
pub mod record;
mod refusal;
pub mod remains;
mod request;
mod retry;
pub mod wait;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub(crate) use ask::Answer;
pub use error::RequestError;
pub(crate) use event::PRUNED;
pub use event::{Event, PlannedComponent, PlannedKept, PlannedLevel, PlannedStep, Reporter, Verb};

use crate::manifest::ObjectId;

const LAST_WORDS: Duration = Duration::from_secs(10);

/// A cluster, and the limits within which this run may use it.
#[derive(Clone)]
pub struct Cluster {
    client: kube::Client,
    kinds: Arc<kinds::Kinds>,
    limits: Limits,
    interrupt: CancellationToken,
    report: Reporter,
    webhooks: Arc<admission::Told>,
}

/// Limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How many requests are in flight at once, at least one.
    pub concurrency: usize,
    /// When the whole run must have ended.
    pub deadline: Instant,
}

impl Cluster {
    /// A cluster behind a client. `interrupt` ends the run after the requests
    /// in flight; `report` is told what happens.
    pub fn new(client: kube::Client, limits: Limits, interrupt: CancellationToken, report: Reporter) -> Self {
        let limits = Limits { concurrency: limits.concurrency.max(1), ..limits };
        Self {
            kinds: Arc::new(kinds::Kinds::new(client.clone())),
            client,
            limits,
            interrupt,
            report,
            webhooks: Arc::default(),
        }
    }

    /// The client, for requests that are none of an installation's.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Tells what happens.
    pub fn report(&self, event: Event) {
        (self.report)(event);
    }

    /// How many requests may be in flight at once.
    pub(crate) fn concurrency(&self) -> usize {
        self.limits.concurrency
    }

    /// The same cluster with another deadline.
    #[must_use]
    pub fn until(&self, deadline: Instant) -> Self {
        Self { limits: Limits { deadline, ..self.limits }, ..self.clone() }
    }

    /// The same cluster for what must be written even after the deadline and
    /// after an interruption.
    #[must_use]
    pub fn last_words(&self) -> Self {
        let deadline = self.limits.deadline.max(request::now() + LAST_WORDS);
        Self { interrupt: CancellationToken::new(), ..self.until(deadline) }
    }

    /// The same cluster, which tells of one object as of another that it stands for.
    pub(crate) fn standing_for(&self, object: &ObjectId, stands_for: &ObjectId) -> Self {
        let (report, from, to) = (Arc::clone(&self.report), object.to_string(), stands_for.to_string());
        let report: Reporter = Arc::new(move |event| {
            report(match event {
                Event::Retrying { request, why, delay_ms } => {
                    Event::Retrying { request: request.replace(&from, &to), why, delay_ms }
                }
                event => event,
            });
        });
        Self { report, ..self.clone() }
    }

    /// Whether the run was asked to end.
    pub fn is_interrupted(&self) -> bool {
        self.interrupt.is_cancelled()
    }
}
