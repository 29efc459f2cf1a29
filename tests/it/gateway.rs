//! The gateway: its parser over recorded and made-up ClientHellos, and the
//! whole of it over loopback sockets, with real TLS and with raw bytes.

mod farm;
mod hellos;
mod limits;
mod relay;
mod routing;
mod sni;
