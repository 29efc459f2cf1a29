//! A new authority, without a moment in which somebody who is trusted is not:
//! first both are trusted and the old one signs, then the new one signs, then
//! the old one is trusted no more.
//!
//! The whole state is in the Secret of the authority, so that a stage begins
//! with one write. What follows from it for the others is decided as ever: each
//! run, and the server, brings them there.

use std::fmt;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use super::CertificateSpec;
use super::issue::{self, IssueError};
use super::live::{KeyState, Layout, LiveCertificate};
use super::secret::{CA, CA_KEY, NEXT, NEXT_KEY, RETIRED, SINCE, SecretData};

/// How far a rotation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// There is none.
    Idle,
    /// Both are trusted, and the old one signs.
    Trust {
        /// Since when.
        since: Timestamp,
    },
    /// Both are trusted, and the new one signs.
    Sign {
        /// Since when.
        since: Timestamp,
    },
    /// One authority is being taken out of what is trusted.
    Drop,
}

/// A step that cannot be taken.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum StepError {
    /// Nothing to go on with.
    #[error("no rotation has begun")]
    Idle,
    /// It has gone too far to be given up.
    #[error("the new authority signs already: the rotation can only go on")]
    TooLate,
}

/// How far a rotation of the authority in this Secret is.
pub fn stage(authority: &SecretData) -> Stage {
    let since = authority.get(SINCE).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
    let since = since.unwrap_or(Timestamp::UNIX_EPOCH);
    match (authority.get(NEXT), authority.get(RETIRED), authority.get(SINCE)) {
        (_, Some(_), _) => Stage::Drop,
        (Some(_), None, _) => Stage::Trust { since },
        (None, None, Some(_)) => Stage::Sign { since },
        (None, None, None) => Stage::Idle,
    }
}

/// Makes the successor and has it trusted. Idle → [`Stage::Trust`].
///
/// # Errors
/// The key of the authority is not held; a key cannot be made.
pub fn begin(spec: &CertificateSpec, authority: &SecretData, now: Timestamp) -> Result<SecretData, IssueError> {
    let refuse = |why: String| IssueError::NotRotatable { secret: spec.secret_path(), why };
    let live = LiveCertificate::read_authority(authority).map_err(|why| refuse(why.to_string()))?;
    if live.layout != Layout::Pem {
        return Err(refuse("cert-manager keeps it".to_owned()));
    }
    if live.key != KeyState::Matches {
        return Err(refuse("its private key is not held here".to_owned()));
    }
    let (certificate, key) = issue::successor(spec, now)?;
    let mut data = authority.clone();
    // The one that signs comes first.
    data.insert(CA, [authority.get(CA).unwrap_or_default(), &certificate].concat());
    data.insert(NEXT, certificate);
    data.insert(NEXT_KEY, key);
    data.insert(SINCE, now.to_string());
    Ok(data)
}

/// The next stage: [`Stage::Trust`] → [`Stage::Sign`] → [`Stage::Drop`] → idle.
///
/// # Errors
/// No rotation has begun.
pub fn go_on(authority: &SecretData, now: Timestamp) -> Result<SecretData, StepError> {
    let mut data = authority.clone();
    match stage(authority) {
        Stage::Idle => return Err(StepError::Idle),
        Stage::Trust { .. } => {
            let next = data.remove(NEXT).unwrap_or_default();
            let key = data.remove(NEXT_KEY).unwrap_or_default();
            let old = without(authority.get(CA).unwrap_or_default(), &next);
            data.insert(CA, [next, old].concat());
            data.insert(CA_KEY, key);
            data.insert(SINCE, now.to_string());
        }
        Stage::Sign { .. } => {
            let all = authority.get(CA).unwrap_or_default();
            let old = without_first(all);
            data.insert(CA, without(all, &old));
            data.insert(RETIRED, old);
            data.remove(SINCE);
        }
        Stage::Drop => drop(data.remove(RETIRED)),
    }
    Ok(data)
}

/// Gives up before the new authority signs: [`Stage::Trust`] → [`Stage::Drop`].
///
/// # Errors
/// There is no rotation, or it is too late.
pub fn abort(authority: &SecretData) -> Result<SecretData, StepError> {
    match stage(authority) {
        Stage::Idle => Err(StepError::Idle),
        Stage::Sign { .. } | Stage::Drop => Err(StepError::TooLate),
        Stage::Trust { .. } => {
            let mut data = authority.clone();
            let next = data.remove(NEXT).unwrap_or_default();
            data.remove(NEXT_KEY);
            data.remove(SINCE);
            data.insert(CA, without(authority.get(CA).unwrap_or_default(), &next));
            data.insert(RETIRED, next);
            Ok(data)
        }
    }
}

/// Certificates but for the first.
pub(super) fn without_first(pem: &[u8]) -> Vec<u8> {
    write(certificates(pem).iter().skip(1))
}

/// Certificates but for others.
fn without(pem: &[u8], others: &[u8]) -> Vec<u8> {
    let others = certificates(others);
    write(certificates(pem).iter().filter(|certificate| !others.contains(certificate)))
}

fn certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect()
}

fn write<'c>(certificates: impl Iterator<Item = &'c CertificateDer<'static>>) -> Vec<u8> {
    use base64::Engine as _;
    let mut pem = String::new();
    for certificate in certificates {
        let text = base64::engine::general_purpose::STANDARD.encode(certificate);
        pem.push_str("-----BEGIN CERTIFICATE-----\n");
        for line in text.as_bytes().chunks(64) {
            pem.push_str(&String::from_utf8_lossy(line));
            pem.push('\n');
        }
        pem.push_str("-----END CERTIFICATE-----\n");
    }
    pem.into_bytes()
}

impl Stage {
    /// Since when, of a stage that is waited in.
    pub fn since(self) -> Option<Timestamp> {
        match self {
            Self::Trust { since } | Self::Sign { since } => Some(since),
            Self::Idle | Self::Drop => None,
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.write_str("no rotation"),
            Self::Trust { since } => {
                write!(f, "stage 1 of 3 since {since}: both authorities are trusted, the old one signs")
            }
            Self::Sign { since } => {
                write!(f, "stage 2 of 3 since {since}: both authorities are trusted, the new one signs")
            }
            Self::Drop => f.write_str("stage 3 of 3: one authority is being taken out of what is trusted"),
        }
    }
}
