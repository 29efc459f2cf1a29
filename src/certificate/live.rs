//! What a Secret in the cluster holds, read once into what the decisions need.

use std::collections::BTreeSet;
use std::net::IpAddr;

use jiff::Timestamp;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer as _;

use super::Usage;
use super::secret::{CA, CA_KEY, CERT, KEY, RETIRED, SecretData};

/// Names of the keys within a Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `ca.pem`, `cert.pem`, `key.pem`: ours and the reference's.
    Pem,
    /// `ca.crt`, `tls.crt`, `tls.key`: cert-manager's, never written by us.
    Tls,
}

/// What is known of the private key beside a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    /// There is none.
    Absent,
    /// It is not a private key that can be used here.
    Unreadable,
    /// It belongs to another certificate.
    Differs,
    /// It is the certificate's.
    Matches,
}

/// A certificate as it is in the cluster, with its key and whom it trusts.
#[derive(Clone, Debug)]
pub struct LiveCertificate {
    /// The certificate.
    pub der: CertificateDer<'static>,
    /// Certificates to trust; of an authority, itself first.
    pub trusted: Vec<CertificateDer<'static>>,
    /// Of an authority: certificates that nobody shall trust any more.
    pub retired: Vec<CertificateDer<'static>>,
    /// The key beside it.
    pub key: KeyState,
    /// How the Secret names its keys.
    pub layout: Layout,
    /// Subject, for example `CN=buildkitd`.
    pub subject: String,
    /// Issuer, likewise.
    pub issuer: String,
    /// DNS names that it covers, lower case.
    pub dns_names: BTreeSet<String>,
    /// Addresses that it covers.
    pub ip_addresses: BTreeSet<IpAddr>,
    /// What it may be used for.
    pub usages: BTreeSet<Usage>,
    /// First moment of its validity.
    pub not_before: Timestamp,
    /// Last moment of its validity.
    pub not_after: Timestamp,
    /// Whether it may sign others.
    pub is_authority: bool,
}

