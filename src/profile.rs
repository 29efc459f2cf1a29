//! Profiles and values: which components in which runlevel, and with what.
//!
//! In: the bundle, the text of a profile, recorded overrides, values files and
//! `--set` arguments. Out: a [`Profile`] and [`Values`], or every fault at once.
//! Pure; no IO.

mod levels;
mod nest;
mod spec;
pub(crate) mod strict;
mod suggest;
pub(crate) mod syntax;
mod values;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::manifest::fault::{Fault, Faults, unless};
use crate::manifest::{Bundle, Runlevel};

pub use spec::{Format, Type, ValueSpec};
pub(crate) use suggest::did_you_mean;
pub use values::{Entry, Source, Values};

use levels::Chain;
use values::Layers;

/// Name of the value that holds the image of our own pods. When it is empty,
/// the image of this executable is used.
pub const IMAGE: &str = "image";

/// Name of the value with the architectures of that image.
const ARCHITECTURES: &str = "images.architectures";

/// Name of the value with the registry that images come from instead of their own.
const REGISTRY: &str = "images.registry";

/// The architecture of this executable, and so of its image.
const ARCHITECTURE: &str = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };

/// Where a profile comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProfileSource {
    /// One of the bundle's.
    Named(String),
    /// A file of the user's; it may extend one of the bundle's.
    File {
        /// Path, for messages.
        path: String,
        /// Content.
        text: String,
    },
}

/// Which components make an installation, in which level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Its name, or the path of its file.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// Components of each level, in the order of the profile.
    pub runlevels: BTreeMap<Runlevel, Vec<String>>,
}

/// What somebody asks for; later fields win.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which profile.
    pub profile: ProfileSource,
    /// Overrides of earlier runs, by name of the value.
    pub recorded: BTreeMap<String, Value>,
    /// Values files: path and text.
    pub files: Vec<(String, String)>,
    /// `NAME=VALUE` arguments.
    pub set: Vec<String>,
    /// The `--image` argument.
    pub image: Option<String>,
    /// The image of our own pods when no value names one.
    pub default_image: String,
}

impl Request {
    /// A profile of the bundle as it is.
    pub fn named(profile: &str, default_image: &str) -> Self {
        Self {
            profile: ProfileSource::Named(profile.to_owned()),
            recorded: BTreeMap::new(),
            files: Vec::new(),
            set: Vec::new(),
            image: None,
            default_image: default_image.to_owned(),
        }
    }
}

/// Reads the profile and merges the values.
///
/// # Errors
/// Every fault of the profile and of all values.
pub fn resolve(bundle: &Bundle, request: &Request) -> Result<(Profile, Values), Faults> {
    let mut faults = Vec::new();
    let chain = Chain::read(bundle, &request.profile, &mut faults);
    let runlevels = chain.runlevels(bundle, &mut faults);
    let mut layers = Layers::new(bundle, &request.default_image, &mut faults);
    for link in &chain.links {
        if let Some(values) = link.map.get("values") {
            layers.mapping(&link.place, values, &link.document, &["values"]);
        }
    }
    layers.recorded(&request.recorded);
    for (path, text) in &request.files {
        layers.file(path, text);
    }
    request.set.iter().for_each(|argument| layers.set(argument));
    if let Some(image) = &request.image {
        layers.image(image);
    }
    let values = layers.finish();
    let profile = Profile { name: chain.name, description: chain.description, runlevels };
    unless(faults, (profile, values))
}

/// Names and descriptions of the bundle's profiles.
///
/// # Errors
/// Faults of the profiles themselves.
pub fn list(bundle: &Bundle) -> Result<Vec<(String, String)>, Faults> {
    let mut faults: Vec<Fault> = Vec::new();
    let describe = |name: &String| {
        let chain = Chain::read(bundle, &ProfileSource::Named(name.clone()), &mut faults);
        (name.clone(), chain.description)
    };
    let profiles = bundle.profiles.keys().map(describe).collect();
    unless(faults, profiles)
}
