//! How events reach people and programs: one line each, as text or JSON.

use std::io::Write as _;
use std::sync::Arc;

use super::{Global, Output};
use crate::cluster::{Event, Reporter};

/// Prints to standard output what an output format asks for. A reader that has
/// gone away does not end a run that writes to a cluster.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", text.trim_end_matches('\n'));
    let _ = out.flush();
}

/// Prints a message for people to standard error.
pub fn message(global: &Global, text: &str) {
    if !global.quiet {
        let _ = writeln!(std::io::stderr().lock(), "{text}");
    }
}

/// Prints a value as one line of JSON.
pub fn print_json(value: &impl serde::Serialize) -> Result<(), super::exit::Failure> {
    print(&serde_json::to_string(value)?);
    Ok(())
}

/// A reporter that prints every event: in JSON all of them, as text what people
/// wait for; repetitions and warnings go to standard error.
pub fn reporter(global: &Global, output: Output) -> Reporter {
    let global = global.clone();
    Arc::new(move |event| match (output, &event) {
        (Output::Json, event) => drop(print_json(event)),
        (Output::Text, Event::Warning { .. } | Event::Retrying { .. }) => message(&global, &event.to_string()),
        (Output::Text, _) if global.quiet => {}
        (Output::Text, event) => print(&event.to_string()),
    })
}

/// A reporter for commands whose result is all that counts: warnings only.
pub fn warnings(global: &Global) -> Reporter {
    let global = global.clone();
    Arc::new(move |event| {
        if matches!(event, Event::Warning { .. } | Event::Retrying { .. }) {
            message(&global, &event.to_string());
        }
    })
}
