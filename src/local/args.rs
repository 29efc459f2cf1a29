//! Flags of `bko-install up`.

mod values;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::runtime;
use super::storage::Kind;
use crate::families::build_farm::settings::Settings;
use crate::names::{DAEMON_PORT, domain_or_nothing};
use crate::router::RouteArgs;
use crate::runtime::listen::ListenAddress;
pub use values::{Buildkit, GatewayListen};

/// Where the state folder is.
#[derive(Clone, Debug, Args)]
pub struct StateArgs {
    /// Folder of everything that the farm keeps [default: /var/lib/bko for root, else ~/.local/state/bko]
    #[arg(long, env = "BKO_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Where an ordinary user's programs keep state.
    #[arg(long, env = "XDG_STATE_HOME", hide = true, hide_env = true)]
    pub xdg_state_home: Option<PathBuf>,
    /// An ordinary user's home.
    #[arg(long, env = "HOME", hide = true, hide_env = true)]
    pub home: Option<PathBuf>,
}

impl StateArgs {
    /// The folder, for a user.
    pub fn folder(&self, uid: u32) -> PathBuf {
        let own = || {
            let xdg = self.xdg_state_home.clone().filter(|path| path.is_absolute());
            let home = || self.home.clone().unwrap_or_default().join(".local/state");
            xdg.unwrap_or_else(home).join("bko")
        };
        match &self.state_dir {
            Some(folder) => std::path::absolute(folder).unwrap_or_else(|_| folder.clone()),
            None if uid == 0 => "/var/lib/bko".into(),
            None => own(),
        }
    }
}

/// Flags of `bko-install up`.
#[derive(Clone, Debug, Args)]
pub struct UpArgs {
    /// Where everything is kept.
    #[command(flatten)]
    pub state: StateArgs,
    /// Address that builds connect to; lo:PORT is every loopback address of this host
    #[arg(long, value_name = "ADDRESS", default_value_t = GatewayListen::Loopback(DAEMON_PORT))]
    pub listen: GatewayListen,
    /// Domain whose names `buildkitd-<key>.<domain>` and `api.<domain>` lead here; loopback addresses without one
    #[arg(long, env = "BUILDKIT_OPERATOR_GATEWAY_DOMAIN", value_name = "DOMAIN", default_value = "",
          value_parser = domain_or_nothing)]
    pub domain: String,
    /// Loopback address of the routing API, without TLS; other hosts use `https://api.<domain>`
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    pub api_listen: ListenAddress,
    /// Address of /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8081")]
    pub metrics_addr: ListenAddress,
    /// How long builds may go on after the first Ctrl-C or SIGTERM; the second ends them
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = humantime::parse_duration)]
    pub drain: Duration,
    /// How daemons are run.
    #[command(flatten)]
    pub daemons: DaemonArgs,
    /// When daemons go.
    #[command(flatten)]
    pub life: LifeArgs,
    /// Flags of the routing API.
    #[command(flatten)]
    pub route: RouteArgs,
}

