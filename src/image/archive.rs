//! The archive: an OCI layout, and beside it the `manifest.json` that
//! `docker load` reads. Everything but the executables is in memory.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;
use sha2::{Digest, Sha256};
use tar::EntryType;

use super::layer::{self, CERTIFICATES};
use super::{ENTRYPOINT, Executable, ImageError, USER, copy};
use crate::key::Arch;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const EPOCH: &str = "1970-01-01T00:00:00Z";

#[derive(Clone, Serialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: &'static str,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<PlatformField>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, String>,
}

#[derive(Clone, Serialize)]
struct PlatformField {
    architecture: Arch,
    os: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u8,
    media_type: &'static str,
    manifests: Vec<Descriptor>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u8,
    media_type: &'static str,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

#[derive(Serialize)]
struct Config {
    created: &'static str,
    architecture: Arch,
    os: &'static str,
    config: RunConfig,
    rootfs: RootFs,
    history: Vec<History>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct RunConfig {
    user: String,
    env: Vec<String>,
    entrypoint: Vec<&'static str>,
    working_dir: &'static str,
    labels: BTreeMap<&'static str, &'static str>,
}

#[derive(Serialize)]
struct RootFs {
    r#type: &'static str,
    diff_ids: Vec<String>,
}

#[derive(Serialize)]
struct History {
    created: &'static str,
    created_by: &'static str,
}

/// One image of `docker load`'s own list.
#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    repo_tags: Vec<String>,
    layers: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Layout {
    image_layout_version: &'static str,
}

enum Blob {
    Bytes(Vec<u8>),
    /// The layer of the executable at this place.
    Executable(usize),
}

/// An image whose every digest is known, ready to be written.
pub(super) struct Image {
    blobs: BTreeMap<String, Blob>,
    index: Vec<u8>,
    docker: Vec<u8>,
    digest: String,
}

impl Image {
    pub(super) fn new(executables: &[Executable], reference: &str) -> Self {
        let mut image = Self { blobs: BTreeMap::new(), index: Vec::new(), docker: Vec::new(), digest: String::new() };
        let base = image.add(LAYER, layer::base());
        let mut manifests = Vec::new();
        let mut docker = Vec::new();
        for (place, executable) in executables.iter().enumerate() {
            let own = Descriptor::new(LAYER, &executable.layer_digest, executable.layer.size());
            image.blobs.insert(executable.layer_digest.clone(), Blob::Executable(place));
            let layers = vec![base.clone(), own];
            let config = image.add(CONFIG, json(&config(executable.arch, &layers)));
            docker.push(DockerImage {
                config: config.path(),
                // Its list knows one image a name: the native one, else the first.
                repo_tags: Vec::new(),
                layers: layers.iter().map(Descriptor::path).collect(),
            });
            let manifest = Manifest { schema_version: 2, media_type: MANIFEST, config, layers };
            let mut descriptor = image.add(MANIFEST, json(&manifest));
            descriptor.platform = Some(PlatformField { architecture: executable.arch, os: "linux" });
            manifests.push(descriptor);
        }
        let native = super::native_arch();
        let named = executables.iter().position(|e| Some(e.arch) == native).unwrap_or(0);
        docker[named].repo_tags.push(reference.to_owned());
        let mut root = match <[Descriptor; 1]>::try_from(manifests) {
            Ok([only]) => only,
            Err(several) => image.add(INDEX, json(&Index::new(several))),
        };
        let tag = reference.rsplit(':').next().unwrap_or_default();
        root.annotations.insert("io.containerd.image.name", reference.to_owned());
        root.annotations.insert("org.opencontainers.image.ref.name", tag.to_owned());
        image.digest = root.digest.clone();
        image.index = json(&Index::new(vec![root]));
        image.docker = json(&docker);
        image
    }

    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    fn add(&mut self, media_type: &'static str, bytes: Vec<u8>) -> Descriptor {
        let digest = hex::encode(Sha256::digest(&bytes));
        let descriptor = Descriptor::new(media_type, &digest, bytes.len() as u64);
        self.blobs.insert(digest, Blob::Bytes(bytes));
        descriptor
    }

