//! `bko-install`: a build farm that installs itself.
//!
//! One package, two halves. The **core** turns values into values and does no
//! IO; the **shell** touches the world. Everything that decides is in the core.
//!
//! | Core | |
//! |---|---|
//! | [`names`] | newtypes at the borders |
//! | [`key`] | request → project key → daemon name → endpoint |
//! | [`identity`] | a CI provider's token → verified repository, or why not |
//! | [`profile`] | raw profile → validated profile and values |
//! | [`manifest`] | embedded bundle, strict templates, parsed objects |
//! | [`certificate`] | certificate specifications, SANs, renewal decisions |
//! | [`plan`] | (desired, live, record) → plan |
//! | [`preflight`] | what must hold of a cluster before the first write |
//! | [`readiness`] | object → ready, pending or failed, one rule a kind |
//! | [`printable`] | text from elsewhere, fit for a terminal |
//! | [`sni`] | bytes → server name, incomplete or rejected |
//!
//! | Shell | |
//! |---|---|
//! | [`cluster`] | observe, apply, wait, record |
//! | [`install`] | the driver: render → observe → plan → record → (apply → wait)* → record |
//! | [`image`] | the running executable as an OCI image |
//! | [`gateway`] | accept, peek, dial, relay |
//! | [`issuers`] | the keys of CI providers, fetched in the background |
//! | [`router`] | the routing API over a [`provisioner::Provisioner`] |
//! | [`provisioner`] | what turns a key into a running, addressable daemon |
//! | [`server`] | the roles of the control plane, composed |
//! | [`local`] | the farm on one host, without Kubernetes |
//! | [`companion`] | the sidecar of a daemon: health, builds, drain, room |
//! | [`runtime`] | client, admin listener, lease, shutdown |
//! | [`telemetry`] | logs and metrics |
//! | [`families`] | what a profile can switch on; `build_farm` is the first |
//! | [`client`] | route → build → complete around stock builders, for CI and people |
//! | [`cli`] | the command line |

pub mod certificate;
pub mod cli;
pub mod client;
pub mod cluster;
pub mod companion;
pub mod families;
pub mod gateway;
pub mod identity;
pub mod image;
pub mod install;
pub mod issuers;
pub mod key;
pub mod local;
pub mod manifest;
pub mod names;
pub mod plan;
pub mod preflight;
pub mod printable;
pub mod profile;
pub mod provisioner;
pub mod readiness;
pub mod router;
pub mod runtime;
pub mod server;
pub mod sni;
pub mod telemetry;

/// The version of this package, as printed, recorded and used in image tags.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
