//! The client certificate, from a folder or from variables, and the private
//! folder that holds what must be a file for the time of a build.
#![expect(clippy::disallowed_methods, reason = "reads the files that it is given")]

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tempfile::TempDir;

use super::platform;

/// Files of a certificate, by either way to name them.
const NAMES: [[&str; 3]; 2] = [["ca.pem", "cert.pem", "key.pem"], ["ca.crt", "tls.crt", "tls.key"]];

/// Where the certificate comes from.
#[derive(Clone)]
pub enum Given {
    /// A folder with `ca.pem`, `cert.pem`, `key.pem`, or `ca.crt`, `tls.crt`, `tls.key`.
    Folder(PathBuf),
    /// Each as PEM, as PEM in base64, or as the path of a file.
    Values {
        /// The authority of the daemons.
        ca: String,
        /// The client's certificate.
        cert: String,
        /// Its key.
        key: String,
    },
}

impl std::fmt::Debug for Given {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(path) => f.debug_tuple("Folder").field(path).finish(),
            Self::Values { .. } => f.write_str("Values(…)"),
        }
    }
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// No such folder.
    #[error("there is no folder \"{}\" with a client certificate", folder.display())]
    NoFolder {
        /// Which.
        folder: PathBuf,
    },
    /// No such file.
    #[error("\"{}\" holds no client certificate: want ca.pem, cert.pem and key.pem, or ca.crt, tls.crt and tls.key", folder.display())]
    Incomplete {
        /// Which folder.
        folder: PathBuf,
    },
    /// The file cannot be read.
    #[error("cannot read \"{}\"", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The value is nothing of the kind.
    #[error("the {what} is neither PEM, nor PEM in base64, nor the path of a file")]
    NotPem {
        /// `certificate`, for example.
        what: &'static str,
    },
    /// No private folder.
    #[error("cannot make a private folder for the time of the build")]
    Private(#[source] io::Error),
}

/// A folder that only its owner can enter, gone when dropped.
#[derive(Debug)]
pub struct Private(TempDir);

impl Private {
    /// Makes one.
    ///
    /// # Errors
    /// [`CertificatesError::Private`].
    pub fn new() -> Result<Self, CertificatesError> {
        let make = || {
            let folder = tempfile::Builder::new().prefix("bko-build-").tempdir()?;
            platform::make_private(folder.path())?;
            Ok(folder)
        };
        make().map(Self).map_err(CertificatesError::Private)
    }

    /// Where a file of this name is or would be.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file that only its owner can read.
    ///
    /// # Errors
    /// [`CertificatesError::Private`].
    pub fn write(&self, name: &str, content: &[u8]) -> Result<PathBuf, CertificatesError> {
        let write = || {
            // Made by the library with mode 0600, never opened when it is there.
            let mut file = tempfile::Builder::new().prefix(name).rand_bytes(0).tempfile_in(self.0.path())?;
            file.write_all(content)?;
            file.keep().map_err(|error| error.error).map(|(_, path)| path)
        };
        write().map_err(CertificatesError::Private)
    }
}

/// Where the three files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// The authority of the daemons.
    pub ca: PathBuf,
    /// The client's certificate.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// A client certificate in memory and in files.
pub struct Certificates {
    /// The authority of the daemons, PEM.
    pub ca: Vec<u8>,
    pub(super) cert: Vec<u8>,
    pub(super) key: Vec<u8>,
    /// The files; absolute.
    pub paths: Paths,
    /// Whether the files outlive the build.
    pub lasting: bool,
}

impl std::fmt::Debug for Certificates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Certificates").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl Certificates {
    /// Reads what is given; values are written to the private folder.
    ///
    /// # Errors
    /// Says what is missing or malformed.
    pub fn open(given: &Given, private: &Private) -> Result<Self, CertificatesError> {
        match given {
            Given::Folder(folder) => Self::folder(folder),
            Given::Values { ca, cert, key } => {
                let (ca, cert, key) = (pem("CA", ca)?, pem("certificate", cert)?, pem("key", key)?);
                let paths = Paths {
                    ca: private.write("ca.pem", &ca)?,
                    cert: private.write("cert.pem", &cert)?,
                    key: private.write("key.pem", &key)?,
                };
                Ok(Self { ca, cert, key, paths, lasting: false })
            }
        }
    }

    fn folder(folder: &Path) -> Result<Self, CertificatesError> {
        let paths = paths(folder)?;
        let read = |path: &Path| {
            std::fs::read(path).map_err(|source| CertificatesError::Read { path: path.to_owned(), source })
        };
        let (ca, cert, key) = (read(&paths.ca)?, read(&paths.cert)?, read(&paths.key)?);
        Ok(Self { ca, cert, key, paths, lasting: true })
    }
}

