//! What every long-running role shares: admin listener, talk among our own
//! processes, lease, shutdown.

pub mod admin;
pub mod clock;
pub mod internal;
pub mod lease;
pub mod listen;
pub mod network;
pub mod shutdown;
pub mod tls;
