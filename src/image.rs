//! An executable as an OCI image, without Docker: an archive that
//! `ctr images import`, `docker load`, `skopeo` and `kind load` read.
//!
//! In: static Linux executables. Out: a tar archive, the same bytes for the
//! same input. Reads files twice, once for digests and once to copy, and holds
//! none of them in memory.

mod archive;
pub mod elf;
mod layer;
mod reference;

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::key::Arch;
use layer::ExecutableLayer;

pub use reference::{ReferenceError, normalize_reference};

/// User and group that the image runs as.
pub const USER: u32 = 65_532;

/// Where the executable is within the image.
pub const ENTRYPOINT: &str = "/bko-install";

/// The running executable on Linux, whatever became of its file.
const OWN: &str = "/proc/self/exe";

/// One executable of the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// What it runs on.
    pub arch: Arch,
    /// Where it is.
    pub executable: PathBuf,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Written {
    /// Name of the image, in full.
    pub reference: String,
    /// `sha256:…` of its manifest, or of its index when there are several platforms.
    pub digest: String,
    /// Architectures, in order.
    pub architectures: Vec<Arch>,
    /// Bytes of the archive.
    pub size: u64,
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// An executable cannot be opened or read.
    #[error("cannot read executable \"{path}\"")]
    Read {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is no executable that can run in an empty image.
    #[error("executable \"{path}\" cannot be the image of {arch}")]
    Unfit {
        /// Which.
        path: String,
        /// What it should run on.
        arch: Arch,
        /// Why.
        #[source]
        source: elf::ElfError,
    },
    /// It changed between its two readings.
    #[error("executable \"{path}\" changed while it was read")]
    Changed {
        /// Which.
        path: String,
    },
    /// There is nothing to make an image of.
    #[error("no executable given")]
    Empty,
    /// The archive cannot be written.
    #[error("cannot write the image archive")]
    Write(#[source] io::Error),
}

impl ImageError {
    /// How to mend it, where there is a way.
    pub fn hint(&self) -> Option<String> {
        let Self::Unfit { arch, source, .. } = self else { return None };
        Some(match source {
            elf::ElfError::Dynamic { .. } => {
                "build a static executable with `make build`; it is at target/release/bko-install".to_owned()
            }
            elf::ElfError::Machine { .. } => {
                "name each executable's own architecture: --executable ARCH=PATH".to_owned()
            }
            elf::ElfError::NotElf | elf::ElfError::Malformed(_) => {
                format!(
                    "an image holds Linux executables: build one for {arch} and name it with --executable {arch}=PATH"
                )
            }
        })
    }
}

/// Architecture that this program runs on, if images exist for it.
pub fn native_arch() -> Option<Arch> {
    std::env::consts::ARCH.parse().ok()
}

/// The running executable. On Linux that stays true when its file is replaced
/// while it runs.
///
/// # Errors
/// The operating system's.
pub fn running_executable() -> io::Result<PathBuf> {
    let link = Path::new(OWN);
    if link.exists() { Ok(link.to_owned()) } else { std::env::current_exe() }
}

/// A path for messages: what the running executable is called.
fn shown(path: &Path) -> String {
    let own = (path == Path::new(OWN)).then(|| path.read_link().ok()).flatten();
    own.as_deref().unwrap_or(path).display().to_string()
}

/// The reference that names this executable's image unless another is given:
/// `docker.io/library/bko-install:<version>-<12 hex of its SHA-256>`. What
/// `image` writes and `cluster init` installs thus agree without a registry.
///
/// # Errors
/// The executable cannot be read.
pub fn default_reference(executable: &Path) -> Result<String, ImageError> {
    let error = |source| ImageError::Read { path: shown(executable), source };
    let mut hash = Sha256::new();
    io::copy(&mut File::open(executable).map_err(error)?, &mut hash).map_err(error)?;
    Ok(reference_of(&hash.finalize()))
}

fn reference_of(digest: &[u8]) -> String {
    format!("docker.io/library/bko-install:{}-{}", crate::VERSION, &hex::encode(digest)[..12])
}

/// Writes the image of `platforms` to `out`. With no `reference`, it is named
/// by the digest of the native executable, or of the first if none is native.
///
/// # Errors
/// An executable that cannot be read or cannot run in the image, or `out`.
pub fn write(platforms: &[Platform], reference: Option<&str>, out: &mut dyn Write) -> Result<Written, ImageError> {
    let mut executables = platforms.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    executables.sort_by_key(|executable| executable.arch);
    let native = native_arch();
    let naming =
        executables.iter().find(|e| Some(e.arch) == native).or(executables.first()).ok_or(ImageError::Empty)?;
    let reference = reference.map_or_else(|| reference_of(&naming.executable_digest), str::to_owned);
    let mut image = archive::Image::new(&executables, &reference);
    let size = image.write(&mut executables, out)?;
    let architectures = executables.iter().map(|e| e.arch).collect();
    Ok(Written { digest: image.digest().to_owned(), reference, architectures, size })
}

/// An executable that is fit for the image, with its digests.
struct Executable {
    arch: Arch,
    path: String,
    file: File,
    executable_digest: [u8; 32],
    layer: ExecutableLayer,
    /// Digest of the layer, hexadecimal.
    layer_digest: String,
}

fn open(platform: &Platform) -> Result<Executable, ImageError> {
    let path = shown(&platform.executable);
    let error = |source| ImageError::Read { path: path.clone(), source };
    let mut file = File::open(&platform.executable).map_err(error)?;
    let metadata = file.metadata().map_err(error)?;
    if metadata.is_dir() {
        return Err(error(io::ErrorKind::IsADirectory.into()));
    }
    let unfit = |source| ImageError::Unfit { path: path.clone(), arch: platform.arch, source };
    elf::check(&mut file, platform.arch).map_err(error)?.map_err(unfit)?;
    let layer = ExecutableLayer::new(metadata.len());
    let (mut executable_hash, mut layer_hash) = (Sha256::new(), Sha256::new());
    layer_hash.update(layer.head());
    let copied = copy(&mut file, |bytes| {
        executable_hash.update(bytes);
        layer_hash.update(bytes);
        Ok(())
    });
    if copied.map_err(error)? != metadata.len() {
        return Err(ImageError::Changed { path });
    }
    layer_hash.update(layer.tail());
    Ok(Executable {
        arch: platform.arch,
        file,
        executable_digest: executable_hash.finalize().into(),
        layer,
        layer_digest: hex::encode(layer_hash.finalize()),
        path,
    })
}

/// Reads a file from its beginning, piece by piece.
fn copy(file: &mut File, mut to: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<u64> {
    file.rewind()?;
    let mut buffer = vec![0; 256 * 1024];
    let mut total = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(total),
            Ok(n) => {
                to(&buffer[..n])?;
                total += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
