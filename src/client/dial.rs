//! Whether the daemon takes our connection, asked before a builder is: its
//! errors name the cause, and nothing has been built when it has gone away.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsConnector;

use super::http::{self, HttpError};

/// A gateway may hold the connection while a daemon wakes, for 18 s at most.
const PATIENCE: Duration = Duration::from_secs(25);
/// What every HTTP/2 connection begins with: the preface and empty settings.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Where a daemon is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Its name, which its certificate covers.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Its address, if the name is not to be resolved.
    pub address: Option<IpAddr>,
}

impl Endpoint {
    /// As the builders take it.
    pub fn url(&self) -> String {
        let bracketed = |host: &str| if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let host = self.address.map_or_else(|| bracketed(&self.host), |address| bracketed(&address.to_string()));
        format!("tcp://{host}:{}", self.port)
    }

    /// The same in other characters, for builders that want no two daemons at
    /// one address: behind a gateway they all are.
    pub fn other_url(&self) -> String {
        match self.address {
            Some(IpAddr::V4(address)) => format!("tcp://[{}]:{}", address.to_ipv6_mapped(), self.port),
            Some(IpAddr::V6(address)) => {
                let parts: Vec<_> = address.segments().iter().map(|part| format!("{part:04x}")).collect();
                format!("tcp://[{}]:{}", parts.join(":"), self.port)
            }
            None => self.url(),
        }
    }

    /// The name for TLS, where the URL holds an address instead.
    pub fn server_name(&self) -> Option<&str> {
        self.address.map(|_| self.host.as_str())
    }

    /// From `tcp://host:port`.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Some(Self { host: host.to_owned(), port: port.parse().ok()?, address: None })
    }
}

/// Why the daemon takes no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// Its name is not known here.
    #[error("cannot resolve \"{host}\", where the daemon is")]
    Resolve {
        /// The name.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// It has another certificate than it should.
    #[error("the certificate of \"{host}\" is not trusted: {why}")]
    NotTrusted {
        /// The name.
        host: String,
        /// Why.
        why: String,
    },
    /// It does not want our certificate.
    #[error("the daemon at \"{host}\" refuses the client certificate: {why}")]
    Refused {
        /// The name.
        host: String,
        /// Why.
        why: String,
    },
    /// It is not there, or has gone away.
    #[error("the daemon at \"{host}\" does not answer: {why}")]
    Away {
        /// The name.
        host: String,
        /// Why.
        why: String,
    },
}

/// Connects as a builder does, and waits for the first byte: only then has the
/// daemon seen the certificate.
pub(super) async fn probe(endpoint: &Endpoint, tls: &Arc<ClientConfig>) -> Result<(), DialError> {
    let host = || endpoint.host.clone();
    let away = |why: String| DialError::Away { host: host(), why };
    let answered = async {
        let stream = match http::dial(&endpoint.host, endpoint.port, endpoint.address).await {
            Ok(stream) => stream,
            Err(HttpError::Resolve { source, .. }) => return Err(DialError::Resolve { host: host(), source }),
            Err(HttpError::Connect { source, .. }) => return Err(away(source.to_string())),
            Err(error) => return Err(away(error.to_string())),
        };
        let name = ServerName::try_from(host()).map_err(|error| away(error.to_string()))?;
        let mut stream =
            TlsConnector::from(Arc::clone(tls)).connect(name, stream).await.map_err(|error| told(endpoint, &error))?;
        stream.write_all(HELLO).await.map_err(|error| told(endpoint, &error))?;
        match stream.read(&mut [0; 9]).await {
            Ok(0) => Err(away("it closes the connection".into())),
            Ok(_) => Ok(()),
            Err(error) => Err(told(endpoint, &error)),
        }
    };
    tokio::time::timeout(PATIENCE, answered).await.unwrap_or_else(|_| Err(away("no answer in time".into())))
}

/// Which side distrusts which, or that somebody has gone away.
fn told(endpoint: &Endpoint, error: &io::Error) -> DialError {
    use rustls::AlertDescription as Alert;
    let host = endpoint.host.clone();
    match http::of_tls(error) {
        Some(rustls::Error::InvalidCertificate(why)) => DialError::NotTrusted { host, why: why.to_string() },
        Some(rustls::Error::AlertReceived(
            alert @ (Alert::BadCertificate
            | Alert::UnknownCA
            | Alert::CertificateRequired
            | Alert::CertificateExpired
            | Alert::CertificateRevoked
            | Alert::CertificateUnknown
            | Alert::UnsupportedCertificate
            | Alert::DecryptError
            | Alert::AccessDenied),
        )) => DialError::Refused { host, why: format!("{alert:?}") },
        _ => DialError::Away { host, why: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_takes_the_place_of_the_name_and_the_name_stays_for_tls() {
        let mut endpoint = Endpoint::parse("tcp://buildkitd-p1.builds.example.org:1234").unwrap();
        assert_eq!(endpoint.url(), "tcp://buildkitd-p1.builds.example.org:1234");
        assert_eq!(endpoint.server_name(), None);
        assert_eq!(endpoint.other_url(), endpoint.url());
        endpoint.address = Some("192.0.2.7".parse().unwrap());
        assert_eq!(endpoint.other_url(), "tcp://[::ffff:192.0.2.7]:1234");
        endpoint.address = Some("2001:db8::1".parse().unwrap());
        assert_eq!(endpoint.other_url(), "tcp://[2001:0db8:0000:0000:0000:0000:0000:0001]:1234");
        assert_eq!(endpoint.url(), "tcp://[2001:db8::1]:1234");
        assert_eq!(endpoint.server_name(), Some("buildkitd-p1.builds.example.org"));
        assert_eq!(Endpoint::parse("tcp://[::1]:5").unwrap().url(), "tcp://[::1]:5");
        for bad in ["unix:///run/x", "tcp://a", "tcp://a:x", ""] {
            assert_eq!(Endpoint::parse(bad), None, "{bad}");
        }
    }
}
