//! Projects as a table: plain, aligned, and within the width of the terminal.
//! Pure.

use std::fmt::Write as _;

use jiff::Timestamp;

use crate::provisioner::project::{ActiveBuild, FinishedBuild, KeptBy, Phase, Summary};

/// From here on there is room for more columns.
const WIDE: u16 = 110;

/// Narrowest column for the names of projects.
const NAME: usize = 12;

/// How it is to look.
#[derive(Clone, Copy, Debug)]
pub(in crate::cli) struct Look {
    pub(in crate::cli) width: u16,
    pub(in crate::cli) colour: bool,
}

/// One cell, and the colour of its text.
struct Cell(String, &'static str);

const PLAIN: &str = "";
const GREEN: &str = "\x1b[32m";
const RED: &str = "\x1b[31m";
const YELLOW: &str = "\x1b[33m";
const DIM: &str = "\x1b[2m";
const RESET: &str = "\x1b[0m";

/// The whole table, with a line below each project for every build that runs.
pub(in crate::cli) fn table(projects: &[Summary], now: Timestamp, look: Look) -> String {
    if projects.is_empty() {
        return "no daemon is up; --all shows those at zero, too\n".to_owned();
    }
    let wide = look.width >= WIDE;
    let rows: Vec<Vec<Cell>> = projects.iter().map(|project| row(project, now, wide)).collect();
    let heads = heads(wide);
    let mut widths: Vec<usize> = heads.iter().map(|head| head.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.0.chars().count());
        }
    }
    // The first column gives way: names can be told apart by their ends.
    let others: usize = widths[1..].iter().map(|width| width + 2).sum();
    widths[0] = widths[0].min(usize::from(look.width).saturating_sub(others).max(NAME));
    let mut out = String::new();
    line(&mut out, heads.iter().map(|head| Cell((*head).to_owned(), DIM)), &widths, look);
    for (project, row) in projects.iter().zip(rows) {
        line(&mut out, row.into_iter(), &widths, look);
        for note in notes(project, now) {
            let text = clip(&format!("  {}", note.0), look.width.into());
            let _ = writeln!(out, "{}", painted(&text, note.1, look.colour));
        }
    }
    out
}

fn heads(wide: bool) -> Vec<&'static str> {
    if wide {
        vec!["PROJECT", "KEY", "ARCH", "STATE", "FOR", "BUILDS", "CACHED", "TOOK", "ENDED", "CACHE", "ZERO IN"]
    } else {
        vec!["PROJECT", "ARCH", "STATE", "BUILDS", "CACHED", "TOOK", "CACHE", "ZERO IN"]
    }
}

fn row(project: &Summary, now: Timestamp, wide: bool) -> Vec<Cell> {
    let plain = |text: String| Cell(printable(&text), PLAIN);
    let last = project.last_build.as_ref();
    let (state, colour) = state(project.phase);
    let mut row = vec![plain(name(project))];
    if wide {
        row.push(plain(project.key.clone()));
    }
    row.push(plain(project.arch.to_string()));
    row.push(Cell(state.to_owned(), colour));
    if wide {
        row.push(plain(project.since.map_or_else(none, |since| span(seconds(since, now)))));
    }
    row.push(plain(builds(project)));
    row.push(last.map_or_else(|| plain(none()), cached));
    row.push(plain(last.and_then(|build| build.duration_ms).map_or_else(none, took)));
    if wide {
        row.push(plain(last.map_or_else(none, |build| format!("{} ago", span(seconds(build.completed, now))))));
    }
    row.push(plain(project.cache.map_or_else(none, |room| bytes(room.bytes_used, room.bytes_total))));
    row.push(plain(zero_in(project, now)));
    row
}

/// Repository, component and target, as far as they tell the project from others.
pub(in crate::cli) fn name(project: &Summary) -> String {
    let mut name = if project.repo.is_empty() { project.key.clone() } else { project.repo.clone() };
    if !project.name.is_empty() {
        let _ = write!(name, ":{}", project.name);
    }
    if !matches!(project.target.as_str(), "" | "default") {
        let _ = write!(name, "@{}", project.target);
    }
    if project.fork {
        name.push_str(" (fork)");
    }
    printable(&name)
}

