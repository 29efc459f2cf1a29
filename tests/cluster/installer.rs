//! `cluster init`, `plan` and `status` against a real API server. Pods are
//! played; what a node has to say about images is written into their status.

mod access;
mod adoption;
mod bundled;
mod certificates;
mod changes;
mod exports;
mod faults;
mod ownership;
mod permissions;
mod preflight;
mod refusals;
mod removal;
mod runs;
mod settled;
mod terminal;
mod weather;

pub(crate) use access::*;
pub(crate) use adoption::*;
use bundled::Bundled;
pub(crate) use certificates::*;
pub(crate) use changes::*;
pub(crate) use exports::*;
pub(crate) use faults::*;
pub(crate) use ownership::*;
pub(crate) use permissions::*;
pub(crate) use preflight::*;
pub(crate) use refusals::*;
pub(crate) use removal::*;
pub(crate) use runs::*;
pub(crate) use settled::*;
pub(crate) use terminal::*;
pub(crate) use weather::*;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, Pod, Secret};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::harness::audit::Write;
use crate::harness::namespaces::Namespaces;
use crate::harness::play::Play;
use crate::harness::{Cluster, executable};

const IMAGE: &str = "registry.example/bko-install:test";
const AGENT: &str = concat!("bko-install/", env!("CARGO_PKG_VERSION"));

/// What is tested.
fn program() -> PathBuf {
    executable::executable().unwrap()
}

fn bko_install() -> Command {
    Command::new(program())
}

/// One installation in three namespaces of its own.
struct Farm {
    cluster: Arc<Cluster>,
    names: Namespaces,
    since: Timestamp,
    play: Play,
}

impl Farm {
    fn new(cluster: Arc<Cluster>, prefix: &str) -> Self {
        let names = cluster.namespaces(prefix);
        let play = Play::start(cluster.client(), &names.operator, Duration::ZERO);
        Self { cluster, names, since: Timestamp::now(), play }
    }

    fn client(&self) -> Client {
        self.cluster.client()
    }

    fn command(&self, verb: &str, args: &[&str]) -> Command {
        let mut command = bko_install();
        command.args(["cluster", verb]).arg("--kubeconfig").arg(self.cluster.kubeconfig());
        if verb != "status" {
            command.args(["--profile", "dev", "--image", IMAGE]).args(self.sets());
        }
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    /// A command with another way to the API server.
    fn command_through(&self, kubeconfig: &Path, verb: &str) -> Command {
        let mut command = bko_install();
        command.args(["cluster", verb, "--kubeconfig"]).arg(kubeconfig);
        match verb {
            "init" => command.args(["--profile", "dev", "--image", IMAGE, "--timeout=60s"]).args(self.sets()),
            _ => command.args(["--namespace", &self.names.operator]),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        command
    }

    fn sets(&self) -> Vec<String> {
        let Namespaces { operator, builds, system } = &self.names;
        [("operator", operator), ("builds", builds), ("system", system)]
            .map(|(name, value)| format!("--set=namespaces.{name}={value}"))
            .to_vec()
    }

    async fn run(&self, verb: &str, args: &[&str]) -> anyhow::Result<Run> {
        Run::new(self.command(verb, args).output().await?)
    }

    async fn init(&self, args: &[&str]) -> anyhow::Result<Run> {
        self.run("init", &[&["--timeout=60s"], args].concat()).await
    }

    fn spawn(&self, verb: &str, args: &[&str]) -> anyhow::Result<Child> {
        Ok(self.command(verb, args).spawn()?)
    }

    /// Writes of this installer since this farm began, to its own namespaces
    /// and to cluster-scoped objects of their names.
    async fn writes(&self) -> anyhow::Result<Vec<Write>> {
        let ours = |write: &Write| {
            [&self.names.operator, &self.names.builds, &self.names.system]
                .into_iter()
                .any(|name| write.namespace == *name || write.name == *name)
        };
        Ok(self.cluster.audit().writes_by(AGENT, self.since).await?.into_iter().filter(ours).collect())
    }

    async fn record(&self) -> anyhow::Result<Option<Value>> {
        record(&self.client(), &self.names.operator).await
    }

    /// Commands that find the installation by its record.
    async fn found(&self, verb: &str, args: &[&str]) -> anyhow::Result<Run> {
        let mut command = bko_install();
        command.args(["cluster", verb, "--namespace", &self.names.operator, "--kubeconfig"]);
        command.arg(self.cluster.kubeconfig()).args(args).kill_on_drop(true);
        Run::new(command.output().await?)
    }

    async fn lease(&self) -> anyhow::Result<Option<Lease>> {
        Ok(Api::<Lease>::namespaced(self.client(), &self.names.operator).get_opt("bko-install").await?)
    }

    /// Secrets of all three namespaces: data by `namespace/name/key`.
    async fn secrets(&self) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
        let mut all = BTreeMap::new();
        for namespace in [&self.names.operator, &self.names.builds, &self.names.system] {
            for secret in Api::<Secret>::namespaced(self.client(), namespace).list(&ListParams::default()).await? {
                let name = secret.name_any();
                for (key, value) in secret.data.unwrap_or_default() {
                    all.insert(format!("{namespace}/{name}/{key}"), value.0);
                }
            }
        }
        Ok(all)
    }
}

/// The record, with its inventory, which is kept in parts.
async fn record(client: &Client, namespace: &str) -> anyhow::Result<Option<Value>> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let Some(map) = maps.get_opt("bko-install").await? else { return Ok(None) };
    let data = map.data.unwrap_or_default();
    let mut record: Value = serde_json::from_str(data.get("record.json").context("no record.json")?)?;
    let mut packed = Vec::new();
    for name in record["inventoryParts"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        let part = maps.get(name).await?.binary_data.unwrap_or_default();
        packed.extend(part.get("part").context("no part")?.0.clone());
    }
    record["inventory"] = serde_json::from_reader(flate2::read::GzDecoder::new(packed.as_slice()))?;
    Ok(Some(record))
}

/// What a run left behind.
struct Run {
    code: Option<i32>,
    signal: Option<i32>,
    out: String,
    err: String,
}

impl Run {
    fn new(output: Output) -> anyhow::Result<Self> {
        use std::os::unix::process::ExitStatusExt;
        Ok(Self {
            code: output.status.code(),
            signal: output.status.signal(),
            out: String::from_utf8(output.stdout)?,
            err: String::from_utf8(output.stderr)?,
        })
    }

    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "stdout:\n{}\nstderr:\n{}", self.out, self.err);
        self
    }

    #[track_caller]
    fn says(&self, text: &str) {
        assert!(self.err.contains(text), "\"{text}\" is not in:\n{}", self.err);
    }
}

fn texts(writes: &[Write]) -> Vec<String> {
    writes.iter().map(|write| format!("{} {}", write.verb, write.resource)).collect()
}

fn kubeconfig_with_token(cluster: &Cluster, token: &str, file: &Path) -> anyhow::Result<()> {
    let mut config: Value = serde_yaml::from_str(&std::fs::read_to_string(cluster.kubeconfig())?)?;
    config["users"][0]["user"] = serde_json::json!({"token": token});
    Ok(std::fs::write(file, serde_yaml::to_string(&config)?)?)
}
