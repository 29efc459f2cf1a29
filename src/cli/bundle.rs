//! Which bundle: the options that choose a profile and its values, shared by
//! every command that renders.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::Value;

use crate::image;
use crate::manifest::{self, Bundle, Fault, Faults, Rendered};
use crate::preflight::understood;
use crate::profile::{self, Profile, ProfileSource, Request, Values};

use super::exit::{Code, Failure};

/// Which profile, with which values.
#[derive(Clone, Debug, Default, Args)]
pub struct BundleArgs {
    /// Profile to use: a name of `profile list`, or a file [default: the installed one, else `default`]
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,
    /// File with values; may be repeated, later ones win
    #[arg(long = "values", short = 'f', value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// One value; may be repeated, wins over files
    #[arg(long, value_name = "NAME=VALUE")]
    pub set: Vec<String>,
    /// Image of our own pods [default: the one that `bko-install image` makes of this executable]
    #[arg(long, value_name = "REF")]
    pub image: Option<String>,
    /// Folder with another bundle: manifests/, profiles/ and certs/, as in this repository
    #[arg(long, value_name = "DIR", hide = true)]
    pub bundle: Option<PathBuf>,
}

/// What the record remembers of earlier runs.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// The profile that is installed.
    pub profile: Option<String>,
    /// Overrides of values: [`Values::overrides`] of the last run.
    pub overrides: BTreeMap<String, Value>,
    /// Values of what is taken over, below those that are given: where they are
    /// from, and a values file.
    pub release: Option<(String, String)>,
}

/// A profile, its values, and what comes of them.
#[derive(Clone, Debug)]
pub struct Bundled {
    /// The profile.
    pub profile: Profile,
    /// Every value and its source.
    pub values: Values,
    /// The objects.
    pub rendered: Rendered,
}

impl BundleArgs {
    /// Reads the files, merges the values.
    ///
    /// # Errors
    /// Exit code 2 with every fault of the profile and the values.
    pub fn resolve(&self, recorded: Recorded, default_image: &str) -> Result<(Profile, Values), Failure> {
        let profile = profile_source(self.profile_name(&recorded))?;
        let (files, mut unread) = self.values_files();
        let request = Request {
            profile,
            recorded: recorded.overrides,
            files: recorded.release.into_iter().chain(files).collect(),
            set: self.set.clone(),
            image: self.image.clone(),
            default_image: default_image.to_owned(),
        };
        // A file that is missing hides no other fault.
        let resolved = profile::resolve(self.bundle()?, &request).map_err(|Faults(faults)| unread.extend(faults));
        let (profile, values) = match resolved {
            Ok(resolved) if unread.is_empty() => resolved,
            _ => return Err(usage(Faults(unread))),
        };
        for name in values.forgotten() {
            tracing::warn!(value.name = %name, "recorded override of a value that this version does not have");
        }
        Ok((profile, values))
    }

    /// The values files, and those that cannot be read.
    fn values_files(&self) -> (Vec<(String, String)>, Vec<Fault>) {
        let (mut files, mut faults) = (Vec::new(), Vec::new());
        for path in &self.files {
            match text(path) {
                Ok(text) => files.push((path.display().to_string(), text)),
                Err(error) => faults.push(Fault::of(path.display().to_string(), format!("cannot read it: {error}"))),
            }
        }
        (files, faults)
    }

    /// Whether a value is valid by itself.
    pub fn accepts(&self, name: &str, value: &Value) -> bool {
        let Ok(profile) = profile_source(self.profile_name(&Recorded::default())) else { return false };
        let text = serde_json::json!({name: value}).to_string();
        let request = Request {
            profile,
            files: vec![(name.to_owned(), text)],
            ..Request::named(DEFAULT_PROFILE, "unused/image:v0")
        };
        self.bundle().is_ok_and(|bundle| profile::resolve(bundle, &request).is_ok())
    }

    /// Reads the files, merges the values, renders the objects.
    ///
    /// # Errors
    /// Exit code 2 with every fault.
    pub fn render(&self, recorded: Recorded, default_image: &str) -> Result<Bundled, Failure> {
        let (profile, values) = self.resolve(recorded, default_image)?;
        let rendered = rendered(self.bundle()?, &profile, &values)?;
        Ok(Bundled { profile, values, rendered })
    }

    /// The reference that `bko-install image` gives the running executable;
    /// the executable is not read when an image is named.
    ///
    /// # Errors
    /// The executable cannot be read.
    pub fn default_image(&self) -> Result<String, Failure> {
        match &self.image {
            Some(image) => Ok(image.clone()),
            None => Ok(image::default_reference(&image::running_executable()?)?),
        }
    }

    /// The bundle: the executable's own, unless another is named.
    fn bundle(&self) -> Result<&'static Bundle, Failure> {
        let Some(folder) = &self.bundle else { return bundle() };
        let mut files = Vec::new();
        collect(folder, folder, &mut files)
            .map_err(|error| usage_of(error.context(format!("cannot read bundle \"{}\"", folder.display()))))?;
        // One for the life of the process, like the embedded one.
        Bundle::parse(files).map(|bundle| &*Box::leak(Box::new(bundle))).map_err(usage)
    }

    /// The profile that is asked for, else the recorded one, else the default.
    pub fn profile_name<'a>(&'a self, recorded: &'a Recorded) -> &'a str {
        self.profile.as_deref().or(recorded.profile.as_deref()).unwrap_or(DEFAULT_PROFILE)
    }
}

/// The objects, which the servers that they start understand.
pub(super) fn rendered(bundle: &Bundle, profile: &Profile, values: &Values) -> Result<Rendered, Failure> {
    let rendered = manifest::render(bundle, profile, values).map_err(usage)?;
    understood::check(&rendered).map_err(usage)?;
    Ok(rendered)
}

/// The embedded bundle.
pub(super) fn bundle() -> Result<&'static Bundle, Failure> {
    Bundle::embedded().map_err(usage)
}

pub(super) fn usage(faults: Faults) -> Failure {
    Failure::new(Code::Usage, faults)
}

fn usage_of(error: anyhow::Error) -> Failure {
    Failure::new(Code::Usage, error)
}

/// The files below a folder, with their paths from its root.
#[expect(clippy::disallowed_methods, reason = "the command line reads the files that it is given")]
fn collect(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(root, &path, files)?;
        } else {
            let name = path.strip_prefix(root)?.display().to_string();
            files.push((name, std::fs::read_to_string(&path)?));
        }
    }
    Ok(())
}

const DEFAULT_PROFILE: &str = "default";

/// What looks like a path is one.
fn profile_source(profile: &str) -> Result<ProfileSource, Failure> {
    if !profile.contains('/') && !profile.ends_with(".yaml") && !profile.ends_with(".yml") {
        return Ok(ProfileSource::Named(profile.to_owned()));
    }
    let (path, text) = read(Path::new(profile))?;
    Ok(ProfileSource::File { path, text })
}

#[expect(clippy::disallowed_methods, reason = "the command line reads the files that it is given")]
fn text(path: &Path) -> std::io::Result<String> {
    std::fs::read_to_string(path)
}

fn read(path: &Path) -> Result<(String, String), Failure> {
    let shown = path.display().to_string();
    match text(path) {
        Ok(text) => Ok((shown, text)),
        Err(error) => {
            let error = anyhow::Error::new(error).context(format!("cannot read \"{shown}\""));
            Err(Failure::new(Code::Usage, error))
        }
    }
}
