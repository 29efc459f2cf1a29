//! The build farm: stock `buildkitd` daemons, one warm cache per project.
//!
//! The reconcile is observe → validate → build → apply → status. What decides
//! is pure: [`lifecycle`], [`roll`], [`health`], [`validate`], [`build`],
//! [`status`], [`moment`], [`ledger`], [`truth`], [`project`] and [`defaults`].
//! The rest carries it out.

pub mod api;
pub mod args;
pub mod build;
pub mod controller;
pub mod defaults;
pub mod directory;
pub mod figures;
pub mod health;
pub mod knobs;
pub mod ledger;
pub mod lifecycle;
pub mod metrics;
pub mod moment;
pub mod project;
pub mod provisioner;
pub mod roll;
pub mod scheduling;
pub mod servers;
pub mod settings;
pub mod signs;
pub mod status;
pub mod truth;
pub mod validate;
pub mod view;
pub mod wake;
pub mod writer;
