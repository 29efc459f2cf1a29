//! One line of the view, and the lines of its cause. Pure.

use std::time::Duration;

use crate::cli::ps::table::clip;
use crate::printable::printable;

/// What a line begins with, and its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Later,
    Working,
    Waiting,
    Ready,
    Failed,
    Kept,
}

impl Mark {
    fn sign(self) -> char {
        match self {
            Self::Later => '·',
            Self::Working => '▸',
            Self::Waiting => '…',
            Self::Ready => '✓',
            Self::Failed => '✗',
            Self::Kept => '=',
        }
    }

    fn code(self) -> &'static str {
        match self {
            Self::Later => "2",
            Self::Working => "36",
            Self::Waiting => "33",
            Self::Ready => "32",
            Self::Failed => "31",
            Self::Kept => "33",
        }
    }
}

/// What is said of one thing.
#[derive(Debug)]
pub(super) struct Line {
    mark: Mark,
    indent: usize,
    text: String,
    time: Option<Duration>,
    /// Why it is waited for, or kept.
    why: String,
}

impl Line {
    /// Of a level or a step.
    pub(super) fn head(mark: Mark, text: String, time: Option<Duration>) -> Self {
        Self { mark, indent: 0, text, time, why: String::new() }
    }

    /// Of what is in one.
    pub(super) fn entry(mark: Mark, text: String, time: Option<Duration>) -> Self {
        Self { indent: 2, ..Self::head(mark, text, time) }
    }

    pub(super) fn because(self, why: String) -> Self {
        Self { why, ..self }
    }

    /// As it is drawn. The cause is what a person needs: it gets lines of its
    /// own where there is no room for it.
    pub(super) fn drawn(self, width: usize, colour: bool) -> Vec<String> {
        let Self { mark, indent, text, time, why } = self;
        let line = format!("{:indent$}{} {text}", "", mark.sign());
        let time = time.map(elapsed).unwrap_or_default();
        let why = printable(&why).replace('\n', " ");
        let whole = if why.is_empty() { line.clone() } else { format!("{line}: {why}") };
        let fits = whole.chars().count() <= width.saturating_sub(TIME);
        let mut lines = vec![painted(&right_aligned(if fits { &whole } else { &line }, &time, width), mark, colour)];
        if !fits && !why.is_empty() {
            lines.extend(wrapped(&why, width.saturating_sub(INDENT)).map(|part| format!("{:INDENT$}{part}", "")));
        }
        lines
    }
}

/// The sign in its colour; all of what comes later is dim.
fn painted(line: &str, mark: Mark, colour: bool) -> String {
    if !colour {
        return line.to_owned();
    }
    let code = mark.code();
    match mark {
        Mark::Later => format!("\x1b[{code}m{line}\x1b[0m"),
        _ => line.replacen(mark.sign(), &format!("\x1b[{code}m{}\x1b[0m", mark.sign()), 1),
    }
}

/// At most two lines of a text, broken between words.
pub(super) fn wrapped(text: &str, width: usize) -> impl Iterator<Item = String> {
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
pub(super) fn right_aligned(text: &str, end: &str, width: usize) -> String {
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

pub(super) fn elapsed(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..=9 => format!("{seconds}.{} s", time.subsec_millis() / 100),
        10..=59 => format!("{seconds} s"),
        _ => format!("{}m {:02}s", seconds / 60, seconds % 60),
    }
}
