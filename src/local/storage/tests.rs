//! Caches are made, copied, kept and removed.
#![expect(clippy::disallowed_methods, reason = "tests read and write files")]

use super::*;

async fn open(folder: &tempfile::TempDir, kind: Kind) -> Result<Storage, StorageError> {
    Storage::open(kind, Layout::new(folder.path().to_owned()).unwrap(), None).await
}

#[tokio::test]
async fn a_cache_is_made_copied_kept_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let storage = open(&folder, Kind::Dir).await.unwrap();
    storage.prepare("p1", None).await.unwrap();
    let cache = storage.layout.cache("p1");
    fs::write(cache.join("a"), "x").unwrap();
    storage.prepare("p1", None).await.unwrap();
    assert_eq!(fs::read_to_string(cache.join("a")).unwrap(), "x", "what is there stays");
    storage.snapshot("p1", "100").await.unwrap();
    storage.snapshot("p1", "101").await.unwrap();
    assert_eq!(storage.snapshots("p1"), ["100", "101"]);
    storage.prepare("forkp1", Some(&storage.layout.snapshots("p1").join("100"))).await.unwrap();
    assert_eq!(fs::read_to_string(storage.layout.cache("forkp1").join("a")).unwrap(), "x");
    storage.remove(&cache).await.unwrap();
    storage.remove(&cache).await.unwrap();
    assert_eq!(names(&storage.layout.caches()), ["forkp1"]);
}

#[tokio::test]
async fn what_was_cut_half_way_is_swept_and_never_taken_for_a_cache() {
    let folder = tempfile::tempdir().unwrap();
    let storage = open(&folder, Kind::Dir).await.unwrap();
    let half = unfinished(&storage.layout.cache("p1"));
    fs::create_dir(&half).unwrap();
    fs::write(half.join("half"), "").unwrap();
    let storage = open(&folder, Kind::Auto).await.unwrap();
    storage.prepare("p1", None).await.unwrap();
    assert!(names(&storage.layout.cache("p1")).is_empty());
    let missing = storage.prepare("p2", Some(Path::new("/nowhere"))).await.unwrap_err().to_string();
    assert!(missing.contains("/nowhere"), "{missing}");
    assert!(!storage.layout.cache("p2").exists());
}

#[tokio::test]
async fn what_the_file_system_cannot_do_is_said() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let error = open(&folder, Kind::Btrfs).await.unwrap_err().to_string();
    assert!(error.starts_with("--storage btrfs: ") && error.ends_with("is not on btrfs"), "{error}");
    let error = open(&folder, Kind::Reflink).await.unwrap_err().to_string();
    assert!(error.contains("cannot share blocks"), "{error}");
    assert_eq!(open(&folder, Kind::Auto).await.unwrap().kind(), Kind::Dir);
}

#[tokio::test]
async fn what_cannot_be_removed_is_told_tried_again_and_in_nobodys_way() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new(folder.path().to_owned()).unwrap();
    fs::create_dir_all(layout.caches().join(".unfinished-p1")).unwrap();
    // Everything that it runs fails.
    let broken = Storage::open(Kind::Dir, layout.clone(), Some("/bin/false".into())).await.unwrap();
    let cache = layout.cache("p1");
    assert_eq!(broken.left(&cache), None, "what an earlier run left is no project's");
    for _ in 0..2 {
        broken.prepare("p1", None).await.unwrap();
        broken.remove(&cache).await.unwrap_err();
        let why = broken.left(&cache).unwrap();
        assert!(why.starts_with("\"rm --recursive"), "{why}");
    }
    broken.prepare("p2", Some(Path::new("/etc"))).await.unwrap_err();
    broken.again().await;
    let mut left = names(&layout.caches());
    left.sort_unstable();
    assert_eq!(left, [".unfinished-1-p1", ".unfinished-2-p1", ".unfinished-p1", ".unfinished-p2"]);
    broken.prepare("p1", None).await.unwrap();
    Storage { rootlesskit: None, ..broken.clone() }.again().await;
    assert_eq!(names(&layout.caches()), ["p1"]);
    assert_eq!(broken.left(&cache), None);
}
