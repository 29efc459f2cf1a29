//! The recorded exchanges, over a socket.

use std::net::SocketAddr;
use std::sync::Arc;

use bko_install::router::{Config, GivenToken, RouteArgs, Secret, Timeouts};
use clap::Parser;

use super::Server;
use super::differences::DIFFERENCES;
use super::issuer::Recorded;
use super::memory::{Memory, Shared};
use super::replay::{self, Exchange, GROUPS, Subject};

/// The recorded server's flags: the routing API's own, and its provisioner's.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    route: RouteArgs,
    #[arg(long, default_value_t = 1234)]
    port: u16,
    #[arg(long)]
    gateway_host: Option<String>,
    #[arg(long)]
    gateway_port: Option<u16>,
    #[arg(long, default_value = "buildkit-builds")]
    namespace: String,
}

struct InMemory {
    address: SocketAddr,
    memory: Shared,
    issuer: Option<Recorded>,
}

impl Subject for InMemory {
    fn address(&self) -> SocketAddr {
        self.address
    }

    async fn inflight(&self, key: &str) -> Option<usize> {
        self.memory.inflight(key)
    }

    async fn let_pods_become_ready(&self) {
        self.memory.let_pods_become_ready();
    }

    fn token(&self, claims: &str) -> String {
        self.issuer.as_ref().unwrap().token(claims)
    }
}

async fn start(recorded: &replay::Server) -> (Server, InMemory) {
    let mut flags = Flags::parse_from(std::iter::once("server").chain(recorded.flags.iter().map(String::as_str)));
    let mut env = recorded.env.clone();
    let issuer = Recorded::of(&mut env).await;
    let text = |name: &str| env.get(name).map(|value| value.as_str().unwrap().to_owned());
    let secret = |name: &str| text(name).as_deref().map(Secret::new);
    flags.route.auth_token = text("BUILDKIT_OPERATOR_AUTH_TOKEN").as_deref().map(GivenToken::new);
    flags.route.admin_token = secret("BUILDKIT_OPERATOR_ADMIN_TOKEN");
    flags.route.oidc_providers = text("BUILDKIT_OPERATOR_OIDC_PROVIDERS");
    flags.route.oidc_repo_allowlist = text("BUILDKIT_OPERATOR_OIDC_REPO_ALLOWLIST");
    flags.route.auth_open = env.is_empty();
    let port = if flags.gateway_host.is_some() { flags.gateway_port.unwrap_or(flags.port) } else { flags.port };
    let memory = Arc::new(Memory::at(&flags.namespace, flags.gateway_host, port));
    let timeouts = Timeouts::new(flags.route.route_wait);
    let server = Server::start(Config::try_from(flags.route).unwrap(), &memory, timeouts).await;
    let subject = InMemory { address: server.address, memory, issuer };
    (server, subject)
}

#[tokio::test]
async fn every_recorded_exchange_comes_out_the_same_or_differs_as_wanted() {
    let mut differed = Vec::new();
    for name in GROUPS {
        let group: Vec<Exchange> = replay::group(name);
        let (server, subject) = start(&group[0].server).await;
        differed.extend(replay::replay(group, &subject, &DIFFERENCES).await);
        server.stop().await;
    }
    let mut wanted: Vec<_> = DIFFERENCES.iter().flat_map(|d| d.exchanges).collect();
    wanted.sort_unstable();
    differed.sort_unstable();
    assert!(differed.iter().eq(wanted.iter().copied()), "{differed:?} and {wanted:?}");
}

#[test]
fn every_difference_is_a_row_of_the_compatibility_page() {
    let page = include_str!("../../../docs/compatibility.md");
    for difference in &DIFFERENCES {
        assert!(page.contains(&format!("| {} |", difference.row)), "{}", difference.row);
    }
}

#[tokio::test]
#[should_panic(expected = "gateway-port-443: header content-type is Some(\"application/json\")")]
async fn an_unwanted_difference_is_reported() {
    let group = replay::group("gateway-443");
    let (server, subject) = start(&group[0].server).await;
    replay::replay(group, &subject, &[]).await;
    server.stop().await;
}
