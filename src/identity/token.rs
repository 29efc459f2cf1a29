//! What a token looks like, before anything of it is believed. Pure; no IO.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::Refused;
use super::claims::Claims;

/// Largest token, in bytes; those of the known providers have about two thousand.
pub const MAX_TOKEN: usize = 16 << 10;

/// A token in its parts. Nothing of it is verified.
#[derive(Debug)]
pub struct Token<'a> {
    text: &'a str,
    algorithm: String,
    key_id: Option<String>,
    claims: Claims,
}

/// Whether a credential wants to be a token: two dots, as no shared token of
/// hex digits has.
pub fn looks_like(credential: &str) -> bool {
    credential.bytes().filter(|b| *b == b'.').count() == 2
}

impl<'a> Token<'a> {
    /// Takes a token apart.
    ///
    /// # Errors
    /// [`Refused::Malformed`], also for what is well formed but asks for
    /// something that we do not do: critical extensions, another type.
    pub fn parse(text: &'a str) -> Result<Self, Refused> {
        if text.len() > MAX_TOKEN {
            return Err(Refused::Malformed("more than 16 KiB"));
        }
        let mut parts = text.split('.');
        let (Some(header), Some(claims), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(Refused::Malformed("not three parts"));
        };
        let header = object(header).ok_or(Refused::Malformed("its header is no JSON object of distinct names"))?;
        let claims = object(claims).ok_or(Refused::Malformed("its claims are no JSON object of distinct names"))?;
        if signature.is_empty() || URL_SAFE_NO_PAD.decode(signature).is_err() {
            return Err(Refused::Malformed("its signature is no base64url"));
        }
        // `jku`, `jwk`, `x5u` and `x5c` bring keys along: they are not looked at.
        if header.get("crit").is_some() || header.get("b64").is_some() {
            return Err(Refused::Malformed("it needs extensions that are not supported"));
        }
        let kind = header.get("typ").map(|kind| kind.as_str().unwrap_or_default());
        if !kind.is_none_or(|kind| kind.eq_ignore_ascii_case("JWT")) {
            return Err(Refused::Malformed("its type is not JWT"));
        }
        let algorithm = header.text("alg").ok_or(Refused::Malformed("it names no algorithm"))?.to_owned();
        let key_id = match header.get("kid") {
            None => None,
            Some(id) => Some(id.as_str().ok_or(Refused::Malformed("its key id is no text"))?.to_owned()),
        };
        Ok(Self { text, algorithm, key_id, claims })
    }

    /// As it was sent.
    pub(super) fn text(&self) -> &str {
        self.text
    }

    /// The algorithm that it says it is signed with.
    pub(super) fn algorithm(&self) -> &str {
        &self.algorithm
    }

    /// The key that it says it is signed by.
    pub(super) fn key_id(&self) -> Option<&str> {
        self.key_id.as_deref()
    }

    /// What it claims.
    pub(super) fn claims(&self) -> &Claims {
        &self.claims
    }

    /// The issuer that it claims: good for choosing whose keys to try, and for
    /// nothing else.
    pub fn unverified_issuer(&self) -> Option<&str> {
        self.claims.text("iss")
    }
}

fn object(part: &str) -> Option<Claims> {
    Claims::parse(&URL_SAFE_NO_PAD.decode(part).ok()?)
}
