//! Command-line flags of the gateway, under the reference's names.

use clap::Args;

use crate::names::DAEMON_PORT;
use crate::runtime::listen::ListenAddress;

/// Flags of the gateway.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Gateway")]
pub struct GatewayArgs {
    /// Address that builds connect to
    #[arg(long, value_name = "ADDRESS", default_value_t = ListenAddress::Any(DAEMON_PORT))]
    pub listen: ListenAddress,
    /// Domains whose names `buildkitd-<key>.<domain>` are relayed, separated by commas
    #[arg(long, env = "BUILDKIT_OPERATOR_GATEWAY_DOMAIN", value_name = "DOMAIN,…", value_delimiter = ',')]
    pub domain: Vec<String>,
    /// Connections at once; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_conns: usize,
    /// Seconds that streams may go on after the end of a rollout was announced
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    pub drain_seconds: u64,
}
