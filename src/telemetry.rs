//! Logs: `tracing`, one line per event; to standard error unless a command has its own place for them.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line, for collectors.
    Json,
}

/// Starts logging. `filter` is a `tracing` directive list, for example
/// `info,bko_install::gateway=debug`; a malformed directive is left out.
pub fn start(filter: &str, format: LogFormat) {
    start_to(filter, format, std::io::stderr);
}

/// Starts logging to somewhere else than standard error, a line in one write.
pub fn start_to<W>(filter: &str, format: LogFormat, writer: W)
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = EnvFilter::builder().parse_lossy(filter);
    // Standard error that cannot be written is nothing to tell on standard error.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_target(false)
        .log_internal_errors(false);
    // A second start, in tests, keeps the first subscriber.
    let _ = match format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
