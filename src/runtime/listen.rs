//! Listen addresses as operators write them: `:8080`, `127.0.0.1:8080`, `[::1]:8080`.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;

/// Where to listen. Without a host: on every address of both families.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// `:port`.
    Any(u16),
    /// `host:port`.
    One(SocketAddr),
}

/// Not a listen address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("\"{0}\" is not a listen address; want \":PORT\", \"ADDRESS:PORT\" or \"[IPV6]:PORT\"")]
pub struct ParseListenAddress(String);

impl FromStr for ListenAddress {
    type Err = ParseListenAddress;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let error = || ParseListenAddress(s.to_owned());
        match s.strip_prefix(':') {
            Some(port) => port.parse().map(Self::Any).map_err(|_| error()),
            None => s.parse().map(Self::One).map_err(|_| error()),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any(port) => write!(f, ":{port}"),
            Self::One(address) => address.fmt(f),
        }
    }
}

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

impl ListenAddress {
    /// Whether only this host can reach it.
    pub fn is_loopback(self) -> bool {
        matches!(self, Self::One(address) if address.ip().is_loopback())
    }

    /// Binds. Any-address listening is dual-stack where the host has IPv6.
    ///
    /// # Errors
    /// When the address is taken or not ours.
    pub fn bind(self) -> std::io::Result<TcpListener> {
        match self {
            Self::One(address) => bind(address),
            Self::Any(port) => bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))
                .or_else(|_| bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))),
        }
    }
}

fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    // A restart must not wait for connections of the last run to time out.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written_the_same() {
        for text in [":8080", "127.0.0.1:0", "[::1]:443"] {
            assert_eq!(text.parse::<ListenAddress>().map(|a| a.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "8080", ":", ":99999", "localhost:80"] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text:?}");
        }
    }

    #[tokio::test]
    async fn without_a_host_both_families_are_served() {
        let listener = ListenAddress::Any(0).bind().unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    }
}
