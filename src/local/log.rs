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

#[cfg(test)]
mod tests {
    use super::*;

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
