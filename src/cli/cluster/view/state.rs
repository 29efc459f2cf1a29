//! The view as a value: events go in, lines come out. Pure; the time is that
//! since the run began.

mod line;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::cli::ps::table::clip;
use crate::cli::screen::Size;
use crate::cluster::{Event, PlannedLevel};
use crate::manifest::{ObjectId, Runlevel};
use crate::plan::Counts;
use line::{Line, Mark, elapsed, right_aligned};
use step::Step;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Everything is ready.
    Well,
    /// Something is not.
    Badly,
}

/// What is known of a run.
#[derive(Debug)]
pub(super) struct View {
    colour: bool,
    plan: Option<Planned>,
    levels: Vec<Level>,
    steps: Vec<Step>,
    /// What stays although it is no longer wanted, and why.
    kept: BTreeMap<ObjectId, String>,
    end: Option<(End, Duration)>,
}

/// What the run is about to do.
#[derive(Clone, Copy, Debug)]
enum Planned {
    /// To apply, and to prune.
    Apply(Counts),
    /// To remove so many objects.
    Remove(usize),
}

#[derive(Debug)]
struct Level {
    runlevel: Runlevel,
    components: Vec<Component>,
    began: Option<Duration>,
    /// When it was ready, or the run ended before.
    ended: Option<Duration>,
    ready: bool,
}

#[derive(Debug)]
struct Component {
    name: String,
    objects: BTreeSet<ObjectId>,
    writes: usize,
    written: usize,
    waiting: BTreeMap<ObjectId, String>,
    /// When the last object that had to be waited for was ready.
    ready: Option<Duration>,
}

impl View {
    pub(super) fn new(colour: bool) -> Self {
        Self { colour, plan: None, levels: Vec::new(), steps: Vec::new(), kept: BTreeMap::new(), end: None }
    }

    /// Takes an event in; what it has to say that does not go by.
    pub(super) fn take(&mut self, event: &Event, at: Duration) -> Option<String> {
        match event {
            Event::Planned { counts, levels, steps } => {
                self.plan = Some(Planned::Apply(*counts));
                self.levels = levels.iter().map(Level::new).collect();
                self.steps = steps.iter().map(Step::new).collect();
            }
            Event::Removing { steps, kept } => {
                self.plan = Some(Planned::Remove(steps.iter().map(|step| step.objects.len()).sum()));
                self.steps = steps.iter().map(Step::new).collect();
                self.kept.extend(kept.iter().map(|kept| (kept.object.clone(), kept.why.clone())));
            }
            Event::Level { runlevel, .. } => self.with_level(*runlevel, |level| level.began = Some(at)),
            Event::LevelReady { runlevel, .. } => self.with_level(*runlevel, |level| {
                level.ended = Some(at);
                level.ready = true;
            }),
            Event::Applied { object, .. } => self.with_component(object, |component| component.written += 1),
            Event::Kept { object, why } => drop(self.kept.insert(object.clone(), why.clone())),
            Event::Step { title, .. } => self.with_step(title, |step| step.began = Some(at)),
            Event::StepDone { title, .. } => self.with_step(title, |step| step.done = Some(at)),
            Event::Deleted { object } => match self.step_of(object) {
                Some(step) => drop(step.deleted.insert(object.clone())),
                None => return Some(event.to_string()),
            },
            Event::Gone { object } => {
                if let Some(step) = self.step_of(object) {
                    step.waiting.remove(object);
                }
            }
            Event::Waiting { object, why } if self.step_of(object).is_some() => {
                if let Some(step) = self.step_of(object) {
                    step.waiting.insert(object.clone(), why.clone());
                }
            }
            Event::Waiting { object, why } => self.with_component(object, |component| {
                component.ready = None;
                component.waiting.insert(object.clone(), why.clone());
            }),
            Event::Ready { object } => self.with_component(object, |component| {
                component.waiting.remove(object);
                component.ready = component.waiting.is_empty().then_some(at);
            }),
            Event::UpToDate | Event::Recorded { .. } => {}
            Event::Retrying { .. } | Event::Stopping | Event::Warning { .. } => return Some(event.to_string()),
        }
        None
    }

    /// The run has ended; whatever is not ready stays as it is.
    pub(super) fn end(&mut self, end: End, at: Duration) {
        self.end = Some((end, at));
        for level in self.levels.iter_mut().filter(|level| level.began.is_some()) {
            level.ended.get_or_insert(at);
        }
        for step in self.steps.iter_mut().filter(|step| step.began.is_some() && step.done.is_none()) {
            step.cut = Some(at);
        }
    }

    fn with_level(&mut self, runlevel: Runlevel, change: impl FnOnce(&mut Level)) {
        if let Some(level) = self.levels.iter_mut().find(|level| level.runlevel == runlevel) {
            change(level);
        }
    }

    fn with_step(&mut self, title: &str, change: impl FnOnce(&mut Step)) {
        if let Some(step) = self.steps.iter_mut().find(|step| step.title == title) {
            change(step);
        }
    }

    fn step_of(&mut self, object: &ObjectId) -> Option<&mut Step> {
        self.steps.iter_mut().find(|step| step.objects.contains(object))
    }

    fn with_component(&mut self, object: &ObjectId, change: impl FnOnce(&mut Component)) {
        let mut components = self.levels.iter_mut().flat_map(|level| &mut level.components);
        if let Some(component) = components.find(|component| component.objects.contains(object)) {
            change(component);
        }
    }

