//! Command-line flags of the gateway, under the reference's names.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::limits::Limits;
use crate::names::DAEMON_PORT;
use crate::runtime::listen::ListenAddress;
use crate::runtime::network::Networks;

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
    /// File with domains, limits and proxyFrom, which go before the flags; read again when it changes
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Connections with a server name at once; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_conns: usize,
    /// Of these, from one source: an IPv4 address, or 64 bits of an IPv6 address; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_conns_per_source: usize,
    /// Of these, for one daemon; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub max_conns_per_daemon: usize,
    /// Connections that have shown no server name yet, of which a newcomer ends the oldest; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub max_unidentified: usize,
    /// Connections that wait for their daemon; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub max_held: usize,
    /// Daemons that one source may wake a minute; 0 lifts the limit
    #[arg(long, value_name = "N", default_value_t = 60)]
    pub wakes_per_source: u32,
    /// Networks of load balancers whose PROXY header is believed, separated by commas
    #[arg(long, value_name = "CIDR,…", default_value = "", hide_default_value = true)]
    pub proxy_from: Networks,
    /// How long a stream may rest without a byte; 0s for any time
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = humantime::parse_duration)]
    pub stream_idle: Duration,
    /// Seconds that streams may go on after the end of a rollout was announced
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    pub drain_seconds: u64,
}

impl GatewayArgs {
    /// The limits that the flags set.
    pub fn limits(&self) -> Limits {
        Limits {
            connections: self.max_conns,
            per_source: self.max_conns_per_source,
            per_daemon: self.max_conns_per_daemon,
            unidentified: self.max_unidentified,
            held: self.max_held,
        }
    }
}
