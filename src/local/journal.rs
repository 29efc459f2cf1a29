//! Changes since the base of the store was written: whole records, appended.
//! What was appended survives the end of this process, however it ends; only a
//! power cut may take what the kernel has not written yet.
//!
//! An entry is its length (4 bytes, little endian), the first 8 bytes of its
//! SHA-256, and JSON. The first entry that is not whole ends the journal.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::record::Record;

/// One change: the record as it is now; none when it is gone.
#[derive(Debug, Serialize, Deserialize)]
pub struct Entry<R = Record> {
    /// The version of the base that it follows; of an older one it says nothing.
    pub base: u64,
    /// The project.
    pub key: String,
    /// Its record.
    pub record: Option<R>,
}

/// The file.
#[derive(Debug)]
pub struct Journal {
    file: File,
    /// Where the next entry goes.
    end: u64,
    /// A failed append that could not be taken back: later entries would be lost behind it.
    broken: bool,
}

const HEAD: usize = 12;

impl Journal {
    /// Opens the journal and reads what is in it. A torn end is cut off.
    ///
    /// # Errors
    /// The operating system's.
    pub fn open(path: &Path) -> io::Result<(Self, Vec<Entry>)> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let (entries, end) = read(&bytes);
        let end = end as u64;
        if end < bytes.len() as u64 {
            tracing::warn!(journal.bytes = bytes.len() as u64 - end, "cutting a torn end off the journal");
            file.set_len(end)?;
        }
        Ok((Self { file, end, broken: false }, entries))
    }

    /// Appends entries, all or none.
    ///
    /// # Errors
    /// The operating system's; nothing was appended then.
    pub fn append<R: Serialize>(&mut self, entries: &[Entry<R>]) -> io::Result<()> {
        if self.broken {
            return Err(io::Error::other("an earlier write was cut and could not be taken back"));
        }
        let mut bytes = Vec::new();
        for entry in entries {
            let json = serde_json::to_vec(entry)?;
            let length = u32::try_from(json.len()).map_err(io::Error::other)?;
            bytes.extend_from_slice(&length.to_le_bytes());
            bytes.extend_from_slice(&Sha256::digest(&json)[..8]);
            bytes.extend_from_slice(&json);
        }
        let written = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(&bytes));
        if let Err(error) = written {
            self.broken = self.file.set_len(self.end).is_err();
            return Err(error);
        }
        self.end += bytes.len() as u64;
        Ok(())
    }

    /// Whether it has no entry.
    pub fn is_empty(&self) -> bool {
        self.end == 0
    }

    /// Forgets all entries: the base has them now.
    ///
    /// # Errors
    /// The operating system's.
    pub fn clear(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.end = 0;
        self.broken = false;
        Ok(())
    }
}

/// The entries that are whole, and where they end.
fn read(bytes: &[u8]) -> (Vec<Entry>, usize) {
    let (mut entries, mut end) = (Vec::new(), 0);
    while let Some((entry, length)) = first(&bytes[end..]) {
        entries.push(entry);
        end += length;
    }
    (entries, end)
}

fn first(bytes: &[u8]) -> Option<(Entry, usize)> {
    let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let json = bytes.get(HEAD..HEAD.checked_add(length)?)?;
    if Sha256::digest(json)[..8] != bytes[4..HEAD] {
        return None;
    }
    Some((serde_json::from_slice(json).ok()?, HEAD + length))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests read and write files")]
mod tests {
    use super::super::store::tests::record;
    use super::*;

    fn entry(key: &str) -> Entry {
        Entry { base: 0, key: key.into(), record: Some(record(key)) }
    }

    fn keys(entries: &[Entry]) -> Vec<&str> {
        entries.iter().map(|entry| entry.key.as_str()).collect()
    }

    #[test]
    fn every_cut_and_every_flipped_byte_leaves_the_entries_before_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let (mut journal, _) = Journal::open(&path).unwrap();
        journal.append(&[entry("p1")]).unwrap();
        let first = journal.end as usize;
        journal.append(&[entry("p2"), Entry { base: 0, key: "p1".into(), record: None }]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(keys(&read(&bytes).0), ["p1", "p2", "p1"]);
        for cut in 0..bytes.len() {
            let (entries, end) = read(&bytes[..cut]);
            assert!(end <= cut && (cut < first || keys(&entries)[0] == "p1"), "cut at {cut}");
        }
        for at in first..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x10;
            assert_eq!(keys(&read(&flipped).0)[0], "p1", "flipped at {at}");
        }
    }

    #[test]
    fn a_torn_end_is_cut_and_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let (mut journal, _) = Journal::open(&path).unwrap();
        journal.append(&[entry("p1"), entry("p2")]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        let (mut journal, entries) = Journal::open(&path).unwrap();
        assert_eq!(keys(&entries), ["p1"]);
        journal.append(&[entry("p3")]).unwrap();
        assert_eq!(keys(&Journal::open(&path).unwrap().1), ["p1", "p3"]);
        journal.clear().unwrap();
        journal.append(&[entry("p4")]).unwrap();
        assert_eq!(keys(&Journal::open(&path).unwrap().1), ["p4"]);
    }

    #[test]
    fn a_full_disk_leaves_the_journal_as_it_was() {
        // A device that is always full.
        let file = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
        let mut journal = Journal { file, end: 0, broken: false };
        let error = journal.append(&[entry("p1")]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(journal.is_empty());
    }
}