/// The authority in a folder, which needs no more than that.
///
/// # Errors
/// Says what is missing.
pub fn authority(folder: &Path) -> Result<Vec<u8>, CertificatesError> {
    let found = NAMES.map(|[ca, ..]| folder.join(ca)).into_iter().find(|path| path.is_file());
    let path = found.ok_or_else(|| incomplete(folder))?;
    std::fs::read(&path).map_err(|source| CertificatesError::Read { path, source })
}

fn incomplete(folder: &Path) -> CertificatesError {
    let folder = folder.to_owned();
    if folder.is_dir() { CertificatesError::Incomplete { folder } } else { CertificatesError::NoFolder { folder } }
}

/// The files of a folder, by either way to name them.
fn paths(folder: &Path) -> Result<Paths, CertificatesError> {
    let whole =
        std::path::absolute(folder).map_err(|source| CertificatesError::Read { path: folder.to_owned(), source })?;
    let found = NAMES.iter().find(|names| names.iter().all(|name| whole.join(name).is_file()));
    let [ca, cert, key] = found.ok_or_else(|| incomplete(folder))?;
    Ok(Paths { ca: whole.join(ca), cert: whole.join(cert), key: whole.join(key) })
}

/// PEM, PEM in base64, or the path of a file that holds either: CI systems keep
/// files as variables, and variables as files.
///
/// # Errors
/// [`CertificatesError::NotPem`]; never with the value.
pub fn pem(what: &'static str, value: &str) -> Result<Vec<u8>, CertificatesError> {
    if let Some(pem) = decoded(value) {
        return Ok(pem);
    }
    let path = Path::new(value.trim());
    if value.len() < 4096 && path.is_file() {
        let text = std::fs::read_to_string(path)
            .map_err(|source| CertificatesError::Read { path: path.to_owned(), source })?;
        return decoded(&text).ok_or(CertificatesError::NotPem { what });
    }
    Err(CertificatesError::NotPem { what })
}

const BEGIN: &str = "-----BEGIN ";

fn decoded(value: &str) -> Option<Vec<u8>> {
    if value.contains(BEGIN) {
        // Some CI systems keep a value of several lines in one.
        let lines = if value.trim().contains('\n') { value.to_owned() } else { value.replace("\\n", "\n") };
        return Some(format!("{}\n", lines.trim()).into_bytes());
    }
    let packed: String = value.split_whitespace().collect();
    let bytes = STANDARD.decode(packed).ok()?;
    std::str::from_utf8(&bytes).ok().filter(|text| text.contains(BEGIN))?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";

    #[test]
    fn pem_comes_in_every_way_that_a_variable_can_hold_it() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("file");
        std::fs::write(&file, PEM).unwrap();
        let packed = STANDARD.encode(PEM);
        let wrapped = format!("{}\n{}\n", &packed[..20], &packed[20..]);
        let one_line = PEM.trim().replace('\n', "\\n");
        for value in [PEM, &packed, &wrapped, &one_line, PEM.trim(), file.to_str().unwrap()] {
            assert_eq!(pem("CA", value).unwrap(), PEM.as_bytes(), "{value:?}");
        }
    }

    #[test]
    fn what_is_no_pem_is_named_but_not_shown() {
        for value in ["", "hunter2", "aHVudGVyMg=="] {
            let error = pem("key", value).unwrap_err().to_string();
            assert!(error.starts_with("the key is neither PEM") && !error.contains("hunter2"), "{error}");
        }
        let given = Given::Values { ca: "x".into(), cert: "y".into(), key: "hunter2".into() };
        assert!(!format!("{given:?}").contains("hunter2"));
    }

    #[cfg(unix)]
    #[test]
    fn files_are_private_and_end_with_the_build() {
        use std::os::unix::fs::PermissionsExt as _;
        let private = Private::new().unwrap();
        let given = Given::Values { ca: PEM.into(), cert: PEM.into(), key: PEM.into() };
        let certificates = Certificates::open(&given, &private).unwrap();
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        let Paths { ca, cert, key } = certificates.paths.clone();
        assert_eq!([mode(&ca), mode(&cert), mode(&key)], [0o600; 3]);
        assert_eq!(mode(ca.parent().unwrap()), 0o700);
        assert!(!certificates.lasting);
        drop(private);
        assert!(!ca.exists() && !ca.parent().unwrap().exists());
    }

    #[test]
    fn a_folder_may_name_its_files_either_way_and_must_have_all() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path();
        std::fs::write(folder.join("ca.pem"), PEM).unwrap();
        assert!(matches!(Certificates::folder(folder), Err(CertificatesError::Incomplete { .. })));
        for name in NAMES[1] {
            std::fs::write(folder.join(name), PEM).unwrap();
        }
        assert_eq!(paths(folder).unwrap().key, folder.join("tls.key"));
        for name in NAMES[0] {
            std::fs::write(folder.join(name), PEM).unwrap();
        }
        let found = Certificates::folder(folder).unwrap();
        assert!(found.lasting && found.paths.key == folder.join("key.pem"));
    }
}
