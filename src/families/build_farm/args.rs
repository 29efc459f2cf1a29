//! Command-line flags of the build farm, under the reference's names.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::defaults::{DefaultsFault, ProjectDefaults};
use super::scheduling::Scheduling;
use super::settings::{CacheKind, DAEMON_IMAGE, Sandbox, Settings};
use crate::identity::authorities;
use crate::key::Arch;
use crate::names::{BUILDS_NAMESPACE, DAEMON_PORT, dns_label, domain_or_nothing};
use crate::profile::syntax::{is_host, is_quantity};
use crate::runtime::clock::Clock;

/// Flags of the build farm.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Build farm")]
pub struct FarmArgs {
    /// Namespace of projects and daemons
    #[arg(long, value_name = "NAME", default_value = BUILDS_NAMESPACE, value_parser = dns_label)]
    pub namespace: String,
    /// Port that daemons serve on
    #[arg(long, default_value_t = DAEMON_PORT)]
    pub port: u16,
    /// Image of the daemons
    #[arg(long, value_name = "REF", default_value = DAEMON_IMAGE)]
    pub buildkit_image: String,
    /// Secrets of the namespace of the daemons with which their images are pulled
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', value_parser = object_name)]
    pub daemon_pull_secrets: Vec<String>,
    /// RuntimeClass that gives each daemon of untrusted builds a machine of its own; empty for none
    #[arg(long, value_name = "NAME", default_value = "")]
    pub sandbox_runtime_class: String,
    /// Image of the daemons in the sandbox; empty for that of the others without `-rootless`
    #[arg(long, value_name = "REF", default_value = "")]
    pub sandbox_buildkit_image: String,
    /// JSON object with nodeSelector, tolerations, affinity and pinArch of the daemons
    #[arg(long, value_name = "JSON", default_value = "")]
    pub daemon_scheduling: Scheduling,
    /// CPU that a daemon asks for, whatever its tier; empty for that of its tier
    #[arg(long, value_name = "QUANTITY", default_value = "", value_parser = quantity_or_nothing)]
    pub daemon_cpu_request: String,
    /// Memory that a daemon asks for, whatever its tier; empty for that of its tier
    #[arg(long, value_name = "QUANTITY", default_value = "", value_parser = quantity_or_nothing)]
    pub daemon_memory_request: String,
    /// Seconds that a daemon may wait for a node before routes are told that none takes it; an autoscaler that says
    /// it is making one is always waited for
    #[arg(long, value_name = "SECONDS", default_value_t = 8)]
    pub unschedulable_wait_seconds: u32,
    /// Whether a companion runs beside each daemon; without it nothing knows of builds that nobody registered
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = true, action = clap::ArgAction::Set)]
    pub companion: bool,
    /// Image of the companion: of this very executable
    #[arg(long, value_name = "REF", default_value = "")]
    pub companion_image: String,
    /// Architectures of the companion's image; daemons of others are refused. Any when left out
    #[arg(long, value_name = "ARCH,…", value_delimiter = ',', value_parser = architecture)]
    pub companion_architectures: Vec<Arch>,
    /// Proxy of the daemons for plain HTTP
    #[arg(long, value_name = "URL", default_value = "")]
    pub daemon_http_proxy: String,
    /// Proxy of the daemons for HTTPS, registries above all
    #[arg(long, value_name = "URL", default_value = "")]
    pub daemon_https_proxy: String,
    /// Hosts, domains and networks that daemons use no proxy for
    #[arg(long, value_name = "NAME,…", default_value = "")]
    pub daemon_no_proxy: String,
    /// File of authorities in PEM that daemons believe of registries beside the public ones; read once
    #[arg(long, value_name = "FILE")]
    pub registry_ca_file: Option<PathBuf>,
    /// Secret with ca.pem, cert.pem and key.pem of the daemons
    #[arg(long, value_name = "NAME", default_value = "buildkit-daemon-certs")]
    pub daemon_certs_secret: String,
    /// Whether that Secret is cert-manager's, with ca.crt, tls.crt and tls.key
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          default_value_t = false, action = clap::ArgAction::Set)]
    pub cert_manager_certs: bool,
    /// ConfigMap with the buildkitd.toml that all daemons begin with, if it exists
    #[arg(long, value_name = "NAME", default_value = "buildkitd-config")]
    pub buildkitd_configmap: String,
    /// StorageClass of new projects; empty for the cluster's default
    #[arg(long, value_name = "NAME", default_value = "")]
    pub default_storage_class: String,
    /// Where daemons keep their caches: pvc, on a volume each, or emptyDir, on the disk of the node, which every scale
    /// to zero loses
    #[arg(long, value_enum, value_name = "KIND", default_value = "pvc")]
    pub cache_kind: CacheKind,
    /// Cache size of new projects, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 60, value_parser = clap::value_parser!(i32).range(1..))]
    pub cache_volume_gi: i32,
    /// Seconds without a build after which the daemon of a new project goes to zero
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    pub idle_seconds: u32,
    /// File of rules that say otherwise for some new projects, in YAML or JSON: tier, idleTimeoutSec, cacheVolumeGi,
    /// s3Cache and resources, by match.repo, match.name and match.arch
    #[arg(long, value_name = "FILE")]
    pub project_defaults_config: Option<PathBuf>,
    /// Seconds without a build after which the daemon of untrusted builds goes to zero
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub fork_idle_seconds: u32,
    /// Idle seconds that a project may earn by building often; 0 keeps every project at its own
    #[arg(long, value_name = "SECONDS", default_value_t = 21_600)]
    pub adaptive_idle_max_seconds: u32,
    /// Age in seconds at which a build that was never released stops holding its daemon; 0 means 7200
    #[arg(long, value_name = "SECONDS", default_value_t = 7200)]
    pub max_build_seconds: u32,
    /// Age in seconds from which a build that was never released may stop holding its daemon when neither a build
    /// nor a stream is there; 0 waits for its full age
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub unused_entry_seconds: u32,
    /// Builds that may be in flight at once on one project
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u16).range(1..=2000))]
    pub max_inflight: u16,
    /// For how long after a route or a prewarm a client that dials the gateway may wake its daemon by that alone;
    /// 0s for never
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = humantime::parse_duration)]
    pub wake_window: Duration,
    /// Domain of the gateway; without it, endpoints are in-cluster names
    #[arg(long, value_name = "DOMAIN", default_value = "", value_parser = domain_or_nothing)]
    pub gateway_host: String,
    /// Port of the gateway that clients dial; 0 means the daemons' port
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub gateway_port: u16,
}

