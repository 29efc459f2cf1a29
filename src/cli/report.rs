//! How events reach people and programs: one line each, as text or JSON.

use std::io::{self, Write};
use std::sync::Arc;

use super::exit::Failure;
use super::{Global, Output};
use crate::cluster::{Event, Reporter};
use crate::printable::printable;

/// Why standard output could not be written.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// Its reader has gone away, as `head` does: nothing to complain about.
    #[error("nobody reads standard output any more")]
    Closed,
    /// It is full, for example.
    #[error("cannot write to standard output")]
    Failed(#[source] io::Error),
}

impl From<io::Error> for OutputError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe { Self::Closed } else { Self::Failed(error) }
    }
}

/// Standard output, whose errors are [`OutputError`]s within an `io::Error`.
#[derive(Debug)]
pub struct Out(io::StdoutLock<'static>);

/// Standard output for results.
pub fn stdout() -> Out {
    Out(io::stdout().lock())
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(marked)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(marked)
    }
}

fn marked(error: io::Error) -> io::Error {
    match error.kind() {
        // Left as it is: the writer tries again by itself.
        io::ErrorKind::Interrupted => error,
        kind => io::Error::new(kind, OutputError::from(error)),
    }
}

/// Prints a result to standard output.
///
/// # Errors
/// An [`OutputError`].
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = stdout();
    writeln!(out, "{}", text.trim_end_matches('\n'))?;
    Ok(out.flush()?)
}

/// Prints to standard error, whatever the text has come from. Who has closed it
/// does not want to know.
pub fn complain(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", printable(text));
}

/// Prints a message for people to standard error.
pub fn message(global: &Global, text: &str) {
    if !global.quiet {
        complain(text);
    }
}

/// Prints a value as one line of JSON.
///
/// # Errors
/// An [`OutputError`].
pub fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    print(&serde_json::to_string(value)?)
}

/// The last line of a command that did not succeed, in JSON.
#[derive(serde::Serialize)]
#[serde(tag = "event", rename = "failed", rename_all = "camelCase")]
struct Failed<'a> {
    /// The error and its causes.
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'a str>,
    exit_code: u8,
}

/// Tells programs that a command has failed. A result that says so itself is
/// the last line, and has no error beside it.
pub fn failed<T>(output: Output, result: &Result<T, Failure>) {
    if let (Output::Json, Err(Failure { code, error: Some(error), hint })) = (output, result) {
        let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
        let failed = Failed { message: causes.join(": "), hint: hint.as_deref(), exit_code: *code as u8 };
        // The failure itself counts for more than that nobody reads of it.
        let _ = print_json(&failed);
    }
}

/// A reporter that prints every event: in JSON all of them, as text what people
/// wait for; repetitions and warnings go to standard error. A reader that has
/// gone away does not end a run that writes to a cluster.
pub fn reporter(global: &Global, output: Output) -> Reporter {
    let global = global.clone();
    Arc::new(move |event| match (output, &event) {
        (Output::Json, event) => {
            // Who has pressed Ctrl-C looks at the terminal, wherever the events go.
            if *event == Event::Stopping {
                message(&global, &event.to_string());
            }
            drop(print_json(event));
        }
        (Output::Text, Event::Warning { .. } | Event::Retrying { .. } | Event::Stopping) => {
            message(&global, &event.to_string())
        }
        (Output::Text, _) if global.quiet => {}
        (Output::Text, event) => drop(print(&printable(&event.to_string()))),
    })
}

/// A reporter for commands whose result is all that counts: warnings only.
pub fn warnings(global: &Global) -> Reporter {
    let global = global.clone();
    Arc::new(move |event| {
        if matches!(event, Event::Warning { .. } | Event::Retrying { .. } | Event::Stopping) {
            message(&global, &event.to_string());
        }
    })
}
