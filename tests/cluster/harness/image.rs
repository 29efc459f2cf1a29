//! Image archives, as far as the harness looks into them.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;

/// An archive that holds one image, in Docker's layout (`manifest.json`).
#[derive(Clone, Debug)]
pub(crate) struct Archive {
    path: PathBuf,
    reference: String,
}

#[derive(Deserialize)]
struct Manifest {
    #[serde(rename = "RepoTags")]
    references: Vec<String>,
}

impl Archive {
    /// Reads which image is in an archive.
    ///
    /// # Errors
    /// It cannot be read, or holds none.
    pub(crate) fn open(path: PathBuf) -> anyhow::Result<Self> {
        let reference = references(&path)?.into_iter().next();
        let reference = reference.with_context(|| format!("\"{}\" holds no image", path.display()))?;
        Ok(Self { path, reference })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What its image is called.
    pub(crate) fn reference(&self) -> &str {
        &self.reference
    }
}

/// What the images of an archive are called.
///
/// # Errors
/// It cannot be read.
pub(crate) fn references(path: &Path) -> anyhow::Result<Vec<String>> {
    let read = || -> anyhow::Result<Vec<String>> {
        for entry in tar::Archive::new(File::open(path)?).entries()? {
            let entry = entry?;
            if entry.path()?.as_os_str() == "manifest.json" {
                let images: Vec<Manifest> = serde_json::from_reader(entry)?;
                return Ok(images.into_iter().flat_map(|image| image.references).collect());
            }
        }
        anyhow::bail!("no manifest.json")
    };
    read().with_context(|| format!("reading image archive \"{}\"", path.display()))
}
