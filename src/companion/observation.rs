//! What is known of the daemon, and what that means for its probes. Pure:
//! answers and times in, observations out.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A point on the monotonic clock: time since the process began.
pub type Moment = Duration;

/// One build as BuildKit's history tells it. Neither arguments nor commands
/// are kept: they may hold secrets, and build steps can read what we serve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Build {
    /// BuildKit's id of the build.
    #[serde(rename = "ref")]
    pub reference: String,
    /// When it began.
    pub started: Option<Timestamp>,
    /// When it ended.
    pub completed: Option<Timestamp>,
    /// Steps in all; 0 where they are not counted.
    pub steps_total: u32,
    /// Steps that the cache answered.
    pub steps_cached: u32,
    /// Steps that are done.
    pub steps_completed: u32,
    /// How it failed: `exit code: 137`, or the name of a status code.
    pub error: Option<String>,
    /// Of a build that runs, the step that has run longest, without its command.
    pub step: Option<String>,
}

/// What serves on the socket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Identity {
    /// BuildKit's version.
    pub version: String,
    /// Snapshotter of the default worker.
    pub snapshotter: String,
}

/// What the daemon said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Builds that run.
    pub active: Vec<Build>,
    /// Builds that ended, newest first; `None` when it was not asked for them.
    pub finished: Option<Vec<Build>>,
    /// What serves; `None` when it was not asked.
    pub identity: Option<Identity>,
    /// Counts the processes that have served on the socket.
    pub process: u64,
}

/// How the daemon stands to us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Link {
    /// It was never asked.
    #[default]
    Unknown,
    /// It answers.
    Answering,
    /// It is there but has not answered since.
    Silent(Moment),
    /// Nothing has listened on the socket since: no process, or one that stops.
    Gone(Moment),
}

impl Link {
    /// In one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Answering => "answering",
            Self::Silent(_) => "silent",
            Self::Gone(_) => "gone",
        }
    }
}

/// All that is known of the daemon. `active` is what ran when it last answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// How the daemon stands to us.
    pub link: Link,
    /// When the question behind this was asked.
    pub asked: Moment,
    /// When it last answered; the age of `active`.
    pub heard: Moment,
    /// Builds that ran when it last answered.
    pub active: Vec<Build>,
    /// Builds that ended, newest first.
    pub finished: Vec<Build>,
    /// When a build last ran.
    pub last_activity: Option<Moment>,
    /// What serves.
    pub identity: Identity,
    /// Counts the processes that have served on the socket.
    pub process: u64,
}

impl Observation {
    /// The next observation, given an answer. Builds that began and ended
    /// between two questions count as activity by the age of their record; each
    /// counts once, so a wall clock that jumps cannot hold a drain for ever.
    #[must_use]
    pub fn answered(&self, answer: Answer, asked: Moment, now: Moment, wall: Timestamp) -> Self {
        let running = (!answer.active.is_empty()).then_some(now);
        let ended = answer.finished.iter().flatten().filter(|build| !self.has_finished(&build.reference));
        let ended = ended.filter_map(|build| Some(now.saturating_sub(age(build.completed?, wall)))).max();
        // What ran until the last look was active at least until then.
        let stopped = (running.is_none() && !self.active.is_empty()).then_some(self.heard);
        Self {
            link: Link::Answering,
            asked,
            heard: now,
            last_activity: [self.last_activity, running, ended, stopped].into_iter().flatten().max(),
            active: answer.active,
            finished: answer.finished.unwrap_or_else(|| self.finished.clone()),
            identity: answer.identity.unwrap_or_else(|| self.identity.clone()),
            process: answer.process,
        }
    }

    /// The next observation when no answer came.
    #[must_use]
    pub fn silent(&self, asked: Moment, now: Moment) -> Self {
        let since = if let Link::Silent(since) = self.link { since } else { now };
        Self { link: Link::Silent(since), asked, ..self.clone() }
    }

    /// The next observation when nothing listens.
    #[must_use]
    pub fn gone(&self, asked: Moment, now: Moment) -> Self {
        let since = if let Link::Gone(since) = self.link { since } else { now };
        Self { link: Link::Gone(since), asked, ..self.clone() }
    }

