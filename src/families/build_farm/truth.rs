//! Whether a daemon may be taken down, from what those say who can know: the
//! companion beside it, which asks BuildKit, and the gateways, which see the
//! streams. Pure; `ask` and `gateways` do the asking.
//!
//! Whoever does not answer counts as busy, for a bounded time: a daemon that is
//! kept too long costs money, one that is taken too early costs a build.

pub mod ask;
pub mod gateways;

use std::time::Duration;

use crate::gateway::streams::Summary;

/// A point on the monotonic clock: time since the process began to ask.
pub type Moment = Duration;

/// How long nothing may have happened before a daemon is taken down.
pub const QUIET: Duration = Duration::from_secs(2);

/// A stream that has moved no byte for this long holds nothing.
pub const STREAM_IDLE: Duration = Duration::from_secs(60);

/// How long a stream without any build holds its daemon.
pub const STREAM_ALONE: Duration = Duration::from_secs(600);

/// How long a gateway that has gone without an end is waited for: streams may
/// live on behind a broken network.
pub const GATEWAY_GONE: Duration = Duration::from_secs(600);

/// What a companion says is believed for this long.
const HEARSAY: Duration = Duration::from_secs(5);

/// Looks that lie further apart than this have nothing to do with one another.
const SAME_LOOK: Duration = Duration::from_secs(60);

/// What is known of the daemon itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Daemon {
    /// No process that could run a build.
    Absent,
    /// It runs without a companion: nobody can tell.
    Unwatched,
    /// The companion, or the daemon behind it, does not answer.
    Silent(String),
    /// The companion told.
    Told {
        /// Builds that run.
        active: usize,
        /// Since a build last ran; `None` when none has.
        idle: Option<Duration>,
    },
}

/// One gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Name of its pod.
    pub name: String,
    /// When it went without having been seen to end; `None` while it is there.
    pub gone: Option<Moment>,
    /// The daemon's streams through it, or why it does not say.
    pub said: Result<Summary, String>,
}

/// What one look found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answers {
    /// Of the daemon.
    pub daemon: Daemon,
    /// Of every gateway; `None` while it is not known which there are.
    pub gateways: Option<Vec<Gateway>>,
}

/// Answers, and since when they have been like that.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observations {
    /// The newest.
    pub answers: Answers,
    looked: Moment,
    /// Since when nobody has been able to say what the daemon does.
    silent: Option<Moment>,
    /// Since when streams have moved bytes.
    streaming: Option<Moment>,
}

impl Observations {
    /// Whether a look now continues this one.
    pub fn counts(&self, now: Moment) -> bool {
        now.saturating_sub(self.looked) <= SAME_LOOK
    }

    /// Adds a look to what was observed before.
    pub fn after(previous: Option<&Self>, answers: Answers, now: Moment) -> Self {
        let previous = previous.filter(|previous| previous.counts(now));
        let since = |holds: bool, before: Option<Moment>| holds.then(|| before.unwrap_or(now));
        let told_of_builds = matches!(answers.daemon, Daemon::Told { active: 1.., .. });
        Self {
            silent: since(matches!(answers.daemon, Daemon::Silent(_)), previous.and_then(|p| p.silent)),
            streaming: since(answers.moving().is_some() && !told_of_builds, previous.and_then(|p| p.streaming)),
            looked: now,
            answers,
        }
    }
}

impl Answers {
    /// A gateway through which bytes have moved lately.
    fn moving(&self) -> Option<&Gateway> {
        let moves = |summary: &Summary| summary.open > 0 && Duration::from_millis(summary.idle_ms) < STREAM_IDLE;
        self.gateways.iter().flatten().find(|gateway| gateway.said.as_ref().is_ok_and(moves))
    }

    /// A gateway that does not say what streams it has.
    fn silent_gateway(&self, now: Moment) -> Option<&Gateway> {
        let counts = |gateway: &&Gateway| gateway.gone.is_none_or(|gone| now.saturating_sub(gone) < GATEWAY_GONE);
        self.gateways.iter().flatten().filter(|gateway| gateway.said.is_err()).find(counts)
    }
}

/// Why a daemon is not taken down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Busy {
    /// BuildKit runs builds that nobody registered, or whose entries were lost.
    #[error("{0} builds run that are not registered")]
    Builds(usize),
    /// A build ended a moment ago; another may follow.
    #[error("a build has just ended")]
    JustBuilt,
    /// New clients may still arrive.
    #[error("its Service still has endpoints")]
    Reachable,
    /// It cannot be told whether builds run.
    #[error("it does not say whether builds run: {0}")]
    Silent(String),
    /// Bytes move between the daemon and a client.
    #[error("a client is connected through gateway {0}")]
    Stream(String),
    /// A gateway does not say what streams it has.
    #[error("gateway {0} does not say what streams it has: {1}")]
    GatewaySilent(String, String),
    /// It is not known yet which gateways there are.
    #[error("it is not known which gateways there are")]
    GatewaysUnknown,
}