/// As people say it.
pub(in crate::cli) fn state(phase: Phase) -> (&'static str, &'static str) {
    match phase {
        Phase::Pending => ("new", YELLOW),
        Phase::Idle => ("cold", DIM),
        Phase::Scaling => ("scaling", YELLOW),
        Phase::Warm => ("warm", GREEN),
        Phase::Failed => ("failed", RED),
    }
}

/// Those that run, of those that were routed here; `?` while nobody can tell.
fn builds(project: &Summary) -> String {
    let routed = project.in_flight.count;
    match project.active_builds.as_ref().map(Vec::len) {
        _ if project.phase == Phase::Idle && routed == 0 => none(),
        Some(active) if active == routed => active.to_string(),
        Some(active) => format!("{active}/{routed}"),
        None => format!("?/{routed}"),
    }
}

/// How many steps of the last build the cache answered; or that it failed.
fn cached(build: &FinishedBuild) -> Cell {
    match (&build.error, build.steps) {
        (Some(_), _) => Cell("failed".to_owned(), RED),
        (None, Some(steps)) => Cell(format!("{}/{}", steps.cached, steps.total), PLAIN),
        (None, None) => Cell(none(), PLAIN),
    }
}

fn zero_in(project: &Summary, now: Timestamp) -> String {
    match (project.kept_by, project.idle_at) {
        (Some(KeptBy::Hot), _) => "never".to_owned(),
        (Some(KeptBy::InFlight), _) => "in use".to_owned(),
        (_, Some(at)) => span(seconds(now, at)),
        (_, None) => none(),
    }
}

fn notes(project: &Summary, now: Timestamp) -> Vec<Cell> {
    let builds = project.active_builds.iter().flatten().map(|build| Cell(running(build, now), PLAIN));
    let reason = project.reason.as_ref().filter(|_| matches!(project.phase, Phase::Failed | Phase::Scaling));
    let colour = if project.phase == Phase::Failed { RED } else { DIM };
    let reason = reason.map(|reason| Cell(printable(reason), colour));
    builds.chain(reason).collect()
}

/// One build that runs.
pub(in crate::cli) fn running(build: &ActiveBuild, now: Timestamp) -> String {
    let mut text = format!("build {}", printable(&build.reference).chars().take(8).collect::<String>());
    if let Some(started) = build.started {
        let _ = write!(text, " for {}", span(seconds(started, now)));
    }
    if let Some(steps) = build.steps {
        let _ = write!(text, ", {} of {} steps, {} cached", steps.completed, steps.total, steps.cached);
    }
    if let Some(step) = &build.step {
        let _ = write!(text, ": {}", printable(step));
    }
    text
}

/// One build that ended.
pub(in crate::cli) fn finished(build: &FinishedBuild) -> String {
    let mut text = format!("build {}", printable(&build.reference).chars().take(8).collect::<String>());
    match &build.error {
        Some(error) => text.push_str(&format!(" failed: {}", printable(error))),
        None => text.push_str(" done"),
    }
    if let Some(ms) = build.duration_ms {
        let _ = write!(text, " in {}", took(ms));
    }
    if let Some(steps) = build.steps {
        let _ = write!(text, ", {} of {} steps cached", steps.cached, steps.total);
    }
    text
}

fn line(out: &mut String, cells: impl Iterator<Item = Cell>, widths: &[usize], look: Look) {
    let last = widths.len() - 1;
    for (i, (cell, width)) in cells.zip(widths).enumerate() {
        let text = if i == 0 { clip_front(&cell.0, *width) } else { cell.0 };
        let padding = if i == last { 0 } else { width.saturating_sub(text.chars().count()) + 2 };
        let _ = write!(out, "{}{:padding$}", painted(&text, cell.1, look.colour), "");
    }
    out.push('\n');
}

