//! What has changed since the last look, one line each. Pure.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::table::{finished, name, running, state};
use crate::provisioner::project::{ActiveBuild, Summary};

/// Remembers the last look.
#[derive(Debug, Default)]
pub(in crate::cli) struct Changes {
    seen: BTreeMap<String, Summary>,
}

impl Changes {
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
    /// for one that is not shown any more.
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
    let ran: Vec<&str> =
        before.iter().flat_map(|before| active(before)).map(|build| build.reference.as_str()).collect();
    let began = active(project).filter(|build| !ran.contains(&build.reference.as_str()));
    news.extend(began.map(|build| running(build, now)));
    let ended = |project: &Summary| project.last_build.as_ref().map(|build| build.reference.clone());
    // What ended before the first look is no news.
    if let (Some(before), Some(build)) = (before, &project.last_build)
        && ended(before) != ended(project)
    {
        news.push(finished(build));
    }
    news
}

fn active(project: &Summary) -> impl Iterator<Item = &ActiveBuild> {
    project.active_builds.iter().flatten()
}
