//! Calls to a running farm over its control socket.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Method, Request, StatusCode, header};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Why a farm did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// None runs there.
    #[error("no farm runs on \"{}\"", .0.display())]
    NotRunning(PathBuf),
    /// It runs, but cannot be asked.
    #[error("cannot ask the farm on \"{}\"", .0.display())]
    Socket(PathBuf, #[source] io::Error),
    /// The connection failed in between.
    #[error("the farm did not answer")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// It does not answer.
    #[error("the farm did not answer within {0:?}")]
    Silent(Duration),
    /// It refused.
    #[error("{1}")]
    Refused(StatusCode, String),
}

/// Most bytes of an answer.
const LIMIT: usize = 64 << 20;

/// Asks once.
///
/// # Errors
/// See [`AskError`].
pub async fn ask<T: DeserializeOwned>(
    socket: &Path,
    method: Method,
    path: &str,
    within: Duration,
) -> Result<T, AskError> {
    let folder = || socket.parent().unwrap_or(socket).to_owned();
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => AskError::NotRunning(folder()),
        _ => AskError::Socket(folder(), error),
    })?;
    let exchange = async {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // Ends with its sender.
        tokio::spawn(connection);
        let mut request = Request::builder().method(method).uri(path).body(Body::empty())?;
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("farm"));
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>((
            status,
            axum::body::to_bytes(Body::new(answer.into_body()), LIMIT).await?,
        ))
    };
    let (status, body) =
        timeout(within, exchange).await.map_err(|_| AskError::Silent(within))?.map_err(AskError::Broken)?;
    if !status.is_success() {
        let said = String::from_utf8_lossy(&body);
        return Err(AskError::Refused(status, said.trim().to_owned()));
    }
    let body = if body.is_empty() { b"null".as_slice() } else { &body };
    serde_json::from_slice(body).map_err(|error| AskError::Broken(error.into()))
}
