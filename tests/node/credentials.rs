//! A machine that knows nothing but what `bko-install credentials` printed: it
//! builds with `bko-install build`, and by the README's lines.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Service;
use kube::Api;

use crate::harness::{Node, executable, process};
use crate::installation::{DOMAIN, Installation, OPERATOR, bko};

pub(crate) async fn a_ci_needs_nothing_but_the_credentials(node: Arc<Node>) -> anyhow::Result<()> {
    let farm = Installation::install(&node).await?;
    names(&node).await?;
    let machine = Machine::new(&node, farm.base())?;
    let [with_client, with_curl] = readme()?;
    let (hand_over, build) = with_client.split_once(". ./farm.env\n").context("the README sources no credentials")?;

    // Whoever administers the farm does this; the rest is the CI's.
    let mut command = bko(&node, &[])?;
    let kubeconfig = command.get_envs().find_map(|(name, value)| (name == "KUBECONFIG").then_some(value?.to_owned()));
    command = machine.shell(hand_over);
    command.env("KUBECONFIG", kubeconfig.context("no kubeconfig")?);
    process::combined_output(command).await?;

    let first = process::combined_output(machine.shell(&format!(". ./farm.env\n{build}"))).await?;
    ensure!(first.contains("Built in step 1 of this cache"), "{first}");
    let second = process::combined_output(machine.shell(&format!(". ./farm.env\n{with_curl}"))).await?;
    ensure!(second.contains("CACHED") && !second.contains("Built in step"), "{second}");
    ensure!(farm.inflight("github.com/acme/shop").await? == 0, "a build was not released");
    Ok(())
}

/// DNS, as far as this machine will ask.
async fn names(node: &Node) -> anyhow::Result<()> {
    let key =
        process::output(bko(node, &["key", "--repo=github.com/acme/shop", "--arch=amd64", "--output=json"])?).await?;
    let key: serde_json::Value = serde_json::from_str(&key)?;
    let daemon = key["daemon"].as_str().context("no daemon")?;
    let names = [format!("{daemon}.{DOMAIN}"), format!("api.{DOMAIN}")];
    node.add_host(address(node, "buildkit-operator-gateway").await?, &names.each_ref().map(String::as_str))?;
    let server = format!("buildkit-operator-buildd.{OPERATOR}.svc");
    node.add_host(address(node, "buildkit-operator-buildd").await?, &[&server])
}

async fn address(node: &Node, service: &str) -> anyhow::Result<IpAddr> {
    let service = Api::<Service>::namespaced(node.client(), OPERATOR).get(service).await?;
    Ok(service.spec.and_then(|spec| spec.cluster_ip).context("no address")?.parse()?)
}

/// The shell blocks of "Use it from CI": with our client, and with curl.
fn readme() -> anyhow::Result<[String; 2]> {
    let text = std::fs::read_to_string("README.md")?;
    let section = text.split("## Use it from CI").nth(1).context("no such section")?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let blocks: Vec<_> = section.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let [client, curl] = blocks[..] else { anyhow::bail!("want two blocks, found {}", blocks.len()) };
    Ok([client.to_owned(), curl.to_owned()])
}

/// A checkout of the example, and a shell that inherits nothing.
struct Machine {
    folder: PathBuf,
    registry: &'static str,
    path: String,
}

impl Machine {
    fn new(node: &Node, base: &str) -> anyhow::Result<Self> {
        let folder = PathBuf::from("/run/bko/ci");
        let bin = folder.join("bin");
        std::fs::create_dir_all(&bin)?;
        std::fs::create_dir_all(folder.join("docker/cli-plugins"))?;
        std::fs::create_dir_all(folder.join("checkout"))?;
        let link = |program: &Path, name: &str| std::os::unix::fs::symlink(program, bin.join(name));
        link(&std::path::absolute(executable::executable()?)?, "bko-install")?;
        let buildx = node.tools().file("buildx");
        std::os::unix::fs::symlink(&buildx, folder.join("docker/cli-plugins/docker-buildx"))?;
        // What `docker` itself does with a plugin, where it is not installed.
        let docker = format!("#!/bin/sh\n[ \"$1\" = buildx ] && shift && exec '{}' \"$@\"\n", buildx.display());
        if !["/usr/bin/docker", "/usr/local/bin/docker"].iter().any(|docker| Path::new(docker).exists()) {
            std::fs::write(bin.join("docker"), docker)?;
            std::fs::set_permissions(bin.join("docker"), std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        }
        for file in std::fs::read_dir("examples/hello")? {
            let file = file?;
            std::fs::copy(file.path(), folder.join("checkout").join(file.file_name()))?;
        }
        let dockerfile = folder.join("checkout/Dockerfile");
        let text = std::fs::read_to_string(&dockerfile)?;
        let ours = text.replace("ARG BASE=docker.io/library/busybox:1.37", &format!("ARG BASE={base}"));
        ensure!(ours != text, "the example has another base");
        std::fs::write(&dockerfile, ours)?;
        let path = format!("{}:/usr/local/bin:/usr/bin:/bin", bin.display());
        let machine = Self { folder, registry: node.registry_address(), path };
        let git = "git init --quiet && git remote add origin https://github.com/acme/shop.git";
        ensure!(machine.shell(git).status()?.success(), "git does not work");
        Ok(machine)
    }

    fn shell(&self, script: &str) -> Command {
        let script = script.replace("registry.example.org", self.registry);
        let mut command = Command::new("sh");
        command.args(["-e", "-c", &script]).current_dir(self.folder.join("checkout")).env_clear();
        command.env("PATH", &self.path).env("HOME", &self.folder).env("DOCKER_CONFIG", self.folder.join("docker"));
        command
    }
}
