//! What to do about a certificate: pure functions of what is wanted, what
//! lives, and the time.

use std::fmt;

use jiff::{SignedDuration, Timestamp};

use super::live::{KeyState, Layout, LiveCertificate, Malformed};
use super::{CertificateSpec, Role, Usage};

/// What to do about one certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is as wanted: its Secret stays byte for byte.
    Keep,
    /// Make it, key included.
    Issue(Reason),
    /// Make its successor: a leaf with a new key, an authority with the same
    /// key and subject, so that everything it signed stays valid.
    Renew(Reason),
    /// It is somebody else's: never written. What is wrong with it, if anything.
    Provided(Vec<Reason>),
    /// It has to be made, and nothing here can sign it.
    Blocked(Reason),
}

/// Why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// There is no Secret.
    Missing,
    /// The Secret holds no certificate.
    Malformed(Malformed),
    /// The private key cannot be used.
    KeyUnreadable,
    /// The private key belongs to another certificate.
    KeyDiffers,
    /// The Secret holds no private key of the authority.
    KeyAbsent,
    /// An authority that may not sign.
    NotAuthority,
    /// Its end is past.
    Expired(Timestamp),
    /// Its end is within the renewal window.
    Expiring(Timestamp),
    /// Its validity has not begun.
    NotYetValid(Timestamp),
    /// Names or addresses that it must cover and does not.
    NamesMissing(Vec<String>),
    /// It may not be used as it must.
    UsageMissing(Usage),
    /// Another authority signed it.
    OtherAuthority,
    /// It does not carry the authority's present certificates.
    AuthorityChanged,
    /// It carries a certificate of the authority that nobody shall trust any more.
    AuthorityRetired,
}

/// Who can sign.
#[derive(Clone, Copy, Debug)]
pub enum Authority<'a> {
    /// We hold the key of this certificate.
    Held(&'a LiveCertificate),
    /// We hold no usable key.
    NotHeld,
}

/// Decides about an authority. `adopted`: certificates of it are in use, so
/// that a new authority would break those who trust them.
pub fn decide_authority(
    spec: &CertificateSpec,
    live: Option<&Result<LiveCertificate, Malformed>>,
    adopted: bool,
    now: Timestamp,
) -> Decision {
    let live = match live {
        None if adopted => return Decision::Provided(Vec::new()),
        None => return Decision::Issue(Reason::Missing),
        Some(Err(why)) if adopted => return Decision::Provided(vec![Reason::Malformed(why.clone())]),
        Some(Err(why)) => return Decision::Issue(Reason::Malformed(why.clone())),
        Some(Ok(live)) => live,
    };
    let mut faults = Vec::new();
    faults.extend(key_fault(live));
    faults.extend((!live.is_authority).then_some(Reason::NotAuthority));
    let aging = age(live, spec, now);
    let ours = faults.is_empty() && live.layout == Layout::Pem && is_own_work(spec, live);
    match aging {
        Some(why @ (Reason::Expired(_) | Reason::Expiring(_))) if ours => Decision::Renew(why),
        None if faults.is_empty() && live.layout == Layout::Pem => Decision::Keep,
        aging => {
            // That its key is elsewhere is what `Provided` means, no fault.
            faults.retain(|why| *why != Reason::KeyAbsent);
            faults.extend(aging);
            Decision::Provided(faults)
        }
    }
}

/// Decides about a server or client certificate.
pub fn decide_leaf(
    spec: &CertificateSpec,
    live: Option<&Result<LiveCertificate, Malformed>>,
    authority: Authority<'_>,
    now: Timestamp,
) -> Decision {
    let make = |why| match authority {
        Authority::Held(_) => Decision::Issue(why),
        Authority::NotHeld => Decision::Blocked(why),
    };
    let live = match live {
        None => return make(Reason::Missing),
        Some(Err(why)) => return make(Reason::Malformed(why.clone())),
        Some(Ok(live)) => live,
    };
    let authority = match authority {
        Authority::Held(authority) if live.layout == Layout::Pem => authority,
        _ => return Decision::Provided(provided_faults(spec, live, now)),
    };
    if let Some(why) = key_fault(live) {
        return Decision::Issue(why);
    }
    if !live.is_signed_by(&authority.der) {
        return Decision::Issue(Reason::OtherAuthority);
    }
    match age(live, spec, now) {
        // Nothing is gained by signing anew what the authority itself cuts short.
        Some(Reason::Expiring(_)) if live.not_after >= authority.not_after => {}
        Some(why @ Reason::Expiring(_)) => return Decision::Renew(why),
        Some(why) => return Decision::Issue(why),
        None => {}
    }
    if let Some(why) = gap(spec, live) {
        return Decision::Issue(why);
    }
    if authority.trusted.iter().any(|certificate| !live.trusted.contains(certificate)) {
        return Decision::Renew(Reason::AuthorityChanged);
    }
    if authority.retired.iter().any(|certificate| live.trusted.contains(certificate)) {
        return Decision::Renew(Reason::AuthorityRetired);
    }
    Decision::Keep
}

