//! The main job on a real node, told to a person: `make demo`.

#![expect(clippy::disallowed_methods, reason = "the demo measures time")]
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "speaks to a person")]

#[path = "../cluster"]
mod shared {
    pub(crate) mod harness;
}

#[path = "../node/installation.rs"]
mod installation;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use bko_install::families::build_farm::api::Phase;
use installation::Installation;
use serde_json::json;
use shared::harness::{self, Node};

async fn tell(node: Arc<Node>) -> anyhow::Result<()> {
    println!("A Kubernetes node runs in namespaces of its own at {}.", node.address());
    println!("Installing the farm from its own image: bko-install cluster init --profile dev …");
    let begun = Instant::now();
    let farm = Installation::install(&node).await?;
    let install = begun.elapsed();

    let body = json!({"repo": "github.com/acme/hello", "arch": "amd64"});
    println!("Asking for a daemon: POST /route {body}");
    let cold = farm.route(&body).await?;
    println!("  → {}", cold.endpoint);
    let image = format!("{}/hello:1", node.registry_address());
    println!("Building examples/hello there, through the gateway, with docker buildx …");
    let first = farm.buildx(&cold, &image).await?;
    let second = farm.buildx(&cold, &image).await?;
    ensure!(!first.cached() && second.cached(), "the second build is not cached:\n{}", second.printed);
    farm.complete(&cold).await?;

    println!("Waiting until the idle daemon is at zero; its cache stays …");
    let idle = |p: &bko_install::families::build_farm::api::BuildProject| {
        p.status.as_ref().and_then(|status| status.phase) == Some(Phase::Idle)
    };
    farm.until(&cold.key, "at zero", Duration::from_secs(60), idle).await?;
    let woken = farm.route(&body).await?;
    let third = farm.buildx(&woken, &image).await?;
    ensure!(third.cached(), "the cache was lost at zero:\n{}", third.printed);
    farm.complete(&woken).await?;

    println!("\n{:<44}{:>8}", "what happened", "seconds");
    for (what, took) in [
        ("install: image made and imported, farm ready", install),
        ("cold route: new project to ready daemon", cold.took),
        ("cold build: builder created, built, pushed", first.took),
        ("warm build: the same again, cached", second.took),
        ("wake from zero: route to ready daemon", woken.took),
        ("build after wake: still cached", third.took),
    ] {
        println!("{what:<44}{:>8.2}", took.as_secs_f64());
    }
    println!("\nNext: README.md says how to install it into a cluster of yours.");
    Ok(())
}

fn main() -> ExitCode {
    harness::enter::<Node>(|node, runtime| match runtime.block_on(tell(node)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    })
}
