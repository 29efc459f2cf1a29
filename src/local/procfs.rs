//! What `/proc` says of processes. Parsing is pure; [`all`] and [`one`] read.
#![expect(clippy::disallowed_methods, reason = "shell: reads /proc")]

use super::record::ProcessId;

/// One process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// It.
    pub id: ProcessId,
    /// Its parent.
    pub parent: u32,
    /// The leader of its group.
    pub group: u32,
    /// Whether it has ended and waits for its parent to hear of it.
    pub ended: bool,
    /// Its command line; empty for those of the kernel.
    pub arguments: Vec<String>,
}

impl Seen {
    /// What follows `--config` on its command line.
    pub fn configuration(&self) -> Option<&str> {
        let flag = self.arguments.iter().position(|argument| argument == "--config")?;
        self.arguments.get(flag + 1).map(String::as_str)
    }
}

/// Reads `/proc/<pid>/stat`. The name, in parentheses, may hold anything.
fn stat(text: &str, arguments: &[u8]) -> Option<Seen> {
    let (pid, rest) = text.split_once(' ')?;
    let fields: Vec<_> = rest.get(rest.rfind(')')? + 1..)?.split_ascii_whitespace().collect();
    let arguments = arguments.split(|byte| *byte == 0).map(|a| String::from_utf8_lossy(a).into_owned());
    Some(Seen {
        id: ProcessId { pid: pid.parse().ok()?, started: fields.get(19)?.parse().ok()? },
        parent: fields.get(1)?.parse().ok()?,
        group: fields.get(2)?.parse().ok()?,
        ended: matches!(*fields.first()?, "Z" | "X"),
        arguments: arguments.filter(|argument| !argument.is_empty()).collect(),
    })
}

/// One process, if it is there.
pub fn one(pid: u32) -> Option<Seen> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    stat(&String::from_utf8_lossy(&text), &arguments)
}

/// Every process that can be seen.
pub fn all() -> Vec<Seen> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| one(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// A process's children, their children and so on.
pub fn descendants(of: u32, all: &[Seen]) -> Vec<ProcessId> {
    let (mut found, mut parents) = (Vec::new(), vec![of]);
    while let Some(parent) = parents.pop() {
        for child in all.iter().filter(|seen| seen.parent == parent && seen.id.pid != parent) {
            found.push(child.id);
            parents.push(child.id.pid);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str =
        "42 (a) b) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 1000 100 18446744073709551615 0";

    #[test]
    fn a_line_is_read_whatever_the_name_holds() {
        let seen = stat(LINE, b"buildkitd\0--config\0/x/daemons/p1/buildkitd.toml\0").unwrap();
        assert_eq!((seen.id.pid, seen.id.started, seen.parent, seen.group, seen.ended), (42, 12345, 7, 42, false));
        assert_eq!(seen.configuration(), Some("/x/daemons/p1/buildkitd.toml"));
        assert_eq!(
            stat(&LINE.replace(") S", ") Z"), b"").map(|seen| (seen.ended, seen.arguments)),
            Some((true, vec![]))
        );
        for cut in ["", "42", "42 (a", "42 (a) S 7", "x (a) S 7 42"] {
            assert_eq!(stat(cut, b""), None, "{cut:?}");
        }
    }

    #[test]
    fn this_process_and_its_family_are_seen() {
        let own = one(std::process::id()).unwrap();
        assert!(!own.ended && !own.arguments.is_empty());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let family = descendants(own.id.pid, &all());
        assert!(family.iter().any(|id| id.pid == child.id()), "{family:?}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(one(child.id()), None);
    }
}
