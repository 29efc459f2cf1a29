//! Who calls: admin header → bearer token → open. Pure; no IO.
//!
//! Verified identities of CI providers come between the first two.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use axum::http::{HeaderMap, HeaderName, header};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Carries the admin token.
pub(super) const ADMIN_HEADER: HeaderName = HeaderName::from_static("x-buildkit-operator-admin-token");

/// A token. Only its hash is kept, so that neither a log nor a memory dump
/// shows it, and so that comparing takes the same time for every length.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// White space around it, as editors and `echo` leave in a Secret, is not part of it.
    pub fn new(token: &str) -> Self {
        Self(Sha256::digest(token.trim()).into())
    }

    fn matches(&self, presented: &[u8]) -> bool {
        self.0.ct_eq(Sha256::digest(presented).as_slice()).into()
    }

    fn is_blank(&self) -> bool {
        self.matches(b"")
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
#[derive(Clone, Debug)]
pub struct Auth {
    token: Option<Secret>,
    admin_token: Option<Secret>,
    open: bool,
}

/// Neither a token nor the wish to be open: every call would be refused, or,
/// worse, none.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("nobody may call the routing API: neither a token nor an admin token is set, and it is not open")]
pub struct NobodyMayCall;

/// A caller that may call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Holds the admin token.
    Admin,
    /// Holds the shared bearer token.
    Bearer,
    /// Anybody, because the API is open.
    Open,
}

impl Identity {
    /// As the audit log calls it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Bearer => "bearer",
            Self::Open => "open",
        }
    }
}

/// Whether a caller may know of the projects of a repository, given as it is
/// normalised. The one place where that is decided.
pub(super) fn may_see(identity: Identity, _repo: &str) -> bool {
    match identity {
        // These may route builds of every repository.
        Identity::Admin | Identity::Bearer | Identity::Open => true,
    }
}

/// Why a caller has no identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    /// Presented nothing.
    Anonymous,
    /// Presented a bearer token that is not, or no longer, accepted. It may
    /// still release a build whose id it knows.
    Unaccepted,
    /// Presented a wrong admin token, which no other credential makes good.
    WrongAdmin,
}

impl Auth {
    /// Blank tokens count as absent.
    ///
    /// # Errors
    /// [`NobodyMayCall`] when nothing is configured and `open` is not asked for.
    pub fn new(token: Option<Secret>, admin_token: Option<Secret>, open: bool) -> Result<Self, NobodyMayCall> {
        let auth =
            Self { token: token.filter(|t| !t.is_blank()), admin_token: admin_token.filter(|t| !t.is_blank()), open };
        if auth.token.is_none() && auth.admin_token.is_none() && !open { Err(NobodyMayCall) } else { Ok(auth) }
    }

    /// Whether anybody may call.
    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Tells who calls.
    pub(super) fn identify(&self, headers: &HeaderMap) -> Result<Identity, Denied> {
        if let (Some(want), Some(presented)) = (&self.admin_token, headers.get(ADMIN_HEADER)) {
            return if want.matches(presented.as_bytes()) { Ok(Identity::Admin) } else { Err(Denied::WrongAdmin) };
        }
        let bearer = bearer(headers);
        match (&self.token, bearer) {
            (Some(want), Some(presented)) if want.matches(presented) => Ok(Identity::Bearer),
            _ if self.open => Ok(Identity::Open),
            (_, Some(_)) => Err(Denied::Unaccepted),
            (_, None) => Err(Denied::Anonymous),
        }
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

    fn auth(token: &str, admin: &str, open: bool) -> Result<Auth, NobodyMayCall> {
        Auth::new(Some(Secret::new(token)), Some(Secret::new(admin)), open)
    }

    #[test]
    fn the_admin_header_comes_first_and_a_wrong_one_is_final() {
        let auth = auth("s3cret", "root", true).unwrap();
        let admin = "x-buildkit-operator-admin-token";
        let bearer = ("authorization", "Bearer s3cret");
        assert_eq!(auth.identify(&headers(&[(admin, "root")])), Ok(Identity::Admin));
        assert_eq!(auth.identify(&headers(&[(admin, "nope"), bearer])), Err(Denied::WrongAdmin));
        assert_eq!(auth.identify(&headers(&[(admin, ""), bearer])), Err(Denied::WrongAdmin));
    }

    #[test]
    fn the_admin_header_is_ignored_while_no_admin_token_is_set() {
        let auth = auth("s3cret", "", false).unwrap();
        let admin = ("x-buildkit-operator-admin-token", "");
        assert_eq!(auth.identify(&headers(&[admin])), Err(Denied::Anonymous));
        assert_eq!(auth.identify(&headers(&[admin, ("authorization", "Bearer s3cret")])), Ok(Identity::Bearer));
    }

    #[test]
    fn bearer_tokens() {
        let auth = auth("s3cret\n", "", false).unwrap();
        for (value, want) in [
            ("Bearer s3cret", Ok(Identity::Bearer)),
            ("bEARER   s3cret ", Ok(Identity::Bearer)),
            ("Bearer s3cre", Err(Denied::Unaccepted)),
            ("Bearer s3crets", Err(Denied::Unaccepted)),
            ("Bearer ", Err(Denied::Anonymous)),
            ("Basic s3cret", Err(Denied::Anonymous)),
            ("s3cret", Err(Denied::Anonymous)),
            ("é", Err(Denied::Anonymous)),
        ] {
            assert_eq!(auth.identify(&headers(&[("authorization", value)])), want, "{value:?}");
        }
    }

    #[test]
    fn an_open_api_takes_anybody_but_still_tells_who_calls() {
        let auth = auth("s3cret", "", true).unwrap();
        assert_eq!(auth.identify(&headers(&[])), Ok(Identity::Open));
        assert_eq!(auth.identify(&headers(&[("authorization", "Bearer nope")])), Ok(Identity::Open));
        assert_eq!(auth.identify(&headers(&[("authorization", "Bearer s3cret")])), Ok(Identity::Bearer));
    }

    #[test]
    fn an_api_that_nobody_may_call_is_refused() {
        assert_eq!(Auth::new(None, None, false).unwrap_err(), NobodyMayCall);
        assert_eq!(auth("", " \n", false).unwrap_err(), NobodyMayCall);
        assert!(auth("", "", true).is_ok() && auth("", "root", false).is_ok());
    }

    #[test]
    fn a_secret_shows_in_no_debug_output() {
        let shown = format!("{:?}", auth("s3cret", "root", false).unwrap());
        assert!(!shown.contains("s3cret") && !shown.contains("root") && shown.contains("Secret(…)"), "{shown}");
    }
}
