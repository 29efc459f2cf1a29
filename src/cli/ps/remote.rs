//! Reads from the routing API: one request a connection, plain or TLS.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use axum::body::Body;
use http::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue, USER_AGENT};
use http::{HeaderMap, Request, StatusCode, Uri};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::super::exit::{Code, Failure};

/// How long one answer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Most bytes of an answer: 500 projects with their builds take less.
const LIMIT: usize = 16 << 20;

const ADMIN: HeaderName = HeaderName::from_static("x-buildkit-operator-admin-token");

pub(super) struct Remote {
    base: Uri,
    headers: HeaderMap,
    tls: TlsConnector,
}

impl Remote {
    pub(super) fn new(
        base: Uri,
        token: Option<String>,
        admin: Option<String>,
        authority: Option<&[u8]>,
    ) -> Result<Self, Failure> {
        let mut headers = HeaderMap::new();
        let mut secret = |name: HeaderName, value: String, flag: &str| {
            let mut value = HeaderValue::try_from(value)
                .map_err(|_| Failure::new(Code::Usage, anyhow!("{flag} holds what no token can hold")))?;
            value.set_sensitive(true);
            headers.insert(name, value);
            Ok::<_, Failure>(())
        };
        token.map_or(Ok(()), |token| secret(AUTHORIZATION, format!("Bearer {token}"), "--token"))?;
        admin.map_or(Ok(()), |token| secret(ADMIN, token, "--admin-token"))?;
        let tls = trust(authority).map_err(|error| Failure::new(Code::Usage, error))?;
        Ok(Self { base, headers, tls: TlsConnector::from(Arc::new(tls)) })
    }

    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let base = &self.base;
        let answer = tokio::time::timeout(PATIENCE, self.request(path)).await;
        let answer = answer.map_err(|_| anyhow!("no answer from {base} within {PATIENCE:?}"))?;
        let (status, body) = answer.with_context(|| format!("cannot ask {base}"))?;
        if status.is_success() {
            let known = serde_json::from_slice(&body);
            return Ok(known.with_context(|| format!("{base} does not answer as a routing API does"))?);
        }
        let line =
            String::from_utf8_lossy(&body).lines().next().unwrap_or_default().chars().take(200).collect::<String>();
        let failure = Failure::new(Code::Failed, anyhow!("{base} answers {status}: {line}"));
        Err(match status {
            StatusCode::UNAUTHORIZED => failure.hint("set BUILDKIT_OPERATOR_TOKEN to the token of the routing API"),
            StatusCode::NOT_FOUND => failure.hint("the server is older than this command, or the address is another's"),
            _ => failure,
        })
    }

    async fn request(&self, path: &str) -> anyhow::Result<(StatusCode, axum::body::Bytes)> {
        let secure = self.base.scheme_str() == Some("https");
        let host = self.base.host().unwrap_or_default();
        let port = self.base.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let address = host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((address, port)).await?;
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = format!("{}{path}", self.base.path().trim_end_matches('/')).parse()?;
        *request.headers_mut() = self.headers.clone();
        let authority = self.base.authority().map_or(host, |authority| authority.as_str());
        request.headers_mut().insert(HOST, HeaderValue::from_str(authority)?);
        let agent = format!("bko-install/{}", crate::VERSION);
        request.headers_mut().insert(USER_AGENT, HeaderValue::try_from(agent)?);
        if secure {
            let name = ServerName::try_from(address.to_owned())?;
            exchange(self.tls.connect(name, stream).await?, request).await
        } else {
            exchange(stream, request).await
        }
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Body>,
) -> anyhow::Result<(StatusCode, axum::body::Bytes)> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // Ends with its sender.
    tokio::spawn(connection);
    let (head, body) = sender.send_request(request).await?.into_parts();
    Ok((head.status, axum::body::to_bytes(Body::new(body), LIMIT).await?))
}

fn trust(authority: Option<&[u8]>) -> anyhow::Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().cloned());
    if let Some(pem) = authority {
        let own = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect::<Vec<_>>();
        if roots.add_parsable_certificates(own).0 == 0 {
            bail!("the authority of the routing API holds no certificate that can be used");
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    Ok(builder.with_safe_default_protocol_versions()?.with_root_certificates(roots).with_no_client_auth())
}
