//! What `up` shows while it runs: on a terminal a block with a line for every
//! project, elsewhere a line for everything that begins and ends.
#![expect(clippy::disallowed_methods, reason = "shell: ages are told as of now")]

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

use crate::cli::ps::changes::Changes;
use crate::cli::ps::table::{self, Look};
use crate::cli::report;
use crate::cli::screen::{Screen, Size, size};
use crate::local::farm::Farm;
use crate::provisioner::Provisioner as _;
use crate::provisioner::project::{Phase, Selection, Summary};

/// How often it is drawn.
const EVERY: Duration = Duration::from_secs(1);

/// The block, for as long as the farm runs.
pub(super) async fn draw(farm: Arc<Farm>, screen: Screen, colour: bool) {
    let mut ticks = ticks();
    let Ok(mut resized) = signal(SignalKind::window_change()) else { return };
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = resized.recv() => {}
        }
        screen.show(block(projects(&farm), Timestamp::now(), size(), colour));
    }
}

/// The lines, for as long as the farm runs.
pub(super) async fn tell(farm: Arc<Farm>) {
    let (mut ticks, mut changes, mut first) = (ticks(), Changes::default(), true);
    loop {
        ticks.tick().await;
        let lines = changes.lines(projects(&farm), Timestamp::now());
        // What was there when the farm began is no news.
        if std::mem::take(&mut first) {
            continue;
        }
        let mut out = report::stdout();
        for line in lines {
            // Whoever does not read it does not want it.
            let _ = writeln!(out, "{line}");
        }
        let _ = out.flush();
    }
}

fn ticks() -> tokio::time::Interval {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

fn projects(farm: &Farm) -> Vec<Summary> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let selection = Selection { repo: None, phase: None, after, limit: 500, visible: &|_| true };
        let page = farm.projects(&selection);
        all.extend(page.projects);
        after = page.next.and_then(|key| key.parse().ok());
        if after.is_none() {
            return all;
        }
    }
}

/// One line about all, then one for each project, and one for each of its
/// builds. Those at zero come last, as far as there is room. Pure.
fn block(mut projects: Vec<Summary>, now: Timestamp, size: Size, colour: bool) -> Vec<String> {
    let look = Look { width: size.columns, colour };
    let head = table::clip(&format!("── {}", totals(&projects)), size.columns.into());
    // What scrolls by above needs room, too.
    let room = usize::from(size.rows.saturating_mul(2) / 3).max(3);
    projects.sort_by_key(|project| (project.phase == Phase::Idle, std::cmp::Reverse(project.last_used)));
    let mut lines = vec![head];
    if !projects.is_empty() {
        lines.extend(table::table(&projects, now, look).lines().map(str::to_owned));
    }
    if lines.len() > room {
        let more = lines.len() - (room - 1);
        lines.truncate(room - 1);
        lines.push(format!("… and {more} lines more: `bko-install ps --all`"));
    }
    lines
}

fn totals(projects: &[Summary]) -> String {
    let up = projects.iter().filter(|project| project.phase != Phase::Idle).count();
    let builds: usize = projects.iter().filter_map(|project| project.active_builds.as_ref()).map(Vec::len).sum();
    let bytes: u64 = projects.iter().filter_map(|project| project.cache).map(|cache| cache.bytes_used).sum();
    let steps = projects.iter().filter_map(|project| project.last_build.as_ref()?.steps);
    let (cached, all) =
        steps.fold((0, 0), |(cached, all), steps| (cached + u64::from(steps.cached), all + u64::from(steps.total)));
    let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let mut text = format!("{}, {up} up, {} running", many(projects.len(), "project"), many(builds, "build"));
    if bytes > 0 {
        text.push_str(&format!(", caches {} GiB", table::gib(bytes)));
    }
    if let Some(share) = (cached * 100).checked_div(all) {
        text.push_str(&format!(", {share}% of steps from the cache"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ps::table::tests::{at, farm};

    fn text(projects: Vec<Summary>, columns: u16, rows: u16) -> String {
        let lines = block(projects, at(0), Size { columns, rows }, false);
        assert!(lines.iter().all(|line| line.chars().count() <= columns.into()), "{lines:#?}");
        assert!(lines.len() <= usize::from(rows), "{lines:#?}");
        lines.join("\n")
    }

    #[test]
    fn the_block_at_80_and_120_columns() {
        for columns in [80, 120] {
            insta::assert_snapshot!(format!("{columns}_columns"), text(farm(), columns, 30));
        }
    }

    #[test]
    fn what_is_at_zero_gives_way_and_nothing_at_all_is_one_line() {
        let mut many = farm();
        let idle = many.iter().find(|project| project.phase == Phase::Idle).unwrap().clone();
        many.splice(0..0, std::iter::repeat_n(idle, 200));
        let low = text(many, 80, 15);
        assert!(low.contains("acme/shop") && low.contains("205 projects, 4 up") && low.contains("lines more"), "{low}");
        assert_eq!(text(vec![], 80, 24), "── 0 projects, 0 up, 0 builds running");
    }
}
