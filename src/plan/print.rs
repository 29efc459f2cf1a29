//! How a plan reads.

use std::fmt;

use serde_json::Value;
use similar::{ChangeTag, TextDiff};

use super::{Action, Change, Counts, FieldChange, Plan};

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to create, {} to configure, {} unchanged", self.create, self.configure, self.unchanged)
    }
}

/// Levels, objects and changed fields; objects that stay as they are only
/// count in the last line.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for level in &self.levels {
            if !level.changes.iter().any(|change| change.action.is_change()) {
                continue;
            }
            writeln!(f, "{}", level.runlevel)?;
            for change in level.changes.iter().filter(|change| change.action.is_change()) {
                write!(f, "{change}")?;
            }
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
            Action::Unchanged => writeln!(f, "  unchanged  {} ({component})", self.id),
            Action::Configure { changes } => {
                let force = if self.force { ", taking over fields of other managers" } else { "" };
                writeln!(f, "  configure  {} ({component}{force})", self.id)?;
                changes.iter().try_for_each(|change| write!(f, "{change}"))
            }
        }
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
