//! Everything that needs no cluster: rendering, plans, the command line, and
//! sockets on loopback.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "helpers of tests, outside of #[test] functions"
)]

mod answering;
mod build;
mod certificates;
mod cli;
mod companion;
mod daemons;
mod export;
mod failures;
mod gateway;
mod image;
mod install;
mod key_command;
mod keys;
mod kube_errors;
mod metrics;
mod ownership;
mod plans;
mod preflight;
mod profiles;
mod purity;
mod readiness;
mod rendering;
mod router;
