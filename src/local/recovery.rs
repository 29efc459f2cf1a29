//! After a start: which daemons of an earlier run still live. Pure.

use std::collections::{HashMap, HashSet};

use super::layout::Layout;
use super::procfs::Seen;
use super::record::ProcessId;

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The daemon of each project: its builds may go on.
    pub daemons: HashMap<String, ProcessId>,
    /// Nobody's any more, with the project that they were of.
    pub orphans: Vec<(String, ProcessId)>,
}

/// Sorts the processes of the host. `recorded` has every project, and the
/// process that was last noted for it.
///
/// Ours are those whose command line names a configuration below the state
/// folder; of those that started one another, the first. Where two claim a
/// project, the recorded one has it, else the older.
pub fn sort(layout: &Layout, recorded: &HashMap<String, Option<ProcessId>>, all: &[Seen]) -> Found {
    let ours: Vec<_> = all
        .iter()
        .filter(|seen| !seen.ended)
        .filter_map(|seen| Some((layout.owner(seen.configuration()?)?, seen)))
        .collect();
    let pids: HashSet<_> = ours.iter().map(|(_, seen)| seen.id.pid).collect();
    let mut first: Vec<_> = ours.into_iter().filter(|(_, seen)| !pids.contains(&seen.parent)).collect();
    first.sort_by_key(|(key, seen)| (recorded.get(key) != Some(&Some(seen.id)), seen.id.started));
    let mut found = Found::default();
    for (key, seen) in first {
        if recorded.contains_key(&key) && !found.daemons.contains_key(&key) {
            found.daemons.insert(key, seen.id);
        } else {
            found.orphans.push((key, seen.id));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pid: u32, parent: u32, key: &str, started: u64) -> Seen {
        let config = format!("/s/daemons/{key}/buildkitd.toml");
        let arguments = ["buildkitd", "--config", &config].map(str::to_owned).to_vec();
        Seen { id: ProcessId { pid, started }, parent, group: pid, ended: false, arguments }
    }

    #[test]
    fn daemons_are_told_from_their_helpers_and_from_orphans() {
        let layout = Layout::new("/s".into()).unwrap();
        let id = |pid, started| ProcessId { pid, started };
        let all = [
            // rootlesskit, its second half, and the daemon.
            seen(10, 1, "p1", 100),
            seen(11, 10, "p1", 101),
            seen(12, 11, "p1", 102),
            // Two of one project: the second is recorded.
            seen(20, 1, "p2", 100),
            seen(21, 1, "p2", 101),
            // Of a project that nobody knows, of another farm, and one that has ended.
            seen(30, 1, "p3", 100),
            Seen {
                arguments: vec!["buildkitd".into(), "--config".into(), "/t/daemons/p1/buildkitd.toml".into()],
                ..seen(40, 1, "p1", 100)
            },
            Seen { ended: true, ..seen(50, 1, "p4", 100) },
        ];
        let recorded = [("p1", None), ("p2", Some(id(21, 101))), ("p4", Some(id(50, 100)))];
        let recorded = recorded.map(|(key, process)| (key.to_owned(), process)).into();
        let mut found = sort(&layout, &recorded, &all);
        found.orphans.sort_by_key(|(_, id)| id.pid);
        let daemons = [("p1".to_owned(), id(10, 100)), ("p2".to_owned(), id(21, 101))].into();
        assert_eq!(
            found,
            Found { daemons, orphans: vec![("p2".to_owned(), id(20, 100)), ("p3".to_owned(), id(30, 100))] }
        );
    }
}
