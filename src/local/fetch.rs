//! BuildKit from its stock image, without Docker: pulled from a registry,
//! verified, and unpacked into the state folder.
#![expect(clippy::disallowed_methods, reason = "shell: reads and writes files")]

mod credentials;
mod pins;
mod unpack;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::TryStreamExt as _;
use oci_client::client::{BlobResponse, Client, ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciErrorCode};
use oci_client::manifest::{OciDescriptor, OciImageManifest};
use oci_client::{Reference, RegistryOperation};
use sha2::{Digest, Sha256};
use tokio::time::sleep;

/// The stock image that `--buildkit auto` falls back to. A digest belongs behind
/// the tag, `…:v0.34.2-rootless@sha256:…`: nothing else is accepted then. Without
/// one, the digest that came first is told, noted, and nothing else is accepted
/// from then on.
pub const STOCK: &str = crate::families::build_farm::settings::DAEMON_IMAGE;

/// Where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The image; with a digest, nothing else is accepted.
    pub image: Reference,
    /// A registry that has the same repositories.
    pub mirror: Option<String>,
    /// Docker's configuration, for credentials.
    pub docker_config: Option<PathBuf>,
}

/// Why BuildKit could not be had from its image.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Not a mirror.
    #[error("--buildkit-mirror: \"{0}\" is no registry; want HOST, HOST:PORT or HOST/PREFIX")]
    Mirror(String),
    /// The registry did not give the image.
    #[error("cannot pull \"{image}\"")]
    Pull {
        /// The image, as asked for.
        image: String,
        /// Why.
        source: Box<OciDistributionError>,
    },
    /// The registry has not got what this state folder holds to.
    #[error("cannot pull \"{image}\": the registry has not got {digest}, which it was when it first came here")]
    Held {
        /// The image, as asked for.
        image: String,
        /// What it was.
        digest: String,
        /// Where that is noted.
        file: PathBuf,
        /// What the registry said.
        source: Box<OciDistributionError>,
    },
    /// A part of it never came whole.
    #[error("cannot pull \"{image}\": {digest} ended early {tries} times")]
    Cut {
        /// The image, as asked for.
        image: String,
        /// The part.
        digest: String,
        /// How often in a row nothing more of it came.
        tries: u32,
        /// Why, the last time.
        source: io::Error,
    },
    /// What came is not what was promised.
    #[error("cannot pull \"{image}\": what came is not {digest}, but {came}")]
    Differs {
        /// The image, as asked for.
        image: String,
        /// What was promised.
        digest: String,
        /// What came.
        came: String,
    },
    /// A layer cannot be unpacked.
    #[error("cannot unpack {0}: {1}")]
    Unpack(String, String),
    /// It is no image of BuildKit.
    #[error("\"{0}\" has no {1}: want an image as moby/buildkit")]
    NotBuildkit(String, &'static str),
    /// A file of the state folder.
    #[error("\"{}\"", .0.display())]
    File(PathBuf, #[source] io::Error),
}

impl FetchError {
    /// How to mend it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Pull { .. } | Self::Cut { .. } => Some(
                "what came is kept, and the next `up` goes on from there; --buildkit-mirror names a registry that has \
                 the same images, --buildkit PATH a buildkitd that is here already"
                    .to_owned(),
            ),
            Self::Held { image, file, .. } => Some(format!(
                "to accept what \"{image}\" is by now, remove its line from \"{}\"; --buildkit-mirror names a registry \
                 that may still have it, --buildkit PATH a buildkitd that is here already",
                file.display()
            )),
            Self::File(_, error) if error.kind() == io::ErrorKind::StorageFull => {
                Some("make room for about 200 MB on the disk of the state folder".to_owned())
            }
            _ => None,
        }
    }
}

/// How often in a row a download may bring nothing.
const TRIES: u32 = 5;

/// Pause after the first of these; twice as long after each.
const PAUSE: Duration = Duration::from_millis(250);

/// A connection that brings nothing for so long is cut.
const STALLED: Duration = Duration::from_secs(30);

