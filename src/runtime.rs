//! What every long-running role shares: admin listener, lease, shutdown.

pub mod admin;
pub mod lease;
pub mod listen;
pub mod shutdown;
