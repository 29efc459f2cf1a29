//! The output of a daemon: appended by the daemon itself, bounded by us.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::layout::Layout;

/// One file may grow to this; there are two.
const LIMIT: u64 = 8 << 20;

/// As much of the end as is read for messages.
const TAIL: u64 = 16 << 10;

/// Moves the output aside when it has grown large. The daemon goes on writing
/// to the same file, whose end is where it appends; a line that it writes in
/// between is lost.
///
/// # Errors
/// The operating system's.
pub fn bound(layout: &Layout, key: &str) -> io::Result<()> {
    let log = layout.log(key);
    if fs::metadata(&log)?.len() < LIMIT {
        return Ok(());
    }
    fs::copy(&log, layout.older_log(key))?;
    OpenOptions::new().write(true).open(&log)?.set_len(0)
}

/// The last lines, from a position on.
///
/// # Errors
/// The operating system's.
pub fn tail(path: &Path, from: u64, lines: usize) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(from.max(length.saturating_sub(TAIL)).min(length)))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    Ok(all[all.len().saturating_sub(lines)..].join("\n"))
}

/// The line that says best why a daemon ended: its own last word, else an
/// error that it logged, else whatever comes last. Stack traces say little.
///
/// # Errors
/// The operating system's.
pub fn last_word(path: &Path, from: u64) -> io::Result<Option<String>> {
    let text = tail(path, from, usize::MAX)?;
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with(char::is_whitespace)).collect();
    let last = |says: &dyn Fn(&str) -> bool| lines.iter().rev().find(|line| says(line)).copied();
    let own = last(&|line| line.starts_with("buildkitd: "));
    let logged = || last(&|line| line.contains("level=fatal") || line.contains("level=error"));
    let helper = || last(&|line| line.contains("error:"));
    let line = own.or_else(logged).or_else(helper).or_else(|| lines.last().copied());
    Ok(line.map(|line| line.chars().take(LINE).collect()))
}

/// Characters of a line that are told.
const LINE: usize = 500;

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests read and write files")]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_is_no_stack_trace() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let word = |text: &str| {
            fs::write(&path, text).unwrap();
            last_word(&path, 0).unwrap()
        };
        assert_eq!(word(""), None);
        assert_eq!(word("started\nstopped\n").as_deref(), Some("stopped"));
        let logged = "time=1 level=error msg=\"no disk\"\ntime=2 level=info msg=bye\n";
        assert_eq!(word(logged).as_deref(), Some("time=1 level=error msg=\"no disk\""));
        let helper = "[rootlesskit:child ] error: exit status 1\n[rootlesskit:parent] error: child exited\n";
        assert_eq!(word(helper).as_deref(), Some("[rootlesskit:parent] error: child exited"));
        let trace = format!(
            "{logged}buildkitd: listen tcp 127.1.2.3:1235: bind: address already in use\nmain.main\n\tmain.go:1\n{helper}"
        );
        assert_eq!(word(&trace).as_deref(), Some("buildkitd: listen tcp 127.1.2.3:1235: bind: address already in use"));
    }

    #[test]
    fn the_output_is_bounded_while_it_is_appended_to() {
        use std::io::Write as _;
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(folder.path().to_owned()).unwrap();
        fs::create_dir_all(layout.daemon("p1")).unwrap();
        let mut daemon = OpenOptions::new().create(true).append(true).open(layout.log("p1")).unwrap();
        daemon.write_all(&vec![b'x'; LIMIT as usize]).unwrap();
        bound(&layout, "p1").unwrap();
        daemon.write_all(b"one\ntwo\n\nthree\n").unwrap();
        bound(&layout, "p1").unwrap();
        assert_eq!(fs::read_to_string(layout.log("p1")).unwrap(), "one\ntwo\n\nthree\n");
        assert_eq!(fs::metadata(layout.older_log("p1")).unwrap().len(), LIMIT);
        assert_eq!(tail(&layout.log("p1"), 0, 2).unwrap(), "two\nthree");
        assert_eq!(tail(&layout.log("p1"), 4, 9).unwrap(), "two\nthree");
        assert_eq!(tail(&layout.log("p1"), 99, 9).unwrap(), "");
    }
}
