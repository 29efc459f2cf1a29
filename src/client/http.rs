//! One HTTP/1 request a connection, over TCP or TLS, through a proxy where the
//! environment names one. A build makes two or three.

mod fault;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use http::header::{HOST, HeaderValue, PROXY_AUTHORIZATION, USER_AGENT};
use http::{HeaderMap, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::VERSION;
pub use fault::HttpError;
use fault::broken;
pub(super) use fault::of_tls;

const CONNECT: Duration = Duration::from_secs(10);
/// No answer of ours is longer: 500 projects with their builds.
const BODY_LIMIT: usize = 16 << 20;

/// An answer.
#[derive(Debug)]
pub(super) struct Response {
    /// The proxy that it came through.
    pub(super) proxy: Option<String>,
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// A name that is dialled at an address, whatever DNS says.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// Names at or below this domain.
    pub domain: String,
    /// Where they are.
    pub address: IpAddr,
}

impl Pinned {
    fn matches(&self, host: &str) -> bool {
        host == self.domain || host.strip_suffix(&self.domain).is_some_and(|rest| rest.ends_with('.'))
    }
}

/// Makes requests.
pub struct Http {
    tls: Arc<ClientConfig>,
    proxies: Matcher,
    pinned: Option<Pinned>,
}

impl std::fmt::Debug for Http {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http").field("pinned", &self.pinned).finish_non_exhaustive()
    }
}

impl Http {
    /// With these roots; proxies as curl reads them from the environment.
    pub fn new(tls: Arc<ClientConfig>, pinned: Option<Pinned>) -> Self {
        Self { tls, proxies: Matcher::from_env(), pinned }
    }

    /// One request and its whole answer. Redirections are answers.
    pub(super) async fn send(
        &self,
        method: Method,
        url: &Uri,
        headers: HeaderMap,
        body: Vec<u8>,
    ) -> Result<Response, HttpError> {
        let target = Target::of(url)?;
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = method;
        *request.headers_mut() = headers;
        let origin = url.path_and_query().map_or("/", |path| path.as_str());
        *request.uri_mut() = origin.parse().map_err(|_| HttpError::Url(url.to_string()))?;
        if let Ok(host) = HeaderValue::try_from(target.authority()) {
            request.headers_mut().insert(HOST, host);
        }
        if let Ok(agent) = HeaderValue::try_from(format!("bko-install/{VERSION}")) {
            request.headers_mut().insert(USER_AGENT, agent);
        }
        let pinned = self.pinned.as_ref().filter(|pinned| pinned.matches(&target.host)).map(|pinned| pinned.address);
        let Some(proxy) = self.proxies.intercept(url).filter(|_| pinned.is_none()) else {
            let stream = dial(&target.host, target.port, pinned).await?;
            return match target.secure {
                true => exchange(self.encrypt(stream, &target).await?, request, &target.host).await,
                false => exchange(stream, request, &target.host).await,
            };
        };
        let address = proxy_address(&proxy)?;
        let shown = format!("{}:{}", address.0, address.1);
        match self.send_through(&proxy, address, &target, request, url).await {
            Ok(response) => Ok(Response { proxy: Some(shown), ..response }),
            Err(error) => Err(HttpError::Through { proxy: shown, source: Box::new(error) }),
        }
    }

    async fn send_through(
        &self,
        proxy: &Intercept,
        (host, port): (String, u16),
        target: &Target,
        mut request: Request<Full<Bytes>>,
        url: &Uri,
    ) -> Result<Response, HttpError> {
        let stream = dial(&host, port, None).await?;
        if target.secure {
            let tunnel = tunnel(stream, proxy, target).await?;
            return exchange(self.encrypt(tunnel, target).await?, request, &target.host).await;
        }
        *request.uri_mut() = url.clone();
        if let Some(auth) = proxy_auth(proxy) {
            request.headers_mut().insert(PROXY_AUTHORIZATION, auth);
        }
        match exchange(stream, request, &host).await? {
            Response { status: status @ StatusCode::PROXY_AUTHENTICATION_REQUIRED, .. } => {
                Err(HttpError::Proxy(status))
            }
            response => Ok(response),
        }
    }

    async fn encrypt<S>(&self, stream: S, target: &Target) -> Result<tokio_rustls::client::TlsStream<S>, HttpError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = ServerName::try_from(target.host.clone()).map_err(|_| HttpError::Url(target.authority()))?;
        let handshake = TlsConnector::from(Arc::clone(&self.tls)).connect(name, stream);
        match tokio::time::timeout(CONNECT, handshake).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(broken(&target.host, error)),
            Err(late) => Err(broken(&target.host, late)),
        }
    }
}

struct Target {
    secure: bool,
    host: String,
    port: u16,
    /// Whether the URL names the port.
    explicit: bool,
}