/// Everything that a person should know about a certificate that is not ours.
pub(super) fn provided_faults(spec: &CertificateSpec, live: &LiveCertificate, now: Timestamp) -> Vec<Reason> {
    let signed = live.trusted.iter().any(|authority| live.is_signed_by(authority));
    let mut faults = Vec::new();
    faults.extend(key_fault(live));
    faults.extend((!signed).then_some(Reason::OtherAuthority));
    faults.extend(age(live, spec, now));
    faults.extend(gap(spec, live));
    faults
}

fn key_fault(live: &LiveCertificate) -> Option<Reason> {
    match live.key {
        KeyState::Matches => None,
        KeyState::Absent => Some(Reason::KeyAbsent),
        KeyState::Unreadable => Some(Reason::KeyUnreadable),
        KeyState::Differs => Some(Reason::KeyDiffers),
    }
}

fn age(live: &LiveCertificate, spec: &CertificateSpec, now: Timestamp) -> Option<Reason> {
    let window = SignedDuration::try_from(spec.renew_before).unwrap_or(SignedDuration::MAX);
    if live.not_after <= now {
        Some(Reason::Expired(live.not_after))
    } else if live.not_before > now {
        Some(Reason::NotYetValid(live.not_before))
    } else if live.not_after.duration_since(now) <= window {
        Some(Reason::Expiring(live.not_after))
    } else {
        None
    }
}

fn gap(spec: &CertificateSpec, live: &LiveCertificate) -> Option<Reason> {
    let dns = spec.dns_names.iter().filter(|name| !live.covers(name)).cloned();
    let ips = spec.ip_addresses.iter().filter(|ip| !live.ip_addresses.contains(ip)).map(ToString::to_string);
    let missing: Vec<_> = dns.chain(ips).collect();
    if !missing.is_empty() {
        return Some(Reason::NamesMissing(missing));
    }
    let Role::Leaf { usages, .. } = &spec.role else { return None };
    usages.iter().find(|usage| !live.usages.contains(usage)).map(|usage| Reason::UsageMissing(*usage))
}

/// Whether an authority is one that this program made: only then may its
/// successor replace it. One that a person handed over stays as it is.
fn is_own_work(spec: &CertificateSpec, live: &LiveCertificate) -> bool {
    live.subject == format!("CN={}", spec.common_name) && live.is_signed_by(&live.der)
}

impl Decision {
    /// The decision in one word, for tables.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Issue(_) => "issue",
            Self::Renew(_) => "renew",
            Self::Provided(_) => "provided",
            Self::Blocked(_) => "blocked",
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        match self {
            Self::Keep => Ok(()),
            Self::Issue(why) | Self::Renew(why) | Self::Blocked(why) => write!(f, ": {why}"),
            Self::Provided(faults) => faults.iter().enumerate().try_for_each(|(i, why)| {
                let separator = if i == 0 { ": " } else { "; " };
                write!(f, "{separator}{why}")
            }),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there is no such Secret"),
            Self::Malformed(why) => write!(f, "{why}"),
            Self::KeyUnreadable => f.write_str("its private key cannot be used"),
            Self::KeyDiffers => f.write_str("its private key belongs to another certificate"),
            Self::KeyAbsent => f.write_str("its private key is not held here"),
            Self::NotAuthority => f.write_str("it may not sign certificates"),
            Self::Expired(at) => write!(f, "it expired at {at}"),
            Self::Expiring(at) => write!(f, "it expires at {at}"),
            Self::NotYetValid(at) => write!(f, "it is valid only from {at}"),
            Self::NamesMissing(names) => write!(f, "it does not cover {}", names.join(", ")),
            Self::UsageMissing(Usage::ServerAuth) => f.write_str("it may not identify a server"),
            Self::UsageMissing(Usage::ClientAuth) => f.write_str("it may not identify a client"),
            Self::OtherAuthority => f.write_str("another authority signed it"),
            Self::AuthorityChanged => f.write_str("it does not carry the authority's present certificate"),
            Self::AuthorityRetired => {
                f.write_str("it carries a certificate of the authority that is no longer trusted")
            }
        }
    }
}