fn painted(text: &str, colour: &str, wanted: bool) -> String {
    if wanted && !colour.is_empty() { format!("{colour}{text}{RESET}") } else { text.to_owned() }
}

/// A text that is cut where the width ends.
pub(in crate::cli) fn clip(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// A text whose end is what matters.
fn clip_front(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.to_owned();
    }
    std::iter::once('…').chain(text.chars().skip(count + 1 - width)).collect()
}

/// What others wrote, within one line.
fn printable(text: &str) -> String {
    crate::printable::line(text, 500)
}

/// One frame: goes to the top, writes every line over the one that was there,
/// and clears what is left below. What does not fit is counted.
pub(in crate::cli) fn frame(text: &str, height: u16, first: bool) -> String {
    let room = usize::from(height).saturating_sub(1).max(1);
    let lines: Vec<&str> = text.trim_end_matches('\n').split('\n').collect();
    let mut out = String::from(if first { "\x1b[?25l\x1b[2J\x1b[H" } else { "\x1b[H" });
    let shown = if lines.len() > room { room - 1 } else { lines.len() };
    for line in &lines[..shown] {
        let _ = write!(out, "{line}\x1b[K\r\n");
    }
    if shown < lines.len() {
        let _ = write!(out, "… and {} lines more\x1b[K\r\n", lines.len() - shown);
    }
    out.push_str("\x1b[J");
    out
}

/// A line over as many as it needs: the cause of an error stands at its end.
pub(in crate::cli) fn wrapped(line: &str, width: u16) -> String {
    let width = usize::from(width.max(1));
    let (mut lines, mut last) = (Vec::new(), String::new());
    for word in line.split(' ') {
        if !last.is_empty() && last.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut last));
        }
        if !last.is_empty() {
            last.push(' ');
        }
        last.push_str(word);
        while last.chars().count() > width {
            let rest = last.chars().skip(width).collect();
            lines.push(last.chars().take(width).collect());
            last = rest;
        }
    }
    lines.push(last);
    lines.join("\n")
}

fn none() -> String {
    "-".to_owned()
}

fn seconds(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.duration_since(from).as_secs()).unwrap_or(0)
}

/// A span of time in its two largest units.
fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// How long a build took: to a tenth of a second where that says something.
fn took(ms: u64) -> String {
    if ms < 10_000 { format!("{}.{}s", ms / 1000, ms % 1000 / 100) } else { span(ms / 1000) }
}

fn bytes(used: u64, total: u64) -> String {
    format!("{}/{}Gi", gib(used), gib(total))
}

/// GiB, to a tenth where that says something.
pub(in crate::cli) fn gib(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    let tenths = (bytes / (GIB / 10)).min(u64::MAX / 10);
    if bytes < 10 * GIB { format!("{}.{}", tenths / 10, tenths % 10) } else { (bytes / GIB).to_string() }
}

#[cfg(test)]
pub(in crate::cli) mod tests {
    use super::*;
    use crate::key::Arch;
    use crate::provisioner::project::{CacheRoom, InFlight, Steps};

    pub(in crate::cli) fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn project(repo: &str, phase: Phase) -> Summary {
        Summary {
            key: "p41bd34a2227aca39".into(),
            repo: repo.into(),
            name: String::new(),
            target: "default".into(),
            arch: Arch::Amd64,
            fork: false,
            endpoint: "tcp://x:1234".into(),
            phase,
            since: Some(at(-300)),
            reason: None,
            ready: phase == Phase::Warm,
            in_flight: InFlight::default(),
            active_builds: None,
            last_build: None,
            last_used: None,
            kept_by: None,
            idle_at: None,
            cache: None,
        }
    }

    fn ended(error: Option<&str>, ms: u64) -> FinishedBuild {
        FinishedBuild {
            reference: "q7w8e9r0t1".into(),
            started: None,
            completed: at(-100),
            duration_ms: Some(ms),
            steps: Some(Steps { total: 12, cached: 8, completed: 12 }),
            error: error.map(str::to_owned),
        }
    }

