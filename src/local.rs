//! The farm on one host: the same decisions as in a cluster, over a local
//! store and processes of this host.
//!
//! `writer` owns the projects and makes every change persistent (`store`,
//! `journal`); [`index`] is what everything else reads. `keeper` carries out,
//! per project, what the pure decisions of the build farm say; [`farm`] is the
//! [`Provisioner`](crate::provisioner::Provisioner). Pure: [`address`],
//! [`layout`], [`record`], `configuration`.

pub mod address;
pub mod args;
pub mod budget;
pub mod certificates;
pub mod client;
pub mod configuration;
pub mod control;
pub mod core;
pub mod farm;
pub mod fetch;
pub mod index;
pub mod journal;
pub mod keeper;
pub mod layout;
pub mod lock;
pub mod log;
pub mod process;
pub mod procfs;
pub mod programs;
pub mod record;
pub mod recovery;
pub mod storage;
pub mod store;
pub mod up;
mod witness;
pub mod writer;
