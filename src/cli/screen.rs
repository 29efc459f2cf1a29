//! A terminal whose last lines are drawn over while those above scroll. Every
//! change is one write, so that nothing flickers. `Block` is pure.

use std::io::{self, IsTerminal as _, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use clap::Args;

use super::Global;

/// What the environment says of the terminal.
#[derive(Clone, Debug, Default, Args)]
pub struct TerminalArgs {
    /// Never use colour, whatever its value (see <https://no-color.org>)
    #[arg(long, env = "NO_COLOR", hide = true, default_value = "")]
    no_color_by_environment: String,
    /// What the terminal can do.
    #[arg(long, env = "TERM", hide = true, hide_env = true, default_value = "")]
    terminal: String,
}

impl TerminalArgs {
    /// The terminal, if there is one that can be drawn on.
    pub(in crate::cli) fn screen(&self, global: &Global) -> Option<Screen> {
        let draws = io::stdout().is_terminal() && !matches!(self.terminal.as_str(), "" | "dumb");
        (draws && !global.quiet).then(Screen::default)
    }

    /// Whether there may be colour.
    pub(in crate::cli) fn colour(&self, global: &Global) -> bool {
        !global.no_color && self.no_color_by_environment.is_empty()
    }
}

/// Columns and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) struct Size {
    pub(in crate::cli) columns: u16,
    pub(in crate::cli) rows: u16,
}

/// What is drawn at the end of the screen.
#[derive(Debug, Default)]
pub(in crate::cli) struct Block {
    lines: Vec<String>,
    /// Columns of each line as it is on the screen.
    drawn: Vec<usize>,
}

impl Block {
    /// What to write so that `said` scrolls by above, and the block is `lines`
    /// from now on, if any are given.
    pub(in crate::cli) fn draw(&mut self, said: &str, lines: Option<Vec<String>>, size: Size) -> String {
        let columns = usize::from(size.columns.max(1));
        // A terminal that has become narrower has broken what is on it.
        let above: usize = self.drawn.iter().map(|drawn| drawn.div_ceil(columns).max(1)).sum();
        let above = above.min(usize::from(size.rows.max(1)) - 1);
        self.lines = lines.unwrap_or_else(|| std::mem::take(&mut self.lines));
        let mut out = String::from("\r");
        if above > 0 {
            out.push_str(&format!("\x1b[{above}A"));
        }
        for line in said.lines().chain(self.lines.iter().map(String::as_str)) {
            out.push_str(line);
            out.push_str("\x1b[K\r\n");
        }
        out.push_str("\x1b[J");
        self.drawn = self.lines.iter().map(|line| columns_of(line)).collect();
        out
    }
}

/// Columns of a line: what is no colour.
fn columns_of(line: &str) -> usize {
    let (mut columns, mut escaped) = (0, false);
    for c in line.chars() {
        match c {
            '\x1b' => escaped = true,
            'm' if escaped => escaped = false,
            _ if escaped => {}
            _ => columns += 1,
        }
    }
    columns
}

/// Standard output as such a terminal; clones are the same one.
#[derive(Clone, Debug, Default)]
pub(in crate::cli) struct Screen(Arc<Mutex<Block>>);

impl Screen {
    /// Lines that scroll.
    pub(in crate::cli) fn say(&self, text: &str) {
        self.write(text, None);
    }

    /// What stands below them.
    pub(in crate::cli) fn show(&self, lines: Vec<String>) {
        self.write("", Some(lines));
    }

    fn write(&self, said: &str, lines: Option<Vec<String>>) {
        let mut block: MutexGuard<'_, Block> = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = block.draw(said, lines, size());
        let mut out = io::stdout().lock();
        // Terminals that know it show the whole of it at once; the others ignore it.
        let text = format!("\x1b[?2026h{text}\x1b[?2026l");
        // Whoever does not read it does not want it.
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

/// Log lines scroll by above the block.
impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.say(&String::from_utf8_lossy(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Of the terminal at this moment.
pub(in crate::cli) fn size() -> Size {
    match rustix::termios::tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col > 0 => Size { columns: size.ws_col, rows: size.ws_row.max(2) },
        _ => Size { columns: 80, rows: 24 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a terminal of some width shows after all that was written.
    fn shown(written: &str, columns: usize) -> Vec<String> {
        let (mut rows, mut at) = (vec![String::new()], (0, 0));
        let mut chars = written.chars();
        while let Some(c) = chars.next() {
            match c {
                '\r' => at.1 = 0,
                '\n' => {
                    at.0 += 1;
                    rows.resize(rows.len().max(at.0 + 1), String::new());
                }
                '\x1b' => {
                    let code: String = chars.by_ref().skip(1).take_while(|c| c.is_ascii_digit()).collect();
                    // The letter was taken along: a number moves up, none clears.
                    match code.parse::<usize>() {
                        Ok(up) => at.0 = at.0.checked_sub(up).expect("above the screen"),
                        Err(_) => {
                            rows[at.0] = rows[at.0].chars().take(at.1).collect();
                            if written.ends_with("\x1b[J") && chars.as_str().is_empty() {
                                rows.truncate(at.0 + 1);
                            }
                        }
                    }
                }
                c => {
                    if at.1 == columns {
                        at = (at.0 + 1, 0);
                        rows.resize(rows.len().max(at.0 + 1), String::new());
                    }
                    let mut row: Vec<char> = rows[at.0].chars().collect();
                    row.resize(row.len().max(at.1 + 1), ' ');
                    row[at.1] = c;
                    rows[at.0] = row.into_iter().collect();
                    at.1 += 1;
                }
            }
        }
        rows
    }

    fn lines(text: &str) -> Option<Vec<String>> {
        Some(text.lines().map(str::to_owned).collect())
    }

    #[test]
    fn lines_scroll_by_above_a_block_that_is_drawn_over() {
        let (mut block, size) = (Block::default(), Size { columns: 20, rows: 10 });
        let mut written = block.draw("", lines("head\none"), size);
        written.push_str(&block.draw("log 1\n", None, size));
        written.push_str(&block.draw("", lines("head\none\ntwo"), size));
        written.push_str(&block.draw("log 2\nlog 3\n", None, size));
        assert_eq!(shown(&written, 20), ["log 1", "log 2", "log 3", "head", "one", "two", ""]);
        written.push_str(&block.draw("", lines("end"), size));
        assert_eq!(shown(&written, 20), ["log 1", "log 2", "log 3", "end", ""]);
    }

    #[test]
    fn a_terminal_that_became_narrower_is_drawn_over_all_the_same() {
        let mut block = Block::default();
        let wide = block.draw("log", lines("0123456789\nabcdefghij"), Size { columns: 10, rows: 9 });
        assert!(wide.starts_with("\rlog\x1b[K\r\n"));
        // Now each line takes two rows.
        let narrow = block.draw("", lines("01234\nabcde"), Size { columns: 5, rows: 9 });
        assert!(narrow.starts_with("\r\x1b[4A01234"), "{narrow:?}");
        let low = block.draw("", lines("x"), Size { columns: 1, rows: 3 });
        assert!(low.starts_with("\r\x1b[2Ax"), "never beyond the top: {low:?}");
    }

    #[test]
    fn colours_take_no_room() {
        assert_eq!(columns_of("\x1b[32mwarm\x1b[0m 5m"), 7);
    }
}
