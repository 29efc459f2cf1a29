//! The one writer of the records: a thread that takes what waits, applies each
//! change by the same pure functions as in a cluster, makes the outcome
//! persistent in one write, publishes it and answers.
#![expect(clippy::disallowed_methods, reason = "shell: operations are dated when they are applied")]

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::sync::oneshot;

use super::address;
use super::index::Index;
use super::record::{ProcessId, Record};
use super::store::{Store, StoreError};
use crate::families::build_farm::api::{BuildProjectSpec, CacheRoom};
use crate::families::build_farm::ledger::{self, Operation, Outcome};
use crate::families::build_farm::lifecycle;
use crate::families::build_farm::settings::Settings;

/// What is asked of the writer.
#[derive(Debug)]
pub enum Change {
    /// An operation on the project's status.
    Apply(Operation),
    /// A project that may not exist yet. It counts as just made.
    Create(Box<BuildProjectSpec>),
    /// Its daemon is this process, or none.
    Process(Option<ProcessId>),
    /// It counts as not used lately, unless builds are in flight; these are forgotten when they are cut.
    Rest {
        /// Whether builds in flight are cut.
        cut: bool,
    },
    /// What its cache holds.
    Room(CacheRoom),
    /// Its daemon is wanted for a moment, whenever it was last used.
    Wake,
    /// Its times that are yet to come are taken for now.
    Rewind,
    /// It goes, if it is a fork that nothing wants.
    Reap,
    /// It goes.
    Remove,
}

/// Why a change did not take effect.
#[derive(Clone, Debug, thiserror::Error)]
pub enum WriteError {
    /// There is no such project.
    #[error("no such project")]
    Gone,
    /// The store cannot be written.
    #[error("{0}")]
    Store(String),
    /// No address is left.
    #[error("no loopback address is free for another project")]
    NoAddress,
    /// The farm is ending.
    #[error("the farm is ending")]
    Ended,
}

type Answer = Result<Outcome, WriteError>;

struct Request {
    key: String,
    change: Change,
    answer: oneshot::Sender<Answer>,
}

/// Requests that go out in one write.
const BATCH: usize = 1024;

/// The way to the writer's thread.
#[derive(Debug)]
pub struct Writer {
    requests: Mutex<Option<Sender<Request>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Writer {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system has no room for one.
    pub fn start(store: Store, index: Arc<Index>, settings: Arc<Settings>) -> std::io::Result<Arc<Self>> {
        let (requests, received) = channel();
        let thread = std::thread::Builder::new().name("writer".to_owned());
        let desk = Desk { store, index, settings };
        let thread = thread.spawn(move || desk.work(&received))?;
        Ok(Arc::new(Self { requests: Mutex::new(Some(requests)), thread: Mutex::new(Some(thread)) }))
    }

    /// Makes a change, and returns when it is persistent. Dropping the future
    /// does not take it back.
    ///
    /// # Errors
    /// See [`WriteError`]; nothing has changed then.
    pub async fn submit(&self, key: &str, change: Change) -> Answer {
        let (answer, received) = oneshot::channel();
        {
            let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(requests) = &*requests else { return Err(WriteError::Ended) };
            let _ = requests.send(Request { key: key.to_owned(), change, answer });
        }
        received.await.unwrap_or(Err(WriteError::Ended))
    }

    /// Ends the thread when everything that was submitted is on disk.
    pub fn end(&self) {
        drop(self.requests.lock().unwrap_or_else(PoisonError::into_inner).take());
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the writer ended early");
        }
    }
}

/// What the thread works with.
struct Desk {
    store: Store,
    index: Arc<Index>,
    settings: Arc<Settings>,
}

/// Records as they will be once the batch is written.
type Draft = HashMap<String, Option<Arc<Record>>>;

