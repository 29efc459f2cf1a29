//! Signatures, checked by ring: the one crypto provider of this program.
//! Pure; no IO.

use jsonwebtoken::crypto::{CryptoProvider, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{Error, ErrorKind};
use jsonwebtoken::signature::{self, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use ring::signature as ring_signature;
use ring::signature::{RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm};

static RING: CryptoProvider = CryptoProvider {
    signer_factory: |_, _| Err(ErrorKind::UnsupportedAlgorithm.into()),
    verifier_factory: verifier,
    key_utils: KeyUtils::new_unimplemented(),
};

/// Makes ring what checks signatures; at the first call, for the process.
pub(super) fn use_ring() {
    // An error says that it has been done.
    let _ = RING.install_default();
}

/// HMAC is none: whoever may check such a signature may also make it.
fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>, Error> {
    if asymmetric(*algorithm).is_none() || !key.family().algorithms().contains(algorithm) {
        return Err(ErrorKind::InvalidAlgorithm.into());
    }
    Ok(Box::new(Ring { algorithm: *algorithm, key: key.clone() }))
}

enum Check {
    Rsa(&'static ring_signature::RsaParameters),
    Curve(&'static dyn VerificationAlgorithm),
}

fn asymmetric(algorithm: Algorithm) -> Option<Check> {
    Some(match algorithm {
        Algorithm::RS256 => Check::Rsa(&ring_signature::RSA_PKCS1_2048_8192_SHA256),
        Algorithm::RS384 => Check::Rsa(&ring_signature::RSA_PKCS1_2048_8192_SHA384),
        Algorithm::RS512 => Check::Rsa(&ring_signature::RSA_PKCS1_2048_8192_SHA512),
        Algorithm::PS256 => Check::Rsa(&ring_signature::RSA_PSS_2048_8192_SHA256),
        Algorithm::PS384 => Check::Rsa(&ring_signature::RSA_PSS_2048_8192_SHA384),
        Algorithm::PS512 => Check::Rsa(&ring_signature::RSA_PSS_2048_8192_SHA512),
        Algorithm::ES256 => Check::Curve(&ring_signature::ECDSA_P256_SHA256_FIXED),
        Algorithm::ES384 => Check::Curve(&ring_signature::ECDSA_P384_SHA384_FIXED),
        Algorithm::EdDSA => Check::Curve(&ring_signature::ED25519),
        _ => return None,
    })
}

struct Ring {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl Verifier<Vec<u8>> for Ring {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> Result<(), signature::Error> {
        let checked = match (asymmetric(self.algorithm), self.key.kind()) {
            (Some(Check::Rsa(parameters)), DecodingKeyKind::RsaModulusExponent { n, e }) => {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature)
            }
            (Some(Check::Curve(algorithm)), DecodingKeyKind::SecretOrDer(point)) => {
                UnparsedPublicKey::new(algorithm, point).verify(message, signature)
            }
            _ => return Err(signature::Error::new()),
        };
        checked.map_err(|_| signature::Error::new())
    }
}

impl JwtVerifier for Ring {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}
