//! `bko-install build` against the real routing API and a real `buildkitd` with
//! mutual TLS, with the real `docker buildx`, `buildx` and `buildctl`. Needs
//! root, and the tools of `make tools`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "this is a test, also outside of #[test] functions"
)]

mod access;
mod builders;
mod ci;
pub(crate) mod daemon;
mod ends;
mod farm;
mod local;
mod lost;
mod refusals;
mod secrets;
mod way;
