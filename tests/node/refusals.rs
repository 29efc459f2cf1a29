//! What `cluster init` says when a real kubelet cannot run our pods.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::ensure;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::DeleteParams;
use tokio::process::Command;

use crate::harness::Node;

/// Installs with an image into namespaces of its own, and returns what was said.
async fn refused(node: &Node, prefix: &str, image: &str) -> anyhow::Result<String> {
    let names = node.namespaces(prefix);
    let mut init = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    init.args(["cluster", "init", "--profile=dev", "--timeout=100s", "--image", image]);
    init.arg("--kubeconfig").arg(node.kubeconfig()).stdin(Stdio::null()).kill_on_drop(true);
    for (name, namespace) in [("operator", &names.operator), ("builds", &names.builds), ("system", &names.system)] {
        init.arg(format!("--set=namespaces.{name}={namespace}"));
    }
    let began = Instant::now();
    let output = init.output().await?;
    // Without its record no other test takes this installation for its own.
    let maps: Api<ConfigMap> = Api::namespaced(node.client(), &names.operator);
    maps.delete("bko-install", &DeleteParams::default()).await?;
    names.delete(&node.client()).await?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(output.status.code() == Some(4), "{said}");
    ensure!(began.elapsed() < Duration::from_secs(60), "after {:?}: {said}", began.elapsed());
    ensure!(
        said.contains(&format!("Deployment {}/buildkit-operator-buildd will not become ready", names.operator)),
        "{said}"
    );
    Ok(said)
}

pub(crate) async fn a_missing_image_is_told_with_a_way_to_have_it(node: Arc<Node>) -> anyhow::Result<()> {
    let image = "registry.invalid/bko-install:none";
    let said = refused(&node, "no-image", image).await?;
    ensure!(said.contains("container \"") && said.contains("ImagePullBackOff: "), "{said}");
    ensure!(said.contains(&format!("hint: the nodes cannot get image \"{image}\"")), "{said}");
    Ok(())
}

/// An image that has no such program.
pub(crate) async fn a_container_that_cannot_start_is_told(node: Arc<Node>) -> anyhow::Result<()> {
    let archive = node.archive("busybox.tar")?;
    let said = refused(&node, "no-start", archive.reference()).await?;
    ensure!(said.contains("\n  pod \"buildkit-operator-buildd-"), "{said}");
    ensure!(!said.contains("hint: the nodes cannot get image"), "{said}");
    Ok(())
}
