//! How the long-running commands log.

use clap::Args;
use tracing_subscriber::fmt::MakeWriter;

use super::Global;
use crate::telemetry::{self, LogFormat};

/// Flags of logging.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// How log lines are written
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "BKO_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// Log directives, for example info,bko_install::gateway=debug
    #[arg(long, value_name = "DIRECTIVES", env = "RUST_LOG", hide_env_values = true)]
    pub log: Option<String>,
}

impl LogArgs {
    /// Starts logging; `--quiet` and `--verbose` count unless directives are given.
    pub fn start(&self, global: &Global) {
        self.start_to(global, std::io::stderr);
    }

    /// The same to somewhere else than standard error.
    pub fn start_to<W>(&self, global: &Global, writer: W)
    where
        W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
    {
        let level = match (global.quiet, global.verbose) {
            (true, _) => "error",
            (_, 0) => "info",
            (_, 1) => "info,bko_install=debug",
            (_, _) => "debug",
        };
        telemetry::start_to(self.log.as_deref().unwrap_or(level), self.log_format, writer);
    }
}
