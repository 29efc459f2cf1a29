//! TLS of a listener of ours: a certificate and its key in files, which are
//! read again when they change, so that a renewal needs no restart.
#![expect(clippy::disallowed_methods, reason = "shell: reads files")]

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// How often to look. A mounted Secret is swapped as a whole, by a link that no
/// watch of the files themselves would see.
const EVERY: Duration = Duration::from_secs(10);

/// Where a certificate lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The chain, the server's own certificate first, in PEM.
    pub certificate: PathBuf,
    /// Its private key, in PEM.
    pub key: PathBuf,
}

/// Why files make no certificate.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("read \"{}\"", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// No certificate is in it.
    #[error("\"{}\" has no certificate in PEM", .0.display())]
    NoCertificate(PathBuf),
    /// No key is in it.
    #[error("\"{}\" has no private key in PEM", .0.display())]
    NoKey(PathBuf),
    /// They do not belong together, or are of a kind that is not served.
    #[error("the certificate of \"{}\" and the key of \"{}\" do not serve", .0.certificate.display(), .0.key.display())]
    Pair(Files, #[source] rustls::Error),
}

/// A certificate that may be exchanged while it is served.
pub struct Certificate {
    files: Files,
    /// What the files were when they were last taken, and what they make; nothing
    /// while they are not there.
    current: RwLock<Option<(Pem, Arc<CertifiedKey>)>>,
}

#[derive(PartialEq, Eq)]
struct Pem {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Certificate {
    /// Reads the files. Those that are not there may come later: until then
    /// every handshake fails.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn read(files: Files) -> Result<Arc<Self>, TlsError> {
        let certificate = Self { files, current: RwLock::default() };
        match certificate.look() {
            Err(TlsError::Read(path, error)) if error.kind() == std::io::ErrorKind::NotFound => {
                tracing::warn!(file = %path.display(), "no certificate yet: nothing is served over TLS until it is there");
            }
            read => drop(read?),
        }
        Ok(Arc::new(certificate))
    }

    /// Shakes hands with it, for HTTP/1.1.
    ///
    /// # Errors
    /// Never with the provider that is built in.
    pub fn acceptor(self: &Arc<Self>) -> Result<TlsAcceptor, rustls::Error> {
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth();
        let mut config = config.with_cert_resolver(self.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    /// Follows the files until `shutdown`. What cannot be served leaves the old
    /// certificate in place, and is said once.
    pub async fn follow(self: Arc<Self>, shutdown: CancellationToken) {
        // What is missing from the start has been said.
        let mut complaint = self.look().err().map(|error| error.to_string());
        while shutdown.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
            match self.look() {
                Ok(changed) => {
                    if changed {
                        tracing::info!(file = %self.files.certificate.display(), "serving another certificate");
                    }
                    complaint = None;
                }
                Err(error) => {
                    let said = error.to_string();
                    if complaint.as_ref() != Some(&said) {
                        let cause = std::error::Error::source(&error).map(ToString::to_string);
                        tracing::error!(error = said, cause, "keeping the certificate as it was");
                        complaint = Some(said);
                    }
                }
            }
        }
    }

    /// Takes the files if they have changed.
    fn look(&self) -> Result<bool, TlsError> {
        let pem = Pem::read(&self.files)?;
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|(known, _)| *known == pem) {
            return Ok(false);
        }
        drop(current);
        let key = pem.parse(&self.files)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some((pem, key));
        Ok(true)
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().map(|(_, key)| key.clone())
    }
}

impl Pem {
    fn read(files: &Files) -> Result<Self, TlsError> {
        let read = |path: &PathBuf| std::fs::read(path).map_err(|error| TlsError::Read(path.clone(), error));
        Ok(Self { certificate: read(&files.certificate)?, key: read(&files.key)? })
    }

    fn parse(&self, files: &Files) -> Result<Arc<CertifiedKey>, TlsError> {
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&self.certificate).collect();
        let chain = chain.ok().filter(|chain| !chain.is_empty());
        let chain = chain.ok_or_else(|| TlsError::NoCertificate(files.certificate.clone()))?;
        let key = PrivateKeyDer::from_pem_slice(&self.key).map_err(|_| TlsError::NoKey(files.key.clone()))?;
        let pair = CertifiedKey::from_der(chain, key, &ring::default_provider());
        pair.map(Arc::new).map_err(|error| TlsError::Pair(files.clone(), error))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rcgen::{CertifiedKey as Generated, generate_simple_self_signed};

    use super::*;

    fn generated() -> (String, String) {
        let Generated { cert, signing_key } = generate_simple_self_signed(["api.test".to_owned()]).unwrap();
        (cert.pem(), signing_key.serialize_pem())
    }

    fn write(folder: &Path, certificate: &str, key: &str) -> Files {
        let files = Files { certificate: folder.join("cert.pem"), key: folder.join("key.pem") };
        std::fs::write(&files.certificate, certificate).unwrap();
        std::fs::write(&files.key, key).unwrap();
        files
    }

    fn served(certificate: &Certificate) -> CertificateDer<'static> {
        certificate.current.read().unwrap().as_ref().unwrap().1.cert[0].clone()
    }

    #[test]
    fn files_that_change_are_taken_and_those_that_do_not_serve_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let ((first, first_key), (second, second_key)) = (generated(), generated());
        let certificate = Certificate::read(write(folder.path(), &first, &first_key)).unwrap();
        let old = served(&certificate);
        assert!(!certificate.look().unwrap());
        write(folder.path(), &second, &first_key);
        let error = certificate.look().unwrap_err();
        assert!(matches!(error, TlsError::Pair(..)), "half a renewal: {error}");
        assert_eq!(served(&certificate), old);
        write(folder.path(), &second, &second_key);
        assert!(certificate.look().unwrap());
        assert_ne!(served(&certificate), old);
    }

    #[test]
    fn what_lacks_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = generated();
        for (chain, secret, fault) in [
            ("", &key, "cert.pem\" has no certificate in PEM"),
            (certificate.as_str(), &certificate, "key.pem\" has no private key in PEM"),
        ] {
            let error = Certificate::read(write(folder.path(), chain, secret)).unwrap_err().to_string();
            assert!(error.ends_with(fault), "{error}");
        }
        std::fs::remove_file(folder.path().join("key.pem")).unwrap();
        let files = Files { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") };
        let later = Certificate::read(files).unwrap();
        assert!(matches!(later.look(), Err(TlsError::Read(..))) && later.current.read().unwrap().is_none());
        write(folder.path(), &certificate, &key);
        assert!(later.look().unwrap(), "it may come later");
    }
}
