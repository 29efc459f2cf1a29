//! The `bko-install` executable.

use std::process::ExitCode;

use bko_install::cli::{self, Cli};
use clap::Parser;

fn main() -> ExitCode {
    cli::run(Cli::parse())
}