fn object_name(s: &str) -> Result<String, &'static str> {
    if is_host(s) { Ok(s.to_owned()) } else { Err("must be a name of a-z, 0-9, - and .") }
}

fn quantity_or_nothing(s: &str) -> Result<String, &'static str> {
    if s.is_empty() || is_quantity(s) { Ok(s.to_owned()) } else { Err("must be a quantity such as 500m or 2Gi") }
}

fn architecture(s: &str) -> Result<Arch, &'static str> {
    match s {
        "amd64" => Ok(Arch::Amd64),
        "arm64" => Ok(Arch::Arm64),
        _ => Err("must be amd64 or arm64"),
    }
}

/// The variables that Go's HTTP client reads.
fn proxy(args: &FarmArgs) -> Vec<(String, String)> {
    let all = [
        ("HTTP_PROXY", &args.daemon_http_proxy),
        ("HTTPS_PROXY", &args.daemon_https_proxy),
        ("NO_PROXY", &args.daemon_no_proxy),
    ];
    all.into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name.to_owned(), value.clone()))
        .collect()
}

/// Why flags of the build farm cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FarmError {
    /// The rules for new projects cannot be read.
    #[error("read --project-defaults-config {path:?}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The authorities of registries cannot be read.
    #[error("read --registry-ca-file {path:?}")]
    ReadAuthorities {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// They are none.
    #[error("--registry-ca-file {path:?} holds no authority: want certificates in PEM")]
    Authorities {
        /// The file.
        path: PathBuf,
    },
    /// The rules for new projects are wrong.
    #[error("--project-defaults-config {path:?}")]
    Defaults {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: DefaultsFault,
    },
}

#[expect(clippy::disallowed_methods, reason = "shell: reads a file that a flag names")]
fn project_defaults(path: &PathBuf) -> Result<ProjectDefaults, FarmError> {
    let text = std::fs::read_to_string(path).map_err(|source| FarmError::Read { path: path.clone(), source })?;
    ProjectDefaults::read(&text).map_err(|source| FarmError::Defaults { path: path.clone(), source })
}

#[expect(clippy::disallowed_methods, reason = "shell: reads a file that a flag names")]
fn registry_ca(path: &PathBuf) -> Result<String, FarmError> {
    let text =
        std::fs::read_to_string(path).map_err(|source| FarmError::ReadAuthorities { path: path.clone(), source })?;
    match authorities::check(&text) {
        Ok(()) => Ok(text),
        Err(_) => Err(FarmError::Authorities { path: path.clone() }),
    }
}

impl TryFrom<&FarmArgs> for Settings {
    type Error = FarmError;

    fn try_from(args: &FarmArgs) -> Result<Self, FarmError> {
        let some = |s: &String| (!s.is_empty()).then(|| s.clone());
        let gateway_port = if args.gateway_port == 0 { args.port } else { args.gateway_port };
        let unused_entry = Duration::from_secs(args.unused_entry_seconds.into());
        let defaults = args.project_defaults_config.as_ref().map(project_defaults).transpose()?;
        let max_build = if args.max_build_seconds == 0 { 7200 } else { args.max_build_seconds };
        Ok(Self {
            namespace: args.namespace.clone(),
            port: args.port,
            daemon_image: args.buildkit_image.clone(),
            sandbox: some(&args.sandbox_runtime_class)
                .map(|runtime_class| Sandbox { runtime_class, image: some(&args.sandbox_buildkit_image) }),
            scheduling: args.daemon_scheduling.clone(),
            cpu_request: some(&args.daemon_cpu_request),
            memory_request: some(&args.daemon_memory_request),
            companion: some(&args.companion_image).filter(|_| args.companion),
            companion_architectures: args.companion_architectures.clone(),
            proxy: proxy(args),
            registry_ca: args.registry_ca_file.as_ref().map(registry_ca).transpose()?.unwrap_or_default(),
            certs_secret: args.daemon_certs_secret.clone(),
            cert_manager_certs: args.cert_manager_certs,
            storage_class: some(&args.default_storage_class),
            cache_kind: args.cache_kind,
            cache_volume_gi: args.cache_volume_gi,
            idle: Duration::from_secs(args.idle_seconds.into()),
            project_defaults: defaults.unwrap_or_default(),
            pull_secrets: args.daemon_pull_secrets.clone(),
            fork_idle: Duration::from_secs(args.fork_idle_seconds.into()),
            unschedulable: Duration::from_secs(args.unschedulable_wait_seconds.into()),
            adaptive_idle_max: Duration::from_secs(args.adaptive_idle_max_seconds.into()),
            max_build: Duration::from_secs(max_build.into()),
            unused_entry: (!unused_entry.is_zero()).then_some(unused_entry),
            gateway: some(&args.gateway_host).map(|host| (host, gateway_port)),
            max_inflight: args.max_inflight.into(),
            wake_window: args.wake_window,
            clock: Clock::default(),
        })
    }
}