/// Told of bytes that came and bytes in all.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Makes sure that `bin` has the programs of an image; returns its digest. What
/// is there of the same image stays; what an image was when it first came is held to.
///
/// # Errors
/// See [`FetchError`].
pub async fn fetch(source: &Source, bin: &Path, progress: Progress<'_>) -> Result<String, FetchError> {
    let name = source.image.whole();
    let noted = bin.join("image");
    let there = pins::read(&noted, &name).ok().flatten();
    if let Some(digest) = there.filter(|_| bin.join("buildkitd").is_file()) {
        return Ok(digest);
    }
    let pinned = bin.with_file_name("images");
    let pins = |error| FetchError::File(pinned.clone(), error);
    let held = if source.image.digest().is_some() { None } else { pins::read(&pinned, &name).map_err(pins)? };
    let pull = |error: OciDistributionError| {
        let (image, source) = (name.clone(), Box::new(error));
        match &held {
            Some(digest) if is_gone(&source) => {
                FetchError::Held { image, digest: digest.clone(), file: pinned.clone(), source }
            }
            _ => FetchError::Pull { image, source },
        }
    };
    let place = source.place(held.as_ref())?;
    let client = client(&place);
    let auth = credentials::find(source.docker_config.as_deref(), place.resolve_registry()).await;
    client.auth(&place, &auth, RegistryOperation::Pull).await.map_err(pull)?;
    // Of the index, where there is one: the same on every architecture.
    let pulled = client.pull_image_manifest_and_list_digest(&place, &auth).await;
    let (manifest, digest, index) = pulled.map_err(pull)?;
    let digest = index.unwrap_or(digest);
    tracing::info!(image.name = name, image.digest = digest, "pulling BuildKit");
    let downloads = bin.with_file_name("download");
    fs::create_dir_all(&downloads).map_err(|error| FetchError::File(downloads.clone(), error))?;
    let pulling = Pulling { client: &client, place: &place, name: &name, downloads: &downloads, progress };
    let files = pulling.layers(&manifest).await?;
    let (target, image) = (bin.to_owned(), name.clone());
    let unpacked = tokio::task::spawn_blocking(move || unpack::programs(&files, &target, &image)).await;
    unpacked.map_err(|error| FetchError::Unpack(name.clone(), error.to_string()))??;
    pins::hold(&pinned, &name, &digest).map_err(pins)?;
    fs::write(&noted, format!("{name} {digest}\n")).map_err(|error| FetchError::File(noted, error))?;
    let _ = fs::remove_dir_all(&downloads);
    Ok(digest)
}

impl Source {
    /// Where the image is asked for, which is `held` if that is known.
    fn place(&self, held: Option<&String>) -> Result<Reference, FetchError> {
        let image = held.map_or_else(|| self.image.clone(), |digest| self.image.clone_with_digest(digest.clone()));
        let Some(mirror) = &self.mirror else { return Ok(image) };
        let rest = match (image.digest(), image.tag()) {
            (Some(digest), _) => format!("@{digest}"),
            (None, tag) => format!(":{}", tag.unwrap_or("latest")),
        };
        let place = format!("{}/{}{rest}", mirror.trim_end_matches('/'), image.repository());
        let place = place.parse::<Reference>().map_err(|_| FetchError::Mirror(mirror.clone()))?;
        // What looks like no host is taken for a part of a repository.
        if mirror.starts_with(place.registry()) { Ok(place) } else { Err(FetchError::Mirror(mirror.clone())) }
    }
}

/// Plain HTTP for a registry on this host only, as Docker has it.
fn client(place: &Reference) -> Client {
    // Somebody else may have chosen one, which will do.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let registry = place.resolve_registry().to_owned();
    let host = registry.rsplit_once(':').map_or(registry.as_str(), |(host, _)| host);
    let here = host == "localhost" || host.parse::<std::net::Ipv4Addr>().is_ok_and(|ip| ip.is_loopback());
    let protocol = if here { ClientProtocol::HttpsExcept(vec![registry]) } else { ClientProtocol::Https };
    Client::new(ClientConfig { protocol, read_timeout: Some(STALLED), ..ClientConfig::default() })
}

struct Pulling<'a> {
    client: &'a Client,
    place: &'a Reference,
    name: &'a str,
    downloads: &'a Path,
    progress: Progress<'a>,
}