    /// As it is to be drawn: never wider, and not higher, as far as that can be.
    pub(super) fn lines(&self, size: Size, at: Duration) -> Vec<String> {
        let width = usize::from(size.columns);
        let names = self.levels.iter().flat_map(|level| &level.components).map(|component| component.name.len());
        let names = names.max().unwrap_or_default().min(width / 3);
        let mut lines = vec![self.head(width, at)];
        let levels =
            self.levels.iter().map(|level| (level.ready || level.began.is_none(), self.level(level, width, names, at)));
        let steps = self.steps.iter().map(|step| {
            (step.done.is_some() || step.began.is_none(), self.painted(step.lines(at, self.end.is_some()), width))
        });
        let kept = (true, self.painted(step::kept(&self.kept), width));
        let whole: Vec<(bool, Vec<String>)> = levels.chain(steps).chain([kept]).collect();
        // What scrolls by above needs room, too.
        let room = usize::from(size.rows).saturating_sub(3).max(3);
        let mut surplus = (1 + whole.iter().map(|(_, own)| own.len()).sum::<usize>()).saturating_sub(room);
        for (is_settled, mut own) in whole {
            // Those that are done, and those to come, can do with a line each.
            if surplus > 0 && is_settled && own.len() > 1 {
                surplus = surplus.saturating_sub(own.len() - 1);
                own.truncate(1);
            }
            lines.extend(own);
        }
        if lines.len() > room {
            let more = lines.len() - (room - 1);
            lines.truncate(room - 1);
            lines.push(clip(&format!("  and {more} lines more"), width));
        }
        lines
    }

    fn head(&self, width: usize, at: Duration) -> String {
        let text = match (self.plan, self.end) {
            (Some(Planned::Remove(_)), Some((End::Well, _))) if self.kept.is_empty() => "everything is gone".to_owned(),
            (Some(Planned::Remove(_)), Some((End::Well, _))) => "everything is gone but what is kept".to_owned(),
            (Some(Planned::Remove(_)), Some((End::Badly, _))) => {
                "the run has ended before everything was gone".to_owned()
            }
            (_, Some((End::Well, _))) => "everything is ready".to_owned(),
            (_, Some((End::Badly, _))) => "the run has ended before everything was ready".to_owned(),
            (None, None) => "looking at the cluster".to_owned(),
            (Some(Planned::Apply(counts)), None) => counts.to_string(),
            (Some(Planned::Remove(count)), None) => format!("{count} to delete, {} kept", self.kept.len()),
        };
        let at = self.end.map_or(at, |(_, at)| at);
        right_aligned(&format!("── {text}"), &elapsed(at), width)
    }

    fn level(&self, level: &Level, width: usize, names: usize, at: Duration) -> Vec<String> {
        let ended_early = self.end.is_some() && !level.ready;
        let (mark, word) = match level.began {
            None => (Mark::Later, "later"),
            Some(_) if level.ready => (Mark::Ready, "ready"),
            Some(_) if ended_early => (Mark::Failed, "not ready"),
            Some(_) => (Mark::Working, "at work"),
        };
        let time = level.began.map(|began| level.ended.unwrap_or(at).saturating_sub(began));
        let head = format!("{}  {word}", level.runlevel);
        let mut lines = vec![Line::head(mark, head, time)];
        for component in &level.components {
            let Shown { mark, text, why, ended } = component.shown(level, ended_early);
            let time = level.began.map(|began| ended.or(level.ended).unwrap_or(at).saturating_sub(began));
            let name = clip(&component.name, names);
            lines.push(Line::entry(mark, format!("{name:<names$}  {text}"), time).because(why));
        }
        self.painted(lines, width)
    }

    fn painted(&self, lines: Vec<Line>, width: usize) -> Vec<String> {
        lines.into_iter().flat_map(|line| line.drawn(width, self.colour)).collect()
    }
}

impl Level {
    fn new(planned: &PlannedLevel) -> Self {
        let components = planned.components.iter().map(|component| Component {
            name: component.name.clone(),
            objects: component.objects.iter().cloned().collect(),
            writes: component.writes,
            written: 0,
            waiting: BTreeMap::new(),
            ready: None,
        });
        Self { runlevel: planned.runlevel, components: components.collect(), began: None, ended: None, ready: false }
    }
}

impl Component {
    fn shown(&self, level: &Level, ended_early: bool) -> Shown {
        let count = self.objects.len();
        let objects = format!("{count} object{}", if count == 1 { "" } else { "s" });
        let written = match self.writes {
            0 => format!("{objects}, unchanged"),
            writes => format!("{objects}, {writes} written"),
        };
        if let Some((object, why)) = self.waiting.first_key_value() {
            let more = match self.waiting.len() {
                1 => String::new(),
                count => format!(" (and {} more)", count - 1),
            };
            let mark = if ended_early { Mark::Failed } else { Mark::Waiting };
            let text = format!("{} {}{more}", object.kind, object.name);
            return Shown { mark, text, why: why.clone(), ended: None };
        }
        let (mark, text, ended) = match level.began {
            None => (Mark::Later, format!("{objects}, {} to write", self.writes), None),
            Some(_) if level.ready || self.ready.is_some() => (Mark::Ready, written, self.ready),
            Some(_) if self.written < self.writes => {
                let mark = if ended_early { Mark::Failed } else { Mark::Working };
                (mark, format!("{objects}, {} of {} written", self.written, self.writes), None)
            }
            Some(_) => (Mark::Working, written, None),
        };
        Shown { mark, text, why: String::new(), ended }
    }
}

/// What is said of a component.
struct Shown {
    mark: Mark,
    text: String,
    /// Why it is waited for.
    why: String,
    /// When it was ready.
    ended: Option<Duration>,
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
