//! The farm's certificates in the state folder: an authority, the clients'
//! certificate, and one for each daemon. What to make, and when to renew, is
//! decided by [`crate::certificate`], as in a cluster.
#![expect(clippy::disallowed_methods, reason = "shell: reads and writes certificates")]

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;

use super::layout::Layout;
use crate::certificate::issue::{IssueError, LiveSecrets, materialise};
use crate::certificate::{CertificateSpec, Decision, LiveCertificate, LiveSecret, Role, SecretData, Usage};
use crate::key::ProjectKey;
use crate::manifest::Runlevel;

/// Why certificates cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// A file cannot be read or written.
    #[error("certificate file \"{}\"", .0.display())]
    File(PathBuf, #[source] io::Error),
    /// Certificates are in use whose authority is not there: another would break all clients.
    #[error("the authority of the farm's certificates in \"{}\" cannot be used: {why}", folder.display())]
    Authority {
        /// Its folder.
        folder: PathBuf,
        /// Why.
        why: String,
    },
    /// A certificate cannot be made.
    #[error(transparent)]
    Issue(#[from] IssueError),
}

impl CertificatesError {
    /// How to mend it, where there is a way.
    pub fn hint(&self) -> Option<String> {
        let Self::Authority { folder, .. } = self else { return None };
        let all = folder.parent().unwrap_or(folder).display();
        Some(format!(
            "put the file back from a backup; or move \"{all}\" away: all certificates are made anew then, and clients \
             need new ones"
        ))
    }
}

const DAY: Duration = Duration::from_secs(86_400);

/// The certificates of one farm.
#[derive(Clone, Debug)]
pub struct Certificates {
    layout: Layout,
    /// Under which daemons are reached beside their addresses.
    domain: Option<String>,
    /// Names of the routing API over TLS.
    api: Vec<String>,
}

impl Certificates {
    /// Makes what is missing of the authority and the clients' certificate.
    ///
    /// # Errors
    /// See [`CertificatesError`].
    pub fn open(layout: Layout, domain: Option<String>) -> Result<Self, CertificatesError> {
        let api = domain.iter().map(|domain| format!("api.{domain}")).collect();
        let certificates = Self { layout, domain, api };
        certificates.client()?;
        Ok(certificates)
    }

    fn client(&self) -> Result<(), CertificatesError> {
        self.make(client(), &self.layout.certificate("client")).map(drop)
    }

    /// Makes those of clients and of the routing API anew, if that is due. Keepers do so for their daemons.
    ///
    /// # Errors
    /// See [`CertificatesError`].
    pub fn renew(&self) -> Result<(), CertificatesError> {
        self.client()?;
        self.api().map(drop)
    }

    /// Makes or renews the certificate of a daemon, if need be. Returns it.
    ///
    /// # Errors
    /// See [`CertificatesError`].
    pub fn daemon(&self, key: &ProjectKey, address: Ipv4Addr) -> Result<Vec<u8>, CertificatesError> {
        let folder = self.layout.daemon(key.as_str()).join("certs");
        let names = self.domain.iter().map(|domain| format!("{}.{domain}", key.daemon())).collect();
        let mut spec = leaf(&key.daemon(), "buildkitd", Usage::ServerAuth, names);
        spec.ip_addresses = vec![IpAddr::V4(address)];
        self.make(spec, &folder)
    }

    /// Makes or renews the certificate of the routing API, for those who reach it through the gateway.
    /// `None` without a domain.
    ///
    /// # Errors
    /// See [`CertificatesError`].
    pub fn api(&self) -> Result<Option<PathBuf>, CertificatesError> {
        if self.api.is_empty() {
            return Ok(None);
        }
        let folder = self.layout.certificate("api");
        self.make(leaf("api", "buildkit-operator API", Usage::ServerAuth, self.api.clone()), &folder)?;
        Ok(Some(folder))
    }

    /// Whether the authority is there, once clients have certificates of it.
    fn check_authority(&self, ca: &Path) -> Result<(), CertificatesError> {
        if read(&self.layout.certificate("client"))?.get("cert.pem").is_none() {
            return Ok(());
        }
        let data = read(ca)?;
        let missing = ["ca.pem", "ca-key.pem"].into_iter().find(|name| data.get(name).is_none());
        let why = match (missing, LiveCertificate::read_authority(&data)) {
            (Some(name), _) => format!("\"{name}\" is missing"),
            (None, Err(why)) => why.to_string(),
            (None, Ok(_)) => return Ok(()),
        };
        Err(CertificatesError::Authority { folder: ca.to_owned(), why })
    }

    /// Makes one certificate, and the authority before it, where that is due.
    fn make(&self, spec: CertificateSpec, folder: &Path) -> Result<Vec<u8>, CertificatesError> {
        let authority = authority();
        let ca = self.layout.certificate("ca");
        self.check_authority(&ca)?;
        let live: LiveSecrets = [(&authority, ca.as_path()), (&spec, folder)]
            .into_iter()
            .filter_map(|(spec, folder)| match read(folder) {
                Ok(data) if data.keys().next().is_none() => None,
                Ok(data) => {
                    let secret = LiveSecret { data, ..LiveSecret::default() };
                    Some(Ok(((spec.namespace.clone(), spec.secret.clone()), secret)))
                }
                Err(error) => Some(Err(error)),
            })
            .collect::<Result<_, _>>()?;
        // The authority first: what it signed must never be there without it.
        let mut certificate = Vec::new();
        for outcome in materialise(&[authority, spec], &live, Timestamp::now())? {
            let folder = if outcome.spec.is_authority() { ca.as_path() } else { folder };
            let Some(data) = &outcome.data else { continue };
            if outcome.decision != Decision::Keep {
                write(folder, data)?;
            }
            certificate = data.get("cert.pem").unwrap_or_default().to_vec();
        }
        Ok(certificate)
    }
}

fn authority() -> CertificateSpec {
    CertificateSpec {
        role: Role::Authority,
        lifetime: 3650 * DAY,
        renew_before: 400 * DAY,
        ..leaf("ca", "buildkit-operator CA", Usage::ServerAuth, vec![])
    }
}

fn client() -> CertificateSpec {
    leaf("client", "client", Usage::ClientAuth, vec!["client".to_owned()])
}

fn leaf(name: &str, common_name: &str, usage: Usage, dns_names: Vec<String>) -> CertificateSpec {
    CertificateSpec {
        name: name.to_owned(),
        component: "certificates".to_owned(),
        runlevel: Runlevel::ALL[1],
        namespace: "certs".to_owned(),
        secret: name.to_owned(),
        labels: BTreeMap::new(),
        common_name: common_name.to_owned(),
        role: Role::Leaf { issuer: "ca".to_owned(), usages: vec![usage] },
        dns_names,
        ip_addresses: vec![],
        optional: false,
        lifetime: 365 * DAY,
        renew_before: 30 * DAY,
        source: "up".to_owned(),
    }
}

const FILES: [&str; 4] = ["ca.pem", "ca-key.pem", "cert.pem", "key.pem"];

/// The files of one certificate, as far as they are there.
///
/// # Errors
/// One cannot be read.
pub fn read(folder: &Path) -> Result<SecretData, CertificatesError> {
    let mut data = SecretData::default();
    for name in FILES {
        let path = folder.join(name);
        match fs::read(&path) {
            Ok(content) => data.insert(name, content),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(CertificatesError::File(path, error)),
        }
    }
    Ok(data)
}

/// Keys before certificates: one without the other is made anew, but a key must
/// never be newer than a certificate that is in use.
fn write(folder: &Path, data: &SecretData) -> Result<(), CertificatesError> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    made.map_err(|error| CertificatesError::File(folder.to_owned(), error))?;
    for name in data.keys() {
        let path = folder.join(name);
        replace(&path, data.get(name).unwrap_or_default()).map_err(|error| CertificatesError::File(path, error))?;
    }
    Ok(())
}

