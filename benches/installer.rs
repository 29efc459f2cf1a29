//! The installer and its scale: `make bench`.
//!
//! Synthetic bundles are installed, installed again, changed and pruned, beside
//! `kubectl apply --server-side` of the same objects, with foreign definitions
//! in the cluster and latency on the way to it. `BKO_REPEAT=full` measures every
//! combination, `BKO_CASE=1000,0,10` one. Prints a table for `docs/performance.md`.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr, reason = "speaks to a person")]

#[path = "../tests/cluster"]
mod shared {
    pub(crate) mod harness;
}

#[path = "installer/bundle.rs"]
mod bundle;
#[path = "installer/latency.rs"]
mod latency;
#[path = "installer/measure.rs"]
mod measure;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bundle::{Part, Synthetic};
use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use measure::Measured;
use shared::harness::{self, Cluster, executable};

/// Objects, foreign definitions, milliseconds of latency.
type Case = (usize, usize, u64);

/// What `make bench` takes the time for.
const QUICK: &[Case] = &[(100, 0, 0), (1000, 0, 0), (1000, 0, 10), (1000, 150, 0)];

fn cases() -> anyhow::Result<Vec<Case>> {
    if let Ok(case) = std::env::var("BKO_CASE") {
        let numbers: Vec<u64> = case.split(',').map(str::parse).collect::<Result<_, _>>().context("BKO_CASE")?;
        let [objects, foreign, latency] = numbers[..] else { anyhow::bail!("BKO_CASE is not like 1000,0,10") };
        return Ok(vec![(usize::try_from(objects)?, usize::try_from(foreign)?, latency)]);
    }
    if std::env::var("BKO_REPEAT").as_deref() != Ok("full") {
        return Ok(QUICK.to_vec());
    }
    let mut cases = Vec::new();
    // Definitions only become more, so that each is made once.
    for foreign in [0, 150, 1000] {
        for latency in [0, 10] {
            cases.extend([100, 1000, 3000].map(|objects| (objects, foreign, latency)));
        }
    }
    Ok(cases)
}

async fn run(cluster: Arc<Cluster>) -> anyhow::Result<()> {
    println!("load before: {}", std::fs::read_to_string("/proc/loadavg")?.trim());
    println!(
        "\n| objects | foreign CRDs | latency, ms | step | bko-install, s | CPU, s | server's CPU, s | MiB | requests | kubectl, s | CPU, s | server's CPU, s | MiB | requests |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    let mut foreign = 0;
    for (number, case) in cases()?.into_iter().enumerate() {
        define_foreign(&cluster, foreign..case.1).await?;
        foreign = foreign.max(case.1);
        measure::settle().await?;
        one_case(&cluster, number, case).await.with_context(|| format!("{case:?}"))?;
    }
    println!("\nload after: {}", std::fs::read_to_string("/proc/loadavg")?.trim());
    Ok(())
}

async fn one_case(cluster: &Cluster, number: usize, (objects, foreign, delay): Case) -> anyhow::Result<()> {
    let proxy = latency::Proxy::start(cluster.kubeconfig(), Duration::from_millis(delay)).await?;
    let ours = Synthetic::new(&format!("scale-{number}-ours"), objects)?;
    let theirs = Synthetic::new(&format!("scale-{number}-theirs"), objects)?;
    for (step, part) in [
        ("cold", Part::whole()),
        ("no-op", Part::whole()),
        ("one change", Part::changed()),
        ("a tenth pruned", Part::pruned()),
    ] {
        ours.write_bundle(part)?;
        measure::settle().await?;
        let installed = Measured::of(cluster, install(&ours, proxy.kubeconfig())?, "bko-install/").await?;
        measure::settle().await?;
        let command = kubectl(cluster, &theirs, part, proxy.kubeconfig())?;
        let applied = Measured::of(cluster, command, "kubectl/").await?;
        println!("| {objects} | {foreign} | {delay} | {step} | {installed} | {applied} |");
    }
    for synthetic in [ours, theirs] {
        remove(cluster, synthetic.namespace()).await?;
    }
    Ok(())
}

fn install(synthetic: &Synthetic, kubeconfig: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(executable::executable()?);
    command.args(["cluster", "init", "--quiet", "--image", "registry.example/bko-install:1", "--kubeconfig"]);
    command.arg(kubeconfig).arg("--bundle").arg(synthetic.folder());
    command.arg(format!("--set=namespaces.operator={}", synthetic.namespace()));
    Ok(command)
}

/// What leaves is deleted by name: that is what there is to compare with.
fn kubectl(cluster: &Cluster, synthetic: &Synthetic, part: Part, kubeconfig: &Path) -> anyhow::Result<Command> {
    let mut command = cluster.tools().command("kubectl");
    command.arg("--kubeconfig").arg(kubeconfig);
    if part.is_pruned() {
        command.args(["delete", "--filename"]).arg(synthetic.write_pruned()?);
    } else {
        command.args(["apply", "--server-side", "--filename"]).arg(synthetic.write_list(part)?);
    }
    Ok(command)
}

async fn define_foreign(cluster: &Cluster, numbers: std::ops::Range<usize>) -> anyhow::Result<()> {
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let create = |number| {
        let api = api.clone();
        async move {
            let definition = bundle::definition(&format!("foreign{}.example.com", number / 5), number, "foreign");
            let definition = serde_json::from_value(definition)?;
            api.create(&PostParams::default(), &definition).await?;
            anyhow::Ok(())
        }
    };
    futures::stream::iter(numbers).map(create).buffer_unordered(8).try_collect::<()>().await
}

/// Removes what a case has left, and returns when it is gone.
async fn remove(cluster: &Cluster, namespace: &str) -> anyhow::Result<()> {
    let definitions: Api<CustomResourceDefinition> = Api::all(cluster.client());
    let labelled = ListParams::default().labels(&format!("bench={namespace}"));
    definitions.delete_collection(&DeleteParams::default(), &labelled).await?;
    let namespaces: Api<Namespace> = Api::all(cluster.client());
    namespaces.delete(namespace, &DeleteParams::background()).await?;
    while namespaces.get_opt(namespace).await?.is_some() {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

fn main() -> ExitCode {
    harness::enter::<Cluster>(|cluster, runtime| match runtime.block_on(run(cluster)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    })
}
