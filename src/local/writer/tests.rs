//! What the writer answers is so, whatever happens next.

use super::super::layout::Layout;
use super::super::store::tests::record;
use super::*;

fn start(folder: &tempfile::TempDir) -> (Arc<Writer>, Arc<Index>) {
    let (store, records) = Store::open(&Layout::new(folder.path().to_owned()).unwrap()).unwrap();
    let (index, _) = Index::new(records);
    (Writer::start(store, index.clone(), Arc::default()).unwrap(), index)
}

fn spec(key: &str) -> Change {
    Change::Create(Box::new(record(key).project.spec))
}

fn begin(id: &str) -> Change {
    Change::Apply(Operation::Begin { id: id.to_owned() })
}

#[tokio::test]
async fn what_was_answered_is_there_after_an_end_without_warning() {
    let folder = tempfile::tempdir().unwrap();
    let (writer, index) = start(&folder);
    assert_eq!(writer.submit("p1", spec("p1")).await.unwrap(), Outcome::Done);
    assert_eq!(writer.submit("p1", spec("p1")).await.unwrap(), Outcome::Nothing);
    let ids: Vec<_> = (0..500).map(|i| i.to_string()).collect();
    let begun = futures::future::join_all(ids.iter().map(|id| writer.submit("p1", begin(id)))).await;
    assert!(begun.into_iter().all(|outcome| outcome.unwrap() == Outcome::Done));
    assert_eq!(index.get("p1").unwrap().project.status_or_default().inflight.len(), 500);
    // As after kill -9: the files as they are now, nothing closed.
    let copy = tempfile::tempdir().unwrap();
    for file in ["state.redb", "journal"] {
        std::fs::copy(folder.path().join(file), copy.path().join(file)).unwrap();
    }
    let (_writer, index) = start(&copy);
    assert_eq!(index.get("p1").unwrap().project.status_or_default().inflight.len(), 500);
}

#[tokio::test]
async fn two_first_routes_make_one_project_and_no_address_is_given_twice() {
    let folder = tempfile::tempdir().unwrap();
    let (writer, index) = start(&folder);
    let keys: Vec<_> = (0..300).map(|i| format!("p{}", i / 2)).collect();
    let made = futures::future::join_all(keys.iter().map(|key| writer.submit(key, spec(key)))).await;
    assert_eq!(made.into_iter().filter(|outcome| matches!(outcome, Ok(Outcome::Done))).count(), 150);
    let addresses: std::collections::HashSet<_> = index.all().iter().map(|record| record.address).collect();
    assert_eq!(addresses.len(), 150);
}

#[tokio::test]
async fn a_removal_is_known_until_its_cache_has_gone_whoever_comes_again() {
    let folder = tempfile::tempdir().unwrap();
    let (writer, index) = start(&folder);
    writer.submit("p1", spec("p1")).await.unwrap();
    assert_eq!(index.removals("p1"), 0);
    // At once, so that the project is never seen to be away.
    let both = tokio::join!(writer.submit("p1", Change::Remove), writer.submit("p1", spec("p1")));
    assert!(matches!(both, (Ok(Outcome::Done), Ok(Outcome::Done))), "{both:?}");
    assert!(index.get("p1").is_some());
    assert_eq!(index.removals("p1"), 1);
    writer.submit("p1", Change::Remove).await.unwrap();
    index.erased("p1", 1);
    assert_eq!(index.removals("p1"), 1, "the second is another");
    index.erased("p1", 1);
    assert_eq!(index.removals("p1"), 0);
    assert!(matches!(writer.submit("p1", Change::Remove).await, Err(WriteError::Gone)));
    assert_eq!(index.removals("p1"), 0, "nothing was removed");
}

#[tokio::test]
async fn a_fork_that_is_wanted_is_not_reaped_and_nobody_is_told_of_what_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let (writer, index) = start(&folder);
    writer.submit("forkp1", spec("forkp1")).await.unwrap();
    writer.submit("forkp1", begin("a")).await.unwrap();
    assert_eq!(writer.submit("forkp1", Change::Reap).await.unwrap(), Outcome::StillWanted);
    writer.submit("forkp1", Change::Remove).await.unwrap();
    assert!(index.get("forkp1").is_none());
    assert!(matches!(writer.submit("forkp1", begin("b")).await, Err(WriteError::Gone)));
    writer.end();
    assert!(matches!(writer.submit("forkp1", begin("b")).await, Err(WriteError::Ended)));
}