/// Why a Secret holds no certificate.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum Malformed {
    /// A key of the Secret is not there.
    #[error("key \"{0}\" is missing")]
    KeyMissing(&'static str),
    /// Not one certificate in PEM.
    #[error("key \"{0}\" holds no PEM certificate")]
    NoCertificate(&'static str),
    /// PEM, but no X.509 within.
    #[error("key \"{0}\" holds a certificate that cannot be parsed")]
    NotX509(&'static str),
}

impl LiveCertificate {
    /// Reads the Secret of an authority (`ca.pem`, and `ca-key.pem` if held).
    ///
    /// # Errors
    /// Says which key of the Secret is at fault.
    pub fn read_authority(data: &SecretData) -> Result<Self, Malformed> {
        let layout = layout(data, CA);
        let (cert, key) = if layout == Layout::Pem { (CA, CA_KEY) } else { ("tls.crt", "tls.key") };
        let live = Self::read(data, layout, cert, cert, key)?;
        let retired = if data.get(RETIRED).is_some() { certificates(data, RETIRED)? } else { Vec::new() };
        Ok(Self { retired, ..live })
    }

    /// Reads the Secret of a server or client certificate.
    ///
    /// # Errors
    /// Says which key of the Secret is at fault.
    pub fn read_leaf(data: &SecretData) -> Result<Self, Malformed> {
        let layout = layout(data, CERT);
        let (ca, cert, key) = if layout == Layout::Pem { (CA, CERT, KEY) } else { ("ca.crt", "tls.crt", "tls.key") };
        let live = Self::read(data, layout, ca, cert, key)?;
        if live.key == KeyState::Absent { Err(Malformed::KeyMissing(key)) } else { Ok(live) }
    }

    fn read(
        data: &SecretData,
        layout: Layout,
        ca: &'static str,
        cert: &'static str,
        key: &'static str,
    ) -> Result<Self, Malformed> {
        let trusted = certificates(data, ca)?;
        let der = certificates(data, cert)?.swap_remove(0);
        let x509 = parse(&der).ok_or(Malformed::NotX509(cert))?;
        if trusted.iter().any(|c| parse(c).is_none()) {
            return Err(Malformed::NotX509(ca));
        }
        let (dns_names, ip_addresses) = names(&x509);
        let validity = x509.validity();
        let usage = x509.extended_key_usage().ok().flatten().map(|extension| extension.value);
        let usages = [
            (Usage::ServerAuth, usage.is_some_and(|u| u.any || u.server_auth)),
            (Usage::ClientAuth, usage.is_some_and(|u| u.any || u.client_auth)),
        ];
        Ok(Self {
            key: key_state(data.get(key), &x509),
            layout,
            subject: x509.subject().to_string(),
            issuer: x509.issuer().to_string(),
            dns_names,
            ip_addresses,
            usages: usages.into_iter().filter_map(|(usage, allowed)| allowed.then_some(usage)).collect(),
            not_before: timestamp(validity.not_before.timestamp()),
            not_after: timestamp(validity.not_after.timestamp()),
            is_authority: x509.is_ca(),
            trusted,
            retired: Vec::new(),
            der: der.clone(),
        })
    }

    /// Whether `authority` signed this certificate: by name and by signature.
    pub fn is_signed_by(&self, authority: &CertificateDer<'_>) -> bool {
        let (Some(own), Some(issuer)) = (parse(&self.der), parse(authority)) else { return false };
        own.issuer().as_raw() == issuer.subject().as_raw() && own.verify_signature(Some(issuer.public_key())).is_ok()
    }

    /// Whether it covers a DNS name, itself or by a wildcard of its parent.
    pub fn covers(&self, name: &str) -> bool {
        let wildcard = name.split_once('.').map(|(_, parent)| format!("*.{parent}"));
        self.dns_names.contains(name) || wildcard.is_some_and(|name| self.dns_names.contains(&name))
    }

    /// Whole days until it ends, negative when that is past.
    pub fn days_left(&self, now: Timestamp) -> i64 {
        (self.not_after.as_second() - now.as_second()).div_euclid(86_400)
    }
}

/// `Tls` only where cert-manager's names are there and ours are not.
fn layout(data: &SecretData, ours: &str) -> Layout {
    if data.get(ours).is_none() && data.get("tls.crt").is_some() { Layout::Tls } else { Layout::Pem }
}

fn certificates(data: &SecretData, key: &'static str) -> Result<Vec<CertificateDer<'static>>, Malformed> {
    let pem = data.get(key).ok_or(Malformed::KeyMissing(key))?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    all.ok().filter(|found| !found.is_empty()).ok_or(Malformed::NoCertificate(key))
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    X509Certificate::from_der(der).ok().map(|(_, certificate)| certificate)
}

fn key_state(pem: Option<&[u8]>, certificate: &X509Certificate<'_>) -> KeyState {
    let Some(pem) = pem else { return KeyState::Absent };
    let key = PrivateKeyDer::from_pem_slice(pem).ok().and_then(|key| any_supported_type(&key).ok());
    match key.as_ref().and_then(|key| key.public_key()) {
        None => KeyState::Unreadable,
        Some(public) if public.as_ref() == certificate.public_key().raw => KeyState::Matches,
        Some(_) => KeyState::Differs,
    }
}

fn names(certificate: &X509Certificate<'_>) -> (BTreeSet<String>, BTreeSet<IpAddr>) {
    let (mut dns, mut ips) = (BTreeSet::new(), BTreeSet::new());
    let extension = certificate.subject_alternative_name().ok().flatten();
    for name in extension.iter().flat_map(|extension| &extension.value.general_names) {
        match name {
            GeneralName::DNSName(name) => {
                dns.insert(name.to_ascii_lowercase());
            }
            GeneralName::IPAddress(bytes) => {
                let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
                ips.extend(v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from)));
            }
            _ => {}
        }
    }
    (dns, ips)
}

/// X.509 reaches beyond what a timestamp holds only in year 9999.
fn timestamp(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}