/// Writes a file that only its owner reads, whole or not at all.
pub(super) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("tmp");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_an_authority_is_refused_while_clients_trust_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(folder.path().to_owned()).unwrap();
        let key: ProjectKey = "p41bd34a2227aca39".parse().unwrap();
        for name in ["ca.pem", "ca-key.pem"] {
            let certificates = Certificates::open(layout.clone(), None).unwrap();
            let path = layout.certificate("ca").join(name);
            let content = fs::read(&path).unwrap();
            fs::remove_file(&path).unwrap();
            let error = Certificates::open(layout.clone(), None).unwrap_err();
            assert!(error.to_string().contains(&format!("\"{name}\" is missing")), "{error}");
            assert!(error.hint().unwrap().contains("from a backup"));
            // Nor is another made behind the clients' back.
            assert!(certificates.daemon(&key, Ipv4Addr::new(127, 1, 2, 3)).is_err() && !path.exists());
            fs::write(&path, content).unwrap();
        }
        fs::write(layout.certificate("ca").join("ca.pem"), "no PEM").unwrap();
        assert!(matches!(Certificates::open(layout.clone(), None), Err(CertificatesError::Authority { .. })));
        // What nobody trusts yet is made anew as a whole.
        fs::remove_dir_all(layout.certificate("client")).unwrap();
        Certificates::open(layout.clone(), None).unwrap();
        Certificates::open(layout, None).unwrap();
    }

    #[test]
    fn certificates_are_made_once_and_cover_where_a_daemon_is_reached() {
        let folder = tempfile::tempdir().unwrap();
        let layout = Layout::new(folder.path().to_owned()).unwrap();
        let key: ProjectKey = "p41bd34a2227aca39".parse().unwrap();
        let address = Ipv4Addr::new(127, 1, 2, 3);
        let certificates = Certificates::open(layout.clone(), None).unwrap();
        let first = certificates.daemon(&key, address).unwrap();
        let ca = fs::read(layout.certificate("ca").join("ca.pem")).unwrap();
        let again = Certificates::open(layout.clone(), None).unwrap();
        assert_eq!(again.daemon(&key, address).unwrap(), first);
        assert_eq!(fs::read(layout.certificate("ca").join("ca.pem")).unwrap(), ca);
        let live = LiveCertificate::read_leaf(&read(&layout.daemon(key.as_str()).join("certs")).unwrap()).unwrap();
        assert!(live.ip_addresses.contains(&IpAddr::V4(address)));
        assert!(live.is_signed_by(&live.trusted[0]));
        // A domain that comes later is taken up.
        let named = Certificates::open(layout.clone(), Some("builds.example.org".into())).unwrap();
        assert_ne!(named.daemon(&key, address).unwrap(), first);
        let live = LiveCertificate::read_leaf(&read(&layout.daemon(key.as_str()).join("certs")).unwrap()).unwrap();
        assert!(live.covers("buildkitd-p41bd34a2227aca39.builds.example.org"));
        assert!(named.api().unwrap().is_some() && again.api().unwrap().is_none());
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &fs::metadata(layout.certificate("client").join("key.pem")).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
    }
}
