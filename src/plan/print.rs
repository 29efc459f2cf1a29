//! How a plan reads.

use std::fmt;

use serde_json::Value;
use similar::{ChangeTag, TextDiff};

use super::{Action, Change, Counts, FieldChange, Means, Plan};

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to create, {} to configure", self.create, self.configure)?;
        if self.recreate > 0 {
            write!(f, ", {} to recreate", self.recreate)?;
        }
        if self.delete > 0 {
            write!(f, ", {} to delete", self.delete)?;
        }
        write!(f, ", {} unchanged", self.unchanged)
    }
}

/// Levels, objects and changed fields; objects that stay as they are only
/// count in the last line.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(values) = &self.values {
            write!(f, "{values}")?;
        }
        for level in &self.levels {
            if !level.changes.iter().any(|change| change.action.is_change()) {
                continue;
            }
            writeln!(f, "{}", level.runlevel)?;
            for change in level.changes.iter().filter(|change| change.action.is_change()) {
                write!(f, "{change}")?;
            }
        }
        if !self.deletions.is_empty() {
            writeln!(f, "when all is ready")?;
        }
        for deletion in &self.deletions {
            writeln!(f, "  delete     {} ({})", deletion.id, deletion.component)?;
            deletion.brakes.iter().try_for_each(|brake| writeln!(f, "             {brake}"))?;
        }
        for release in &self.releases {
            writeln!(f, "{release}: Helm is made to forget it")?;
        }
        if let Some(why) = &self.record {
            writeln!(f, "record: {why}")?;
        }
        writeln!(f, "{}", self.counts())
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let component = &self.component;
        match &self.action {
            Action::Create => writeln!(f, "  create     {} ({component})", self.id),
            Action::Finished => writeln!(f, "  finished   {} ({component})", self.id),
            Action::Unchanged => writeln!(f, "  unchanged  {} ({component})", self.id),
            Action::Configure { changes } => {
                writeln!(f, "  configure  {} ({component}{})", self.id, self.means)?;
                changes.iter().try_for_each(|change| write!(f, "{change}"))
            }
            Action::Recreate { changes, why, loss } => {
                writeln!(f, "  recreate   {} ({component}; {loss}: {why})", self.id)?;
                changes.iter().try_for_each(|change| write!(f, "{change}"))
            }
        }
    }
}

impl fmt::Display for Means {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.predecessors.is_empty() {
            write!(f, ", taking over from {}", self.predecessors.join(", "))?;
        } else if self.force {
            write!(f, ", taking over fields of other managers")?;
        }
        if !self.yields.is_empty() {
            write!(f, ", leaving {} to its owner", self.yields.join(", "))?;
        }
        if !self.migrates.is_empty() {
            write!(f, ", moving live objects out of {}", self.migrates.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for FieldChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = &self.path;
        match (&self.before, &self.after) {
            (Some(Value::String(before)), Some(Value::String(after))) if (before.clone() + after).contains('\n') => {
                writeln!(f, "             {path}:")?;
                lines(f, before, after)
            }
            (Some(before), Some(after)) => writeln!(f, "             {path}: {before} → {after}"),
            (None, Some(after)) => writeln!(f, "             {path}: + {after}"),
            (Some(before), None) => writeln!(f, "             {path}: - {before}"),
            (None, None) => Ok(()),
        }
    }
}

/// Changed lines of a text with two lines around them.
fn lines(f: &mut fmt::Formatter<'_>, before: &str, after: &str) -> fmt::Result {
    let diff = TextDiff::from_lines(before, after);
    for group in diff.grouped_ops(2) {
        for change in group.iter().flat_map(|op| diff.iter_changes(op)) {
            let sign = match change.tag() {
                ChangeTag::Delete => '-',
                ChangeTag::Insert => '+',
                ChangeTag::Equal => ' ',
            };
            writeln!(f, "               {sign} {}", change.value().trim_end_matches('\n'))?;
        }
    }
    Ok(())
}