/// What to do about the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing happens there.
    Quiet,
    /// Something may.
    Busy(Busy),
}

/// Judges one look. No build lasts longer than `max_build`, so a silence that
/// has lasted longer hides none.
pub fn quiet(seen: &Observations, max_build: Duration, now: Moment) -> Verdict {
    let within = |since: Option<Moment>, limit: Duration| since.is_some_and(|since| now.saturating_sub(since) < limit);
    let told = match &seen.answers.daemon {
        Daemon::Told { active: active @ 1.., .. } => return Verdict::Busy(Busy::Builds(*active)),
        Daemon::Told { idle: Some(idle), .. } if *idle < QUIET => return Verdict::Busy(Busy::JustBuilt),
        Daemon::Silent(why) if within(seen.silent, max_build) => return Verdict::Busy(Busy::Silent(why.clone())),
        Daemon::Silent(_) | Daemon::Unwatched => false,
        Daemon::Told { .. } | Daemon::Absent => true,
    };
    if seen.answers.gateways.is_none() {
        return Verdict::Busy(Busy::GatewaysUnknown);
    }
    let alone = if told { STREAM_ALONE } else { max_build };
    match (seen.answers.moving(), seen.answers.silent_gateway(now)) {
        (Some(gateway), _) if within(seen.streaming, alone) => Verdict::Busy(Busy::Stream(gateway.name.clone())),
        (_, Some(Gateway { name, said: Err(why), .. })) => {
            Verdict::Busy(Busy::GatewaySilent(name.clone(), why.clone()))
        }
        _ => Verdict::Quiet,
    }
}

/// Whether entries that are older than `age` stand for nothing: for all that
/// time no build has run, and no stream is open. Only those who know can say.
pub fn unused(answers: &Answers, age: Duration, now: Moment) -> bool {
    let idle = matches!(answers.daemon, Daemon::Told { active: 0, idle } if idle.is_none_or(|idle| idle >= age));
    let open = |gateway: &Gateway| gateway.said.as_ref().is_ok_and(|summary| summary.open > 0);
    let streams = answers.gateways.as_ref().is_none_or(|gateways| gateways.iter().any(open));
    idle && !streams && answers.silent_gateway(now).is_none()
}

/// What the companion's `/builds` says, as far as it matters here.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Builds {
    daemon: String,
    heard_ms_ago: u64,
    idle_ms: Option<u64>,
    active: Vec<serde::de::IgnoredAny>,
}

