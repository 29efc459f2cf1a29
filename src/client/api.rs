//! The routing API as a client sees it: one call each, no repetition.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Method, StatusCode, Uri};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::http::{Http, HttpError, Response};
use super::token::{Token, TokenError, TokenSource};
use crate::printable::line;

const WAITING_FOR: &str = "x-buildkit-operator-waiting-for";

/// Where the routing API is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl(String);

/// Not the address of an API.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("\"{0}\" is no address of a routing API: want http://HOST:PORT or https://HOST:PORT, without a password")]
pub struct ParseBaseUrl(String);

impl FromStr for BaseUrl {
    type Err = ParseBaseUrl;

    /// With or without `/route` at its end, as other commands print it.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim().trim_end_matches('/');
        let base = trimmed.strip_suffix("/route").unwrap_or(trimmed);
        // A password may be in it, with or without a scheme before.
        let refuse = || ParseBaseUrl(if base.contains('@') { "…@…".to_owned() } else { text.to_owned() });
        let uri: Uri = base.parse().map_err(|_| refuse())?;
        let host = uri.host().is_some_and(|host| !host.is_empty()) && !base.contains('@');
        let scheme = matches!(uri.scheme_str(), Some("http" | "https"));
        if host && scheme && uri.query().is_none() { Ok(Self(base.to_owned())) } else { Err(refuse()) }
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What to build, as far as routing is concerned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RouteRequest {
    /// Absent when the identity names it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub repo: String,
    /// Component of a monorepo.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Target of the Dockerfile.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub target: String,
    /// `amd64` or `arm64`.
    pub arch: String,
    /// From code that nobody has reviewed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub untrusted: bool,
}

/// A build that has its daemon.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Routed {
    /// The project.
    pub key: String,
    /// What ends the build; older servers give none.
    #[serde(default)]
    pub(super) build_id: String,
    /// `tcp://host:port`.
    pub endpoint: String,
    /// A cache outside of the daemon, for when its own is cold.
    #[serde(default)]
    pub cache: Option<Cache>,
}

impl fmt::Debug for Routed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routed").field("key", &self.key).field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// A cache in a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Cache {
    /// `s3`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The bucket.
    pub bucket: String,
    /// Its region.
    pub region: String,
    /// Where it is, if not at Amazon.
    pub endpoint_url: String,
    /// The cache's name within.
    pub name: String,
    /// Whether somebody else writes it this time.
    pub skip_export: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Completion<'a> {
    key: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    build_id: &'a str,
}

