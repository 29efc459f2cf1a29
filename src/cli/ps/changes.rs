//! What has changed since the last look, one line each. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::table::{finished, name, running, state};
use crate::printable::printable;
use crate::provisioner::project::{ActiveBuild, Phase, Summary};

/// Remembers the last look.
#[derive(Debug, Default)]
pub(in crate::cli) struct Changes {
    seen: BTreeMap<String, Summary>,
}

impl Changes {
    /// Whether a project was told of.
    pub(in crate::cli) fn knows(&self, key: &str) -> bool {
        self.seen.contains_key(key)
    }

    /// For people: what began, ended, warmed and cooled.
    pub(in crate::cli) fn lines(&mut self, projects: Vec<Summary>, now: Timestamp) -> Vec<String> {
        let time = now.strftime("%H:%M:%S");
        let mut lines = Vec::new();
        let next: BTreeMap<_, _> = projects.into_iter().map(|project| (project.key.clone(), project)).collect();
        for (key, project) in &next {
            let before = self.seen.get(key);
            let told = news(before, project, now);
            lines.extend(told.into_iter().map(|news| format!("{time}Z  {}  {news}", name(project))));
        }
        let gone = self.seen.iter().filter(|(key, _)| !next.contains_key(*key));
        lines.extend(gone.map(|(_, project)| format!("{time}Z  {}  gone", name(project))));
        self.seen = next;
        lines
    }

    /// For programs: every project that is not as it was, and `{"key", "gone"}`
    /// for one that is not there any more.
    pub(in crate::cli) fn documents(&mut self, projects: Vec<Summary>) -> serde_json::Result<Vec<String>> {
        let mut lines = Vec::new();
        let next: BTreeMap<_, _> = projects.into_iter().map(|project| (project.key.clone(), project)).collect();
        for (key, project) in next.iter().filter(|(key, project)| self.seen.get(*key) != Some(project)) {
            debug_assert_eq!(*key, project.key);
            lines.push(serde_json::to_string(project)?);
        }
        for key in self.seen.keys().filter(|key| !next.contains_key(*key)) {
            lines.push(serde_json::json!({"key": key, "gone": true}).to_string());
        }
        self.seen = next;
        Ok(lines)
    }
}

fn news(before: Option<&Summary>, project: &Summary, now: Timestamp) -> Vec<String> {
    let mut news = Vec::new();
    if before.map(|before| before.phase) != Some(project.phase) {
        let (state, _) = state(project.phase);
        let reason = project.reason.as_deref().map_or_else(String::new, |reason| format!(" ({reason})"));
        news.push(format!("{state}{reason}"));
    }
    if before.is_some_and(|before| is_restarted(before, project)) {
        news.push("warm again: its daemon was started anew".to_owned());
    }
    let ran: Vec<&str> =
        before.iter().flat_map(|before| active(before)).map(|build| build.reference.as_str()).collect();
    let began = active(project).filter(|build| !ran.contains(&build.reference.as_str()));
    news.extend(began.map(|build| match before {
        Some(_) => format!("build {} began", short(&build.reference)),
        None => running(build, now),
    }));
    let last = project.last_build.as_ref();
    let ended = |project: &Summary| project.last_build.as_ref().map(|build| build.reference.clone());
    // What ended before the first look is no news.
    let newest = last.filter(|_| before.is_some_and(|before| ended(before) != ended(project)));
    let newest_id = newest.map(|build| build.reference.as_str());
    // The list tells how the newest ended; of others between two looks only that they did.
    if let Some(active) = &project.active_builds {
        let runs = |id: &str| active.iter().any(|build| build.reference == id);
        let over = ran.iter().filter(|id| !runs(id) && Some(**id) != newest_id);
        news.extend(over.map(|id| format!("build {} ended", short(id))));
    }
    if let Some(build) = newest {
        if !ran.contains(&build.reference.as_str()) {
            news.push(format!("build {} began", short(&build.reference)));
        }
        news.push(finished(build));
    }
    news
}

/// Warm at both looks, and another time of getting there.
fn is_restarted(before: &Summary, project: &Summary) -> bool {
    let warm = before.phase == Phase::Warm && project.phase == Phase::Warm;
    warm && before.since.zip(project.since).is_some_and(|(before, now)| before != now)
}

fn short(reference: &str) -> String {
    printable(reference).chars().take(8).collect()
}

fn active(project: &Summary) -> impl Iterator<Item = &ActiveBuild> {
    project.active_builds.iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ps::table::tests::{at, farm};
    use crate::provisioner::project::FinishedBuild;

    fn warm() -> Summary {
        let mut project = farm().into_iter().find(|project| project.phase == Phase::Warm).unwrap();
        (project.active_builds, project.last_build, project.since) = (Some(vec![]), None, Some(at(0)));
        project
    }

    fn build(reference: &str) -> ActiveBuild {
        ActiveBuild { reference: reference.into(), started: None, step: None, steps: None }
    }

    fn told(looks: Vec<Summary>) -> Vec<String> {
        let mut changes = Changes::default();
        let mut lines = Vec::new();
        for look in looks {
            lines = changes.lines(vec![look], at(0));
        }
        lines.iter().map(|line| line.splitn(3, "  ").nth(2).unwrap().to_owned()).collect()
    }

    #[test]
    fn every_build_has_a_beginning_and_an_end() {
        let running = Summary { active_builds: Some(vec![build("aaaaaaaaaa"), build("bbbbbbbbbb")]), ..warm() };
        assert_eq!(told(vec![warm(), running.clone()]), ["build aaaaaaaa began", "build bbbbbbbb began"]);
        let last = FinishedBuild {
            reference: "cccccccccc".into(),
            started: None,
            completed: at(0),
            duration_ms: None,
            steps: None,
            error: None,
        };
        // One that came and went between two looks, and two whose end was not the last.
        let after = Summary { last_build: Some(last), ..warm() };
        assert_eq!(
            told(vec![running, after]),
            ["build aaaaaaaa ended", "build bbbbbbbb ended", "build cccccccc began", "build cccccccc done"]
        );
    }

    #[test]
    fn a_daemon_that_was_started_anew_between_two_looks_is_told() {
        let again = Summary { since: Some(at(7)), ..warm() };
        assert_eq!(told(vec![warm(), again]), ["warm again: its daemon was started anew"]);
        assert!(told(vec![warm(), warm()]).is_empty());
    }

    #[test]
    fn a_project_at_zero_is_cold_and_one_that_was_removed_is_gone() {
        let cold = Summary { phase: Phase::Idle, reason: None, ..warm() };
        assert_eq!(told(vec![warm(), cold]), ["cold"]);
        let mut changes = Changes::default();
        changes.lines(vec![warm()], at(0));
        assert!(changes.knows(&warm().key));
        assert!(changes.lines(vec![], at(0))[0].ends_with("  gone"));
    }
}