impl Pulling<'_> {
    /// All layers, in order, each a verified file.
    async fn layers(&self, manifest: &OciImageManifest) -> Result<Vec<(PathBuf, String)>, FetchError> {
        let total = manifest.layers.iter().map(|layer| u64::try_from(layer.size).unwrap_or(0)).sum();
        let (mut files, mut before) = (Vec::new(), 0);
        for layer in &manifest.layers {
            let file = self.downloads.join(layer.digest.replace(':', "-"));
            self.layer(layer, &file, &|came| (self.progress)(before + came, total)).await?;
            before += u64::try_from(layer.size).unwrap_or(0);
            files.push((file, layer.media_type.clone()));
        }
        Ok(files)
    }

    /// Goes on where an earlier try, or an earlier run, was cut.
    async fn layer(&self, layer: &OciDescriptor, file: &Path, came: &(dyn Fn(u64) + Sync)) -> Result<(), FetchError> {
        let io = |error| FetchError::File(file.to_owned(), error);
        let size = u64::try_from(layer.size).unwrap_or(0);
        let (mut tries, mut pause) = (0, PAUSE);
        loop {
            let have = fs::metadata(file).map_or(0, |metadata| metadata.len());
            if have >= size {
                break;
            }
            let error = match self.rest(layer, file, have, came).await {
                Ok(()) => continue,
                Err(Rest::File(error)) => return Err(io(error)),
                Err(Rest::Registry(error)) if !passes(&error) => {
                    return Err(FetchError::Pull { image: self.name.to_owned(), source: Box::new(error) });
                }
                Err(Rest::Registry(error)) => io::Error::other(error),
                Err(Rest::Connection(error)) => error,
            };
            let more = fs::metadata(file).map_or(0, |metadata| metadata.len()) > have;
            (tries, pause) = if more { (0, PAUSE) } else { (tries + 1, pause * 2) };
            if tries >= TRIES {
                let (image, digest) = (self.name.to_owned(), layer.digest.clone());
                return Err(FetchError::Cut { image, digest, tries, source: error });
            }
            tracing::debug!(%error, "a download was cut, going on with it");
            sleep(pause).await;
        }
        let digest = sha256(file).map_err(io)?;
        if digest != layer.digest {
            let _ = fs::remove_file(file);
            let (image, promised) = (self.name.to_owned(), layer.digest.clone());
            return Err(FetchError::Differs { image, digest: promised, came: digest });
        }
        Ok(())
    }

    async fn rest(
        &self,
        layer: &OciDescriptor,
        file: &Path,
        have: u64,
        came: &(dyn Fn(u64) + Sync),
    ) -> Result<(), Rest> {
        let answer = self.client.pull_blob_stream_partial(self.place, layer, have, None).await;
        let (mut stream, mut have) = match answer.map_err(Rest::Registry)? {
            BlobResponse::Partial(stream) => (stream.stream, have),
            BlobResponse::Full(stream) => (stream.stream, 0),
        };
        let mut out = OpenOptions::new().create(true).append(true).open(file).map_err(Rest::File)?;
        if have == 0 {
            out.set_len(0).map_err(Rest::File)?;
        }
        while let Some(bytes) = stream.try_next().await.map_err(Rest::Connection)? {
            out.write_all(&bytes).map_err(Rest::File)?;
            have += bytes.len() as u64;
            came(have);
        }
        Ok(())
    }
}

/// What went wrong with the rest of a download.
enum Rest {
    Registry(OciDistributionError),
    Connection(io::Error),
    File(io::Error),
}

/// Whether a registry may answer otherwise in a moment.
fn passes(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::RequestError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code == 429 || *code >= 500,
        _ => false,
    }
}

/// Whether a registry said that it has not got what was asked for, or gave something else.
fn is_gone(error: &OciDistributionError) -> bool {
    match error {
        OciDistributionError::ImageManifestNotFoundError(_) | OciDistributionError::DigestError(_) => true,
        OciDistributionError::ServerError { code, .. } => *code == 404,
        OciDistributionError::RegistryError { envelope, .. } => envelope.errors.iter().any(|error| {
            matches!(error.code, OciErrorCode::ManifestUnknown | OciErrorCode::NameUnknown | OciErrorCode::NotFound)
        }),
        _ => false,
    }
}

fn sha256(file: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut buffer) = (File::open(file)?, Sha256::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(format!("sha256:{}", hex::encode(hash.finalize()))),
            count => hash.update(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_has_the_same_repositories() {
        let place = |image: &str, mirror: &str| {
            let source = Source { image: image.parse().unwrap(), mirror: Some(mirror.into()), docker_config: None };
            source.place(None).map(|place| place.whole()).map_err(|error| error.to_string())
        };
        let tagged = "docker.io/moby/buildkit:v1-rootless";
        assert_eq!(place(tagged, "mirror.example.org").as_deref(), Ok("mirror.example.org/moby/buildkit:v1-rootless"));
        assert_eq!(place(tagged, "127.0.0.1:5000/hub/").as_deref(), Ok("127.0.0.1:5000/hub/moby/buildkit:v1-rootless"));
        let digest = format!("sha256:{}", "a".repeat(64));
        let pinned = format!("docker.io/moby/buildkit:v1@{digest}");
        assert_eq!(place(&pinned, "m.example.org"), Ok(format!("m.example.org/moby/buildkit@{digest}")));
        assert!(place(tagged, "https://m.example.org").unwrap_err().contains("want HOST"));
        let mirror = Some("m.example.org".to_owned());
        let source = Source { image: tagged.parse().unwrap(), mirror, docker_config: None };
        let held = source.place(Some(&digest)).unwrap().whole();
        assert_eq!(held, format!("m.example.org/moby/buildkit@{digest}"), "what is held to is asked for, not the tag");
    }
}
