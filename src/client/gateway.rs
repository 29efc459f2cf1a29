//! Where daemons are, if not where the answer says. Pure; no IO.

use std::net::IpAddr;

use super::dial::Endpoint;

/// Where daemons are, if not where the answer says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gateway {
    /// The domain below which they have their names.
    pub host: Option<String>,
    /// The port.
    pub port: Option<u16>,
    /// The address, when DNS does not know the names.
    pub address: Option<IpAddr>,
}

impl Gateway {
    /// Where a daemon is.
    pub fn place(&self, mut endpoint: Endpoint) -> Endpoint {
        if let Some(domain) = &self.host {
            let daemon = endpoint.host.split('.').next().unwrap_or_default();
            endpoint.host = format!("{daemon}.{domain}");
        }
        endpoint.port = self.port.unwrap_or(endpoint.port);
        endpoint.address = self.address.or(endpoint.address);
        endpoint
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateway_may_be_elsewhere() {
        let endpoint = Endpoint::parse("tcp://buildkitd-p1.buildkit-builds.svc:1234").unwrap();
        let gateway = Gateway {
            host: Some("builds.example.org".into()),
            port: Some(443),
            address: Some("192.0.2.7".parse().unwrap()),
        };
        let placed = gateway.place(endpoint.clone());
        assert_eq!(
            (placed.host.as_str(), placed.url().as_str()),
            ("buildkitd-p1.builds.example.org", "tcp://192.0.2.7:443")
        );
        assert_eq!(Gateway::default().place(endpoint.clone()), endpoint);
    }
}
