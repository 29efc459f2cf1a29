//! The HTTP API against its own document: schemathesis sends what the document
//! allows and what it forbids, to the real server on a real API server.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::farm::Server;
use crate::harness::{Cluster, repetitions};
use crate::routes::farm;

const TOKEN: &str = "for-callers";

pub(crate) async fn an_open_api_is_as_documented(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    conforms(&cluster, "schema-open", &[]).await
}

pub(crate) async fn an_api_with_a_token_is_as_documented(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    conforms(&cluster, "schema-token", &[("BUILDKIT_OPERATOR_AUTH_TOKEN", TOKEN)]).await
}

async fn conforms(cluster: &Cluster, prefix: &str, env: &[(&str, &str)]) -> anyhow::Result<()> {
    let farm = farm(cluster, prefix).await?;
    farm.play.set_delay(Duration::ZERO);
    // Neither of these is a fault: so many calls, and entries that nobody releases.
    let flags = farm.flags(&["--api-rate-limit=0", "--idle-seconds=3600"]);
    let server = Server::with(cluster, &flags, env).await?;
    let begun = Instant::now();
    let mut command = Command::new("schemathesis");
    command
        .args(["--no-color", "run", &format!("http://{}/openapi.json", server.api), "--checks=all"])
        .args(["--seed=1", "--generation-database=none", "--suppress-health-check=all", "--continue-on-failure"])
        .args(["--request-timeout=20", "--warnings=off", &format!("--max-examples={}", repetitions(200))])
        .env("SCHEMATHESIS_HOOKS", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/schemathesis/formats.py"))
        .current_dir("/run/bko");
    if !env.is_empty() {
        command.args(["--header", &format!("Authorization: Bearer {TOKEN}")]);
    }
    let mut command = tokio::process::Command::from(command);
    let output = command.kill_on_drop(true).output().await.context("run schemathesis: `make tools` installs it")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    // A document that nothing could be made of passes, too.
    ensure!(said.contains("16 selected / 16 total"), "not all was tried:\n{said}");
    eprintln!("schemathesis in {:?}", begun.elapsed());
    Ok(())
}
