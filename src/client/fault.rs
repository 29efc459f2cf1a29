//! Why there was no build.

use std::path::PathBuf;
use std::time::Duration;

use super::api::ApiError;
use super::builder::Unsupported;
use super::dial::DialError;
use super::execute::ExecuteError;
use super::tls::TlsError;

/// Why there was no build.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// No daemon, and asking again does not help.
    #[error("no daemon for {what}")]
    Refused {
        /// Which build.
        what: String,
        /// Why.
        source: ApiError,
    },
    /// No daemon in time.
    #[error("no daemon for {what} after {} s", waited.as_secs())]
    NotInTime {
        /// Which build.
        what: String,
        /// For how long was asked.
        waited: Duration,
        /// The last refusal.
        source: Option<ApiError>,
    },
    /// The answer names no place.
    #[error("the routing API answers with endpoint \"{0}\": want tcp://HOST:PORT")]
    Endpoint(String),
    /// The daemon takes no connection.
    #[error("cannot build on {key}")]
    Dial {
        /// The project.
        key: String,
        /// Why.
        source: DialError,
    },
    /// The builder cannot do that.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The builder does not run.
    #[error("the builder does not run")]
    Execute(#[source] ExecuteError),
    /// The certificate cannot be used.
    #[error("the client certificate cannot be used")]
    Tls(#[source] TlsError),
    /// Signals cannot be had.
    #[error("cannot listen to signals")]
    Signals(#[source] std::io::Error),
    /// What was built cannot be told.
    #[error("cannot write what was built to \"{}\"", path.display())]
    Metadata {
        /// Where to.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What was built is not known.
    #[error("the image was built, but its digest cannot be written to \"{}\": {why}", path.display())]
    Digest {
        /// Where to.
        path: PathBuf,
        /// Why.
        why: String,
    },
}
