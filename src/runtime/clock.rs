//! The wall clock that decisions are dated by, as a value: tests bring a clock
//! of their own.
#![expect(clippy::disallowed_methods, reason = "shell: this is where the wall clock is read")]

use std::fmt;
use std::sync::Arc;

use jiff::Timestamp;

/// A wall clock. The system's by default.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    /// A clock that shows what `read` returns.
    pub fn new(read: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// What it shows.
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(Timestamp::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}
