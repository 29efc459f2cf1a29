//! Who calls: admin header → token of a CI provider → bearer token → open.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, header};
use prometheus_client::registry::Registry;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tokio_util::sync::CancellationToken;

use super::tokens::TokenDir;
use crate::identity::{Refused, Verified, token};
use crate::issuers::{Issuers, Metrics, Rejected};

/// Carries the admin token.
pub(super) const ADMIN_HEADER: HeaderName = HeaderName::from_static("x-buildkit-operator-admin-token");

/// A token. Only its hash is kept, so that neither a log nor a memory dump
/// shows it, and so that comparing takes the same time for every length.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// White space around it, as editors and `echo` leave in a Secret, is not part of it.
    pub fn new(token: &str) -> Self {
        Self(Sha256::digest(token.trim()).into())
    }

    pub(super) fn matches(&self, presented: &[u8]) -> bool {
        self.0.ct_eq(Sha256::digest(presented).as_slice()).into()
    }

    pub(super) fn is_blank(&self) -> bool {
        self.matches(b"")
    }
}

/// A token as it was given, for who hands it on. Never shown.
#[derive(Clone)]
pub struct GivenToken(String);

impl GivenToken {
    /// White space around it is not part of it.
    pub fn new(token: &str) -> Self {
        Self(token.trim().to_owned())
    }

    /// What callers are compared with.
    pub fn secret(&self) -> Secret {
        Secret::new(&self.0)
    }

    /// The token itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl FromStr for GivenToken {
    type Err = Infallible;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(Self::new(s))
    }
}

impl fmt::Debug for GivenToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GivenToken(…)")
    }
}

impl FromStr for Secret {
    type Err = Infallible;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(Self::new(s))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Who may call.
#[derive(Clone, Debug, Default)]
pub struct Auth {
    /// The bearer token of the flags.
    pub token: Option<Secret>,
    /// The bearer tokens of a folder.
    pub token_dir: Option<TokenDir>,
    /// The token of the admin header.
    pub admin_token: Option<Secret>,
    /// The providers whose tokens are accepted.
    pub issuers: Option<Issuers>,
    /// Whether anybody may.
    pub open: bool,
}

/// Why a way to call is none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AuthError {
    /// Neither a token nor the wish to be open: every call would be refused,
    /// or, worse, none.
    #[error(
        "nobody may call the routing API: neither a token nor an admin token is set, no identity provider is \
         configured, and it is not open; set BUILDKIT_OPERATOR_AUTH_TOKEN, --auth-token-dir or --oidc-config, or let \
         anybody call with --auth-open"
    )]
    Nobody,
    /// Who presents nothing could act for any repository, so that identities
    /// would restrict nobody.
    #[error(
        "--auth-open lets anybody act for any repository, beside identity providers that restrict who may; remove \
         --auth-open, or switch the providers off with --oidc-disable=true"
    )]
    OpenDespiteProviders,
}

/// A caller that may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Holds the admin token.
    Admin,
    /// A job that its provider vouches for.
    Verified(Arc<Verified>),
    /// Holds the shared bearer token.
    Bearer,
    /// Anybody, because the API is open.
    Open,
}

impl Identity {
    /// As the audit log calls it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Verified(_) => "oidc",
            Self::Bearer => "bearer",
            Self::Open => "open",
        }
    }

    /// What its provider says of it.
    pub(super) fn verified(&self) -> Option<&Arc<Verified>> {
        match self {
            Self::Verified(verified) => Some(verified),
            Self::Admin | Self::Bearer | Self::Open => None,
        }
    }
}

/// Whether a caller may know of the projects of a repository, given as it is
/// normalised. The one place where that is decided.
pub(super) fn may_see(identity: &Identity, repo: &str) -> bool {
    match identity {
        Identity::Verified(verified) => verified.repo.as_str() == repo,
        // These may route builds of every repository.
        Identity::Admin | Identity::Bearer | Identity::Open => true,
    }
}

