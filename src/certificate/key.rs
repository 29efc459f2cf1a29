//! Private keys that sign certificates.

use std::sync::Arc;

use rcgen::SignatureAlgorithm;
use rustls::SignatureScheme;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{PrivateKeyDer, SubjectPublicKeyInfoDer};
use rustls::sign::SigningKey;
use x509_parser::prelude::FromDer as _;
use x509_parser::x509::SubjectPublicKeyInfo;

/// A private key in any encoding that rustls reads: an authority that was made
/// elsewhere may be RSA, and in PKCS#1 or SEC1, which rcgen does not read.
pub(super) struct Key {
    key: Arc<dyn SigningKey>,
    scheme: SignatureScheme,
    algorithm: &'static SignatureAlgorithm,
    /// The key's bits, without the algorithm around them.
    public: Vec<u8>,
}

const SCHEMES: [(SignatureScheme, &SignatureAlgorithm); 4] = [
    (SignatureScheme::ECDSA_NISTP256_SHA256, &rcgen::PKCS_ECDSA_P256_SHA256),
    (SignatureScheme::ECDSA_NISTP384_SHA384, &rcgen::PKCS_ECDSA_P384_SHA384),
    (SignatureScheme::ED25519, &rcgen::PKCS_ED25519),
    (SignatureScheme::RSA_PKCS1_SHA256, &rcgen::PKCS_RSA_SHA256),
];

impl Key {
    pub(super) fn from_pem(pem: &[u8]) -> Option<Self> {
        let key = any_supported_type(&PrivateKeyDer::from_pem_slice(pem).ok()?).ok()?;
        let (scheme, algorithm) = SCHEMES.into_iter().find(|(scheme, _)| key.choose_scheme(&[*scheme]).is_some())?;
        let public = public_bits(&key.public_key()?)?;
        Some(Self { scheme, algorithm, public, key })
    }
}

fn public_bits(info: &SubjectPublicKeyInfoDer<'_>) -> Option<Vec<u8>> {
    let (_, info) = SubjectPublicKeyInfo::from_der(info).ok()?;
    Some(info.subject_public_key.data.to_vec())
}

impl rcgen::PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signer = self.key.choose_scheme(&[self.scheme]).ok_or(rcgen::Error::RemoteKeyError)?;
        signer.sign(message).map_err(|_| rcgen::Error::RemoteKeyError)
    }
}
