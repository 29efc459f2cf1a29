//! What a run shows on a terminal: runlevels as a list, a line for each
//! component with what it waits for, redrawn in place; warnings scroll by above.
#![expect(clippy::disallowed_methods, reason = "shell: what is shown has a time")]

mod state;

use std::io::IsTerminal as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

use crate::cli::screen::{Screen, Size, TerminalArgs, size};
use crate::cli::{Global, Output, report};
use crate::cluster::{Event, Reporter};
use crate::printable::printable;
use state::{End, View};

/// How often it is looked whether something is to be drawn anew.
const EVERY: Duration = Duration::from_millis(100);

/// A view that follows the events of a run.
pub(super) struct Live {
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    view: Mutex<View>,
    drawn: Mutex<Vec<String>>,
    screen: Screen,
    began: Instant,
}

impl Live {
    /// Begins to draw, if there is a terminal to draw on.
    pub(super) fn start(terminal: &TerminalArgs, global: &Global, output: Output) -> Option<Self> {
        let screen = terminal.screen(global).filter(|_| output == Output::Text)?;
        let view = Mutex::new(View::new(terminal.colour(global)));
        let shared = Arc::new(Shared { view, drawn: Mutex::default(), screen, began: Instant::now() });
        let task = tokio::spawn(follow(shared.clone()));
        Some(Self { shared, task })
    }

    /// Where the run's events go.
    pub(super) fn reporter(&self) -> Reporter {
        let shared = self.shared.clone();
        Arc::new(move |event| shared.take(&event))
    }

    /// Leaves the last state on the screen, to scroll by with all else.
    pub(super) async fn end(self, well: bool) {
        self.task.abort();
        let _ = self.task.await;
        let at = self.shared.began.elapsed();
        self.shared.view().end(if well { End::Well } else { End::Badly }, at);
        let all = Size { rows: u16::MAX, ..size() };
        self.shared.screen.show(self.shared.view().lines(all, at));
    }
}

async fn follow(shared: Arc<Shared>) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let Ok(mut resized) = signal(SignalKind::window_change()) else { return };
    loop {
        tokio::select! {
            _ = ticks.tick() => shared.draw(false),
            // The terminal has broken what stood on it.
            _ = resized.recv() => shared.draw(true),
        }
    }
}

impl Shared {
    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, event: &Event) {
        let told = self.view().take(event, self.began.elapsed());
        match told {
            Some(line) if std::io::stderr().is_terminal() => self.screen.say(&printable(&line)),
            // Messages go where messages were sent.
            Some(line) => report::complain(&line),
            None => {}
        }
    }

    /// Draws what has changed, and nothing if nothing has.
    fn draw(&self, anew: bool) {
        let lines = self.view().lines(size(), self.began.elapsed());
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if anew || *drawn != lines {
            drawn.clone_from(&lines);
            self.screen.show(lines);
        }
    }
}