    /// Writes the archive and returns its size.
    pub(super) fn write(&mut self, executables: &mut [Executable], out: &mut dyn Write) -> Result<u64, ImageError> {
        let mut out = Counting { out, written: 0 };
        let layout = json(&Layout { image_layout_version: "1.0.0" });
        out.folder("blobs/").and_then(|()| out.folder("blobs/sha256/")).map_err(ImageError::Write)?;
        for (digest, blob) in &self.blobs {
            let path = format!("blobs/sha256/{digest}");
            match blob {
                Blob::Bytes(bytes) => out.file(&path, bytes).map_err(ImageError::Write)?,
                Blob::Executable(place) => write_executable(&mut executables[*place], &path, &mut out)?,
            }
        }
        [("index.json", &self.index), ("manifest.json", &self.docker), ("oci-layout", &layout)]
            .into_iter()
            .try_for_each(|(path, bytes)| out.file(path, bytes))
            .and_then(|()| out.write_all(&[0; 1024]))
            .and_then(|()| out.flush())
            .map_err(ImageError::Write)?;
        Ok(out.written)
    }
}

fn write_executable(executable: &mut Executable, path: &str, out: &mut Counting<'_>) -> Result<(), ImageError> {
    let size = executable.layer.size();
    out.head(path, EntryType::Regular, 0o644, size).map_err(ImageError::Write)?;
    out.write_all(executable.layer.head()).map_err(ImageError::Write)?;
    let mut hash = Sha256::new();
    let mut failed = None;
    let copied = copy(&mut executable.file, |bytes| {
        hash.update(bytes);
        out.write_all(bytes).map_err(|error| {
            let kind = error.kind();
            failed = Some(error);
            kind.into()
        })
    });
    match (copied, failed) {
        (_, Some(source)) => return Err(ImageError::Write(source)),
        (Err(source), None) => return Err(ImageError::Read { path: executable.path.clone(), source }),
        (Ok(_), None) => {}
    }
    if hash.finalize()[..] != executable.executable_digest {
        return Err(ImageError::Changed { path: executable.path.clone() });
    }
    out.write_all(&executable.layer.tail()).and_then(|()| out.pad(size)).map_err(ImageError::Write)
}

fn config(arch: Arch, layers: &[Descriptor]) -> Config {
    Config {
        created: EPOCH,
        architecture: arch,
        os: "linux",
        config: RunConfig {
            user: format!("{USER}:{USER}"),
            env: vec!["PATH=/".to_owned(), format!("SSL_CERT_FILE={CERTIFICATES}")],
            entrypoint: vec![ENTRYPOINT],
            working_dir: "/",
            labels: BTreeMap::from([
                ("org.opencontainers.image.description", env!("CARGO_PKG_DESCRIPTION")),
                ("org.opencontainers.image.licenses", env!("CARGO_PKG_LICENSE")),
                ("org.opencontainers.image.source", env!("CARGO_PKG_REPOSITORY")),
                ("org.opencontainers.image.title", env!("CARGO_PKG_NAME")),
                ("org.opencontainers.image.version", crate::VERSION),
            ]),
        },
        rootfs: RootFs { r#type: "layers", diff_ids: layers.iter().map(|layer| layer.digest.clone()).collect() },
        history: vec![
            History { created: EPOCH, created_by: "bko-install image: certificates, users" },
            History { created: EPOCH, created_by: "bko-install image: executable" },
        ],
    }
}

impl Descriptor {
    fn new(media_type: &'static str, digest: &str, size: u64) -> Self {
        let digest = format!("sha256:{digest}");
        Self { media_type, digest, size, platform: None, annotations: BTreeMap::new() }
    }

    /// Where its blob is in the archive.
    fn path(&self) -> String {
        format!("blobs/{}", self.digest.replace(':', "/"))
    }
}

impl Index {
    fn new(manifests: Vec<Descriptor>) -> Self {
        Self { schema_version: 2, media_type: INDEX, manifests }
    }
}

/// JSON of our own types: text keys and plain values, which always serialise.
fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_else(|error| unreachable!("{error}"))
}

/// A tar writer that counts.
struct Counting<'a> {
    out: &'a mut dyn Write,
    written: u64,
}

impl Counting<'_> {
    fn head(&mut self, path: &str, kind: EntryType, mode: u32, size: u64) -> io::Result<()> {
        self.write_all(layer::header(path, kind, mode, size).as_bytes())
    }

    fn folder(&mut self, path: &str) -> io::Result<()> {
        self.head(path, EntryType::Directory, 0o755, 0)
    }

    fn file(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        let size = bytes.len() as u64;
        self.head(path, EntryType::Regular, 0o644, size)?;
        self.write_all(bytes)?;
        self.pad(size)
    }

    fn pad(&mut self, size: u64) -> io::Result<()> {
        self.write_all(&[0; 512][..layer::padding(size)])
    }
}

impl Write for Counting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.written += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
