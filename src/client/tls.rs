//! Whom the client trusts, and who it is.

use std::sync::Arc;

use jiff::Timestamp;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};

use super::certificates::Certificates;

/// Why no connection can be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// No certificate within the PEM.
    #[error("the {0} holds no certificate that can be used")]
    NoCertificate(&'static str),
    /// No key within the PEM, or one that does not belong to the certificate.
    #[error("the client's key cannot be used, or does not belong to its certificate")]
    Key(#[source] rustls::Error),
    /// No key within the PEM.
    #[error("the client's key holds no private key")]
    NoKey,
    /// Its time has passed.
    #[error("the client's certificate has expired on {0}")]
    Expired(Timestamp),
    /// The library refuses.
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
}

fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, TlsError> {
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Setup)
}

/// Trusts what the system trusts, or, where it has nothing, what Mozilla does;
/// and the authority of the farm.
///
/// # Errors
/// The authority is none.
pub fn api_trust(authority: Option<&[u8]>) -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        roots.add_parsable_certificates(webpki_root_certs::TLS_SERVER_ROOT_CERTS.iter().cloned());
    }
    if let Some(pem) = authority {
        add(&mut roots, pem)?;
    }
    let mut config = builder()?.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Looks whether a daemon could take the certificate.
///
/// # Errors
/// Says why not.
pub fn check(certificates: &Certificates, now: Timestamp) -> Result<(), TlsError> {
    daemon_trust(certificates)?;
    let chain = parse(&certificates.cert);
    let parsed = chain.first().and_then(|der| x509_parser::parse_x509_certificate(der).ok());
    let (_, certificate) = parsed.ok_or(TlsError::NoCertificate("client's certificate"))?;
    match Timestamp::from_second(certificate.validity().not_after.timestamp()) {
        Ok(end) if end < now => Err(TlsError::Expired(end)),
        _ => Ok(()),
    }
}

/// Looks whether the three, in PEM, can be used together, whatever the time.
///
/// # Errors
/// Says why not.
pub fn check_pair(ca: &[u8], cert: &[u8], key: &[u8]) -> Result<(), TlsError> {
    trust(ca, cert, key).map(drop)
}

/// Trusts the farm alone, and is the client.
pub(super) fn daemon_trust(certificates: &Certificates) -> Result<Arc<ClientConfig>, TlsError> {
    trust(&certificates.ca, &certificates.cert, &certificates.key)
}

fn trust(ca: &[u8], cert: &[u8], key: &[u8]) -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = RootCertStore::empty();
    add(&mut roots, ca)?;
    let chain: Vec<_> = parse(cert);
    if chain.is_empty() {
        return Err(TlsError::NoCertificate("client's certificate"));
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsError::NoKey)?;
    let mut config =
        builder()?.with_root_certificates(roots).with_client_auth_cert(chain, key).map_err(TlsError::Key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

fn add(roots: &mut RootCertStore, pem: &[u8]) -> Result<(), TlsError> {
    match roots.add_parsable_certificates(parse(pem)) {
        (0, _) => Err(TlsError::NoCertificate("CA")),
        _ => Ok(()),
    }
}

fn parse(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect()
}
