//! The gateway: its parser over recorded and made-up ClientHellos, and the
//! whole of it over loopback sockets with real TLS.

mod hellos;
mod sni;
