//! From the command line, and what an earlier run recorded, to objects.

use serde_json::Value;

use super::super::bundle::{BundleArgs, Bundled, Recorded};
use super::super::exit::Failure;
use crate::cluster::Cluster;
use crate::cluster::record;
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
    let image = args.default_image()?;
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
    let recorded = match &record {
        Some(record) => {
            Recorded { profile: Some(record.settings.profile.clone()), overrides: record.settings.overrides.clone() }
        }
        None => Recorded::default(),
    };
    let profile = args.profile_name(&recorded).to_owned();
    let Bundled { values, rendered, .. } = args.render(recorded, default_image)?;
    let settings = Settings {
        profile,
        overrides: values.overrides().clone(),
        image: values.get(IMAGE).and_then(Value::as_str).unwrap_or(default_image).to_owned(),
    };
    Ok(Wanted { rendered, settings, values, record })
}

/// Where the installation is whose record is found; nothing when there is none.
pub(super) async fn namespace(cluster: &Cluster, args: &BundleArgs) -> Result<Option<String>, Failure> {
    let wanted = render(args, None, "unused/image:v0")?;
    let found = record::locate(cluster, &wanted.rendered.operator_namespace).await;
    found.map_err(super::session::record)
}
