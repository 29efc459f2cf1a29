//! The gateway: reads the server name of a TLS ClientHello, maps it to a
//! daemon, and relays the still-encrypted bytes.

pub mod args;
pub mod directory;
