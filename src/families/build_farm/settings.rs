//! What the farm is told on the command line, once parsed. Plain values.

use std::time::Duration;

use clap::ValueEnum;

use super::defaults::ProjectDefaults;
use super::scheduling::Scheduling;
use crate::key::Arch;
use crate::runtime::clock::Clock;

/// Settings of the controller and of the projects that it makes.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Namespace of projects and daemons.
    pub namespace: String,
    /// Port that daemons serve on.
    pub port: u16,
    /// Image of the daemon.
    pub daemon_image: String,
    /// Where untrusted builds run, when they have a sandbox.
    pub sandbox: Option<Sandbox>,
    /// On which nodes daemons run.
    pub scheduling: Scheduling,
    /// CPU that a daemon's container asks for; by tier when absent.
    pub cpu_request: Option<String>,
    /// Memory that it asks for; by tier when absent.
    pub memory_request: Option<String>,
    /// Image of the companion beside each daemon; none runs when absent.
    pub companion: Option<String>,
    /// Architectures of that image; any when empty.
    pub companion_architectures: Vec<Arch>,
    /// Variables by which daemons find their proxies.
    pub proxy: Vec<(String, String)>,
    /// Authorities in PEM that daemons believe of registries beside the public ones; none when empty.
    pub registry_ca: String,
    /// Secret with `ca.pem`, `cert.pem`, `key.pem` of the daemons.
    pub certs_secret: String,
    /// Whether it has cert-manager's keys instead: `ca.crt`, `tls.crt`, `tls.key`.
    pub cert_manager_certs: bool,
    /// StorageClass stamped on new projects; the cluster's default when absent.
    pub storage_class: Option<String>,
    /// Where caches are kept.
    pub cache_kind: CacheKind,
    /// Cache size stamped on new projects, in GiB.
    pub cache_volume_gi: i32,
    /// Idle timeout stamped on new projects.
    pub idle: Duration,
    /// What new projects begin with instead, by rules.
    pub project_defaults: ProjectDefaults,
    /// Secrets with which the images of daemons are pulled.
    pub pull_secrets: Vec<String>,
    /// Idle timeout of forks.
    pub fork_idle: Duration,
    /// How long a pod may wait for a node before routes are told that it does not start.
    pub unschedulable: Duration,
    /// Longest idle timeout that a busy project may earn; zero switches that off.
    pub adaptive_idle_max: Duration,
    /// Age at which an in-flight entry expires.
    pub max_build: Duration,
    /// Age from which an entry may expire that neither a build nor a stream stands behind; never when absent.
    pub unused_entry: Option<Duration>,
    /// Domain and port of the gateway, when clients come through it.
    pub gateway: Option<(String, u16)>,
    /// Builds that may be in flight at once on one project.
    pub max_inflight: usize,
    /// For how long after a route or a prewarm a dial alone may wake the daemon; never when zero.
    pub wake_window: Duration,
    /// The clock by which decisions are dated.
    pub clock: Clock,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            namespace: crate::names::BUILDS_NAMESPACE.to_owned(),
            port: crate::names::DAEMON_PORT,
            daemon_image: DAEMON_IMAGE.to_owned(),
            sandbox: None,
            cpu_request: None,
            memory_request: None,
            scheduling: Scheduling::default(),
            companion: None,
            companion_architectures: Vec::new(),
            proxy: Vec::new(),
            registry_ca: String::new(),
            certs_secret: "buildkit-daemon-certs".to_owned(),
            cert_manager_certs: false,
            storage_class: None,
            cache_kind: CacheKind::default(),
            cache_volume_gi: 60,
            idle: Duration::from_secs(900),
            project_defaults: ProjectDefaults::default(),
            pull_secrets: Vec::new(),
            fork_idle: Duration::from_secs(300),
            unschedulable: Duration::from_secs(8),
            adaptive_idle_max: Duration::from_secs(21_600),
            max_build: Duration::from_secs(7200),
            unused_entry: Some(Duration::from_secs(600)),
            gateway: None,
            max_inflight: super::api::MAX_INFLIGHT,
            wake_window: Duration::from_secs(24 * 3600),
            clock: Clock::default(),
        }
    }
}

/// Where a daemon keeps its cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CacheKind {
    /// A volume of its own, which outlives its pods.
    #[default]
    Pvc,
    /// The disk of its node: every scale to zero loses it.
    #[value(name = "emptyDir")]
    EmptyDir,
}

/// A machine of its own for every daemon of untrusted builds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sandbox {
    /// The runtime class that makes it, for example of Kata Containers.
    pub runtime_class: String,
    /// Image of the daemon within, when it is not the usual one for root.
    pub image: Option<String>,
}

/// The daemon that this version is tested with.
pub const DAEMON_IMAGE: &str = "docker.io/moby/buildkit:v0.34.2-rootless";
