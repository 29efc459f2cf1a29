//! The recorded exchanges, over a socket.

use std::net::SocketAddr;
use std::sync::Arc;

use bko_install::router::{Config, RouteArgs, Secret, Timeouts};
use clap::Parser;

use super::Server;
use super::memory::{Memory, Shared};
use super::replay::{self, Difference, Exchange, GROUPS, Subject};

/// Every wanted difference; the rows are explained in `docs/compatibility.md`.
const DIFFERENCES: [Difference; 4] = [
    Difference {
        exchanges: &[
            "prewarm-absent",
            "prewarm-again-cold",
            "prewarm-warm",
            "prewarm-ignores-untrusted",
            "token-scheme-any-case",
            "admin-right",
            "admin-right-bearer-only",
            "gateway-port-443",
            "port-4321-prewarm",
        ],
        row: "BF-41",
        ours: |response| {
            response.headers.insert("content-type".to_owned(), "application/json".to_owned());
        },
        last: false,
    },
    Difference {
        exchanges: &["double-slash-redirects"],
        row: "BF-41",
        ours: |response| {
            response.status = 404;
            response.headers.clear();
            response.headers.insert("content-type".to_owned(), "text/plain; charset=utf-8".to_owned());
            response.headers.insert("x-content-type-options".to_owned(), "nosniff".to_owned());
            response.body = "404 page not found\n".into();
        },
        last: false,
    },
    // Last: it makes a project and waits for its daemon.
    Difference {
        exchanges: &["route-unknown-field"],
        row: "BF-21",
        ours: |response| {
            response.status = 200;
            response.headers.clear();
            response.headers.insert("content-type".to_owned(), "application/json".to_owned());
            response.headers.insert("x-buildkit-operator-ignored-fields".to_owned(), "branch".to_owned());
            response.body = serde_json::json!({
                "key": "p280ada3d8fae4e39",
                "buildId": "<buildId>",
                "endpoint": "tcp://buildkitd-p280ada3d8fae4e39.buildkit-builds.svc:1234",
                "namespace": "buildkit-builds",
                "ready": true,
            });
        },
        last: true,
    },
    // Last: it releases the oldest entry.
    Difference {
        exchanges: &["complete-unknown-field"],
        row: "BF-21",
        ours: |response| {
            response.status = 204;
            response.headers.clear();
            response.headers.insert("x-buildkit-operator-ignored-fields".to_owned(), "build_id".to_owned());
            response.body = "".into();
        },
        last: true,
    },
];

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
}

async fn start(recorded: &replay::Server) -> (Server, InMemory) {
    let mut flags = Flags::parse_from(std::iter::once("server").chain(recorded.flags.iter().map(String::as_str)));
    let secret = |name: &str| recorded.env.get(name).map(|token| Secret::new(token.as_str().unwrap()));
    flags.route.auth_token = secret("BUILDKIT_OPERATOR_AUTH_TOKEN");
    flags.route.admin_token = secret("BUILDKIT_OPERATOR_ADMIN_TOKEN");
    flags.route.auth_open = flags.route.auth_token.is_none();
    let port = if flags.gateway_host.is_some() { flags.gateway_port.unwrap_or(flags.port) } else { flags.port };
    let memory = Arc::new(Memory::at(&flags.namespace, flags.gateway_host, port));
    let timeouts = Timeouts::new(flags.route.route_wait);
    let server = Server::start(Config::try_from(flags.route).unwrap(), &memory, timeouts).await;
    let subject = InMemory { address: server.address, memory };
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
