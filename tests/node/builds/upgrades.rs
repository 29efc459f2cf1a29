//! The installer at work under a build: another image and back, a release of
//! Helm's that is taken over. The build succeeds, its daemon is the same.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use super::{daemon, same_pod};
use crate::harness::{executable, process};
use crate::installation::{BUILDS, FLAGS, Installation, OPERATOR, bko};

/// Longer than two rolls of server and gateway.
const STEP: u32 = 60;

const SECOND: &str = "docker.io/library/bko-install:second";

pub(super) async fn another_image_and_back(farm: &Installation<'_>) -> anyhow::Result<()> {
    let archive = "/run/bko/second.tar";
    let mut image = Command::new(executable::executable()?);
    image.args(["image", "--output", archive, "--reference", SECOND]);
    process::output(image).await?;
    farm.node.import(archive.as_ref()).await?;

    // A gateway that is rolled lets builds go on for as long: the profile's 30 s are for short ones.
    init(farm, &["--set=gateway.drainSeconds=300"]).await?;
    let (route, uid) = daemon(farm, "upgraded").await?;
    let build = farm.begin(&route.endpoint, "upgraded", STEP).await?;
    let first = image_of(farm).await?;
    init(farm, &["--image", SECOND]).await?;
    ensure!(image_of(farm).await? == SECOND, "the server still runs {first}");
    process::combined_output(bko(farm.node, &["cluster", "rollback", "--timeout=2m"])?).await?;
    ensure!(image_of(farm).await? == first, "the server was not rolled back");
    build.succeeds("an upgrade and a rollback").await?;
    same_pod(farm, &route, &uid).await
}

async fn init(farm: &Installation<'_>, more: &[&str]) -> anyhow::Result<String> {
    let mut init = bko(farm.node, &["cluster", "init"])?;
    init.args(FLAGS).args(more);
    process::combined_output(init).await
}

async fn image_of(farm: &Installation<'_>) -> anyhow::Result<String> {
    let server = Api::<Deployment>::namespaced(farm.node.client(), OPERATOR).get("buildkit-operator-buildd").await?;
    let server = serde_json::to_value(server)?;
    let image = server.pointer("/spec/template/spec/containers/0/image").and_then(Value::as_str);
    Ok(image.context("no image")?.to_owned())
}

/// Everything is made to look as if Helm had installed it, and is adopted.
pub(super) async fn an_adoption(farm: &Installation<'_>) -> anyhow::Result<()> {
    let (route, uid) = daemon(farm, "adopted").await?;
    let build = farm.begin(&route.endpoint, "adopted", STEP).await?;
    let objects = give_to_helm(farm).await?;
    ensure!(objects > 8, "{objects} objects");
    let authority = authority(farm).await?;
    let said = init(farm, &["--adopt"]).await?;
    ensure!(said.contains("Helm no longer knows"), "{said}");
    build.succeeds("an adoption").await?;
    same_pod(farm, &route, &uid).await?;
    ensure!(authority == self::authority(farm).await?, "another authority");
    let secrets = Api::<Secret>::namespaced(farm.node.client(), OPERATOR);
    ensure!(secrets.list(&ListParams::default().labels("owner=helm")).await?.items.is_empty(), "Helm knows it still");
    process::combined_output(bko(farm.node, &["cluster", "status"])?).await?;
    Ok(())
}

async fn authority(farm: &Installation<'_>) -> anyhow::Result<Option<Vec<u8>>> {
    let secret = Api::<Secret>::namespaced(farm.node.client(), BUILDS).get("buildkit-daemon-certs").await?;
    Ok(secret.data.and_then(|mut data| data.remove("ca.pem")).map(|bytes| bytes.0))
}

/// Makes Helm the owner of what we installed, with a release of its own, and
/// forgets our record.
async fn give_to_helm(farm: &Installation<'_>) -> anyhow::Result<usize> {
    let kinds = "namespaces,deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,configmaps";
    let listed = kubectl(
        farm,
        &["get", kinds, "--all-namespaces", "--selector=app.kubernetes.io/managed-by=bko-install", "--output=json"],
        "",
    )
    .await?;
    let listed: Value = serde_json::from_str(&listed)?;
    let mut documents = Vec::new();
    for object in listed["items"].as_array().into_iter().flatten() {
        let name = object["metadata"]["name"].as_str().context("no name")?;
        let ours = object["metadata"]["labels"].get("bko-install/component").is_some();
        if !ours || name == OPERATOR {
            continue;
        }
        let mut object = object.clone();
        let metadata = object["metadata"].as_object_mut().context("no metadata")?;
        for key in ["managedFields", "resourceVersion", "uid", "generation", "creationTimestamp"] {
            metadata.remove(key);
        }
        metadata.insert(
            "annotations".into(),
            json!({"meta.helm.sh/release-name": OPERATOR, "meta.helm.sh/release-namespace": OPERATOR}),
        );
        let labels = metadata["labels"].as_object_mut().context("no labels")?;
        labels.remove("bko-install/component");
        labels.insert("app.kubernetes.io/managed-by".into(), "Helm".into());
        object.as_object_mut().context("no object")?.remove("status");
        let kind = object["kind"].as_str().context("no kind")?.to_lowercase();
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or(OPERATOR).to_owned();
        let reset = [
            "patch",
            &kind,
            name,
            "--namespace",
            &namespace,
            "--type=merge",
            "--patch",
            r#"{"metadata":{"managedFields":[{}],"labels":{"bko-install/component":null}}}"#,
        ];
        kubectl(farm, &reset, "").await?;
        documents.push(object);
    }
    let manifest: String = documents.iter().map(|document| format!("---\n{document}\n")).collect();
    kubectl(farm, &["apply", "--server-side", "--force-conflicts", "--field-manager=helm", "--filename=-"], &manifest)
        .await?;
    release(farm, &manifest).await?;
    let maps = Api::<ConfigMap>::namespaced(farm.node.client(), OPERATOR);
    maps.delete("bko-install", &DeleteParams::default()).await?;
    Ok(documents.len())
}

async fn release(farm: &Installation<'_>, manifest: &str) -> anyhow::Result<()> {
    let content = json!({"name": OPERATOR, "manifest": manifest, "chart": {"metadata": {"name": "buildkit-operator"}}});
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    packed.write_all(content.to_string().as_bytes())?;
    let secret: Secret = serde_json::from_value(json!({
        "metadata": {
            "name": format!("sh.helm.release.v1.{OPERATOR}.v1"),
            "labels": {"owner": "helm", "name": OPERATOR, "status": "deployed", "version": "1"},
        },
        "type": "helm.sh/release.v1",
        "stringData": {"release": STANDARD.encode(packed.finish()?)},
    }))?;
    Api::namespaced(farm.node.client(), OPERATOR).create(&PostParams::default(), &secret).await?;
    Ok(())
}

async fn kubectl(farm: &Installation<'_>, args: &[&str], input: &str) -> anyhow::Result<String> {
    use tokio::io::AsyncWriteExt;
    let mut kubectl = farm.node.tools().command("kubectl");
    kubectl.arg("--kubeconfig").arg(farm.node.kubeconfig()).args(args);
    kubectl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = tokio::process::Command::from(kubectl).spawn()?;
    let mut stdin = child.stdin.take().context("no input")?;
    stdin.write_all(input.as_bytes()).await?;
    drop(stdin);
    let output = child.wait_with_output().await?;
    ensure!(output.status.success(), "kubectl {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}
