//! The view as a value: events go in, lines come out. Pure; the time is that
//! since the run began.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::cli::ps::table::clip;
use crate::cli::screen::Size;
use crate::cluster::{Event, PlannedLevel};
use crate::manifest::{ObjectId, Runlevel};
use crate::plan::Counts;
use crate::printable::printable;

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
    counts: Option<Counts>,
    levels: Vec<Level>,
    end: Option<(End, Duration)>,
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

/// What a line begins with, and its colour.
#[derive(Clone, Copy)]
enum Mark {
    Later,
    Working,
    Waiting,
    Ready,
    Failed,
}

impl Mark {
    fn sign(self) -> char {
        match self {
            Self::Later => '·',
            Self::Working => '▸',
            Self::Waiting => '…',
            Self::Ready => '✓',
            Self::Failed => '✗',
        }
    }

    fn code(self) -> &'static str {
        match self {
            Self::Later => "2",
            Self::Working => "36",
            Self::Waiting => "33",
            Self::Ready => "32",
            Self::Failed => "31",
        }
    }
}

impl View {
    pub(super) fn new(colour: bool) -> Self {
        Self { colour, counts: None, levels: Vec::new(), end: None }
    }

    /// Takes an event in; what it has to say that does not go by.
    pub(super) fn take(&mut self, event: &Event, at: Duration) -> Option<String> {
        match event {
            Event::Planned { counts, levels } => {
                self.counts = Some(*counts);
                self.levels = levels.iter().map(Level::new).collect();
            }
            Event::Level { runlevel, .. } => self.with_level(*runlevel, |level| level.began = Some(at)),
            Event::LevelReady { runlevel, .. } => self.with_level(*runlevel, |level| {
                level.ended = Some(at);
                level.ready = true;
            }),
            Event::Applied { object, .. } => self.with_component(object, |component| component.written += 1),
            Event::Waiting { object, why } => self.with_component(object, |component| {
                component.ready = None;
                component.waiting.insert(object.clone(), why.clone());
            }),
            Event::Ready { object } => self.with_component(object, |component| {
                component.waiting.remove(object);
                component.ready = component.waiting.is_empty().then_some(at);
            }),
            Event::UpToDate | Event::Recorded { .. } => {}
            Event::Retrying { .. }
            | Event::Stopping
            | Event::Warning { .. }
            | Event::Deleted { .. }
            | Event::Kept { .. } => return Some(event.to_string()),
        }
        None
    }

    /// The run has ended; whatever is not ready stays as it is.
    pub(super) fn end(&mut self, end: End, at: Duration) {
        self.end = Some((end, at));
        for level in self.levels.iter_mut().filter(|level| level.began.is_some()) {
            level.ended.get_or_insert(at);
        }
    }

    fn with_level(&mut self, runlevel: Runlevel, change: impl FnOnce(&mut Level)) {
        if let Some(level) = self.levels.iter_mut().find(|level| level.runlevel == runlevel) {
            change(level);
        }
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
        let whole: Vec<Vec<String>> = self.levels.iter().map(|level| self.level(level, width, names, at)).collect();
        // What scrolls by above needs room, too.
        let room = usize::from(size.rows).saturating_sub(3).max(3);
        let mut surplus = (1 + whole.iter().map(Vec::len).sum::<usize>()).saturating_sub(room);
        for (level, mut own) in self.levels.iter().zip(whole) {
            // Those that are done, and those to come, can do with a line each.
            if surplus > 0 && (level.ready || level.began.is_none()) && own.len() > 1 {
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
        let text = match (self.counts, self.end) {
            (_, Some((End::Well, _))) => "everything is ready".to_owned(),
            (_, Some((End::Badly, _))) => "the run has ended before everything was ready".to_owned(),
            (None, None) => "looking at the cluster".to_owned(),
            (Some(counts), None) => counts.to_string(),
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
        let head = format!("{} {}  {word}", mark.sign(), level.runlevel);
        let mut lines = vec![self.painted(&right_aligned(&head, &time.map(elapsed).unwrap_or_default(), width), mark)];
        for component in &level.components {
            let Shown { mark, text, why, ended } = component.shown(level, ended_early);
            let time = level.began.map(|began| ended.or(level.ended).unwrap_or(at).saturating_sub(began));
            let name = clip(&component.name, names);
            let line = format!("  {} {name:<names$}  {text}", mark.sign());
            let time = time.map(elapsed).unwrap_or_default();
            let why = printable(&why).replace('\n', " ");
            let whole = if why.is_empty() { line.clone() } else { format!("{line}: {why}") };
            // The cause is what a person needs: it gets lines of its own where there is no room for it.
            let fits = whole.chars().count() <= width.saturating_sub(TIME);
            lines.push(self.painted(&right_aligned(if fits { &whole } else { &line }, &time, width), mark));
            if !fits && !why.is_empty() {
                lines.extend(wrapped(&why, width.saturating_sub(INDENT)).map(|part| format!("{:INDENT$}{part}", "")));
            }
        }
        lines
    }

    /// The sign in its colour; all of what comes later is dim.
    fn painted(&self, line: &str, mark: Mark) -> String {
        if !self.colour {
            return line.to_owned();
        }
        let code = mark.code();
        match mark {
            Mark::Later => format!("\x1b[{code}m{line}\x1b[0m"),
            _ => line.replacen(mark.sign(), &format!("\x1b[{code}m{}\x1b[0m", mark.sign()), 1),
        }
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

/// At most two lines of a text, broken between words.
fn wrapped(text: &str, width: usize) -> impl Iterator<Item = String> {
    let (mut first, mut rest) = (String::new(), text);
    while let Some((word, after)) = rest.split_once(' ') {
        if first.chars().count() + 1 + word.chars().count() > width {
            break;
        }
        first.push_str(if first.is_empty() { "" } else { " " });
        first.push_str(word);
        rest = after;
    }
    let whole = first.chars().count() + 1 + rest.chars().count() <= width;
    let lines = if whole || first.is_empty() { [text, ""] } else { [&first, rest] };
    lines.map(|line| clip(line, width)).into_iter().filter(|line| !line.is_empty())
}

/// A text, and another at the end of the line; where there is no room for
/// both, the text alone.
fn right_aligned(text: &str, end: &str, width: usize) -> String {
    let column = width.saturating_sub(TIME);
    if end.is_empty() || column < 3 * TIME {
        return clip(text, width);
    }
    let text = clip(text, column);
    format!("{text:<column$}{end:>TIME$}")
}

/// Columns of a time and the gap before it.
const TIME: usize = 8;

/// Columns before the cause on lines of its own.
const INDENT: usize = 6;

fn elapsed(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..=9 => format!("{seconds}.{} s", time.subsec_millis() / 100),
        10..=59 => format!("{seconds} s"),
        _ => format!("{}m {:02}s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
