//! BuildKit out of its stock image, from a registry that cuts connections.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context as _, ensure};
use oci_client::client::{ClientConfig, ClientProtocol, Config, ImageLayer};
use oci_client::manifest::{OCI_IMAGE_INDEX_MEDIA_TYPE, OCI_IMAGE_MEDIA_TYPE};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy};
use tokio::net::{TcpListener, TcpStream};

use crate::Machine;
use crate::harness::process::{Process, answers};
use crate::host::{Farm, Who, printed};

const REGISTRY: u16 = 25_000;
const CUTTING: u16 = 25_001;

/// Bytes that a connection brings before it is cut.
const CUT: u64 = 6 << 20;

async fn registry(machine: &Machine) -> anyhow::Result<Process> {
    let config = "/tmp/hostpath_pv/registry.yaml";
    let text = format!(
        "version: 0.1\nlog: {{level: warn, accesslog: {{disabled: true}}}}\nstorage: {{delete: {{enabled: true}}, \
         filesystem: {{rootdirectory: /tmp/hostpath_pv/registry}}}}\nhttp: {{addr: 127.0.0.1:{REGISTRY}}}\n"
    );
    std::fs::write(config, text)?;
    let mut command = machine.tools.command("docker-registry");
    command.args(["serve", config]);
    let registry = Process::spawn("registry", command)?;
    let url = format!("http://127.0.0.1:{REGISTRY}/v2/");
    registry.wait_until(std::time::Duration::from_secs(10), async || answers(&url).await).await?;
    Ok(registry)
}

/// An index of upstream's layout: what attests an image, and the image in two layers. Its digest.
async fn push(machine: &Machine) -> anyhow::Result<String> {
    let root = Path::new("/tmp/hostpath_pv/image");
    let layers = [
        vec![("buildkitd", machine.tools.file("buildkitd")), ("buildctl", machine.tools.file("buildctl"))],
        vec![("buildkit-runc", PathBuf::from("/usr/sbin/runc")), ("rootlesskit", machine.tools.file("rootlesskit"))],
    ];
    let mut pushed = Vec::new();
    for (n, programs) in layers.into_iter().enumerate() {
        let folder = root.join(n.to_string());
        std::fs::create_dir_all(folder.join("usr/bin"))?;
        for (name, path) in programs {
            std::fs::copy(&path, folder.join("usr/bin").join(name)).with_context(|| path.display().to_string())?;
        }
        let archive = root.join(format!("{n}.tar.gz"));
        let mut tar = Command::new("tar");
        printed(tar.arg("-C").arg(&folder).arg("-czf").arg(&archive).arg("usr").output()?)?;
        pushed.push(ImageLayer::oci_v1_gzip(std::fs::read(archive)?, None));
    }
    let registry = format!("127.0.0.1:{REGISTRY}");
    let client = Client::new(plain());
    let auth = RegistryAuth::Anonymous;
    let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let mut manifests = Vec::new();
    for (name, layers, architecture, os) in
        [("attestation", &pushed[..1], "unknown", "unknown"), ("image", &pushed[..], arch, "linux")]
    {
        let image: Reference = format!("{registry}/moby/buildkit:{name}").parse()?;
        let json = json!({"architecture": architecture, "os": os, "rootfs": {"type": "layers", "diff_ids": []}});
        client.push(&image, layers, Config::oci_v1(json.to_string(), None), &auth, None).await?;
        let (manifest, digest) = client.pull_manifest_raw(&image, &auth, &[OCI_IMAGE_MEDIA_TYPE]).await?;
        manifests.push(json!({
            "mediaType": OCI_IMAGE_MEDIA_TYPE,
            "digest": digest,
            "size": manifest.len(),
            "platform": {"architecture": architecture, "os": os},
        }));
    }
    index(&client, &manifests).await
}

fn plain() -> ClientConfig {
    rustls::crypto::ring::default_provider().install_default().ok();
    let registry = format!("127.0.0.1:{REGISTRY}");
    ClientConfig { protocol: ClientProtocol::HttpsExcept(vec![registry]), ..ClientConfig::default() }
}

/// Lets the tag lead to an index of these; its digest.
async fn index(client: &Client, manifests: &[Value]) -> anyhow::Result<String> {
    let index = json!({"schemaVersion": 2, "mediaType": OCI_IMAGE_INDEX_MEDIA_TYPE, "manifests": manifests});
    let tag: Reference = format!("127.0.0.1:{REGISTRY}/moby/buildkit:v1").parse()?;
    client.push_manifest_list(&tag, &RegistryAuth::Anonymous, serde_json::from_value(index)?).await?;
    Ok(client.fetch_manifest_digest(&tag, &RegistryAuth::Anonymous).await?)
}

/// Stands before the registry, and ends every connection after [`CUT`] bytes;
/// after the first of these it gives nothing any more while `dead`.
async fn cutting(cuts: Arc<AtomicUsize>, dead: Arc<AtomicBool>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", CUTTING)).await?;
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            if dead.load(Ordering::Relaxed) && cuts.load(Ordering::Relaxed) > 0 {
                continue;
            }
            let cuts = cuts.clone();
            tokio::spawn(async move {
                let mut registry = TcpStream::connect(("127.0.0.1", REGISTRY)).await?;
                let (mut from_client, mut to_client) = client.split();
                let (from_registry, mut to_registry) = registry.split();
                let mut limited = from_registry.take(CUT);
                tokio::select! {
                    _ = copy(&mut from_client, &mut to_registry) => {}
                    _ = copy(&mut limited, &mut to_client) => {
                        if limited.limit() == 0 {
                            cuts.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                to_client.shutdown().await
            });
        }
    });
    Ok(())
}

