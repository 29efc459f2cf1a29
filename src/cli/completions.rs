//! `bko-install completions`.

use std::io::Write as _;

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::exit::Failure;
use super::{Cli, report};

/// Prints the script.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(shell: Shell) -> Result<(), Failure> {
    let mut out = report::stdout();
    out.write_all(script(shell).as_bytes())?;
    Ok(out.flush()?)
}

/// The script of a shell. For bash, `clap_complete` takes the hyphen in our
/// name for the border of a subcommand in one of two places that must agree.
fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "bko-install", &mut script);
    let script = String::from_utf8_lossy(&script);
    match shell {
        Shell::Bash => script.replace("bko__subcmd__install__", "bko__install__"),
        _ => script.into_owned(),
    }
}
