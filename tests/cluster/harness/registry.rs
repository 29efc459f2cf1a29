//! A container registry on the node's address.

use std::time::Duration;

use super::process::{Process, answers};
use super::tools::Tools;

/// The same from tests, node and pods.
pub(crate) const ADDRESS: &str = "192.168.64.2:5000";

const CONFIG: &str = "\
version: 0.1
log: {level: warn, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: /run/bko/registry}, delete: {enabled: true}}
http: {addr: 192.168.64.2:5000}
";

/// Starts the registry.
///
/// # Errors
/// It does not answer; with the end of its log.
pub(crate) async fn start(tools: &Tools) -> anyhow::Result<Process> {
    let config = "/run/bko/registry.yaml";
    std::fs::write(config, CONFIG)?;
    let mut command = tools.command("docker-registry");
    command.args(["serve", config]);
    let registry = Process::spawn("registry", command)?;
    registry.wait_until(Duration::from_secs(10), async || answers(&format!("http://{ADDRESS}/v2/")).await).await?;
    Ok(registry)
}
