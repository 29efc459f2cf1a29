//! Why there is no answer, and whether asking again may help. Pure; no IO.

use std::error::Error;
use std::io;

use http::StatusCode;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Not a URL that can be dialled.
    #[error("\"{0}\" is no http:// or https:// URL with a host")]
    Url(String),
    /// The name is not known.
    #[error("cannot resolve \"{host}\"")]
    Resolve {
        /// The name.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// Nobody listens.
    #[error("cannot connect to {address}")]
    Connect {
        /// `host:port`.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// The server's certificate is not trusted.
    #[error("the certificate of \"{host}\" is not trusted: {why}")]
    NotTrusted {
        /// The server.
        host: String,
        /// Why.
        why: String,
    },
    /// The two do not agree on TLS, and will not.
    #[error("no TLS with \"{host}\": {why}")]
    Tls {
        /// The server.
        host: String,
        /// Why.
        why: String,
    },
    /// It answers, but not in HTTP.
    #[error("\"{host}\" does not speak HTTP: {why}")]
    Foreign {
        /// The server.
        host: String,
        /// Why.
        why: String,
    },
    /// The environment names a proxy of another kind.
    #[error("the proxy {0} of the environment cannot be used: want http://HOST:PORT")]
    UnknownProxy(String),
    /// The proxy refuses.
    #[error("the proxy answers {0}")]
    Proxy(StatusCode),
    /// Something of all this, with a proxy on the way.
    #[error("the way leads through the proxy {proxy} of the environment")]
    Through {
        /// `host:port`.
        proxy: String,
        /// What.
        source: Box<HttpError>,
    },
    /// The connection broke.
    #[error("the exchange with \"{host}\" broke off")]
    Exchange {
        /// The server.
        host: String,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl HttpError {
    /// Whether the same may work a moment later.
    pub fn is_temporary(&self) -> bool {
        match self.innermost() {
            // Of other answers it will not change its mind.
            Self::Proxy(status) => matches!(status.as_u16(), 502..=504),
            error => matches!(error, Self::Resolve { .. } | Self::Connect { .. } | Self::Exchange { .. }),
        }
    }

    /// What went wrong, whatever the way.
    pub fn innermost(&self) -> &Self {
        if let Self::Through { source, .. } = self { source } else { self }
    }
}

/// What TLS says, if that is what went wrong. An `io::Error` hides what it wraps.
pub(in crate::client) fn of_tls<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let inner = |error: &'a (dyn Error + 'static)| match error.downcast_ref::<io::Error>() {
        Some(io) => io.get_ref().map(|inner| inner as &(dyn Error + 'static)),
        None => error.source(),
    };
    std::iter::successors(Some(error), |error| inner(*error)).find_map(|error| error.downcast_ref())
}

/// What will not heal is told from a connection that broke.
pub(super) fn broken(host: &str, source: impl Into<Box<dyn Error + Send + Sync>>) -> HttpError {
    use rustls::AlertDescription as Alert;
    let (host, source) = (host.to_owned(), source.into());
    let why = match of_tls(&*source) {
        Some(rustls::Error::InvalidCertificate(why)) => return HttpError::NotTrusted { host, why: why.to_string() },
        // A gateway whose backend is away, or one that ends.
        Some(rustls::Error::AlertReceived(Alert::InternalError | Alert::CloseNotify | Alert::UserCanceled)) => None,
        Some(rustls::Error::AlertReceived(Alert::CertificateRequired | Alert::BadCertificate)) => {
            Some("it wants a client certificate, as daemons do and no routing API does".to_owned())
        }
        Some(rustls::Error::AlertReceived(Alert::UnrecognisedName)) => Some("it knows no such name".to_owned()),
        Some(rustls::Error::InvalidMessage(_)) => {
            Some("it speaks something else: is it an http:// address?".to_owned())
        }
        Some(error @ (rustls::Error::AlertReceived(_) | rustls::Error::PeerIncompatible(_))) => Some(error.to_string()),
        _ => None,
    };
    let garbled = source.downcast_ref::<hyper::Error>().filter(|error| error.is_parse()).map(ToString::to_string);
    match (why, garbled) {
        (Some(why), _) => HttpError::Tls { host, why },
        (None, Some(why)) => HttpError::Foreign { host, why: format!("{why}; is it an https:// address?") },
        (None, None) => HttpError::Exchange { host, source },
    }
}
