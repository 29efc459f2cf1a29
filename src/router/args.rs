//! The flags of the routing API, named as the reference names them.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;

use super::{Auth, Config, NobodyMayCall, RateError, RateLimit, Secret, TrustedProxies};

/// Flags of the routing API.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Routing API")]
pub struct RouteArgs {
    /// Bearer token of the callers
    #[arg(long, env = "BUILDKIT_OPERATOR_AUTH_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub auth_token: Option<Secret>,
    /// Token of the header X-Buildkit-Operator-Admin-Token
    #[arg(long, env = "BUILDKIT_OPERATOR_ADMIN_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub admin_token: Option<Secret>,
    /// Let anybody call who can reach the API
    #[arg(long)]
    pub auth_open: bool,
    /// Calls per second over all callers, fractions allowed; 0 lifts the limit
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
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    /// Nobody may call.
    #[error("{0}; set BUILDKIT_OPERATOR_AUTH_TOKEN, or let anybody call with --auth-open")]
    Auth(NobodyMayCall),
    /// The rate is none.
    #[error("--api-rate-limit and --api-rate-burst: {0}")]
    Rate(RateError),
}

impl TryFrom<RouteArgs> for Config {
    type Error = ConfigError;

    fn try_from(args: RouteArgs) -> Result<Self, Self::Error> {
        Ok(Self {
            auth: Auth::new(args.auth_token, args.admin_token, args.auth_open).map_err(ConfigError::Auth)?,
            rate: RateLimit::new(args.api_rate_limit, args.api_rate_burst).map_err(ConfigError::Rate)?,
            max_cold_starts: args.max_cold_starts,
            route_wait: args.route_wait,
            require_build_id: args.require_build_id,
            trusted_proxies: args.trusted_proxies,
        })
    }
}
