//! Keeps the records: a redb file as the base, and a journal of what changed
//! since. See ADR 10.
#![expect(clippy::disallowed_methods, reason = "shell: the base is written once a second at most")]

use std::collections::{HashMap, HashSet};
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redb::{Database, DatabaseError, ReadableDatabase, ReadableTable, StorageError, TableDefinition};

use super::journal::{Entry, Journal};
use super::layout::Layout;
use super::record::Record;

const PROJECTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("projects");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
/// Grows with every commit, so that what a power cut leaves of an old journal is known as such.
const VERSION: &str = "version";

/// How long a change may wait to be written to the base.
pub const FOLD_EVERY: Duration = Duration::from_secs(1);

/// Why records cannot be kept or read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The base is not one, or damaged.
    #[error("the state file \"{}\" is damaged: {why}", .path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What redb says.
        why: String,
    },
    /// A file cannot be read or written.
    #[error("the state file \"{}\" cannot be used", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another process has it open.
    #[error("the state file \"{}\" is in use by another process", .0.display())]
    InUse(PathBuf),
}

impl StoreError {
    /// How to mend it, where there is a way.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Corrupt { path, .. } => Some(format!(
                "move it away and start again:\n  mv {0} {0}.damaged\ncaches stay where they are, and a project finds \
                 its own with its next build; only settings of single projects and builds in flight are forgotten",
                path.display()
            )),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some("make room on the disk of the state folder, for example with `bko-install prune`".to_owned())
            }
            _ => None,
        }
    }
}

/// The base and the journal.
#[derive(Debug)]
pub struct Store {
    /// Closed after a failed write, and opened again for the next.
    base: Option<Database>,
    base_path: PathBuf,
    version: u64,
    journal: Journal,
    journal_path: PathBuf,
    /// What the base does not know yet.
    pending: HashMap<String, Option<Arc<Record>>>,
    folded: Instant,
}

/// A record as it is now; none when it is gone.
pub type Change = (String, Option<Arc<Record>>);

impl Store {
    /// Opens the store of a state folder that exists, and reads it.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn open(layout: &Layout) -> Result<(Self, HashMap<String, Arc<Record>>), StoreError> {
        let (base_path, journal_path) = (layout.store(), layout.journal());
        let base = open(&base_path)?;
        let (mut records, version) = read(&base, &base_path)?;
        let io = |source| StoreError::Io { path: journal_path.clone(), source };
        let (journal, entries) = Journal::open(&journal_path).map_err(io)?;
        let mut pending = HashMap::new();
        for Entry { key, record, .. } in entries.into_iter().filter(|entry| entry.base == version) {
            let record = record.map(Arc::new);
            match &record {
                Some(record) => records.insert(key.clone(), record.clone()),
                None => records.remove(&key),
            };
            pending.insert(key, record);
        }
        let mut store =
            Self { base: Some(base), base_path, version, journal, journal_path, pending, folded: Instant::now() };
        store.fold()?;
        Ok((store, records))
    }

    /// Keeps changes: all or none. They survive the end of this process, and,
    /// once [`Store::fold`] has run, a power cut.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        let base = self.version;
        let entry = |(key, record): &Change| Entry { base, key: key.clone(), record: record.clone() };
        let entries: Vec<_> = changes.iter().map(entry).collect();
        let path = &self.journal_path;
        self.journal.append(&entries).map_err(|source| StoreError::Io { path: path.clone(), source })?;
        self.pending.extend(changes.iter().cloned());
        Ok(())
    }

    /// When the base should be written; `None` when it has everything.
    pub fn due(&self) -> Option<Duration> {
        (!self.pending.is_empty()).then(|| FOLD_EVERY.saturating_sub(self.folded.elapsed()))
    }

    /// Writes to the base what it does not have yet, and waits for the disk.
    ///
    /// # Errors
    /// See [`StoreError`]; the journal still has everything then.
    pub fn fold(&mut self) -> Result<(), StoreError> {
        self.folded = Instant::now();
        if self.pending.is_empty() && self.journal.is_empty() {
            return Ok(());
        }
        let base = match self.base.take() {
            Some(base) => base,
            None => open(&self.base_path)?,
        };
        commit(&base, self.version + 1, &self.pending).map_err(|error| fault(&self.base_path, error))?;
        self.base = Some(base);
        self.version += 1;
        self.pending.clear();
        self.journal.clear().map_err(|source| StoreError::Io { path: self.journal_path.clone(), source })
    }
}

fn open(path: &Path) -> Result<Database, StoreError> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    file.map_err(|source| StoreError::Io { path: path.to_owned(), source })?;
    // What it takes for impossible in a file of its own it panics about.
    let opened = std::panic::catch_unwind(|| Database::create(path));
    let opened =
        opened.map_err(|_| StoreError::Corrupt { path: path.to_owned(), why: "redb gave up on it".to_owned() })?;
    opened.map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse(path.to_owned()),
        error => fault(path, error),
    })
}

fn read(base: &Database, path: &Path) -> Result<(HashMap<String, Arc<Record>>, u64), StoreError> {
    let mut records = HashMap::new();
    let mut unreadable = HashSet::new();
    let read = || -> Result<u64, redb::Error> {
        let transaction = base.begin_read()?;
        let table = match transaction.open_table(PROJECTS) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(0),
            table => table?,
        };
        for row in table.iter()? {
            let (key, value) = row?;
            match serde_json::from_slice(value.value()) {
                Ok(record) => drop(records.insert(key.value().to_owned(), Arc::new(record))),
                Err(error) => drop(unreadable.insert(format!("project \"{}\": {error}", key.value()))),
            }
        }
        Ok(transaction.open_table(META)?.get(VERSION)?.map_or(0, |version| version.value()))
    };
    let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read));
    let read = read.map_err(|_| StoreError::Corrupt { path: path.to_owned(), why: "redb gave up on it".to_owned() })?;
    let version = read.map_err(|error| fault(path, error))?;
    match unreadable.into_iter().next() {
        Some(why) => Err(StoreError::Corrupt { path: path.to_owned(), why }),
        None => Ok((records, version)),
    }
}

fn commit(base: &Database, version: u64, changes: &HashMap<String, Option<Arc<Record>>>) -> Result<(), redb::Error> {
    let transaction = base.begin_write()?;
    transaction.open_table(META)?.insert(VERSION, version)?;
    {
        let mut table = transaction.open_table(PROJECTS)?;
        for (key, record) in changes {
            match record {
                Some(record) => {
                    let json = serde_json::to_vec(record).map_err(|e| StorageError::Io(io::Error::other(e)))?;
                    table.insert(key.as_str(), json.as_slice())?;
                }
                None => drop(table.remove(key.as_str())?),
            }
        }
    }
    Ok(transaction.commit()?)
}

fn fault(path: &Path, error: impl Into<redb::Error>) -> StoreError {
    let path = path.to_owned();
    match error.into() {
        // What redb does not recognise as its own it reports so.
        redb::Error::Io(source) if source.kind() == io::ErrorKind::InvalidData => {
            StoreError::Corrupt { path, why: source.to_string() }
        }
        redb::Error::Io(source) if source.kind() == io::ErrorKind::UnexpectedEof => {
            StoreError::Corrupt { path, why: source.to_string() }
        }
        redb::Error::Io(source) => StoreError::Io { path, source },
        error => StoreError::Corrupt { path, why: error.to_string() },
    }
}

#[cfg(test)]
pub(super) mod tests;
