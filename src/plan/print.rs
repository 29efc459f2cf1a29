//! How a plan reads.

use std::fmt;

use serde_json::Value;
use similar::{ChangeTag, TextDiff};

use super::difference::OWNERSHIP;
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
        if path == OWNERSHIP {
            return ownership(f, self.before.as_ref(), self.after.as_ref());
        }
        match (&self.before, &self.after) {
            (Some(before), Some(after)) => {
                if let Some((before, after)) = texts(before, after) {
                    writeln!(f, "             {path}:")?;
                    return lines(f, &before, &after);
                }
                let (before, after) = shorten(&before.to_string(), &after.to_string());
                writeln!(f, "             {path}: {before} → {after}")
            }
            (None, Some(after)) => one_sided(f, path, '+', after),
            (Some(before), None) => one_sided(f, path, '-', before),
            (None, None) => Ok(()),
        }
    }
}

/// Who owns fields whose values stay.
fn ownership(f: &mut fmt::Formatter<'_>, before: Option<&Value>, after: Option<&Value>) -> fmt::Result {
    if let (Some(Value::String(before)), Some(Value::String(after))) = (before, after) {
        return writeln!(f, "             {before} become {after}");
    }
    for (what, paths) in [("no longer ours", before), ("ours from now on", after)] {
        let paths: Vec<&str> =
            paths.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let (shown, more) = paths.split_at(paths.len().min(FIELDS));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
        if !shown.is_empty() {
            writeln!(f, "             {what}, with the same value: {}{more}", shown.join(", "))?;
        }
    }
    Ok(())
}

/// So many fields are named where only their owner changes.
const FIELDS: usize = 5;

/// Values up to this length stand in one line, in characters.
const LINE: usize = 100;

/// What is read line by line: texts of several lines, lists, and long JSON.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if text.contains('\n') => Some(text.clone()),
        Value::String(text) if text.len() > LINE && text.starts_with(['{', '[']) => {
            let parsed: Value = serde_json::from_str(text).ok()?;
            serde_json::to_string_pretty(&parsed).ok()
        }
        Value::Array(list) => Some(list.iter().map(|element| format!("{element}\n")).collect()),
        _ => None,
    }
}

/// The same of two values, if it is right for both.
fn texts(before: &Value, after: &Value) -> Option<(String, String)> {
    if let (Value::String(before), Value::String(after)) = (before, after)
        && (before.contains('\n') || after.contains('\n'))
    {
        return Some((before.clone(), after.clone()));
    }
    Some((text(before)?, text(after)?))
}

fn one_sided(f: &mut fmt::Formatter<'_>, path: &str, sign: char, value: &Value) -> fmt::Result {
    let short = value.to_string();
    let whole = match value {
        Value::Object(_) | Value::Array(_) if short.len() > LINE => serde_json::to_string_pretty(value).ok(),
        Value::String(_) => text(value),
        _ => None,
    };
    let Some(whole) = whole else { return writeln!(f, "             {path}: {sign} {short}") };
    writeln!(f, "             {path}:")?;
    whole.lines().try_for_each(|line| writeln!(f, "               {sign} {line}"))
}

/// Two long values without most of what they have in common.
pub(super) fn shorten(before: &str, after: &str) -> (String, String) {
    let (before, after): (Vec<char>, Vec<char>) = (before.chars().collect(), after.chars().collect());
    let most = before.len().min(after.len());
    let same = before.iter().zip(&after).take_while(|(a, b)| a == b).count();
    let ending = before.iter().rev().zip(after.iter().rev()).take_while(|(a, b)| a == b).count().min(most - same);
    let cut = |value: &[char]| -> String {
        if value.len() <= LINE {
            return value.iter().collect();
        }
        let (from, to) = (same.saturating_sub(AROUND), (value.len() - ending + AROUND).min(value.len()));
        let mut short: String = if from > 0 { "…".into() } else { String::new() };
        let middle = &value[from..to];
        match middle.len() > 2 * LINE {
            true => {
                short.extend(&middle[..LINE]);
                short.push('…');
                short.extend(&middle[middle.len() - LINE..]);
            }
            false => short.extend(middle),
        }
        if to < value.len() {
            short.push('…');
        }
        short
    };
    (cut(&before), cut(&after))
}

/// So much of what two long values have in common is shown on either side.
const AROUND: usize = 20;

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
