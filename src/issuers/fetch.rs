//! Discovery documents and key sets over HTTPS, within limits. Redirects are
//! not followed: who an issuer is must not depend on who answers.
#![expect(clippy::disallowed_methods, reason = "shell: reads files of authorities")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper::{Request, StatusCode, Uri, header};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;

use crate::client::http::proxied;
use crate::identity::authorities;
use crate::identity::keys::{KeySet, ParseKeys};
use crate::identity::url::{HttpsUrl, Issuer, ParseUrl};

/// Largest discovery document, in bytes.
const MAX_DISCOVERY: usize = 64 << 10;

/// Largest key set, in bytes.
const MAX_KEYS: usize = 256 << 10;

/// Fetches for one issuer.
pub(super) struct Fetcher {
    tls: TlsConnector,
    /// Proxies as curl reads them from the environment.
    proxies: Matcher,
}

/// Why a file gives no authorities.
#[derive(Debug, thiserror::Error)]
pub enum RootsError {
    /// It cannot be read.
    #[error("read authorities from {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It holds no certificate in PEM, or a broken one.
    #[error("{path:?} holds no authority: want certificates in PEM")]
    None {
        /// The file.
        path: PathBuf,
    },
    /// TLS cannot be set up.
    #[error("set up TLS")]
    Tls(#[source] rustls::Error),
}

/// Why keys could not be looked up. Shows no more than addresses.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// No connection.
    #[error("connect to {url}")]
    Connect {
        /// What was asked for.
        url: HttpsUrl,
        /// Why.
        source: std::io::Error,
    },
    /// No answer.
    #[error("get {url}")]
    Get {
        /// What was asked for.
        url: HttpsUrl,
        /// Why.
        source: hyper::Error,
    },
    /// An answer that is none.
    #[error("get {url}: the answer is {status}{}", if status.is_redirection() { "; redirects are not followed" } else { "" })]
    Status {
        /// What was asked for.
        url: HttpsUrl,
        /// Its status.
        status: StatusCode,
    },
    /// An answer without an end, or cut.
    #[error("get {url}: the answer is cut, or more than {limit} bytes")]
    Body {
        /// What was asked for.
        url: HttpsUrl,
        /// Most that is read.
        limit: usize,
    },
    /// No discovery document.
    #[error("{url} is no discovery document: want a JSON object with \"issuer\" and \"jwks_uri\"")]
    Discovery {
        /// The document.
        url: HttpsUrl,
    },
    /// Somebody else's.
    #[error("{url} is of the issuer {found:?}, which is another; configure exactly the issuer that it names")]
    OtherIssuer {
        /// The document.
        url: HttpsUrl,
        /// Its issuer.
        found: String,
    },
    /// Keys elsewhere than on the web.
    #[error("jwks_uri of {url}")]
    KeysUrl {
        /// The document.
        url: HttpsUrl,
        /// Why.
        source: ParseUrl,
    },
    /// No key set.
    #[error("{url} is no key set")]
    Keys {
        /// The key set.
        url: HttpsUrl,
        /// Why.
        source: ParseKeys,
    },
    /// The issuer's address.
    #[error("the issuer has no discovery address")]
    Address(#[source] ParseUrl),
    /// It took too long.
    #[error("no answer in time")]
    TimedOut,
}

#[derive(Deserialize)]
struct Discovery {
    issuer: String,
    jwks_uri: String,
}

impl Fetcher {
    /// Believes the public authorities, and those of a file.
    pub(super) fn public(more: Option<&Path>) -> Result<Self, RootsError> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().cloned());
        if let Some(path) = more {
            add(&mut roots, path)?;
        }
        Self::trusting(roots)
    }

    /// Believes the authorities of a file alone.
    pub(super) fn private(only: &Path) -> Result<Self, RootsError> {
        let mut roots = RootCertStore::empty();
        add(&mut roots, only)?;
        Self::trusting(roots)
    }

    fn trusting(roots: RootCertStore) -> Result<Self, RootsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let config = config.map_err(RootsError::Tls)?.with_root_certificates(roots).with_no_client_auth();
        Ok(Self { tls: TlsConnector::from(Arc::new(config)), proxies: Matcher::from_env() })
    }

    /// Looks an issuer's keys up: where it says they are.
    pub(super) async fn keys(&self, issuer: &Issuer) -> Result<KeySet, FetchError> {
        let url = issuer.discovery().map_err(FetchError::Address)?;
        let document = self.get(&url, MAX_DISCOVERY).await?;
        let Discovery { issuer: found, jwks_uri } =
            serde_json::from_slice(&document).map_err(|_| FetchError::Discovery { url: url.clone() })?;
        if !issuer.is(&found) {
            return Err(FetchError::OtherIssuer { url, found: found.chars().take(256).collect() });
        }
        let url = jwks_uri.parse::<HttpsUrl>().map_err(|source| FetchError::KeysUrl { url, source })?;
        let keys = self.get(&url, MAX_KEYS).await?;
        KeySet::parse(&keys).map_err(|source| FetchError::Keys { url, source })
    }

    async fn get(&self, url: &HttpsUrl, limit: usize) -> Result<Vec<u8>, FetchError> {
        let connect = |source| FetchError::Connect { url: url.clone(), source };
        let get = |source| FetchError::Get { url: url.clone(), source };
        let name = ServerName::try_from(url.host().to_owned()).map_err(|e| connect(std::io::Error::other(e)))?;
        let tcp = self.dial(url).await.map_err(connect)?;
        let tls = self.tls.connect(name, tcp).await.map_err(connect)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(tls)).await.map_err(get)?;
        let request = Request::get(url.path())
            .header(header::HOST, url.authority())
            .header(header::ACCEPT, "application/json")
            .header(header::USER_AGENT, concat!("bko-install/", env!("CARGO_PKG_VERSION")))
            .header(header::CONNECTION, "close")
            .body(Body::empty())
            .map_err(|e| connect(std::io::Error::other(e)))?;
        let answer = async {
            let response = sender.send_request(request).await.map_err(get)?;
            if response.status() != StatusCode::OK {
                return Err(FetchError::Status { url: url.clone(), status: response.status() });
            }
            let body = to_bytes(Body::new(response.into_body()), limit).await;
            body.map(Into::into).map_err(|_| FetchError::Body { url: url.clone(), limit })
        };
        // The connection must be driven for the answer to come, and ends with it.
        let drive = async {
            let _ = connection.await;
            std::future::pending().await
        };
        tokio::select! {
            answer = answer => answer,
            never = drive => never,
        }
    }
}

impl Fetcher {
    /// To the host itself, or through the proxy that is named for it.
    async fn dial(&self, url: &HttpsUrl) -> std::io::Result<Either<TcpStream, TokioIo<Upgraded>>> {
        let uri: Uri = url.to_string().parse().map_err(std::io::Error::other)?;
        match proxied(&self.proxies, &uri).await.map_err(std::io::Error::other)? {
            Some(tunnel) => Ok(Either::Right(tunnel)),
            None => TcpStream::connect((url.host(), url.port())).await.map(Either::Left),
        }
    }
}

fn add(roots: &mut RootCertStore, path: &Path) -> Result<(), RootsError> {
    let pem = std::fs::read(path).map_err(|source| RootsError::Read { path: path.to_owned(), source })?;
    authorities::add(roots, &pem).map_err(|_| RootsError::None { path: path.to_owned() })
}
