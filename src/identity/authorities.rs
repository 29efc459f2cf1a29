//! Authorities in PEM. Pure; no IO.

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Why a text gives no authorities.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("want certificates in PEM, at least one, that can be used")]
pub struct NoAuthority;

/// Adds all of a text.
///
/// # Errors
/// When there is none, or one of them is broken.
pub fn add(roots: &mut RootCertStore, pem: &[u8]) -> Result<(), NoAuthority> {
    let mut found = false;
    for certificate in CertificateDer::pem_slice_iter(pem) {
        roots.add(certificate.map_err(|_| NoAuthority)?).map_err(|_| NoAuthority)?;
        found = true;
    }
    if found { Ok(()) } else { Err(NoAuthority) }
}

/// Checks a text as it stands among an installer's values.
///
/// # Errors
/// When there is none, or one of them is broken.
pub fn check(pem: &str) -> Result<(), NoAuthority> {
    add(&mut RootCertStore::empty(), pem.as_bytes())
}