impl Desk {
    fn work(mut self, requests: &Receiver<Request>) {
        loop {
            let first = match self.store.due() {
                Some(due) => requests.recv_timeout(due),
                None => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match first {
                Ok(first) => {
                    let more = requests.try_iter().take(BATCH - 1);
                    self.serve(std::iter::once(first).chain(more).collect());
                }
                Err(RecvTimeoutError::Timeout) => self.fold(),
                Err(RecvTimeoutError::Disconnected) => return self.fold(),
            }
            if self.store.due().is_some_and(|due| due.is_zero()) {
                self.fold();
            }
        }
    }

    /// The journal has everything meanwhile.
    fn fold(&mut self) {
        if let Err(error) = self.store.fold() {
            tracing::error!(error = %with_cause(&error), "the state could not be written to its file, trying again");
        }
    }

    fn serve(&mut self, batch: Vec<Request>) {
        let now = Timestamp::now();
        let mut draft = Draft::new();
        let mut lasting = false;
        let mut answers = Vec::with_capacity(batch.len());
        let mut removed = Vec::new();
        for Request { key, change, answer } in batch {
            let removes = matches!(change, Change::Reap | Change::Remove).then(|| key.clone());
            lasting |= removes.is_some() || matches!(change, Change::Create(_));
            let outcome = self.apply(&mut draft, key, change, now);
            removed.extend(removes.filter(|_| matches!(outcome, Ok(Outcome::Done))));
            answers.push((answer, outcome));
        }
        // Nothing to do writes nothing.
        draft.retain(|key, record| self.index.get(key).as_deref() != record.as_deref());
        let changes: Vec<_> = draft.into_iter().collect();
        if !changes.is_empty() {
            if let Err(error) = self.store.write(&changes) {
                let error = WriteError::Store(with_cause(&error));
                tracing::error!(%error, "nothing can be changed");
                return answers.into_iter().for_each(|(answer, _)| drop(answer.send(Err(error.clone()))));
            }
            if lasting {
                self.fold();
            }
            self.index.publish(changes, removed);
        }
        for (answer, outcome) in answers {
            // Who has gone does not want its answer.
            let _ = answer.send(outcome);
        }
    }

    fn apply(&self, draft: &mut Draft, key: String, change: Change, now: Timestamp) -> Answer {
        let known = draft.get(&key).cloned().unwrap_or_else(|| self.index.get(&key));
        let (next, outcome) = match (change, known) {
            (Change::Create(_), Some(_)) => return Ok(Outcome::Nothing),
            (Change::Create(spec), None) => {
                let drafted = |a| draft.values().flatten().any(|record| record.address == a);
                let address = address::choose(&key, |a| drafted(a) || self.index.takes(a));
                let record = Record::new(&key, *spec, address.ok_or(WriteError::NoAddress)?, now);
                (Some(record), Outcome::Done)
            }
            (_, None) => return Err(WriteError::Gone),
            (Change::Apply(operation), Some(known)) => {
                let mut record = (*known).clone();
                let outcome = ledger::apply(&mut record.project, &operation, &self.settings, now);
                (Some(record), outcome)
            }
            (Change::Process(process), Some(known)) => (Some(Record { process, ..(*known).clone() }), Outcome::Done),
            (Change::Reap, Some(known)) if !lifecycle::reap(&known.project, &self.settings, now) => {
                return Ok(Outcome::StillWanted);
            }
            (Change::Rewind, Some(known)) => match known.until(now) {
                Some(record) => (Some(record), Outcome::Done),
                None => return Ok(Outcome::Nothing),
            },
            (Change::Room(room), Some(known)) => {
                let mut record = (*known).clone();
                record.project.status.get_or_insert_default().cache = Some(room);
                (Some(record), Outcome::Done)
            }
            (Change::Wake, Some(known)) => {
                let mut record = (*known).clone();
                let until = Time(now + lifecycle::WAKE);
                record.project.status.get_or_insert_default().wake_until = Some(until);
                (Some(record), Outcome::Done)
            }
            (Change::Rest { cut }, Some(known)) => {
                let mut record = (*known).clone();
                let status = record.project.status.get_or_insert_default();
                if !cut && lifecycle::live_entries(status, self.settings.max_build, now).next().is_some() {
                    return Ok(Outcome::StillWanted);
                }
                (status.last_build_time, status.wake_until, status.inflight_builds) = (None, None, 0);
                status.inflight.clear();
                (Some(record), Outcome::Done)
            }
            (Change::Reap | Change::Remove, Some(_)) => (None, Outcome::Done),
        };
        draft.insert(key, next.map(Arc::new));
        Ok(outcome)
    }
}

/// An error and its causes in one line.
fn with_cause(error: &StoreError) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

#[cfg(test)]
mod tests;