    /// Builds that ended since an earlier observation.
    pub fn ended_since<'a>(&'a self, earlier: &Self) -> Vec<&'a Build> {
        self.finished.iter().filter(|build| !earlier.has_finished(&build.reference)).collect()
    }

    /// Whether the running builds are others than in `active`.
    pub fn differs(&self, active: &[Build]) -> bool {
        let refs = |builds: &[Build]| builds.iter().map(|b| b.reference.clone()).collect::<BTreeSet<_>>();
        refs(&self.active) != refs(active)
    }

    /// Running builds, where that is known.
    pub fn running(&self) -> Option<usize> {
        (self.link == Link::Answering).then_some(self.active.len())
    }

    fn has_finished(&self, reference: &str) -> bool {
        self.finished.iter().any(|build| build.reference == reference)
    }
}

fn age(completed: Timestamp, wall: Timestamp) -> Duration {
    Duration::try_from(wall.duration_since(completed)).unwrap_or(Duration::ZERO)
}

/// Whether builds may be sent here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Gate {
    /// They may.
    #[default]
    Open,
    /// They may not, until it is opened.
    Closed,
    /// They may not until another process than this one serves: the container
    /// is ending, and a hook also runs when a container is merely restarted.
    ClosedForProcess(u64),
}

impl Gate {
    /// The gate once `process` serves.
    #[must_use]
    pub fn seen(self, process: u64) -> Self {
        match self {
            Self::ClosedForProcess(closed) if process > closed => Self::Open,
            gate => gate,
        }
    }
}

/// Why the daemon takes no builds; `None` when it does.
pub fn unready(daemon: &Observation, gate: Gate, expected_snapshotter: Option<&str>) -> Option<String> {
    if gate != Gate::Open {
        return Some("draining".to_owned());
    }
    match daemon.link {
        Link::Unknown => return Some("the daemon has not answered yet".to_owned()),
        Link::Silent(_) => return Some("the daemon does not answer".to_owned()),
        Link::Gone(_) => return Some("nothing listens on the daemon's socket".to_owned()),
        Link::Answering => {}
    }
    let actual = daemon.identity.snapshotter.as_str();
    expected_snapshotter
        .filter(|expected| *expected != actual)
        .map(|expected| format!("the daemon uses the snapshotter \"{actual}\", want \"{expected}\""))
}