    pub(in crate::cli) fn farm() -> Vec<Summary> {
        let room = |used: u64| Some(CacheRoom { bytes_used: used << 30, bytes_total: 60 << 30 });
        let build = ActiveBuild {
            reference: "a1b2c3d4e5f6".into(),
            started: Some(at(-35)),
            step: Some("[build 5/9] RUN".into()),
            steps: Some(Steps { total: 12, cached: 2, completed: 4 }),
        };
        let mut busy = project("github.com/acme/shop", Phase::Warm);
        busy.in_flight = InFlight { count: 1, since: Some(at(-40)) };
        busy.active_builds = Some(vec![build.clone(), ActiveBuild { step: None, steps: None, ..build }]);
        (busy.last_build, busy.cache, busy.kept_by) = (Some(ended(None, 62_300)), room(12), Some(KeptBy::InFlight));
        let mut warm = project("gitlab.example.org/a-very-long-group/with/subgroups/and/a-service", Phase::Warm);
        (warm.name, warm.target) = ("web".into(), "release".into());
        (warm.active_builds, warm.idle_at) = (Some(Vec::new()), Some(at(843)));
        (warm.last_build, warm.cache, warm.kept_by) =
            (Some(ended(Some("exit code: 1"), 3_250)), room(1), Some(KeptBy::RecentUse));
        let mut hot = project("github.com/acme/api", Phase::Warm);
        (hot.arch, hot.kept_by, hot.fork) = (Arch::Arm64, Some(KeptBy::Hot), true);
        let mut broken = project("github.com/acme/\x1b[31mblog", Phase::Failed);
        (broken.reason, broken.in_flight.count) = (Some("ErrImagePull".into()), 2);
        vec![busy, warm, hot, broken, project("github.com/acme/docs", Phase::Idle)]
    }

    #[test]
    fn a_long_line_is_cut_between_words_and_loses_nothing() {
        assert_eq!(wrapped("trying again: no answer", 14), "trying again:\nno answer");
        assert_eq!(wrapped("a abcdefgh b", 3), "a\nabc\ndef\ngh\nb");
        assert_eq!(wrapped("", 80), "");
        let long = format!("cannot ask {}: connection refused", "x".repeat(90));
        let text = wrapped(&long, 80);
        assert!(text.lines().all(|line| line.chars().count() <= 80) && text.ends_with("connection refused"), "{text}");
    }

    #[test]
    fn a_farm_at_80_and_120_columns() {
        for width in [80, 120] {
            let text = table(&farm(), at(0), Look { width, colour: false });
            assert!(text.lines().all(|line| line.chars().count() <= width.into()), "{text}");
            insta::assert_snapshot!(format!("{width}_columns"), text);
        }
    }

    #[test]
    fn colour_changes_nothing_but_colour() {
        let plain = table(&farm(), at(0), Look { width: 80, colour: false });
        let mut coloured = table(&farm(), at(0), Look { width: 80, colour: true });
        assert!(coloured.contains(GREEN) && coloured.contains(RED));
        for code in [GREEN, RED, YELLOW, DIM, RESET] {
            coloured = coloured.replace(code, "");
        }
        assert_eq!(coloured, plain);
        assert!(!plain.contains('\x1b'), "nothing of a project reaches the terminal as a command");
    }

    #[test]
    fn spans_sizes_and_frames() {
        assert_eq!([0, 59, 60, 3599, 3600, 90_000].map(span), ["0s", "59s", "1m00s", "59m59s", "1h00m", "1d01h"]);
        assert_eq!([0, 950, 9_999, 62_300].map(took), ["0.0s", "0.9s", "9.9s", "1m02s"]);
        assert_eq!(bytes(1 << 30, 60 << 30), "1.0/60Gi");
        assert_eq!(frame("a\nb\n", 3, false), "\x1b[Ha\x1b[K\r\nb\x1b[K\r\n\x1b[J");
        assert_eq!(frame("a\nb\nc\n", 3, true), "\x1b[?25l\x1b[2J\x1b[Ha\x1b[K\r\n… and 2 lines more\x1b[K\r\n\x1b[J");
    }
}