/// Why a call did not do what it asked for.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// No answer.
    #[error("no answer from the routing API")]
    Http(#[source] HttpError),
    /// No identity.
    #[error("no identity for the routing API")]
    Token(#[source] TokenError),
    /// A refusal, with its reason.
    #[error("the routing API answers {}: {text}", status.as_u16())]
    Refused {
        /// Its status.
        status: StatusCode,
        /// Its reason.
        text: String,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
        /// What the daemon was waiting for.
        waiting_for: Option<String>,
    },
    /// It answers, but not like a routing API.
    #[error("this is no routing API: {0}")]
    Foreign(String),
}

/// The routing API.
#[derive(Debug)]
pub struct Api {
    /// Where it is.
    pub base: BaseUrl,
    /// How to get there.
    pub http: Http,
    /// Who asks.
    pub token: TokenSource,
    /// Who may ask for anything.
    pub admin: Option<Token>,
}

impl Api {
    /// Reads what the API shows.
    ///
    /// # Errors
    /// See [`ApiError`].
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiError> {
        let response = self.send(Method::GET, path, HeaderMap::new(), Vec::new()).await?;
        answer(&response, path)
    }

    /// Asks for a daemon once. A caller who drops this releases the build.
    pub(super) async fn route(&self, request: &RouteRequest) -> Result<Routed, ApiError> {
        answer(&self.post("/route", request).await?, "/route")
    }

    /// Ends a build.
    pub(super) async fn complete(&self, routed: &Routed) -> Result<(), ApiError> {
        let body = Completion { key: &routed.key, build_id: &routed.build_id };
        let response = self.post("/complete", &body).await?;
        if response.status.is_success() { Ok(()) } else { Err(refusal(&response)) }
    }

    async fn post(&self, path: &str, body: &impl Serialize) -> Result<Response, ApiError> {
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let body = serde_json::to_vec(body).map_err(|error| ApiError::Foreign(error.to_string()))?;
        self.send(Method::POST, path, headers, body).await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        mut headers: HeaderMap,
        body: Vec<u8>,
    ) -> Result<Response, ApiError> {
        headers.extend(self.token.headers(&self.http, self.admin.as_ref()).await.map_err(ApiError::Token)?);
        let url = format!("{}{path}", self.base);
        let url = url.parse().map_err(|_| ApiError::Http(HttpError::Url(url)))?;
        self.http.send(method, &url, headers, body).await.map_err(ApiError::Http)
    }
}

fn answer<T: DeserializeOwned>(response: &Response, path: &str) -> Result<T, ApiError> {
    if response.status != StatusCode::OK {
        return Err(refusal(response));
    }
    let known = serde_json::from_slice(&response.body);
    known.map_err(|error| {
        ApiError::Foreign(format!("the answer of {path} cannot be read: {error}{}", through(response)))
    })
}

fn refusal(response: &Response) -> ApiError {
    let header = |name: &str| response.headers.get(name).and_then(|value| value.to_str().ok());
    if response.status.is_redirection() {
        let to = line(header(LOCATION.as_str()).unwrap_or_default(), LONGEST);
        return ApiError::Foreign(format!(
            "it redirects ({}) to \"{to}\"{}",
            response.status.as_u16(),
            through(response)
        ));
    }
    let text = String::from_utf8_lossy(&response.body);
    let text = line(text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default(), LONGEST);
    let reason = response.status.canonical_reason().unwrap_or("no reason");
    let mut text = match text.chars().next() {
        None => reason.to_owned(),
        // Of a proxy or another server.
        Some('<') => format!("{reason}, with a page in HTML as no routing API has it"),
        Some(_) => text,
    };
    if let Some(why) = header(WWW_AUTHENTICATE.as_str()).and_then(description) {
        text = format!("{text}: {}", line(why, LONGEST));
    }
    ApiError::Refused {
        status: response.status,
        text: text + &through(response),
        retry_after: header(RETRY_AFTER.as_str()).and_then(|s| s.trim().parse().ok()).map(Duration::from_secs),
        waiting_for: header(WAITING_FOR).map(|text| line(text, LONGEST)),
    }
}

/// Most characters of what a server says that are shown.
const LONGEST: usize = 300;

fn through(response: &Response) -> String {
    response.proxy.as_ref().map_or_else(String::new, |proxy| format!(" (asked through the proxy {proxy})"))
}

/// What a challenge says of the token: its description, or else its error.
fn description(challenge: &str) -> Option<&str> {
    let value = |name| challenge.split_once(name)?.1.split('"').next().filter(|value| !value.is_empty());
    value("error_description=\"").or_else(|| value("error=\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_may_end_as_other_commands_print_it() {
        for (text, want) in [
            ("http://a:8080", "http://a:8080"),
            (" https://api.example.org:1234/ ", "https://api.example.org:1234"),
            ("http://a:8080/route", "http://a:8080"),
            ("https://a/farm/route/", "https://a/farm"),
            ("http://[::1]:8080", "http://[::1]:8080"),
        ] {
            assert_eq!(text.parse::<BaseUrl>().unwrap().to_string(), want);
        }
        for bad in ["", "a:8080", "ftp://a", "http://", "/route", "http://a?x=1", "http://a b"] {
            assert!(bad.parse::<BaseUrl>().is_err(), "{bad}");
        }
        let error = "http://user:hunter2@a".parse::<BaseUrl>().unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn nothing_is_sent_that_was_not_said() {
        let request = RouteRequest {
            repo: "github.com/acme/shop".into(),
            name: String::new(),
            target: String::new(),
            arch: "amd64".into(),
            untrusted: false,
        };
        let json = serde_json::to_string(&request).unwrap();
        assert_eq!(json, r#"{"repo":"github.com/acme/shop","arch":"amd64"}"#);
        let json = serde_json::to_string(&Completion { key: "p1", build_id: "" }).unwrap();
        assert_eq!(json, r#"{"key":"p1"}"#);
    }

    #[test]
    fn a_challenge_says_what_is_wrong() {
        let whole = r#"Bearer realm="b", error="invalid_token", error_description="the token has expired""#;
        assert_eq!(description(whole), Some("the token has expired"));
        assert_eq!(description(r#"Bearer error="invalid_token""#), Some("invalid_token"));
        assert_eq!(description(r#"Bearer realm="b""#), None);
    }

    #[test]
    fn an_answer_with_a_cache_is_understood() {
        let answer = r#"{"key":"p1","buildId":"ab","endpoint":"tcp://a:1","namespace":"n","ready":true,"later":1,
            "cache":{"type":"s3","bucket":"b","region":"r","endpointUrl":"http://m:9000","name":"p1","skipExport":true}}"#;
        let routed: Routed = serde_json::from_str(answer).unwrap();
        let cache = routed.cache.clone().unwrap();
        assert_eq!((cache.bucket.as_str(), cache.skip_export), ("b", true));
        assert!(!format!("{routed:?}").contains("ab\""), "the build's id is a capability");
    }
}