/// Why the daemon should be restarted; `None` when it should not. Never while
/// one of its builds may be alive: one that ran when it was last heard counts
/// for `longest`, for a starved daemon is slow to answer, not dead.
pub fn dead(daemon: &Observation, now: Moment, longest: Duration) -> Option<&'static str> {
    let protected = !daemon.active.is_empty() && now.saturating_sub(daemon.heard) < longest;
    match daemon.link {
        Link::Answering => None,
        Link::Silent(_) | Link::Gone(_) if protected => None,
        Link::Unknown => Some("the daemon has not answered yet"),
        Link::Silent(_) => Some("the daemon does not answer, and no build is known to run"),
        Link::Gone(_) => Some("nothing listens on the daemon's socket"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;

    fn build(reference: &str, completed: Option<i64>) -> Build {
        let completed = completed.map(|s| Timestamp::from_second(s).unwrap());
        Build { reference: reference.to_owned(), completed, ..Build::default() }
    }

    fn wall(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn running(names: &[&str]) -> Answer {
        Answer { active: names.iter().map(|n| build(n, None)).collect(), process: 1, ..Answer::default() }
    }

    fn ended(names: &[(&str, i64)]) -> Answer {
        let finished = names.iter().map(|(name, at)| build(name, Some(*at))).collect();
        Answer { finished: Some(finished), process: 1, ..Answer::default() }
    }

    #[test]
    fn a_running_build_is_activity_now() {
        let seen = Observation::default().answered(running(&["a"]), S(4), S(5), wall(100));
        assert_eq!((seen.last_activity, seen.running()), (Some(S(5)), Some(1)));
        let later = seen.answered(running(&[]), S(8), S(9), wall(104));
        assert_eq!((later.last_activity, later.running()), (Some(S(5)), Some(0)), "active until the last look");
    }

    #[test]
    fn a_build_between_two_looks_counts_by_its_record() {
        let seen = Observation::default().answered(ended(&[("old", 40)]), S(10), S(10), wall(100));
        assert_eq!(seen.last_activity, Some(S(0)), "ended before this process began");
        let seen = seen.answered(ended(&[("new", 107), ("old", 40)]), S(18), S(18), wall(108));
        assert_eq!(seen.last_activity, Some(S(17)));
    }

    #[test]
    fn a_wall_clock_that_jumps_back_delays_once_only() {
        let seen = Observation::default().answered(ended(&[("a", 9_000)]), S(10), S(10), wall(100));
        assert_eq!(seen.last_activity, Some(S(10)));
        let seen = seen.answered(ended(&[("a", 9_000)]), S(20), S(20), wall(110));
        assert_eq!(seen.last_activity, Some(S(10)));
    }

    #[test]
    fn silence_and_absence_count_from_their_begin_and_keep_what_was_known() {
        let seen = Observation::default().answered(running(&["a"]), S(4), S(5), wall(100));
        let silent = seen.silent(S(6), S(9)).silent(S(9), S(19));
        assert_eq!((silent.link, silent.asked, silent.heard), (Link::Silent(S(9)), S(9), S(5)));
        assert_eq!((silent.active.len(), silent.running()), (1, None));
        let gone = silent.gone(S(20), S(20)).gone(S(21), S(21));
        assert_eq!(gone.link, Link::Gone(S(20)));
    }

    #[test]
    fn builds_are_counted_once_as_ended() {
        let before = Observation::default().answered(ended(&[("a", 1)]), S(1), S(1), wall(2));
        let after = before.answered(ended(&[("b", 3), ("a", 1)]), S(2), S(2), wall(4));
        assert_eq!(after.ended_since(&before), [&build("b", Some(3))]);
        assert!(before.differs(&[build("x", None)]) && !before.differs(&[]));
    }

    #[test]
    fn ready_means_open_and_answering_with_the_right_snapshotter() {
        let identity = Identity { version: String::new(), snapshotter: "overlayfs".to_owned() };
        let answer = Answer { identity: Some(identity), ..running(&[]) };
        let up = Observation::default().answered(answer, S(1), S(1), wall(1));
        for (observation, gate, snapshotter, ready) in [
            (Observation::default(), Gate::Open, None, false),
            (up.clone(), Gate::Open, None, true),
            (up.clone(), Gate::Open, Some("overlayfs"), true),
            (up.clone(), Gate::Open, Some("native"), false),
            (up.clone(), Gate::Closed, None, false),
            (up.clone(), Gate::ClosedForProcess(1), None, false),
            (up.clone(), Gate::ClosedForProcess(1).seen(1), None, false),
            (up.clone(), Gate::ClosedForProcess(1).seen(2), None, true),
            (up.clone(), Gate::Closed.seen(2), None, false),
            (up.silent(S(2), S(5)), Gate::Open, None, false),
            (up.gone(S(2), S(2)), Gate::Open, None, false),
        ] {
            assert_eq!(unready(&observation, gate, snapshotter).is_none(), ready, "{:?} {gate:?}", observation.link);
        }
    }

    #[test]
    fn no_daemon_is_dead_while_a_build_may_be_alive() {
        let idle = Observation::default().answered(running(&[]), S(10), S(10), wall(1));
        let busy = Observation::default().answered(running(&["a"]), S(10), S(10), wall(1));
        for (observation, now, alive) in [
            (Observation::default(), S(1), false),
            (idle.clone(), S(1_000), true),
            (idle.silent(S(11), S(14)), S(14), false),
            (idle.gone(S(11), S(11)), S(11), false),
            (busy.clone(), S(9_000), true),
            (busy.silent(S(11), S(14)), S(14), true),
            (busy.silent(S(11), S(14)), S(109), true),
            (busy.silent(S(11), S(14)), S(110), false),
            (busy.gone(S(11), S(11)), S(60), true),
        ] {
            assert_eq!(dead(&observation, now, S(100)).is_none(), alive, "{:?} at {now:?}", observation.link);
        }
    }
}
