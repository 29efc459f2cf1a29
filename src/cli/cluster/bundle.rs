//! From the command line, and what an earlier run recorded, to objects.

use serde_json::Value;

use super::super::bundle::{BundleArgs, Recorded};
use super::super::exit::Failure;
use crate::cluster::{Cluster, record};
use crate::manifest::Rendered;
use crate::plan::{Record, Settings};
use crate::profile::{IMAGE, Values};

/// What the command line asks for, rendered.
pub(super) struct Wanted {
    pub(super) rendered: Rendered,
    pub(super) settings: Settings,
    pub(super) values: Values,
    /// The record of the installation that is there.
    pub(super) record: Option<Record>,
}

/// Renders the bundle, with the overrides of the installation that is there.
/// Where its record is depends on the values, so that these are read twice.
pub(super) async fn wanted(cluster: &Cluster, args: &BundleArgs) -> Result<Wanted, Failure> {
    let first = render(args, None, None)?;
    let record = record::find(cluster, &first.rendered.operator_namespace).await.map_err(super::session::record)?;
    match record {
        None => Ok(first),
        Some(record) => render(args, Some(record), Some(first.settings.image).filter(|_| args.image.is_none())),
    }
}

/// Renders what is installed, as it was asked for.
pub(super) async fn installed(cluster: &Cluster, args: &BundleArgs) -> Result<Option<Wanted>, Failure> {
    let Wanted { record, .. } = wanted(cluster, args).await?;
    let Some(record) = record else { return Ok(None) };
    let image = record.settings.image.clone();
    render(args, Some(record), Some(image)).map(Some)
}

fn render(args: &BundleArgs, record: Option<Record>, image: Option<String>) -> Result<Wanted, Failure> {
    let recorded = record.as_ref().map(|record| &record.settings);
    let bundled = args.render(Recorded {
        profile: recorded.map(|settings| settings.profile.clone()),
        overrides: recorded.map(|settings| settings.overrides.clone()).unwrap_or_default(),
        image,
    })?;
    let image = bundled.values.get(IMAGE).and_then(Value::as_str).unwrap_or_default();
    let settings = Settings {
        profile: bundled.profile.name.clone(),
        overrides: bundled.values.overrides().clone(),
        image: image.to_owned(),
    };
    Ok(Wanted { rendered: bundled.rendered, settings, values: bundled.values, record })
}
