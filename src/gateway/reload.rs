//! Reads the file of rules again when it has changed. A file that cannot be
//! taken leaves in force what was, and says so.
#![expect(clippy::disallowed_methods, reason = "shell: reads a file")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::metrics::Metrics;
use super::rules::{Rules, RulesError};

/// How often to look. A mounted ConfigMap is swapped as a whole, by a link that
/// no watch of the file itself would see.
const EVERY: Duration = Duration::from_secs(5);

/// Why the file is not taken.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// It cannot be read.
    #[error("read \"{}\"", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// It makes no rules.
    #[error("\"{}\"", .0.display())]
    Rules(PathBuf, #[source] RulesError),
}

/// The rules of the flags, changed by what the file says now.
///
/// # Errors
/// See [`ReloadError`].
pub fn read(flags: &Rules, file: &Path) -> Result<(Rules, String), ReloadError> {
    let text = std::fs::read_to_string(file).map_err(|error| ReloadError::Read(file.to_owned(), error))?;
    let rules = flags.with(&text).map_err(|error| ReloadError::Rules(file.to_owned(), error))?;
    Ok((rules, text))
}

/// Follows the file until `shutdown`, and publishes what it says. `last` is the
/// text that is in force.
pub async fn follow(
    (flags, file): (Rules, PathBuf),
    mut last: String,
    rules: watch::Sender<Rules>,
    metrics: Arc<Metrics>,
    shutdown: CancellationToken,
) {
    let mut complaint = None;
    while shutdown.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        match read(&flags, &file) {
            Ok((_, text)) if text == last => complaint = None,
            Ok((new, text)) => {
                tracing::info!(file = %file.display(), domains = %new.domains, limits = ?new.limits, "configuration changed");
                rules.send_replace(new);
                metrics.reloaded(true);
                (last, complaint) = (text, None);
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                let said = format!("{error}: {cause}");
                if complaint.as_ref() != Some(&said) {
                    metrics.reloaded(false);
                    tracing::error!(error = said, "keeping the configuration as it was");
                    complaint = Some(said);
                }
            }
        }
    }
}