/// Why a caller has no identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// Presented nothing.
    Anonymous,
    /// Presented a bearer token that is not, or no longer, accepted. It may
    /// still release a build whose id it knows.
    Unaccepted(Option<Refused>),
    /// Presented a wrong admin token, which no other credential makes good.
    WrongAdmin,
    /// Is who it says, but its repository may not build.
    NotAllowed(Refused),
    /// Nobody can tell yet. It may still release a build whose id it knows.
    Unavailable(Duration),
    /// Presented too many tokens to verify.
    TooMany(Duration),
}

impl Auth {
    /// Checks that somebody may call, and that no way in makes another useless.
    /// Blank tokens count as absent.
    ///
    /// # Errors
    /// See [`AuthError`].
    pub fn checked(mut self) -> Result<Self, AuthError> {
        self.token = self.token.filter(|token| !token.is_blank());
        self.admin_token = self.admin_token.filter(|token| !token.is_blank());
        let bearer = self.token.is_some() || self.token_dir.is_some();
        match (self.open, &self.issuers) {
            (true, Some(_)) => Err(AuthError::OpenDespiteProviders),
            (false, None) if !bearer && self.admin_token.is_none() => Err(AuthError::Nobody),
            _ => Ok(self),
        }
    }

    /// Shows what is counted of identity providers.
    pub fn register_metrics(&self, registry: &mut Registry) {
        self.issuers.as_ref().map_or_else(Metrics::default, |issuers| issuers.metrics().clone()).register(registry);
    }

    /// Keeps what is read from outside fresh: keys of providers, tokens of the folder.
    pub async fn keep_fresh(self, shutdown: CancellationToken) {
        let issuers = async {
            if let Some(issuers) = self.issuers {
                issuers.keep_fresh(shutdown.clone()).await;
            }
        };
        let tokens = async {
            if let Some(folder) = self.token_dir {
                folder.follow(shutdown.clone()).await;
            }
        };
        tokio::join!(issuers, tokens);
    }

    /// Whether callers may be bound to a repository by their token.
    pub(super) fn has_providers(&self) -> bool {
        self.issuers.is_some()
    }

    /// Whether anybody may call.
    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Tells who calls. `may_verify` is asked before the work of verifying a
    /// token, which anybody can cause.
    pub(super) async fn identify(
        &self,
        headers: &HeaderMap,
        may_verify: impl FnOnce() -> Result<(), Duration>,
    ) -> Result<Identity, Denied> {
        if let (Some(want), Some(presented)) = (&self.admin_token, headers.get(ADMIN_HEADER)) {
            return if want.matches(presented.as_bytes()) { Ok(Identity::Admin) } else { Err(Denied::WrongAdmin) };
        }
        let bearer = bearer(headers);
        let rejected = match self.verify(bearer, may_verify).await {
            Some(Ok(verified)) => return Ok(Identity::Verified(Arc::new(verified))),
            Some(Err(denied)) => Some(denied),
            None => None,
        };
        match bearer {
            Some(presented) if self.is_bearer(presented) => Ok(Identity::Bearer),
            _ if self.open => Ok(Identity::Open),
            Some(_) => Err(rejected.unwrap_or(Denied::Unaccepted(None))),
            None => Err(Denied::Anonymous),
        }
    }

    /// Nothing, when it is not for providers to say.
    async fn verify(
        &self,
        bearer: Option<&[u8]>,
        may_verify: impl FnOnce() -> Result<(), Duration>,
    ) -> Option<Result<Verified, Denied>> {
        let issuers = self.issuers.as_ref()?;
        let token = std::str::from_utf8(bearer?).ok().filter(|text| token::looks_like(text))?;
        if let Err(wait) = may_verify() {
            return Some(Err(Denied::TooMany(wait)));
        }
        Some(issuers.verify(token).await.map_err(|rejected| match rejected {
            Rejected::Refused(refused @ Refused::NotAllowed(_)) => Denied::NotAllowed(refused),
            Rejected::Refused(refused) => Denied::Unaccepted(Some(refused)),
            Rejected::Unavailable { retry_after } => Denied::Unavailable(retry_after),
        }))
    }