impl Target {
    fn of(url: &Uri) -> Result<Self, HttpError> {
        let (secure, default) = match url.scheme_str() {
            Some("https") => (true, 443),
            Some("http") => (false, 80),
            _ => return Err(HttpError::Url(url.to_string())),
        };
        let host = url.host().filter(|host| !host.is_empty()).ok_or_else(|| HttpError::Url(url.to_string()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase();
        Ok(Self { secure, host, port: url.port_u16().unwrap_or(default), explicit: url.port().is_some() })
    }

    fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.explicit { format!("{host}:{}", self.port) } else { host }
    }
}

/// Connects to the first address that answers.
pub(super) async fn dial(host: &str, port: u16, pinned: Option<IpAddr>) -> Result<TcpStream, HttpError> {
    let address = format!("{host}:{port}");
    let connect = async {
        let found: Vec<_> = match pinned {
            Some(address) => vec![(address, port).into()],
            None => tokio::net::lookup_host((host, port))
                .await
                .map_err(|source| HttpError::Resolve { host: host.to_owned(), source })?
                .collect(),
        };
        let stream = TcpStream::connect(found.as_slice()).await;
        stream.map_err(|source| HttpError::Connect { address: address.clone(), source })
    };
    let stream = tokio::time::timeout(CONNECT, connect)
        .await
        .map_err(|late| HttpError::Connect { address: address.clone(), source: late.into() })??;
    let _ = stream.set_nodelay(true);
    Ok(stream)
}

fn proxy_address(proxy: &Intercept) -> Result<(String, u16), HttpError> {
    let uri = proxy.uri();
    let host = uri.host().filter(|_| uri.scheme_str() == Some("http"));
    let host = host.ok_or_else(|| HttpError::UnknownProxy(uri.to_string()))?;
    Ok((host.to_owned(), uri.port_u16().unwrap_or(80)))
}

fn proxy_auth(proxy: &Intercept) -> Option<HeaderValue> {
    let raw = || {
        let (user, password) = proxy.raw_auth()?;
        let pair = base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}"));
        HeaderValue::try_from(format!("Basic {pair}")).ok()
    };
    proxy.basic_auth().cloned().or_else(raw)
}

/// A way through the proxy to the target.
async fn tunnel(
    stream: TcpStream,
    proxy: &Intercept,
    target: &Target,
) -> Result<TokioIo<hyper::upgrade::Upgraded>, HttpError> {
    let (host, _) = proxy_address(proxy)?;
    let address = format!("{}:{}", target.host, target.port);
    let mut request = Request::connect(address.as_str()).body(Empty::<Bytes>::new()).map_err(|e| broken(&host, e))?;
    if let Ok(value) = HeaderValue::try_from(address) {
        request.headers_mut().insert(HOST, value);
    }
    if let Some(auth) = proxy_auth(proxy) {
        request.headers_mut().insert(PROXY_AUTHORIZATION, auth);
    }
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(&host, e))?;
    tokio::spawn(connection.with_upgrades());
    let response = sender.send_request(request).await.map_err(|e| broken(&host, e))?;
    if response.status() != StatusCode::OK {
        return Err(HttpError::Proxy(response.status()));
    }
    let upgraded = hyper::upgrade::on(response).await.map_err(|e| broken(&host, e))?;
    Ok(TokioIo::new(upgraded))
}

/// A way through the proxy that the environment names for this URL; nothing
/// when it names none.
pub(crate) async fn proxied(
    proxies: &Matcher,
    url: &Uri,
) -> Result<Option<TokioIo<hyper::upgrade::Upgraded>>, HttpError> {
    let Some(proxy) = proxies.intercept(url) else { return Ok(None) };
    let (host, port) = proxy_address(&proxy)?;
    let through = async { tunnel(dial(&host, port, None).await?, &proxy, &Target::of(url)?).await };
    match through.await {
        Ok(tunnel) => Ok(Some(tunnel)),
        Err(error) => Err(HttpError::Through { proxy: format!("{host}:{port}"), source: Box::new(error) }),
    }
}

async fn exchange<S>(stream: S, request: Request<Full<Bytes>>, host: &str) -> Result<Response, HttpError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(host, e))?;
    // Ended with this function, so that a caller who leaves leaves at once.
    let connection = tokio::spawn(connection);
    let _ended = AbortOnDrop(connection.abort_handle());
    let response = sender.send_request(request).await.map_err(|e| broken(host, e))?;
    let (head, body) = response.into_parts();
    let body = Limited::new(body, BODY_LIMIT).collect().await.map_err(|e| broken(host, e))?.to_bytes();
    Ok(Response { proxy: None, status: head.status, headers: head.headers, body })
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