pub(crate) async fn buildkit_comes_out_of_its_image_however_often_the_registry_cuts(
    machine: Arc<Machine>,
) -> anyhow::Result<()> {
    let _registry = registry(&machine).await?;
    let digest = push(&machine).await?;
    let (cuts, dead) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
    cutting(cuts.clone(), dead.clone()).await?;

    let mirror = format!("--buildkit-mirror=127.0.0.1:{CUTTING}");
    let pinned = format!("--buildkit=docker.io/moby/buildkit:v1@{digest}");
    let other = format!("--buildkit=docker.io/moby/buildkit:v1@sha256:{}", "0".repeat(64));
    let refused = Farm::new(&machine.tools, Who::Root, &[&other, &mirror])?.up_command().output()?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains("cannot pull") && said.contains("hint: "), "{said}");

    // One that dies half-way is told of, with what to do; and what came is kept.
    let farm = Farm::new(&machine.tools, Who::Root, &[&pinned, &mirror])?;
    let refused = tokio::process::Command::from(farm.up_command()).output().await?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(!refused.status.success() && said.contains("ended early 5 times"), "{said}");
    ensure!(said.contains("hint: what came is kept"), "{said}");
    let kept = std::fs::read_dir(farm.state.join("download"))?.flatten();
    let kept: u64 = kept.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len()).sum();
    ensure!(kept > 1 << 20, "{kept} bytes are kept of {CUT}");
    dead.store(false, Ordering::Relaxed);

    for who in [Who::Root, Who::Ordinary] {
        cuts.store(0, Ordering::Relaxed);
        let mut farm = Farm::up(&machine.tools, who, &[&pinned, &mirror]).await?;
        ensure!(cuts.load(Ordering::Relaxed) > 2, "{} cuts", cuts.load(Ordering::Relaxed));
        ensure!(farm.said().contains(&digest), "{}", farm.said());
        let routed = farm.route("github.com/acme/shop")?;
        let [(pid, _)] = farm.daemons()[..] else { anyhow::bail!("{:?}", farm.daemons()) };
        let program = std::fs::read_link(format!("/proc/{pid}/exe"))?;
        ensure!(program == farm.state.join("bin/buildkitd"), "{}", program.display());
        farm.build(&routed.endpoint, "fetched").await?;
        farm.complete(&routed)?;
        farm.stop().await?;
        // What is there is not asked for again.
        cuts.store(0, Ordering::Relaxed);
        farm.start().await?;
        ensure!(cuts.load(Ordering::Relaxed) == 0);
    }
    a_tag_is_held_to_what_it_was(&machine, &digest).await
}

/// Without a digest, the first that came is told, noted, and nothing else is accepted from then on.
async fn a_tag_is_held_to_what_it_was(machine: &Machine, digest: &str) -> anyhow::Result<()> {
    let tag = format!("127.0.0.1:{REGISTRY}/moby/buildkit:v1");
    let flag = format!("--buildkit={tag}");
    let mut farm = Farm::up(&machine.tools, Who::Root, &[&flag]).await?;
    let line = format!("{tag} {digest}\n");
    ensure!(std::fs::read_to_string(farm.state.join("images"))? == line);
    ensure!(farm.said().contains(digest), "{}", farm.said());
    farm.stop().await?;
    // The tag leads elsewhere: what it was comes again all the same.
    let client = Client::new(plain());
    let old: Reference = format!("127.0.0.1:{REGISTRY}/moby/buildkit@{digest}").parse()?;
    let (text, _) = client.pull_manifest_raw(&old, &RegistryAuth::Anonymous, &[OCI_IMAGE_INDEX_MEDIA_TYPE]).await?;
    let manifests: Value = serde_json::from_slice(&text)?;
    let moved = index(&client, &manifests["manifests"].as_array().context("no manifests")?[1..]).await?;
    ensure!(moved != digest);
    std::fs::remove_file(farm.state.join("bin/buildkitd"))?;
    farm.start().await?;
    let route = farm.route("github.com/acme/shop")?;
    farm.build(&route.endpoint, "held").await?;
    farm.complete(&route)?;
    ensure!(!farm.said().contains(&moved), "{}", farm.said());
    farm.stop().await?;
    // And where the registry has it no more, that is said, with the way out.
    let url = format!("http://127.0.0.1:{REGISTRY}/v2/moby/buildkit/manifests/{digest}");
    delete(&url).await?;
    std::fs::remove_dir_all(farm.state.join("bin"))?;
    let refused = farm.up_command().output()?;
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(refused.status.code() == Some(1) && said.contains(&format!("has not got {digest}")), "{said}");
    ensure!(said.contains("hint: to accept what") && said.contains("/images\""), "{said}");
    std::fs::remove_file(farm.state.join("images"))?;
    farm.start().await?;
    ensure!(std::fs::read_to_string(farm.state.join("images"))? == format!("{tag} {moved}\n"));
    Ok(())
}

async fn delete(url: &str) -> anyhow::Result<()> {
    let (host, path) = url.trim_start_matches("http://").split_once('/').context("no path")?;
    let mut stream = TcpStream::connect(host).await?;
    let head = format!("DELETE /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    ensure!(answer.starts_with("HTTP/1.1 202"), "{answer}");
    Ok(())
}
