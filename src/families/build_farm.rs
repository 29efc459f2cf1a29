//! The build farm: stock `buildkitd` daemons, one warm cache per project.
//!
//! The reconcile is observe → validate → build → apply → status. What decides
//! is pure: [`lifecycle`], [`validate`], [`build`], [`status`] and [`ledger`].
//! The rest carries it out.

pub mod api;
pub mod args;
pub mod build;
pub mod controller;
pub mod directory;
pub mod ledger;
pub mod lifecycle;
pub mod metrics;
pub mod provisioner;
pub mod scheduling;
pub mod settings;
pub mod status;
pub mod validate;
pub mod view;
pub mod writer;