/// How daemons are run.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Daemons")]
pub struct DaemonArgs {
    /// How daemons are run
    #[arg(long, value_enum, default_value_t)]
    pub runtime: runtime::Kind,
    /// Cgroup below which each daemon has its own [default: this process's, at the top with cgroup v1; "" for none]
    #[arg(long, value_name = "PATH")]
    pub cgroup: Option<String>,
    /// What daemons run: auto is the buildkitd of PATH, else that of the stock image; or a file, a folder, an image
    #[arg(long, value_name = "auto|PATH|IMAGE", default_value_t = Buildkit::Auto)]
    pub buildkit: Buildkit,
    /// Registry that has the same images, such as mirror.example.org/hub
    #[arg(long, value_name = "REGISTRY")]
    pub buildkit_mirror: Option<String>,
    /// Where Docker keeps credentials of registries.
    #[arg(long, env = "DOCKER_CONFIG", hide = true, hide_env = true)]
    pub docker_config: Option<PathBuf>,
    /// File of the buildkitd.toml that all daemons begin with
    #[arg(long, value_name = "FILE")]
    pub buildkitd_config: Option<PathBuf>,
    /// Port that daemons listen on, each on a loopback address of its own
    #[arg(long, value_name = "PORT", default_value_t = DAEMON_PORT + 1)]
    pub daemon_port: u16,
    /// How caches are kept
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    pub storage: Kind,
    /// Size of a cache, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 60, value_parser = clap::value_parser!(i32).range(1..))]
    pub cache_volume_gi: i32,
    /// Bytes that all caches may have together, such as 200Gi; the least recently used are pruned first
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    pub cache_budget: Option<u64>,
    /// How often caches are added up for the budget
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = humantime::parse_duration, hide = true)]
    pub cache_budget_every: Duration,
    /// Seconds between snapshots of a cache, taken when its daemon goes to zero; 0 takes none
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub snapshot_every_seconds: u32,
    /// Snapshots to keep of each cache
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub keep_snapshots: usize,
    /// Let untrusted builds run beside others, though nothing but a process is between them
    #[arg(long)]
    pub allow_unisolated_forks: bool,
    /// Where programs are looked for.
    #[arg(long, env = "PATH", hide = true, hide_env = true, default_value = "/usr/local/bin:/usr/bin:/bin")]
    pub path: std::ffi::OsString,
}

/// When daemons go, and when builds stop holding them.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Lifecycle")]
pub struct LifeArgs {
    /// Seconds without a build after which the daemon of a new project goes to zero
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    pub idle_seconds: u32,
    /// Seconds without a build after which the daemon of untrusted builds goes to zero; its cache goes with it, when it
    /// is 90 seconds old
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub fork_idle_seconds: u32,
    /// Idle seconds that a project may earn by building often; 0 keeps every project at its own
    #[arg(long, value_name = "SECONDS", default_value_t = 21_600)]
    pub adaptive_idle_max_seconds: u32,
    /// Age in seconds at which a build that was never released stops holding its daemon
    #[arg(long, value_name = "SECONDS", default_value_t = 7200, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_build_seconds: u32,
    /// Age in seconds from which it may do so sooner, when neither a build nor a stream is there; 0 waits for the
    /// full age
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub unused_entry_seconds: u32,
    /// Builds that may be in flight at once on one project
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u16).range(1..=2000))]
    pub max_inflight: u16,
}

impl UpArgs {
    /// The domain, if there is one.
    pub fn domain(&self) -> Option<String> {
        Some(self.domain.clone()).filter(|domain| !domain.is_empty())
    }

    /// What decides, given the port that clients dial.
    pub fn settings(&self, port: u16) -> Settings {
        let seconds = |n: u32| Duration::from_secs(n.into());
        let LifeArgs { idle_seconds, fork_idle_seconds, .. } = self.life;
        Settings {
            namespace: "local".to_owned(),
            port,
            cache_volume_gi: self.daemons.cache_volume_gi,
            idle: seconds(idle_seconds),
            fork_idle: seconds(fork_idle_seconds),
            adaptive_idle_max: seconds(self.life.adaptive_idle_max_seconds),
            max_build: seconds(self.life.max_build_seconds),
            unused_entry: Some(seconds(self.life.unused_entry_seconds)).filter(|age| !age.is_zero()),
            max_inflight: self.life.max_inflight.into(),
            gateway: self.domain().map(|domain| (domain, port)),
            ..Settings::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_where_such_a_user_keeps_state() {
        let args = |state: Option<&str>, xdg: Option<&str>| StateArgs {
            state_dir: state.map(Into::into),
            xdg_state_home: xdg.map(Into::into),
            home: Some("/home/ci".into()),
        };
        for (state, xdg, uid, folder) in [
            (None, None, 0, "/var/lib/bko"),
            (None, None, 1000, "/home/ci/.local/state/bko"),
            (None, Some("/x"), 1000, "/x/bko"),
            (None, Some("relative"), 1000, "/home/ci/.local/state/bko"),
            (Some("/s"), Some("/x"), 1000, "/s"),
        ] {
            assert_eq!(args(state, xdg).folder(uid), PathBuf::from(folder));
        }
    }
}
