//! What the controller remembers between passes: nothing that a daemon's life
//! depends on. A new leader begins without it. Pure.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use jiff::Timestamp;

use super::super::health::End;

/// Per project key.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Since when no build is in flight.
    quiet: HashMap<String, Timestamp>,
    /// The last end of each container that was told.
    told: HashMap<String, HashMap<String, String>>,
    /// The last loss of a cache that was told.
    lost: HashMap<String, Timestamp>,
    /// Whose changed template waits for builds.
    held: HashSet<String>,
}

impl Memory {
    /// How long no build has been in flight.
    pub(super) fn quiet(&mut self, key: &str, builds: bool, now: Timestamp) -> Duration {
        if builds {
            self.quiet.remove(key);
            return Duration::ZERO;
        }
        let since = *self.quiet.entry(key.to_owned()).or_insert(now);
        super::lifecycle::age(since, now)
    }

    /// Ends that nobody was told of: newer than `begun`, when this process
    /// began to look, and each once.
    pub(super) fn news(&mut self, key: &str, ends: Vec<End>, begun: Timestamp) -> Vec<End> {
        let mut is_news = |end: &End| {
            let told = self.told.entry(key.to_owned()).or_default();
            told.insert(end.container.clone(), end.id.clone()).as_ref() != Some(&end.id) && end.at >= begun
        };
        ends.into_iter().filter(|end| is_news(end)).collect()
    }

    /// Whether the loss of a cache is news, as an end of a container is.
    pub(super) fn is_new_loss(&mut self, key: &str, at: Timestamp, begun: Timestamp) -> bool {
        self.lost.insert(key.to_owned(), at) != Some(at) && at >= begun
    }

    /// Notes whether a roll is held; returns how many are in all.
    pub(super) fn hold(&mut self, key: &str, held: bool) -> usize {
        if held {
            self.held.insert(key.to_owned());
        } else {
            self.held.remove(key);
        }
        self.held.len()
    }

    /// Whether a roll is held.
    pub(super) fn holds(&self, key: &str) -> bool {
        self.held.contains(key)
    }

    /// Forgets a project; returns how many rolls are still held.
    pub(super) fn forget(&mut self, key: &str) -> usize {
        self.quiet.remove(key);
        self.told.remove(key);
        self.lost.remove(key);
        self.hold(key, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_news_once() {
        let at = |s| Timestamp::from_second(s).unwrap();
        let end = |id: &str, s| End {
            container: "buildkitd".into(),
            id: id.into(),
            at: at(s),
            code: 137,
            out_of_memory: true,
            said: None,
        };
        let mut memory = Memory::default();
        assert_eq!(memory.news("p1", vec![end("a", 5)], at(10)), [], "it was before our time");
        assert_eq!(memory.news("p1", vec![end("b", 15)], at(10)).len(), 1);
        assert_eq!(memory.news("p1", vec![end("b", 15)], at(10)), []);
        assert_eq!(memory.news("p1", vec![end("c", 20)], at(10)).len(), 1);
        assert_eq!(memory.news("p2", vec![end("c", 20)], at(10)).len(), 1);
    }

    #[test]
    fn a_loss_is_news_once() {
        let at = |s| Timestamp::from_second(s).unwrap();
        let mut memory = Memory::default();
        assert!(!memory.is_new_loss("p1", at(5), at(10)), "it was before our time");
        assert!(memory.is_new_loss("p1", at(15), at(10)));
        assert!(!memory.is_new_loss("p1", at(15), at(10)));
        memory.forget("p1");
        assert!(memory.is_new_loss("p1", at(15), at(10)));
    }

    #[test]
    fn quiet_begins_when_the_last_build_ends() {
        let at = |s| Timestamp::from_second(s).unwrap();
        let mut memory = Memory::default();
        assert_eq!(memory.quiet("p1", false, at(5)), Duration::ZERO);
        assert_eq!(memory.quiet("p1", false, at(8)), Duration::from_secs(3));
        assert_eq!(memory.quiet("p1", true, at(9)), Duration::ZERO);
        assert_eq!(memory.quiet("p1", false, at(20)), Duration::ZERO);
    }
}
