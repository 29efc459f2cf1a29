//! Options of `bko-install build`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::cli::access::{ApiArgs, Maybe, or_nothing};
use crate::cli::key::yes_or_no;
use crate::client::builder::Wanted;
use crate::local::args::StateArgs;

/// Build an image on the farm.
#[derive(Debug, Args)]
#[command(
    after_long_help = "The output is the builder's, and so is the exit code; 130 after Ctrl-C, 143 after SIGTERM. \
                       Without --token an identity is asked of the CI system: see docs/build.md."
)]
pub struct BuildArgs {
    /// Folder to build, or the URL of a repository or an archive [default: .]
    ///
    /// `--context` means the same here, and no context of a kubeconfig: `build` reads none.
    #[arg(value_name = "CONTEXT")]
    pub(super) source: Option<String>,
    /// Further arguments of the builder's own `build`
    #[arg(last = true, value_name = "BUILDER ARGS")]
    pub(super) extra: Vec<OsString>,
    /// What the image shall be.
    #[command(flatten)]
    pub(super) image: ImageArgs,
    /// Where the build goes.
    #[command(flatten)]
    pub(super) route: RouteArgs,
    /// How to get there.
    #[command(flatten)]
    pub(super) access: AccessArgs,
    /// Which builder to use
    #[arg(long, value_enum, default_value_t = Wanted::Auto)]
    pub(super) builder: Wanted,
    /// How the builder shows its progress
    #[arg(long, value_name = "HOW", value_parser = ["auto", "plain", "tty", "rawjson", "quiet", "none"])]
    pub(super) progress: Option<String>,
    /// Repeat a build this often when its daemon goes away, even if steps had begun
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) retries: u32,
    /// Check what can be checked here, print the commands that would be run, and call nobody
    #[arg(long)]
    pub(super) dry_run: bool,
}

/// What the image shall be.
#[derive(Debug, Args)]
#[command(next_help_heading = "Image")]
pub(super) struct ImageArgs {
    /// Dockerfile [default: CONTEXT/Dockerfile]
    #[arg(long, short, value_name = "FILE")]
    pub(super) file: Option<PathBuf>,
    /// Name of the image; may be repeated
    #[arg(long = "tag", short, value_name = "NAME")]
    pub(super) tags: Vec<String>,
    /// Push the image to its registry
    #[arg(long)]
    pub(super) push: bool,
    /// Hand the image to the local Docker; docker buildx only
    #[arg(long)]
    pub(super) load: bool,
    /// Another export, such as type=local,dest=out; may be repeated
    #[arg(long = "output", short, value_name = "EXPORT")]
    pub(super) outputs: Vec<String>,
    /// Build argument; may be repeated
    #[arg(long = "build-arg", value_name = "NAME=VALUE")]
    pub(super) build_args: Vec<String>,
    /// Label of the image; may be repeated
    #[arg(long = "label", value_name = "NAME=VALUE")]
    pub(super) labels: Vec<String>,
    /// Secret of the build: NAME=VALUE, or id=NAME,src=FILE, or id=NAME,env=VARIABLE; may be repeated
    ///
    /// A value on a command line can be read by everybody on the machine: better in the variable
    /// BUILDKIT_OPERATOR_SECRETS, one on each line. Values reach the builder in files that only
    /// their owner can read.
    #[arg(long = "secret", value_name = "SECRET")]
    pub(super) secrets: Vec<String>,
    /// Secrets of the build, one on each line, as a variable of the CI system holds them
    #[arg(long = "secrets", env = "BUILDKIT_OPERATOR_SECRETS", hide = true, hide_env_values = true)]
    pub(super) secret_lines: Option<String>,
    /// SSH agent or keys for the build, such as default; may be repeated
    #[arg(long, value_name = "SSH")]
    pub(super) ssh: Vec<String>,
    /// Provenance attestation: true, false, mode=max
    #[arg(long, value_name = "HOW")]
    pub(super) provenance: Option<String>,
    /// SBOM attestation: true, false, or its generator
    #[arg(long, value_name = "HOW")]
    pub(super) sbom: Option<String>,
    /// Cache to read besides the daemon's own; may be repeated
    #[arg(long, value_name = "CACHE")]
    pub(super) cache_from: Vec<String>,
    /// Cache to write; may be repeated. It may fail without failing the build
    #[arg(long, value_name = "CACHE")]
    pub(super) cache_to: Vec<String>,
    /// Repeat every step
    #[arg(long)]
    pub(super) no_cache: bool,
    /// Write what was built to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) metadata_file: Option<PathBuf>,
    /// Write the image's digest to this file
    #[arg(long, value_name = "FILE")]
    pub(super) digest_file: Option<PathBuf>,
}

