//! The farm on one host: the same decisions as in a cluster, over a local
//! store and processes of this host.
//!
//! `writer` owns the projects and makes every change persistent (`store`,
//! `journal`); [`index`] is what everything else reads. `keeper` carries out,
//! per project, what the pure decisions of the build farm say; [`farm`] is the
//! [`Provisioner`](crate::provisioner::Provisioner). [`runtime`] and [`storage`]
//! know how daemons are run and caches kept: what comes beside processes and
//! file systems has its place there. Pure: [`address`], [`layout`], [`record`],
//! [`recovery`], [`configuration`], [`budget::plan`], [`cgroup::place`].

pub mod address;
pub mod args;
pub mod budget;
pub mod certificates;
pub mod cgroup;
pub mod client;
pub mod clock;
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
pub mod mounts;
pub mod process;
pub mod procfs;
pub mod programs;
pub mod record;
pub mod recovery;
pub mod runtime;
pub mod storage;
pub mod store;
pub mod up;
mod witness;
pub mod writer;
