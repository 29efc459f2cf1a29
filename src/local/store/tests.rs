//! What is kept is there again, and what is damaged is said to be.

use jiff::Timestamp;

use super::*;
use crate::families::build_farm::lifecycle::tests::project;

pub(in crate::local) fn record(key: &str) -> Record {
    let spec = project(key, &[], None).spec;
    Record::new(key, spec, [127, 1, 2, 3].into(), Timestamp::from_second(5).unwrap())
}

fn layout(folder: &tempfile::TempDir) -> Layout {
    Layout::new(folder.path().to_owned()).unwrap()
}

fn keys(records: &HashMap<String, Arc<Record>>) -> Vec<&str> {
    let mut keys: Vec<_> = records.keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

fn put(key: &str) -> Change {
    (key.to_owned(), Some(Arc::new(record(key))))
}

#[test]
fn what_was_written_is_read_again_folded_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let (mut store, records) = Store::open(&layout(&folder)).unwrap();
    assert!(records.is_empty() && store.due().is_none());
    store.write(&[put("p1"), put("p2")]).unwrap();
    store.fold().unwrap();
    store.write(&[put("p3"), ("p1".to_owned(), None)]).unwrap();
    assert!(store.due().is_some());
    // A killed process closes nothing.
    std::mem::forget(store.base.take());
    let copy = tempfile::tempdir().unwrap();
    for file in ["state.redb", "journal"] {
        std::fs::copy(folder.path().join(file), copy.path().join(file)).unwrap();
    }
    let (store, records) = Store::open(&layout(&copy)).unwrap();
    assert_eq!(keys(&records), ["p2", "p3"]);
    assert_eq!(*records["p2"], record("p2"));
    assert!(store.due().is_none(), "opening folds");
}

#[test]
fn only_their_owner_reads_the_files() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let _store = Store::open(&layout(&folder)).unwrap();
    let _lock = crate::local::lock::Lock::take(&folder.path().join("lock")).unwrap();
    for file in ["state.redb", "journal", "lock"] {
        let mode = std::fs::metadata(folder.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
}

#[test]
fn an_old_journal_that_a_power_cut_brings_back_says_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (mut store, _) = Store::open(&layout(&folder)).unwrap();
    store.write(&[put("p1")]).unwrap();
    let old = std::fs::read(folder.path().join("journal")).unwrap();
    store.fold().unwrap();
    store.write(&[("p1".to_owned(), None)]).unwrap();
    store.fold().unwrap();
    drop(store);
    std::fs::write(folder.path().join("journal"), old).unwrap();
    assert!(Store::open(&layout(&folder)).unwrap().1.is_empty());
}

#[test]
fn a_damaged_base_is_said_and_how_to_mend_it() {
    for damage in [b"not a database at all".to_vec(), vec![0; 8192]] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("state.redb"), &damage).unwrap();
        let error = Store::open(&layout(&folder)).unwrap_err();
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
        assert!(error.hint().unwrap().contains("state.redb.damaged"), "{error}");
    }
}

#[test]
fn a_base_that_is_cut_or_scribbled_on_is_an_error_or_whole_never_a_panic() {
    let folder = tempfile::tempdir().unwrap();
    let (mut store, _) = Store::open(&layout(&folder)).unwrap();
    store.write(&(0..200).map(|i| put(&format!("p{i}"))).collect::<Vec<_>>()).unwrap();
    store.fold().unwrap();
    drop(store);
    let whole = std::fs::read(folder.path().join("state.redb")).unwrap();
    for step in 1..40 {
        let copy = tempfile::tempdir().unwrap();
        let mut bytes = whole.clone();
        let at = whole.len() * step / 40;
        if step % 2 == 0 {
            bytes.truncate(at);
        } else {
            let end = (at + 64).min(bytes.len());
            bytes[at..end].fill(0xa5);
        }
        std::fs::write(copy.path().join("state.redb"), &bytes).unwrap();
        match Store::open(&layout(&copy)) {
            Ok(_) | Err(StoreError::Corrupt { .. } | StoreError::Io { .. }) => {}
            Err(other) => panic!("{step}: {other:?}"),
        }
    }
}
