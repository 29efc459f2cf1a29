//! What is wrong with a bundle, a profile, or values: every fault at once,
//! each with its place.

use std::fmt;

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// A file (`profiles/dev.yaml`) or an argument (`--set server.replicas=x`).
    pub place: String,
    /// Line within the file, from 1.
    pub line: Option<usize>,
    /// What is wrong, and how to mend it.
    pub message: String,
}

impl Fault {
    /// A fault at a line of a file.
    pub fn at(place: impl Into<String>, line: usize, message: impl Into<String>) -> Self {
        Self { place: place.into(), line: Some(line), message: message.into() }
    }

    /// A fault of a whole file or argument.
    pub fn of(place: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: place.into(), line: None, message: message.into() }
    }
}

/// `profiles/dev.yaml:12: unknown value "server.replica"`.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}: {}", self.place, self.message),
            None => write!(f, "{}: {}", self.place, self.message),
        }
    }
}

/// All faults of one run, as one error: never empty.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [only] = self.0.as_slice() {
            return only.fmt(f);
        }
        write!(f, "{} faults", self.0.len())?;
        self.0.iter().try_for_each(|fault| write!(f, "\n  {fault}"))
    }
}

/// `value` unless there are faults, which come out sorted and once each.
pub(crate) fn unless<T>(mut faults: Vec<Fault>, value: T) -> Result<T, Faults> {
    if faults.is_empty() {
        return Ok(value);
    }
    faults.sort();
    faults.dedup();
    Err(Faults(faults))
}