impl From<Builds> for Daemon {
    fn from(builds: Builds) -> Self {
        let heard = Duration::from_millis(builds.heard_ms_ago);
        match builds.daemon.as_str() {
            "answering" if heard <= HEARSAY => {
                Self::Told { active: builds.active.len(), idle: builds.idle_ms.map(Duration::from_millis) }
            }
            // The process is gone, and its builds with it.
            "gone" => Self::Absent,
            link => Self::Silent(format!("the daemon is {link}, last heard {} s ago", heard.as_secs())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: fn(u64) -> Duration = Duration::from_secs;
    const MAX_BUILD: Duration = Duration::from_secs(7200);

    fn told(active: usize, idle: Option<u64>) -> Daemon {
        Daemon::Told { active, idle: idle.map(S) }
    }

    fn gateway(open: usize, idle: u64) -> Gateway {
        Gateway { name: "gw".into(), gone: None, said: Ok(Summary { open, idle_ms: idle * 1000 }) }
    }

    fn mute(gone: Option<u64>) -> Gateway {
        Gateway { name: "gw".into(), gone: gone.map(S), said: Err("refused".into()) }
    }

    fn answers(daemon: Daemon, gateways: Vec<Gateway>) -> Answers {
        Answers { daemon, gateways: Some(gateways) }
    }

    /// The verdict when the same was seen every 10 s from `from` to `now`.
    fn after(answers: &Answers, from: u64, now: u64) -> Verdict {
        let mut seen = Observations::after(None, answers.clone(), S(from));
        for second in (from..=now).step_by(10).chain([now]) {
            seen = Observations::after(Some(&seen), answers.clone(), S(second));
        }
        quiet(&seen, MAX_BUILD, S(now))
    }

    fn silent() -> Daemon {
        Daemon::Silent("late".into())
    }

    #[test]
    fn a_daemon_is_quiet_only_when_all_who_know_say_so() {
        let stream = Verdict::Busy(Busy::Stream("gw".into()));
        let mute_gateway = Verdict::Busy(Busy::GatewaySilent("gw".into(), "refused".into()));
        let late = Verdict::Busy(Busy::Silent("late".into()));
        for (name, answers, from, now, verdict) in [
            ("nothing there", answers(Daemon::Absent, vec![]), 0, 0, Verdict::Quiet),
            ("never built", answers(told(0, None), vec![]), 0, 0, Verdict::Quiet),
            ("idle for long", answers(told(0, Some(2)), vec![gateway(0, 0)]), 0, 0, Verdict::Quiet),
            ("a build runs", answers(told(1, Some(0)), vec![]), 0, 100_000, Verdict::Busy(Busy::Builds(1))),
            ("a build has ended", answers(told(0, Some(1)), vec![]), 0, 0, Verdict::Busy(Busy::JustBuilt)),
            ("no answer", answers(silent(), vec![]), 0, 7190, late.clone()),
            ("no answer for longer than any build", answers(silent(), vec![]), 0, 7200, Verdict::Quiet),
            ("nobody can tell", answers(Daemon::Unwatched, vec![]), 0, 0, Verdict::Quiet),
            ("bytes move, no build", answers(told(0, None), vec![gateway(1, 59)]), 0, 599, stream.clone()),
            ("they have for ten minutes", answers(told(0, None), vec![gateway(1, 0)]), 0, 600, Verdict::Quiet),
            ("bytes move, builds unknown", answers(Daemon::Unwatched, vec![gateway(1, 0)]), 0, 7199, stream.clone()),
            ("a stream without bytes", answers(told(0, None), vec![gateway(1, 60)]), 0, 0, Verdict::Quiet),
            ("the other gateway has one", answers(told(0, None), vec![gateway(0, 0), gateway(2, 1)]), 0, 0, stream),
            ("a mute gateway", answers(told(0, None), vec![mute(None)]), 0, 100_000, mute_gateway.clone()),
            ("one that went", answers(told(0, None), vec![mute(Some(5))]), 0, 604, mute_gateway.clone()),
            ("one that went long ago", answers(told(0, None), vec![mute(Some(5))]), 0, 605, Verdict::Quiet),
            (
                "bytes that count no more do not hide a mute gateway",
                answers(told(0, None), vec![gateway(1, 0), mute(None)]),
                0,
                700,
                mute_gateway,
            ),
            (
                "gateways unknown",
                Answers { daemon: told(0, None), gateways: None },
                0,
                0,
                Verdict::Busy(Busy::GatewaysUnknown),
            ),
        ] {
            assert_eq!(after(&answers, from, now), verdict, "{name}");
        }
    }

    #[test]
    fn a_build_in_between_begins_the_ten_minutes_anew() {
        let stream = answers(told(0, Some(3)), vec![gateway(1, 0)]);
        let building = answers(told(1, Some(0)), vec![gateway(1, 0)]);
        let seen = Observations::after(None, stream.clone(), S(0));
        let seen = Observations::after(Some(&seen), building, S(50));
        let seen = Observations::after(Some(&seen), stream, S(60));
        assert_eq!(seen.streaming, Some(S(60)));
    }

    #[test]
    fn looks_far_apart_have_nothing_to_do_with_one_another() {
        let stream = answers(told(0, None), vec![gateway(1, 0)]);
        let seen = Observations::after(None, stream.clone(), S(0));
        let seen = Observations::after(Some(&seen), stream, S(9000));
        assert_eq!(quiet(&seen, MAX_BUILD, S(9000)), Verdict::Busy(Busy::Stream("gw".into())));
    }

    #[test]
    fn entries_are_unused_only_when_that_is_known() {
        for (answers, wanted) in [
            (answers(told(0, Some(600)), vec![gateway(0, 0)]), true),
            (answers(told(0, None), vec![]), true),
            (answers(told(0, Some(599)), vec![]), false),
            (answers(told(1, None), vec![]), false),
            (answers(told(0, None), vec![gateway(1, 100_000)]), false),
            (answers(told(0, None), vec![mute(None)]), false),
            (answers(Daemon::Unwatched, vec![]), false),
            (answers(Daemon::Absent, vec![]), false),
            (answers(silent(), vec![]), false),
            (Answers { daemon: told(0, None), gateways: None }, false),
        ] {
            assert_eq!(unused(&answers, S(600), S(0)), wanted, "{answers:?}");
        }
    }

    #[test]
    fn what_the_companion_says_is_read() {
        let read = |daemon: &str, heard: u64, active: &str| {
            let text = format!(
                r#"{{"daemon": "{daemon}", "identity": {{}}, "draining": false, "heardMsAgo": {heard},
                    "idleMs": 4000, "active": {active}, "finished": []}}"#
            );
            Daemon::from(serde_json::from_str::<Builds>(&text).unwrap())
        };
        assert_eq!(read("answering", 400, "[]"), told(0, Some(4)));
        assert_eq!(read("answering", 400, r#"[{"ref": "a", "stepsTotal": 1}]"#), told(1, Some(4)));
        assert_eq!(read("gone", 400, r#"[{"ref": "a"}]"#), Daemon::Absent);
        assert!(matches!(read("answering", 5001, "[]"), Daemon::Silent(_)));
        assert!(matches!(read("silent", 400, "[]"), Daemon::Silent(_)));
        assert!(matches!(read("unknown", 0, "[]"), Daemon::Silent(_)));
    }
}
