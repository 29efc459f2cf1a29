//! The one way to write a project's status: operations for one project are
//! gathered while a write is under way, and go out together in the next one.
//! A conflict reads the truth again and decides again; nothing is ever lost.
#![expect(clippy::disallowed_methods, reason = "shell: operations are dated when they are applied")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::api::BuildProject;
use super::ledger::{self, Operation, Outcome};
use super::settings::Settings;
use super::view::View;
use crate::names::CONTROLLER_MANAGER;

/// Why an operation did not take effect.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WriteError {
    /// The project does not exist (any more).
    #[error("no such project")]
    Gone,
    /// The API server did not answer, or only with faults that pass, in time.
    #[error("write project status: {0}")]
    Unavailable(String),
    /// The API server refused.
    #[error("write project status: {0}")]
    Refused(String),
}

type Answer = Result<Outcome, WriteError>;

struct Entry {
    operation: Operation,
    deadline: Instant,
    answer: oneshot::Sender<Answer>,
}

/// Writes statuses of projects.
pub struct Writer {
    api: Api<BuildProject>,
    view: Arc<View>,
    settings: Arc<Settings>,
    /// Waiting operations per key; a key is here while a task commits for it.
    lanes: Mutex<HashMap<String, Vec<Entry>>>,
}

const BACKOFF_FIRST: Duration = Duration::from_millis(25);
const BACKOFF_LAST: Duration = Duration::from_secs(1);

impl Writer {
    /// A writer for the projects of one namespace.
    pub fn new(client: Client, view: Arc<View>, settings: Arc<Settings>) -> Arc<Self> {
        let api = Api::namespaced(client, &settings.namespace);
        Arc::new(Self { api, view, settings, lanes: Mutex::default() })
    }

    /// Applies one operation and returns when its effect is persisted. Dropping
    /// the future does not take the operation back.
    ///
    /// # Errors
    /// See [`WriteError`]; the operation has then had no effect, or, when the
    /// answer was lost, may have had.
    pub async fn submit(self: &Arc<Self>, key: &str, operation: Operation, budget: Duration) -> Answer {
        let (answer, received) = oneshot::channel();
        let entry = Entry { operation, deadline: Instant::now() + budget, answer };
        let first = {
            let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(lane) = lanes.get_mut(key) {
                lane.push(entry);
                false
            } else {
                lanes.insert(key.to_owned(), vec![entry]);
                true
            }
        };
        if first {
            tokio::spawn(self.clone().drain(key.to_owned()));
        }
        received.await.unwrap_or_else(|_| Err(WriteError::Unavailable("the writer ended".to_owned())))
    }

    async fn drain(self: Arc<Self>, key: String) {
        loop {
            let batch = {
                let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
                match lanes.get_mut(&key).map(std::mem::take) {
                    Some(batch) if !batch.is_empty() => batch,
                    _ => {
                        lanes.remove(&key);
                        return;
                    }
                }
            };
            self.commit(&key, batch).await;
        }
    }

    async fn commit(&self, key: &str, mut batch: Vec<Entry>) {
        let mut known = self.view.project(key);
        let mut fresh = false;
        let mut backoff = BACKOFF_FIRST;
        loop {
            let Some(project) = &known else {
                if fresh {
                    return answer_all(batch, &Err(WriteError::Gone));
                }
                (known, fresh) = match self.read(key, &mut batch, &mut backoff).await {
                    Some(read) => (read, true),
                    None => return,
                };
                continue;
            };
            let mut next = (**project).clone();
            let now = self.settings.clock.now();
            let outcomes: Vec<_> =
                batch.iter().map(|e| ledger::apply(&mut next, &e.operation, &self.settings, now)).collect();
            // The entry to release, or the route that a wake needs, may have been written by another replica just now.
            let missed = batch.iter().zip(&outcomes).any(|(e, o)| misses(&e.operation, *o));
            if missed && !fresh {
                known = None;
                continue;
            }
            if next.status == project.status {
                return answer_each(batch, &outcomes);
            }
            let name = key.to_owned();
            match self.api.replace_status(&name, &post_params(), &next).await {
                Ok(written) => {
                    self.view.publish(written);
                    return answer_each(batch, &outcomes);
                }
                Err(kube::Error::Api(status)) if status.is_conflict() => {}
                Err(kube::Error::Api(status)) if status.is_not_found() => {
                    return answer_all(batch, &Err(WriteError::Gone));
                }
                Err(error) if passes(&error) => batch = wait(batch, &error, &mut backoff).await,
                Err(error) => return answer_all(batch, &Err(WriteError::Refused(describe(&error)))),
            }
            if batch.is_empty() {
                return;
            }
            (known, fresh) = (None, false);
        }
    }

    /// Reads the project from the API server, however long that may take
    /// within the deadlines. `None`: nobody is left who waits for it.
    async fn read(
        &self,
        key: &str,
        batch: &mut Vec<Entry>,
        backoff: &mut Duration,
    ) -> Option<Option<Arc<BuildProject>>> {
        loop {
            match self.api.get_opt(key).await {
                Ok(Some(project)) => {
                    self.view.publish(project.clone());
                    return Some(Some(Arc::new(project)));
                }
                Ok(None) => return Some(None),
                Err(error) if passes(&error) => {
                    *batch = wait(std::mem::take(batch), &error, backoff).await;
                    if batch.is_empty() {
                        return None;
                    }
                }
                Err(error) => {
                    answer_all(std::mem::take(batch), &Err(WriteError::Refused(describe(&error))));
                    return None;
                }
            }
        }
    }
}

fn misses(operation: &Operation, outcome: Outcome) -> bool {
    let released = matches!(operation, Operation::End { .. }) && outcome == Outcome::Nothing;
    released || outcome == Outcome::Forgotten
}

fn post_params() -> PostParams {
    PostParams { field_manager: Some(CONTROLLER_MANAGER.to_owned()), ..PostParams::default() }
}

fn answer_each(batch: Vec<Entry>, outcomes: &[Outcome]) {
    for (entry, outcome) in batch.into_iter().zip(outcomes) {
        // A caller that has gone does not want its answer.
        let _ = entry.answer.send(Ok(*outcome));
    }
}

fn answer_all(batch: Vec<Entry>, answer: &Answer) {
    for entry in batch {
        let _ = entry.answer.send(answer.clone());
    }
}

/// Waits a little, and answers those whose budget is used up.
async fn wait(batch: Vec<Entry>, error: &kube::Error, backoff: &mut Duration) -> Vec<Entry> {
    tokio::time::sleep(*backoff).await;
    *backoff = (*backoff * 2).min(BACKOFF_LAST);
    let now = Instant::now();
    let (late, left): (Vec<_>, Vec<_>) = batch.into_iter().partition(|entry| entry.deadline <= now);
    answer_all(late, &Err(WriteError::Unavailable(describe(error))));
    left
}

/// Whether trying again can help: throttling, faults of the server, and
/// everything below HTTP.
pub(crate) fn passes(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        kube::Error::SerdeError(_) | kube::Error::BuildRequest(_) => false,
        _ => true,
    }
}

/// What the API server said, or what went wrong on the way to it.
pub(crate) fn describe(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}
