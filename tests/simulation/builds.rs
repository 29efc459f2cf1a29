//! The builds that clients run, as the world knows them.

use std::collections::HashMap;
use std::time::Duration;

/// All builds that were answered.
#[derive(Debug, Default)]
pub(crate) struct Builds {
    answered: Vec<Build>,
    /// By the pod: until when builds run there that went past the gate.
    direct: HashMap<String, u64>,
}

/// A build with an endpoint.
#[derive(Clone, Debug)]
pub(crate) struct Build {
    pub(crate) number: usize,
    pub(crate) key: String,
    /// Its entry.
    digest: String,
    /// Its daemon's pod.
    pub(crate) pod: String,
    asked: u64,
    /// From here on its entry may expire.
    expires: u64,
    over: bool,
}

/// Clocks of nodes differ by up to 40 s.
pub(crate) const SLACK_MS: u64 = 42_000;

impl Build {
    /// Whether a roll that is long overdue may cut it.
    pub(crate) fn is_old(&self, now: u64) -> bool {
        now + SLACK_MS >= self.asked + 3_600_000
    }
}

impl Builds {
    /// A build was answered that was asked for at `asked`.
    pub(crate) fn answered(
        &mut self,
        number: usize,
        key: &str,
        digest: String,
        pod: String,
        asked: u64,
        max: Duration,
    ) {
        let expires = asked + u64::try_from(max.as_millis()).unwrap() - SLACK_MS;
        self.answered.push(Build { number, key: key.to_owned(), digest, pod, asked, expires, over: false });
    }

    /// It ended, however.
    pub(crate) fn over(&mut self, number: usize) {
        for build in self.answered.iter_mut().filter(|build| build.number == number) {
            build.over = true;
        }
    }

    /// Its pod was killed by somebody else.
    pub(crate) fn lost(&mut self, pod: &str) {
        for build in self.answered.iter_mut().filter(|build| build.pod == pod) {
            build.over = true;
        }
    }

    /// A client dials a pod past the gate, and builds there until then.
    pub(crate) fn dialed(&mut self, pod: &str, until: u64) {
        let known = self.direct.entry(pod.to_owned()).or_default();
        *known = until.max(*known);
    }

    /// Until when such builds run on a pod.
    pub(crate) fn direct(&self, pod: &str) -> u64 {
        self.direct.get(pod).copied().unwrap_or(0)
    }

    /// The live build that an entry stands for.
    pub(crate) fn of_entry(&self, digest: &str, now: u64) -> Option<usize> {
        self.live(now).find(|build| build.digest == digest).map(|build| build.number)
    }

    /// Builds that nobody may cut now.
    pub(crate) fn live(&self, now: u64) -> impl Iterator<Item = &Build> {
        self.answered.iter().filter(move |build| !build.over && now < build.expires)
    }
}
