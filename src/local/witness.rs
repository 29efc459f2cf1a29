//! Who knows of a daemon's builds on one host: the daemon itself, and the
//! gateway in this process. Pure.

use std::time::Duration;

use crate::companion::observation::{Link, Moment, Observation};
use crate::families::build_farm::truth::{Answers, Daemon, Gateway};
use crate::gateway::streams::Summary;

/// What a daemon said is believed for this long.
const HEARSAY: Duration = Duration::from_secs(5);

/// What both say now. Without an observation there is no process.
pub(super) fn answers(observation: Option<&Observation>, streams: Summary, now: Moment) -> Answers {
    let here = Gateway { name: "here".to_owned(), gone: None, said: Ok(streams) };
    Answers { daemon: observation.map_or(Daemon::Absent, |seen| daemon(seen, now)), gateways: Some(vec![here]) }
}

fn daemon(seen: &Observation, now: Moment) -> Daemon {
    let heard = now.saturating_sub(seen.heard);
    match seen.link {
        Link::Answering if heard <= HEARSAY => {
            Daemon::Told { active: seen.active.len(), idle: seen.last_activity.map(|last| now.saturating_sub(last)) }
        }
        Link::Gone(_) => Daemon::Absent,
        link => Daemon::Silent(format!("the daemon is {}, last heard {} s ago", link.as_str(), heard.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_daemon_does_not_say_counts_as_silence() {
        let at = Duration::from_secs;
        let seen =
            |link, heard| Observation { link, heard: at(heard), last_activity: Some(at(1)), ..Default::default() };
        for (observation, now, expected) in [
            (None, 9, Daemon::Absent),
            (Some(seen(Link::Answering, 8)), 9, Daemon::Told { active: 0, idle: Some(at(8)) }),
            (Some(seen(Link::Answering, 3)), 9, Daemon::Silent("the daemon is answering, last heard 6 s ago".into())),
            (Some(seen(Link::Silent(at(8)), 3)), 9, Daemon::Silent("the daemon is silent, last heard 6 s ago".into())),
            (Some(seen(Link::Gone(at(8)), 3)), 9, Daemon::Absent),
        ] {
            assert_eq!(answers(observation.as_ref(), Summary::default(), at(now)).daemon, expected, "{observation:?}");
        }
    }
}
