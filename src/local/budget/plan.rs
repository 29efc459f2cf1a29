//! Which caches make room for the others. Pure.

use jiff::Timestamp;

/// One cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Its project.
    pub key: String,
    /// Its size, when it was last looked at.
    pub bytes: u64,
    /// When a build last asked for it.
    pub used: Option<Timestamp>,
    /// Whether builds are in flight or run there, or it can give no more.
    pub busy: bool,
}

/// What to prune, and to how many bytes, so that all fit into the budget: the
/// least recently used first, and none that a build uses.
pub fn plan(mut caches: Vec<Cache>, budget: u64) -> Vec<(String, u64)> {
    let total: u64 = caches.iter().map(|cache| cache.bytes).sum();
    let mut excess = total.saturating_sub(budget);
    caches.retain(|cache| !cache.busy && cache.bytes > 0);
    caches.sort_by_key(|cache| cache.used);
    let mut prunes = Vec::new();
    for cache in caches {
        if excess == 0 {
            break;
        }
        let bytes = excess.min(cache.bytes);
        excess -= bytes;
        prunes.push((cache.key, cache.bytes - bytes));
    }
    prunes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(key: &str, bytes: u64, used: i64, busy: bool) -> Cache {
        Cache { key: key.into(), bytes, used: Some(Timestamp::from_second(used).unwrap()), busy }
    }

    #[test]
    fn the_least_recently_used_go_first_and_never_under_a_build() {
        let caches = || {
            vec![
                cache("new", 40, 9, false),
                cache("busy", 50, 1, true),
                cache("old", 30, 2, false),
                cache("empty", 0, 0, false),
            ]
        };
        assert_eq!(plan(caches(), 120), []);
        assert_eq!(plan(caches(), 100), [("old".into(), 10)]);
        assert_eq!(plan(caches(), 80), [("old".into(), 0), ("new".into(), 30)]);
        assert_eq!(plan(caches(), 0), [("old".into(), 0), ("new".into(), 0)], "a build keeps its cache");
    }
}
