//! What a person sees while nothing is built yet: one line that lives on a
//! terminal, a line for every change elsewhere. To standard error.

use std::future::Future;
use std::io::{IsTerminal as _, Write as _};
use std::sync::Mutex;
use std::time::Duration;

use super::now;
use crate::printable::{line, printable};

/// Tells what is going on.
#[derive(Debug)]
pub struct Narrator {
    quiet: bool,
    terminal: bool,
    last: Mutex<String>,
}

impl Narrator {
    /// For this process's standard error.
    pub fn new(quiet: bool) -> Self {
        Self { quiet, terminal: std::io::stderr().is_terminal(), last: Mutex::default() }
    }

    /// Whether a person watches.
    pub(super) fn terminal(&self) -> bool {
        self.terminal
    }

    /// A line that stays.
    pub fn say(&self, text: &str) {
        if !self.quiet {
            self.write(&format!("{}{}\n", self.clear(), printable(text)));
        }
    }

    /// A line that stays, also when quiet.
    pub fn warn(&self, text: &str) {
        self.write(&format!("{}warning: {}\n", self.clear(), printable(text)));
    }

    /// Waits for something, and says for what.
    pub(super) async fn wait<T>(&self, what: &str, future: impl Future<Output = T>) -> T {
        if self.quiet {
            return future.await;
        }
        if !self.terminal {
            self.once(what);
            return future.await;
        }
        tokio::pin!(future);
        let begun = now();
        let mut second = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                biased;
                done = &mut future => {
                    self.write(self.clear());
                    return done;
                }
                _ = second.tick() => self.write(&live(what, begun.elapsed())),
            }
        }
    }

    /// Off a terminal nothing is said twice in a row.
    fn once(&self, what: &str) {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *last != what {
            what.clone_into(&mut last);
            self.write(&format!("{}\n", printable(what)));
        }
    }

    fn clear(&self) -> &'static str {
        if self.terminal && !self.quiet { "\r\x1b[K" } else { "" }
    }

    fn write(&self, text: &str) {
        let mut err = std::io::stderr().lock();
        // Who has closed it does not want to know.
        let _ = err.write_all(text.as_bytes()).and_then(|()| err.flush());
    }
}

/// Not longer than a narrow terminal: a line that wraps is not cleared.
fn live(what: &str, elapsed: Duration) -> String {
    let what = line(what, 68);
    format!("\r\x1b[K{what} ({} s)", elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_living_line_fits_a_terminal() {
        assert_eq!(live("waiting", Duration::from_millis(3900)), "\r\x1b[Kwaiting (3 s)");
        assert_eq!(live("a\x1b[2J\nb", Duration::ZERO), "\r\x1b[Ka\u{fffd}[2J b (0 s)");
        assert!(live(&"x".repeat(500), Duration::from_secs(999)).len() <= 80 + "\r\x1b[K".len());
    }
}
