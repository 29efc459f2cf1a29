//! Verified identities of CI providers: (token, configuration, keys, now) →
//! [`Verified`] or [`Refused`].
//!
//! A provider's job token (OpenID Connect) says which repository a job works
//! for, and whether its code has been reviewed. Nothing of a token is believed
//! before its signature is, except which issuer's keys to try. Pure; no IO:
//! keys and time are arguments.

pub mod allowlist;
pub mod authorities;
pub mod claims;
pub mod config;
pub mod keys;
pub mod provider;
mod signature;
pub mod token;
pub mod url;

use std::num::NonZeroU32;

use jsonwebtoken::{Validation, decode};
use serde_json::{Map, Value};

use crate::key::{ProjectKey, Repo};
use config::Config;
use keys::KeySet;
use provider::Provider;
use token::Token;

/// How far a provider's clock may be from ours, in seconds.
pub const LEEWAY: i64 = 60;

/// Who a job is, on its provider's word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The provider's type, such as `github`.
    pub provider: String,
    /// The claim `sub`, for the audit log.
    pub subject: String,
    /// The repository that the job works for.
    pub repo: Repo,
    /// Whether its code may come from somebody who may not push.
    pub untrusted: bool,
    /// The pull or merge request that it works for, if the token names one.
    pub pull_request: Option<NonZeroU32>,
}

impl Verified {
    /// Whether it may have a say about the builds of a daemon of its own
    /// repository: unreviewed code only about forks, and not about those of
    /// another pull request.
    pub fn may_touch(&self, key: &ProjectKey) -> bool {
        if !self.untrusted {
            return true;
        }
        key.is_fork() && key.pull_request().is_none_or(|number| self.pull_request == Some(number))
    }
}

/// Why a token gives no identity. Neither Debug nor Display shows any of it,
/// except the repository of a token that was genuine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Not what a token looks like.
    #[error("malformed token: {0}")]
    Malformed(&'static str),
    /// No provider has this issuer.
    #[error("the token's issuer is not configured")]
    UnknownIssuer,
    /// The issuer's keys have none that fits.
    #[error("no key of the issuer fits the token's key id and algorithm")]
    UnknownKey,
    /// Not signed by that key.
    #[error("the token's signature is wrong")]
    Signature,
    /// For somebody else.
    #[error("the token's audience is another")]
    Audience,
    /// Its time has passed.
    #[error("the token has expired")]
    Expired,
    /// Its time has not come.
    #[error("the token is not valid yet")]
    TooEarly,
    /// Genuine, but it does not say what it must.
    #[error("the token's claim {0}")]
    Claim(String),
    /// Genuine, but its repository is not on the list.
    #[error("repository {0} is not on the allowlist")]
    NotAllowed(Repo),
}

impl Refused {
    /// As metrics and the audit log call it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "malformed",
            Self::UnknownIssuer => "unknown_issuer",
            Self::UnknownKey => "unknown_key",
            Self::Signature => "bad_signature",
            Self::Audience => "wrong_audience",
            Self::Expired => "expired",
            Self::TooEarly => "not_yet_valid",
            Self::Claim(_) => "bad_claim",
            Self::NotAllowed(_) => "not_allowed",
        }
    }
}

/// Verifies a token of one provider. `now` is in seconds since 1970.
///
/// # Errors
/// The first check that failed: key, signature, issuer, audience, time,
/// claims, allowlist.
pub fn verify(
    token: &Token<'_>,
    provider: &Provider,
    config: &Config,
    keys: &KeySet,
    now: i64,
) -> Result<Verified, Refused> {
    let key = keys.find(token.algorithm(), token.key_id())?;
    let mut checks = Validation::new(key.algorithm);
    // Time is checked below, against the `now` that was given.
    (checks.validate_exp, checks.validate_nbf) = (false, false);
    checks.set_required_spec_claims(&["iss", "aud"]);
    checks.set_issuer(&provider.issuer.spellings());
    checks.set_audience(&[&provider.audience]);
    decode::<Map<String, Value>>(token.text(), &key.key, &checks).map_err(|error| refusal(&error))?;
    in_time(token, now)?;
    let verified = provider.identity(token.claims(), config.trusted_events())?;
    if config.allowlist.allows(&verified.repo) { Ok(verified) } else { Err(Refused::NotAllowed(verified.repo)) }
}

fn refusal(error: &jsonwebtoken::errors::Error) -> Refused {
    use jsonwebtoken::errors::ErrorKind;
    match error.kind() {
        ErrorKind::InvalidAudience => Refused::Audience,
        ErrorKind::MissingRequiredClaim(claim) if claim == "aud" => Refused::Audience,
        ErrorKind::InvalidIssuer | ErrorKind::MissingRequiredClaim(_) => Refused::UnknownIssuer,
        ErrorKind::InvalidSignature => Refused::Signature,
        ErrorKind::InvalidAlgorithm | ErrorKind::InvalidAlgorithmName => Refused::UnknownKey,
        _ => Refused::Malformed("its parts are not what a token's are"),
    }
}

/// `exp` must be there; `nbf` and `iat` count if they are.
fn in_time(token: &Token<'_>, now: i64) -> Result<(), Refused> {
    let claims = token.claims();
    let expires = claims.seconds("exp")?.ok_or_else(|| Refused::Claim("exp is missing".to_owned()))?;
    if now >= expires.saturating_add(LEEWAY) {
        return Err(Refused::Expired);
    }
    for claim in ["nbf", "iat"] {
        if claims.seconds(claim)?.is_some_and(|from| from > now.saturating_add(LEEWAY)) {
            return Err(Refused::TooEarly);
        }
    }
    Ok(())
}
