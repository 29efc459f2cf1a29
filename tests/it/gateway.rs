//! The gateway: its parser over recorded and made-up ClientHellos, and the
//! whole of it over loopback sockets, with real TLS and with raw bytes.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a failed step fails the test, and these tests measure time"
)]

mod farm;
mod hellos;
mod limits;
mod relay;
mod routing;
mod sni;
