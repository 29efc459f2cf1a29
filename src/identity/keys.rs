//! The keys of one issuer. Pure; no IO.

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind};
use serde::Deserialize;
use serde_json::Value;

use super::Refused;
use super::signature::use_ring;

/// Most keys that a set may have.
const MAX_KEYS: usize = 100;

/// Least size of an RSA modulus, in bits.
const RSA_BITS: usize = 2048;

/// The keys that an issuer signs with. Never mixed with another's.
#[derive(Clone, Debug, Default)]
pub struct KeySet {
    keys: Vec<Key>,
    unusable: usize,
}

/// One public key, and the one algorithm that it is for.
#[derive(Clone, Debug)]
pub struct Key {
    id: Option<String>,
    pub(super) algorithm: Algorithm,
    pub(super) key: DecodingKey,
}

/// Why a document is no set of keys.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseKeys {
    /// No JSON of that shape.
    #[error("not a JSON object with a list \"keys\"")]
    Shape,
    /// More than anybody rotates through.
    #[error("{0} keys, want at most 100")]
    TooMany(usize),
}

impl KeySet {
    /// Reads a JWK set. Keys that we have no use for are left out: for
    /// encryption, symmetric, too weak, of an unknown kind.
    ///
    /// # Errors
    /// [`ParseKeys`] when it is no set at all.
    pub fn parse(json: &[u8]) -> Result<Self, ParseKeys> {
        #[derive(Deserialize)]
        struct Set {
            keys: Vec<Value>,
        }
        use_ring();
        let Set { keys: all } = serde_json::from_slice(json).map_err(|_| ParseKeys::Shape)?;
        if all.len() > MAX_KEYS {
            return Err(ParseKeys::TooMany(all.len()));
        }
        let found = all.len();
        let keys: Vec<Key> = all.into_iter().filter_map(Key::usable).collect();
        Ok(Self { unusable: found - keys.len(), keys })
    }

    /// How many keys can be used.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// How many keys were left out.
    pub fn unusable(&self) -> usize {
        self.unusable
    }

    /// The one key of that id for that algorithm. A token without a key id is
    /// of the one key that fits, if there is only one.
    pub(super) fn find(&self, algorithm: &str, id: Option<&str>) -> Result<&Key, Refused> {
        let algorithm: Algorithm = algorithm.parse().map_err(|_| Refused::UnknownKey)?;
        let fits = |key: &&Key| key.algorithm == algorithm && (id.is_none() || key.id.as_deref() == id);
        let mut fitting = self.keys.iter().filter(fits);
        match (fitting.next(), fitting.next()) {
            (Some(key), None) => Ok(key),
            _ => Err(Refused::UnknownKey),
        }
    }
}

impl Key {
    fn usable(value: Value) -> Option<Self> {
        let jwk: Jwk = serde_json::from_value(value).ok()?;
        let signs = jwk.common.public_key_use.as_ref().is_none_or(|it| *it == PublicKeyUse::Signature);
        let verifies = jwk.common.key_operations.as_ref().is_none_or(|all| all.contains(&KeyOperations::Verify));
        let algorithm = match jwk.common.key_algorithm {
            Some(named) => Algorithm::try_from(named).ok()?,
            None => customary(&jwk.algorithm)?,
        };
        let key = DecodingKey::from_jwk(&jwk).ok()?;
        let fits = key.family().algorithms().contains(&algorithm) && curve_fits(&jwk.algorithm, algorithm);
        (signs && verifies && fits && strong(&key)).then(|| Self { id: jwk.common.key_id, algorithm, key })
    }
}

/// The algorithm of a key that names none.
fn customary(parameters: &AlgorithmParameters) -> Option<Algorithm> {
    match parameters {
        AlgorithmParameters::RSA(_) => Some(Algorithm::RS256),
        AlgorithmParameters::EllipticCurve(point) if point.curve == EllipticCurve::P256 => Some(Algorithm::ES256),
        AlgorithmParameters::EllipticCurve(point) if point.curve == EllipticCurve::P384 => Some(Algorithm::ES384),
        AlgorithmParameters::OctetKeyPair(_) => Some(Algorithm::EdDSA),
        _ => None,
    }
}

fn curve_fits(parameters: &AlgorithmParameters, algorithm: Algorithm) -> bool {
    match parameters {
        AlgorithmParameters::RSA(_) => true,
        AlgorithmParameters::EllipticCurve(point) => match algorithm {
            Algorithm::ES256 => point.curve == EllipticCurve::P256,
            Algorithm::ES384 => point.curve == EllipticCurve::P384,
            _ => false,
        },
        AlgorithmParameters::OctetKeyPair(pair) => pair.curve == EllipticCurve::Ed25519,
        _ => false,
    }
}

fn strong(key: &DecodingKey) -> bool {
    match key.kind() {
        DecodingKeyKind::RsaModulusExponent { n, .. } => {
            let significant = n.iter().position(|byte| *byte != 0).map_or(&[][..], |first| &n[first..]);
            let leading = significant.first().map_or(0, |byte| byte.leading_zeros() as usize);
            significant.len() * 8 - leading >= RSA_BITS
        }
        DecodingKeyKind::SecretOrDer(_) => true,
    }
}
