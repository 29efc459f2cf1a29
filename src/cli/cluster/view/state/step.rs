//! Objects that are deleted together, and objects that stay. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::line::{Line, Mark};
use crate::cluster::PlannedStep;
use crate::manifest::ObjectId;

/// How many are told one by one.
const SHOWN: usize = 5;

/// One step of a removal.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) title: String,
    pub(super) objects: BTreeSet<ObjectId>,
    pub(super) deleted: BTreeSet<ObjectId>,
    /// What is not gone yet although it was deleted, and why.
    pub(super) waiting: BTreeMap<ObjectId, String>,
    pub(super) began: Option<Duration>,
    /// When everything was gone.
    pub(super) done: Option<Duration>,
    /// When the run ended before that.
    pub(super) cut: Option<Duration>,
}

impl Step {
    pub(super) fn new(planned: &PlannedStep) -> Self {
        Self {
            title: planned.title.clone(),
            objects: planned.objects.iter().cloned().collect(),
            deleted: BTreeSet::new(),
            waiting: BTreeMap::new(),
            began: None,
            done: None,
            cut: None,
        }
    }

    pub(super) fn lines(&self, at: Duration, has_ended: bool) -> Vec<Line> {
        let (all, deleted) = (self.objects.len(), self.deleted.len());
        let (mark, text) = match (self.began, self.done) {
            (None, _) => (Mark::Later, format!("{all} to delete")),
            (Some(_), Some(_)) => (Mark::Ready, format!("{all} gone")),
            (Some(_), None) if has_ended => (Mark::Failed, format!("{deleted} of {all} deleted")),
            (Some(_), None) => (Mark::Working, format!("{deleted} of {all} deleted")),
        };
        let end = self.done.or(self.cut).unwrap_or(at);
        let time = self.began.map(|began| end.saturating_sub(began));
        let mut lines = vec![Line::head(mark, format!("{}  {text}", self.title), time)];
        let mark = if has_ended { Mark::Failed } else { Mark::Waiting };
        lines.extend(told(&self.waiting, |object, why| Line::entry(mark, object.to_string(), None).because(why)));
        lines
    }
}

/// What stays.
pub(super) fn kept(kept: &BTreeMap<ObjectId, String>) -> Vec<Line> {
    if kept.is_empty() {
        return Vec::new();
    }
    let head = Line::head(Mark::Kept, format!("kept  {}", kept.len()), None);
    let lines = told(kept, |object, why| Line::entry(Mark::Kept, object.to_string(), None).because(why));
    std::iter::once(head).chain(lines).collect()
}

fn told(all: &BTreeMap<ObjectId, String>, line: impl Fn(&ObjectId, String) -> Line) -> Vec<Line> {
    let mut lines: Vec<Line> = all.iter().take(SHOWN).map(|(object, why)| line(object, why.clone())).collect();
    if all.len() > SHOWN {
        lines.push(Line::entry(Mark::Later, format!("and {} more", all.len() - SHOWN), None));
    }
    lines
}
