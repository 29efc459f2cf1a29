//! From the command line, and what an earlier run recorded, to objects.

use std::path::Path;

use serde_json::Value;

use super::super::bundle::BundleArgs;
use super::super::exit::{Code, Failure};
use crate::cluster::Cluster;
use crate::cluster::record;
use crate::image;
use crate::manifest::{self, Bundle, Faults, Rendered};
use crate::plan::{Record, Settings};
use crate::profile::{self, IMAGE, ProfileSource, Request, Values};

/// What the command line asks for, rendered.
pub(super) struct Wanted {
    pub(super) rendered: Rendered,
    pub(super) settings: Settings,
    pub(super) values: Values,
    /// The record of the installation that is there.
    pub(super) record: Option<Record>,
}

const DEFAULT_PROFILE: &str = "default";

/// Renders the bundle, with the overrides of the installation that is there.
/// Where its record is depends on the values, so that these are read twice.
pub(super) async fn wanted(cluster: &Cluster, args: &BundleArgs) -> Result<Wanted, Failure> {
    let image = image::default_reference(&image::running_executable()?)?;
    let first = render(args, None, &image)?;
    let record = record::find(cluster, &first.rendered.operator_namespace).await.map_err(super::session::record)?;
    match record {
        None => Ok(first),
        Some(record) => render(args, Some(record), &image),
    }
}

/// Renders what is installed, as it was asked for.
pub(super) async fn installed(cluster: &Cluster, args: &BundleArgs) -> Result<Option<Wanted>, Failure> {
    let wanted = wanted(cluster, args).await?;
    match wanted.record {
        None => Ok(None),
        Some(record) => {
            let image = record.settings.image.clone();
            render(args, Some(record), &image).map(Some)
        }
    }
}

fn render(args: &BundleArgs, record: Option<Record>, default_image: &str) -> Result<Wanted, Failure> {
    let recorded = record.as_ref().map(|record| &record.settings);
    let profile = args.profile.as_deref().or(recorded.map(|r| r.profile.as_str())).unwrap_or(DEFAULT_PROFILE);
    let request = Request {
        profile: source(profile)?,
        recorded: recorded.map(|r| r.overrides.clone()).unwrap_or_default(),
        files: args.files.iter().map(|path| read(path)).collect::<Result<_, _>>()?,
        set: args.set.clone(),
        image: args.image.clone(),
        default_image: default_image.to_owned(),
    };
    let bundle = Bundle::embedded().map_err(faulty)?;
    let (resolved, values) = profile::resolve(bundle, &request).map_err(faulty)?;
    let rendered = manifest::render(bundle, &resolved, &values).map_err(faulty)?;
    let settings = Settings {
        profile: profile.to_owned(),
        overrides: values.overrides().clone(),
        image: values.get(IMAGE).and_then(Value::as_str).unwrap_or(default_image).to_owned(),
    };
    Ok(Wanted { rendered, settings, values, record })
}

/// A profile of the bundle by its name, or a file by its path.
fn source(profile: &str) -> Result<ProfileSource, Failure> {
    let is_file = profile.contains(['/', '\\']) || profile.ends_with(".yaml") || profile.ends_with(".yml");
    if !is_file {
        return Ok(ProfileSource::Named(profile.to_owned()));
    }
    let (path, text) = read(Path::new(profile))?;
    Ok(ProfileSource::File { path, text })
}

#[expect(clippy::disallowed_methods, reason = "values files are read here")]
fn read(path: &Path) -> Result<(String, String), Failure> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok((path.display().to_string(), text)),
        Err(error) => {
            let error = anyhow::Error::new(error).context(format!("cannot read \"{}\"", path.display()));
            Err(Failure::new(Code::Usage, error))
        }
    }
}

fn faulty(faults: Faults) -> Failure {
    Failure::new(Code::Usage, faults)
}
