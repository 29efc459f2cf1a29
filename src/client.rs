//! The client of a farm: route → build → complete around stock `docker buildx`
//! or `buildctl`.
//!
//! In goes what to build and how to reach the routing API; out comes the
//! builder's own output and exit code. It reads no environment (the command
//! line does) and runs wherever the builders do: what differs between systems
//! is in `platform`.

mod api;
pub mod builder;
mod certificates;
mod dial;
mod execute;
mod fault;
mod gateway;
pub(crate) mod http;
mod narrate;
mod output;
mod patience;
pub mod platform;
mod session;
pub mod shell;
mod tls;
mod token;

pub use api::{Api, ApiError, BaseUrl, Cache, ParseBaseUrl, RouteRequest, Routed};
pub use certificates::{Certificates, CertificatesError, Given, Paths, Private, authority, pem};
pub use dial::{DialError, Endpoint};
pub use execute::ExecuteError;
pub use fault::BuildError;
pub use gateway::Gateway;
pub use http::{Http, HttpError, Pinned};
pub use narrate::Narrator;
pub use output::Progress;
pub use session::{Build, run};
pub use tls::{TlsError, api_trust, check, check_pair};
pub use token::{Mint, Shown, Token, TokenError, TokenSource};

#[expect(clippy::disallowed_methods, reason = "waiting is measured here, once")]
fn now() -> tokio::time::Instant {
    tokio::time::Instant::now()
}
