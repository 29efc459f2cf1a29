//! The flags of the routing API, named as the reference names them, and the
//! files that they name.
#![expect(clippy::disallowed_methods, reason = "shell: reads the file of identity providers")]

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::tokens::{TokenDir, TokenDirError};
use super::{Auth, AuthError, Config, GivenToken, RateError, RateLimit, Secret, TrustedProxies};
use crate::identity::config::{self, ConfigFault, Sources};
use crate::issuers::{Issuers, RootsError, Timing};

/// Flags of the routing API.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Routing API")]
pub struct RouteArgs {
    /// Bearer token of the callers
    #[arg(long, env = "BUILDKIT_OPERATOR_AUTH_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub auth_token: Option<GivenToken>,
    /// Folder whose file `token`, and `previous` if there is one, hold bearer tokens; read again when it changes
    #[arg(long, value_name = "DIR")]
    pub auth_token_dir: Option<PathBuf>,
    /// Token of the header X-Buildkit-Operator-Admin-Token
    #[arg(long, env = "BUILDKIT_OPERATOR_ADMIN_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub admin_token: Option<Secret>,
    /// Let anybody call who can reach the API
    #[arg(long)]
    pub auth_open: bool,
    /// File of identity providers, in YAML or JSON
    #[arg(long, value_name = "FILE")]
    pub oidc_config: Option<PathBuf>,
    /// Identity providers as a list in JSON, instead of those of the file
    #[arg(long, env = "BUILDKIT_OPERATOR_OIDC_PROVIDERS", value_name = "LIST")]
    pub oidc_providers: Option<String>,
    /// Repositories that identities may build, instead of those of the file: github.com/acme/*, …
    #[arg(long, env = "BUILDKIT_OPERATOR_OIDC_REPO_ALLOWLIST", value_name = "PATTERN,…")]
    pub oidc_repo_allowlist: Option<String>,
    /// Accept no identities, whatever the file says
    #[arg(long, env = "BUILDKIT_OPERATOR_OIDC_DISABLE", value_name = "BOOL", num_args = 0..=1,
          default_missing_value = "true")]
    pub oidc_disable: Option<String>,
    /// Authorities in PEM that are believed of identity providers beside the public ones
    #[arg(long, value_name = "FILE")]
    pub oidc_ca_file: Option<PathBuf>,
    /// Events whose builds are trusted, of pull_request_target, issue_comment and workflow_run
    #[arg(long, value_name = "EVENT,…", value_delimiter = ',')]
    pub trust_events: Vec<String>,
    /// Tokens of identity providers to verify per second and source address; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 200.0)]
    pub source_rate_limit: f64,
    /// Tokens of identity providers to verify at once, before that rate counts
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub source_rate_burst: u32,
    /// Calls per second of one caller, fractions allowed; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 50.0)]
    pub api_rate_limit: f64,
    /// Calls at once, before the rate counts
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub api_rate_burst: u32,
    /// Routes that wait for a daemon at once; the others queue
    #[arg(long, value_name = "N", default_value = "8")]
    pub max_cold_starts: NonZeroUsize,
    /// Longest time that one route may take, queue included
    #[arg(long, value_name = "DURATION", default_value = "180s", value_parser = humantime::parse_duration)]
    pub route_wait: Duration,
    /// Refuse a /complete that names no build
    #[arg(long)]
    pub require_build_id: bool,
    /// Networks of proxies whose X-Forwarded-For is believed, separated by commas
    #[arg(long, value_name = "CIDR,…", default_value = "", hide_default_value = true)]
    pub trusted_proxies: TrustedProxies,
}

/// Why flags make no routing API.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Nobody may call, or anybody despite identities.
    #[error(transparent)]
    Auth(AuthError),
    /// The rate is none.
    #[error("--api-rate-limit and --api-rate-burst: {0}")]
    Rate(RateError),
    /// The rate before verification is none.
    #[error("--source-rate-limit and --source-rate-burst: {0}")]
    SourceRate(RateError),
    /// The folder of tokens.
    #[error(transparent)]
    Tokens(TokenDirError),
    /// The file of providers cannot be read.
    #[error("--oidc-config: read {path:?}")]
    ReadOidc {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The providers.
    #[error(transparent)]
    Oidc(ConfigFault),
    /// The authorities of providers.
    #[error("--oidc-ca-file, or caFile of a provider")]
    Roots(#[source] RootsError),
}

impl TryFrom<RouteArgs> for Config {
    type Error = ConfigError;

    /// Reads the files that the flags name.
    fn try_from(args: RouteArgs) -> Result<Self, Self::Error> {
        let rate = RateLimit::new(args.api_rate_limit, args.api_rate_burst).map_err(ConfigError::Rate)?;
        let source = RateLimit::new(args.source_rate_limit, args.source_rate_burst).map_err(ConfigError::SourceRate)?;
        let (max_cold_starts, route_wait) = (args.max_cold_starts, args.route_wait);
        let (require_build_id, trusted_proxies) = (args.require_build_id, args.trusted_proxies.clone());
        let auth = auth(args)?;
        Ok(Self { auth, rate, source_rate: source, max_cold_starts, route_wait, require_build_id, trusted_proxies })
    }
}

fn auth(args: RouteArgs) -> Result<Auth, ConfigError> {
    let ca_file = args.oidc_ca_file.clone();
    let token_dir = args.auth_token_dir.clone().map(TokenDir::open).transpose().map_err(ConfigError::Tokens)?;
    let (token, admin_token, open) =
        (args.auth_token.as_ref().map(GivenToken::secret), args.admin_token.clone(), args.auth_open);
    let providers = config::Config::read(sources(args)?).map_err(ConfigError::Oidc)?;
    let issuers = providers.map(|providers| Issuers::new(providers, ca_file.as_deref(), Timing::default()));
    let issuers = issuers.transpose().map_err(ConfigError::Roots)?;
    Auth { token, token_dir, admin_token, issuers, open }.checked().map_err(ConfigError::Auth)
}

fn sources(args: RouteArgs) -> Result<Sources, ConfigError> {
    let file = match args.oidc_config {
        Some(path) => match std::fs::read_to_string(&path) {
            Ok(text) => Some((path.display().to_string(), text)),
            Err(source) => return Err(ConfigError::ReadOidc { path, source }),
        },
        None => None,
    };
    Ok(Sources {
        file,
        providers: args.oidc_providers,
        repo_allowlist: args.oidc_repo_allowlist,
        disable: args.oidc_disable,
        trust_events: args.trust_events,
    })
}
