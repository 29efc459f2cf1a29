//! Why a farm does not come up, and how to mend it.

use std::io;
use std::path::PathBuf;

use crate::families::build_farm::build::config::BaseError;
use crate::local::args::GatewayListen;
use crate::local::certificates::CertificatesError;
use crate::local::fetch::FetchError;
use crate::local::layout::LayoutError;
use crate::local::lock::LockError;
use crate::local::programs::ProgramsError;
use crate::local::storage::StorageError;
use crate::local::store::StoreError;
use crate::local::writer::WriteError;
use crate::router::ConfigError;
use crate::runtime::listen::ListenAddress;
use crate::runtime::tls::TlsError;
use crate::sni::DomainsError;

/// Why the farm does not come up.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    /// The state folder's path.
    #[error("--state-dir: {0}")]
    Layout(#[from] LayoutError),
    /// The state folder.
    #[error("cannot make the state folder \"{}\"", .0.display())]
    Folder(PathBuf, #[source] io::Error),
    /// It is another's.
    #[error("the state folder \"{}\" belongs to user {}, not to user {} who runs this", .0.display(), .1, .2)]
    Owner(PathBuf, u32, u32),
    /// Somebody has it.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store, later.
    #[error("cannot change the state")]
    Write(#[from] WriteError),
    /// No BuildKit.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// Its image.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// One that cannot be run.
    #[error("\"{file}\" cannot be run: {why}", file = .0.display(), why = .1)]
    Buildkit(PathBuf, String),
    /// The caches.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The certificates.
    #[error(transparent)]
    Certificates(#[from] CertificatesError),
    /// The certificate of the routing API.
    #[error("certificate of the routing API")]
    Tls(#[from] TlsError),
    /// A user's buildkitd.toml cannot be read.
    #[error("--buildkitd-config: cannot read \"{}\"", .0.display())]
    ReadBase(PathBuf, #[source] io::Error),
    /// Or is none.
    #[error("--buildkitd-config: {0}")]
    Base(BaseError),
    /// The routing API's flags.
    #[error(transparent)]
    Route(#[from] ConfigError),
    /// The domain.
    #[error("--domain: {0}")]
    Domain(#[from] DomainsError),
    /// Other hosts cannot use loopback addresses.
    #[error("--listen {0}: other hosts reach daemons by name only, so this needs --domain")]
    NoDomain(GatewayListen),
    /// Whoever is on the way could read tokens.
    #[error("--api-listen {0}: it has no TLS, so it is for loopback addresses only")]
    PlainApi(ListenAddress),
    /// Two things on one port.
    #[error("--daemon-port {0} is the port that builds connect to, too")]
    SamePort(u16),
    /// Every daemon listens on the same port, which the gateway must know.
    #[error("--daemon-port 0: daemons need a port that is known; leave it out for 1235")]
    NoPort,
    /// Both everybody and some may call.
    #[error("--auth-open lets everybody call, with a token or without: leave it out, or the token")]
    OpenWithToken,
    /// A token that no client can send.
    #[error("the token \"{}\" holds several lines, blanks or characters that no token has", .0.display())]
    OddToken(PathBuf),
    /// Something else was named.
    #[error("--buildkit: \"{}\" is no buildkitd: asked for its version it says \"{said}\"", file.display())]
    NotBuildkitd {
        /// What was named.
        file: PathBuf,
        /// Its first line.
        said: String,
    },
    /// A port is taken.
    #[error("listen on {address} ({flag})")]
    Listen {
        /// Where.
        address: String,
        /// The flag that sets it.
        flag: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The token.
    #[error("cannot read or make the token \"{}\"", .0.display())]
    Token(PathBuf, #[source] io::Error),
    /// The system.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}

impl UpError {
    /// How to mend it, where there is a way.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Programs(error) => Some(error.hint()),
            Self::Fetch(error) => error.hint(),
            Self::Store(error) => error.hint(),
            Self::Certificates(error) => error.hint(),
            Self::OddToken(_) => Some(
                "leave one line with the token alone in it, or remove the file: another one is made then".to_owned(),
            ),
            Self::NotBuildkitd { .. } => Some("name the file buildkitd, or the folder that has it".to_owned()),
            Self::Lock(LockError::Held { .. }) => Some(
                "use that one, or give this one a folder of its own with --state-dir, and its own ports".to_owned(),
            ),
            Self::Listen { flag, source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                Some(format!("another program has that port: choose another with {flag}"))
            }
            Self::Owner(folder, ..) => Some(format!(
                "choose another folder with --state-dir, or make this one yours: chown -R \"$(id -u)\" \"{}\"",
                folder.display()
            )),
            Self::PlainApi(_) => Some(
                "other hosts reach the routing API with TLS, as https://api.DOMAIN:PORT: --listen 0.0.0.0 --domain DOMAIN"
                    .to_owned(),
            ),
            Self::Folder(_, error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Some("choose a folder that you may write with --state-dir".to_owned())
            }
            _ => None,
        }
    }
}
