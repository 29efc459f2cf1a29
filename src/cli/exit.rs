//! Exit codes, and how an error is printed.

use std::process::ExitCode;

use super::report::{OutputError, complain};

/// Documented exit codes; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// Something failed.
    Failed = 1,
    /// The command line, a profile or a value is wrong.
    Usage = 2,
    /// `plan`: there are changes.
    ChangesPending = 3,
    /// Not ready, or timed out.
    NotReady = 4,
    /// A safety brake refused.
    Refused = 5,
    /// Interrupted by a signal.
    Interrupted = 130,
}

/// A command that did not succeed: its code, and, unless the output already
/// says it all, an error with a hint.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: Code,
    /// What went wrong; printed as `error: …` and its causes.
    pub error: Option<anyhow::Error>,
    /// How to mend it; printed as `hint: …`.
    pub hint: Option<String>,
}

impl Failure {
    /// A failure with an error to print.
    pub fn new(code: Code, error: impl Into<anyhow::Error>) -> Self {
        Self { code, error: Some(error.into()), hint: None }
    }

    /// An exit code alone.
    pub fn silent(code: Code) -> Self {
        Self { code, error: None, hint: None }
    }

    /// Adds how to mend it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(Code::Failed, error)
    }
}

/// Prints what went wrong to standard error and returns the process's exit code.
/// That the reader of standard output has gone away is no failure, as for `--help`.
pub fn finish(result: Result<(), Failure>) -> ExitCode {
    let Err(failure) = result else { return ExitCode::SUCCESS };
    if failure.error.as_ref().is_some_and(is_unread) {
        return ExitCode::SUCCESS;
    }
    if let Some(error) = &failure.error {
        let mut said = error.to_string();
        complain(&format!("error: {said}"));
        for cause in error.chain().skip(1).map(ToString::to_string) {
            // Some libraries repeat their cause in their own words.
            if !said.contains(&cause) {
                complain(&format!("caused by: {cause}"));
            }
            said += &cause;
        }
    }
    if let Some(hint) = &failure.hint {
        complain(&format!("\nhint: {hint}"));
    }
    ExitCode::from(failure.code as u8)
}

fn is_unread(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let inner = cause.downcast_ref::<std::io::Error>().and_then(|error| error.get_ref());
        inner.and_then(|inner| inner.downcast_ref()).is_some_and(|error| matches!(error, OutputError::Closed))
    })
}
