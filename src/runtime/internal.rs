//! What our own processes ask one another, on the admin listener: who may ask,
//! and how to ask. The token lies in a Secret of the operator namespace, since
//! to review tokens of service accounts would need a ClusterRole.

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio::net::TcpStream;

/// The token that our own processes know one another by. Never printed.
#[derive(Clone)]
pub struct InternalToken(String);

impl FromStr for InternalToken {
    type Err = Infallible;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(Self(s.trim().to_owned()))
    }
}

impl fmt::Debug for InternalToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InternalToken(…)")
    }
}

impl InternalToken {
    /// Hashed, so that comparing takes the same time whatever was presented.
    fn admits(&self, headers: &HeaderMap) -> bool {
        let presented = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let expected = Sha256::digest(self.0.as_bytes());
        presented.is_some_and(|token| Sha256::digest(token).ct_eq(&expected).into()) && !self.0.is_empty()
    }
}

/// Lets those through to `routes` who have the token. Without a token there are
/// no such routes.
pub fn guarded(token: Option<InternalToken>, routes: Router) -> Router {
    match token {
        Some(token) => routes.layer(from_fn_with_state(token, admit)),
        None => Router::new(),
    }
}

async fn admit(State(token): State<InternalToken>, request: Request, next: Next) -> Response {
    if token.admits(request.headers()) {
        next.run(request).await
    } else {
        (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "want the internal token\n").into_response()
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens there, or the network is in the way.
    #[error("connect to {0}: {1}")]
    Connect(SocketAddr, #[source] std::io::Error),
    /// The request failed.
    #[error("ask {0}: {1}")]
    Request(SocketAddr, #[source] hyper::Error),
    /// Refused.
    #[error("{0} answered {1}")]
    Status(SocketAddr, StatusCode),
    /// Not what was expected.
    #[error("{0} answered something else: {1}")]
    Body(SocketAddr, String),
    /// Too late.
    #[error("{0} did not answer within {1:?}")]
    Late(SocketAddr, Duration),
}

/// Most bytes of an answer.
const ANSWER_LIMIT: usize = 1024 * 1024;

/// Asks one process over plain HTTP and a connection of its own, so that an old
/// connection to a pod that has gone cannot stand for a new one at its address.
///
/// # Errors
/// Without an answer by `limit`, or with another than was expected.
pub async fn ask<T: DeserializeOwned>(
    address: SocketAddr,
    path_and_query: &str,
    token: Option<&InternalToken>,
    limit: Duration,
) -> Result<T, AskError> {
    exchange(address, Method::GET, path_and_query, Body::empty(), token, limit).await
}

/// Tells one process something, as JSON, in the same way.
///
/// # Errors
/// Without an answer by `limit`, or with another than was expected.
pub async fn tell<T: DeserializeOwned>(
    address: SocketAddr,
    path: &str,
    what: &impl Serialize,
    token: Option<&InternalToken>,
    limit: Duration,
) -> Result<T, AskError> {
    let body = serde_json::to_vec(what).map_err(|error| AskError::Body(address, error.to_string()))?;
    exchange(address, Method::POST, path, Body::from(body), token, limit).await
}

async fn exchange<T: DeserializeOwned>(
    address: SocketAddr,
    method: Method,
    path_and_query: &str,
    body: Body,
    token: Option<&InternalToken>,
    limit: Duration,
) -> Result<T, AskError> {
    let mut request = Request::new(body);
    *request.method_mut() = method;
    *request.uri_mut() =
        path_and_query.parse().map_err(|_| AskError::Body(address, format!("no path: \"{path_and_query}\"")))?;
    let host = HeaderValue::try_from(address.to_string()).unwrap_or(HeaderValue::from_static("internal"));
    request.headers_mut().insert(header::HOST, host);
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(value) = token.and_then(|token| HeaderValue::try_from(format!("Bearer {}", token.0)).ok()) {
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
    let answer = tokio::time::timeout(limit, send(address, request));
    let bytes = answer.await.map_err(|_| AskError::Late(address, limit))??;
    serde_json::from_slice(&bytes).map_err(|error| AskError::Body(address, error.to_string()))
}

async fn send(address: SocketAddr, request: Request) -> Result<axum::body::Bytes, AskError> {
    let stream = TcpStream::connect(address).await.map_err(|error| AskError::Connect(address, error))?;
    let handshake = http1::handshake::<_, Body>(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| AskError::Request(address, error))?;
    // Ends with its sender.
    tokio::spawn(connection);
    let answer = sender.send_request(request).await.map_err(|error| AskError::Request(address, error))?;
    if !answer.status().is_success() {
        return Err(AskError::Status(address, answer.status()));
    }
    let body = axum::body::to_bytes(Body::new(answer.into_body()), ANSWER_LIMIT).await;
    body.map_err(|error| AskError::Body(address, error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use axum::Json;
    use axum::routing::get;
    use tokio::net::TcpListener;

    use super::*;

    async fn serve(token: Option<&str>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/internal/x", get(|| async { Json(HashMap::from([("a", 1)])) }));
        let app = guarded(token.map(|t| t.parse().unwrap()), routes);
        tokio::spawn(async move { axum::serve(listener, app).await });
        address
    }

    async fn status(address: SocketAddr, token: Option<&str>) -> Result<HashMap<String, i32>, u16> {
        let token = token.map(|t| t.parse().unwrap());
        match ask(address, "/internal/x", token.as_ref(), Duration::from_secs(5)).await {
            Ok(map) => Ok(map),
            Err(AskError::Status(_, status)) => Err(status.as_u16()),
            Err(other) => panic!("{other}"),
        }
    }

    #[tokio::test]
    async fn only_those_who_have_the_token_are_answered() {
        let address = serve(Some("secret\n")).await;
        assert_eq!(status(address, Some("secret")).await, Ok(HashMap::from([("a".to_owned(), 1)])));
        for wrong in [None, Some(""), Some("secre"), Some("secrets")] {
            assert_eq!(status(address, wrong).await, Err(401), "{wrong:?}");
        }
        assert_eq!(status(serve(None).await, Some("secret")).await, Err(404), "nothing is there without a token");
        assert_eq!(status(serve(Some("")).await, Some("")).await, Err(401), "an empty token is none");
    }

    #[tokio::test]
    async fn one_that_never_answers_is_given_up() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let late = ask::<i32>(address, "/", None, Duration::from_millis(50)).await;
        assert!(matches!(late, Err(AskError::Late(..))), "{late:?}");
    }

    #[test]
    fn a_token_is_not_printed() {
        assert_eq!(format!("{:?}", "secret".parse::<InternalToken>()), "Ok(InternalToken(…))");
    }
}