    fn is_bearer(&self, presented: &[u8]) -> bool {
        let fixed = self.token.as_ref().is_some_and(|token| token.matches(presented));
        let rotated = self.token_dir.as_ref().is_some_and(|folder| folder.matches(presented));
        fixed | rotated
    }
}

/// The token of `Authorization: Bearer …`, scheme in any case.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.as_bytes().split_at_checked("bearer ".len())?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    fn auth(token: &str, admin: &str, open: bool) -> Result<Auth, AuthError> {
        let (token, admin_token) = (Some(Secret::new(token)), Some(Secret::new(admin)));
        Auth { token, admin_token, open, ..Auth::default() }.checked()
    }

    async fn identify(auth: &Auth, pairs: &[(&'static str, &str)]) -> Result<Identity, Denied> {
        auth.identify(&headers(pairs), || Ok(())).await
    }

    #[tokio::test]
    async fn the_admin_header_comes_first_and_a_wrong_one_is_final() {
        let auth = auth("s3cret", "root", true).unwrap();
        let admin = "x-buildkit-operator-admin-token";
        let bearer = ("authorization", "Bearer s3cret");
        assert_eq!(identify(&auth, &[(admin, "root")]).await, Ok(Identity::Admin));
        assert_eq!(identify(&auth, &[(admin, "nope"), bearer]).await, Err(Denied::WrongAdmin));
        assert_eq!(identify(&auth, &[(admin, ""), bearer]).await, Err(Denied::WrongAdmin));
    }

    #[tokio::test]
    async fn the_admin_header_is_ignored_while_no_admin_token_is_set() {
        let auth = auth("s3cret", "", false).unwrap();
        let admin = ("x-buildkit-operator-admin-token", "");
        assert_eq!(identify(&auth, &[admin]).await, Err(Denied::Anonymous));
        assert_eq!(identify(&auth, &[admin, ("authorization", "Bearer s3cret")]).await, Ok(Identity::Bearer));
    }

    #[tokio::test]
    async fn bearer_tokens() {
        let auth = auth("s3cret\n", "", false).unwrap();
        for (value, want) in [
            ("Bearer s3cret", Ok(Identity::Bearer)),
            ("bEARER   s3cret ", Ok(Identity::Bearer)),
            ("Bearer s3cre", Err(Denied::Unaccepted(None))),
            ("Bearer s3crets", Err(Denied::Unaccepted(None))),
            ("Bearer ", Err(Denied::Anonymous)),
            ("Basic s3cret", Err(Denied::Anonymous)),
            ("s3cret", Err(Denied::Anonymous)),
            ("é", Err(Denied::Anonymous)),
        ] {
            assert_eq!(identify(&auth, &[("authorization", value)]).await, want, "{value:?}");
        }
    }

    #[tokio::test]
    async fn an_open_api_takes_anybody_but_still_tells_who_calls() {
        let auth = auth("s3cret", "", true).unwrap();
        assert_eq!(identify(&auth, &[]).await, Ok(Identity::Open));
        assert_eq!(identify(&auth, &[("authorization", "Bearer nope")]).await, Ok(Identity::Open));
        assert_eq!(identify(&auth, &[("authorization", "Bearer s3cret")]).await, Ok(Identity::Bearer));
    }

    #[test]
    fn an_api_that_nobody_may_call_is_refused() {
        assert_eq!(Auth::default().checked().unwrap_err(), AuthError::Nobody);
        assert_eq!(auth("", " \n", false).unwrap_err(), AuthError::Nobody);
        assert!(auth("", "", true).is_ok() && auth("", "root", false).is_ok());
    }

    #[test]
    fn a_secret_shows_in_no_debug_output() {
        let shown = format!("{:?}", auth("s3cret", "root", false).unwrap());
        assert!(!shown.contains("s3cret") && !shown.contains("root") && shown.contains("Secret(…)"), "{shown}");
    }
}
