//! Who runs, and where a test cuts the run off.

use std::cell::Cell;
use std::str::FromStr;

use crate::manifest::Runlevel;

/// Where the process kills itself, as a crash would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopPoint {
    /// When the intent is recorded.
    Intent,
    /// When so many objects are written.
    Apply(usize),
    /// When a level is ready; after the last one, before the outcome.
    Level(Runlevel),
}

/// Why a text is no stop point.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("\"{0}\" is no stop point: want intent, apply:N or level:rcN")]
pub struct ParseStopPoint(String);

impl FromStr for StopPoint {
    type Err = ParseStopPoint;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let point = match s.split_once(':') {
            None if s == "intent" => Some(Self::Intent),
            Some(("apply", count)) => count.parse().ok().map(Self::Apply),
            Some(("level", name)) => Runlevel::ALL.into_iter().find(|l| l.to_string() == name).map(Self::Level),
            _ => None,
        };
        point.ok_or_else(|| ParseStopPoint(s.to_owned()))
    }
}

/// Kills the process if this is where it shall stop.
pub(super) fn stop_at(wanted: Option<StopPoint>, here: StopPoint) {
    if wanted == Some(here) {
        // Nothing is left to do when the signal cannot be sent: the run goes on,
        // and the test that asked for it fails.
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Counts written objects down to the stop point.
pub(super) struct Countdown {
    wanted: Option<StopPoint>,
    written: Cell<usize>,
}

impl Countdown {
    pub(super) fn new(wanted: Option<StopPoint>) -> Self {
        Self { wanted, written: Cell::new(0) }
    }

    pub(super) fn tick(&self) {
        self.written.set(self.written.get() + 1);
        stop_at(self.wanted, StopPoint::Apply(self.written.get()));
    }
}

/// Who holds the lock, in words that lead a person there: host and process,
/// and a random part, because both may come again.
#[expect(clippy::disallowed_methods, reason = "the holder of a lock names itself")]
pub(super) fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "unknown host" } else { host.trim() };
    let mut random = [0; 4];
    // Without randomness the process id alone must do.
    let _ = getrandom::fill(&mut random);
    format!("{host}, process {}, {}", std::process::id(), hex::encode(random))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_points_are_read_or_refused() {
        assert_eq!("intent".parse(), Ok(StopPoint::Intent));
        assert_eq!("apply:3".parse(), Ok(StopPoint::Apply(3)));
        assert_eq!("level:rc4".parse(), Ok(StopPoint::Level(Runlevel::Rc4)));
        for text in ["", "intent:1", "apply", "apply:x", "level:rc5", "level:"] {
            assert!(text.parse::<StopPoint>().is_err(), "{text}");
        }
    }
}