/// Where the build goes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Routing")]
pub(super) struct RouteArgs {
    /// Repository that the build belongs to [default: the remote "origin" of the context]
    // Often the URL of a checkout, which holds a token.
    #[arg(long, env = "BUILDKIT_OPERATOR_REPO", value_name = "REPO", hide_env_values = true)]
    pub(super) repo: Option<String>,
    /// Component of a monorepo
    #[arg(long, env = "BUILDKIT_OPERATOR_NAME", value_name = "NAME")]
    pub(super) name: Option<String>,
    /// Target of the Dockerfile
    #[arg(long, env = "BUILDKIT_OPERATOR_TARGET", value_name = "TARGET")]
    pub(super) target: Option<String>,
    /// Architecture to build natively: amd64, arm64; several make one image for all, with docker
    /// buildx only [default: this machine's]
    #[arg(long = "arch", env = "BUILDKIT_OPERATOR_ARCH", value_name = "ARCH", value_delimiter = ',')]
    pub(super) arches: Vec<String>,
    /// The build comes from code that nobody has reviewed: a fork
    #[arg(long, env = "BUILDKIT_OPERATOR_UNTRUSTED", value_parser = yes_or_no)]
    pub(super) untrusted: bool,
    /// How long a daemon may take to wake
    #[arg(
        long,
        env = "BUILDKIT_OPERATOR_ROUTE_WAIT",
        value_name = "DURATION",
        default_value = "5m",
        value_parser = duration
    )]
    pub(super) route_wait: Duration,
}

/// How to get there: `bko-install credentials` prints all of it; a farm on this host is found without.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(super) struct AccessArgs {
    #[command(flatten)]
    pub(super) api: ApiArgs,
    /// Client certificate, without a folder: PEM, PEM in base64, or a file
    #[arg(long, env = "BUILDKIT_OPERATOR_CERT", value_name = "PEM|FILE", hide_env_values = true)]
    pub(super) cert: Option<String>,
    /// Its key, likewise
    #[arg(long, env = "BUILDKIT_OPERATOR_KEY", value_name = "PEM|FILE", hide_env_values = true)]
    pub(super) key: Option<String>,
    /// Port of the gateway, instead of the answer's
    #[arg(long, env = "BUILDKIT_OPERATOR_GATEWAY_PORT", value_name = "PORT", value_parser = port)]
    pub(super) gateway_port: Option<Maybe<u16>>,
    /// A farm on this host, used when no address of a routing API is given.
    #[command(flatten)]
    pub(super) state: StateArgs,
}

/// Variables that a builder need not see.
pub(super) const HIDDEN: [&str; 8] = [
    "BUILDKIT_OPERATOR_SECRETS",
    "BUILDKIT_OPERATOR_CA",
    "BUILDKIT_OPERATOR_CERT",
    "BUILDKIT_OPERATOR_KEY",
    "BUILDKIT_OPERATOR_API_CA",
    "BUILDKIT_OPERATOR_TOKEN",
    "BUILDKIT_OPERATOR_ADMIN_TOKEN",
    "BUILDKIT_OPERATOR_ID_TOKEN",
];

/// Seconds, or a duration with units; blank is the default.
fn duration(text: &str) -> Result<Duration, String> {
    match text.trim() {
        "" => Ok(Duration::from_secs(300)),
        text => match text.parse() {
            Ok(seconds) => Ok(Duration::from_secs(seconds)),
            Err(_) => humantime::parse_duration(text).map_err(|error| error.to_string()),
        },
    }
}

fn port(text: &str) -> Result<Option<u16>, String> {
    or_nothing(text, |text| text.parse().ok().filter(|port| *port > 0).ok_or_else(|| "want 1 to 65535".to_owned()))
}
