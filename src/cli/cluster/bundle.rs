//! From the command line, and what an earlier run recorded, to objects.

use serde_json::Value;

use super::super::bundle::{BundleArgs, Bundled, Recorded};
use super::super::exit::Failure;
use super::session;
use crate::cluster::record::{self, RecordError};
use crate::cluster::{Cluster, RequestError};
use crate::install;
use crate::manifest::Rendered;
use crate::plan::{Carried, Record, ReleaseValues, Settings};
use crate::profile::{IMAGE, Values};

/// What the command line asks for, rendered.
pub(super) struct Wanted {
    pub(super) rendered: Rendered,
    pub(super) settings: Settings,
    pub(super) values: Values,
    /// The record of the installation that is there.
    pub(super) record: Option<Record>,
    /// What is taken over of a release's values.
    pub(super) release: Option<ReleaseValues>,
}

/// Renders the bundle, with the overrides of the installation that is there.
/// Where its record is depends on the values, so that these are read twice.
pub(super) async fn wanted(cluster: &Cluster, args: &BundleArgs) -> Result<Wanted, Failure> {
    let first = render(args, None, None, &args.default_image()?)?;
    let record = record::find(cluster, &first.rendered.operator_namespace).await.map_err(session::record)?;
    recorded(args, first, record)
}

/// The same, for what finds out later, and tells with all the rest, that the
/// record may not be read.
pub(super) async fn wanted_unless_forbidden(cluster: &Cluster, args: &BundleArgs) -> Result<Wanted, Failure> {
    let first = render(args, None, None, &args.default_image()?)?;
    match record::find(cluster, &first.rendered.operator_namespace).await {
        Err(RecordError::Request { source: RequestError::Forbidden { .. }, .. }) => Ok(first),
        record => recorded(args, first, record.map_err(session::record)?),
    }
}

fn recorded(args: &BundleArgs, first: Wanted, record: Option<Record>) -> Result<Wanted, Failure> {
    match record {
        None => Ok(first),
        Some(record) => render(args, Some(record), None, &args.default_image()?),
    }
}

/// The same; of a release that is taken over, what its user had set counts, too.
/// From then on, the record has it.
pub(super) async fn wanted_of(cluster: &Cluster, args: &BundleArgs, adopt: bool) -> Result<Wanted, Failure> {
    let wanted = wanted_unless_forbidden(cluster, args).await?;
    if !adopt || wanted.record.is_some() {
        return Ok(wanted);
    }
    let releases = install::release_values(cluster, &wanted.rendered.operator_namespace).await;
    let Some((release, config)) = releases.map_err(session::failure)?.into_iter().next() else { return Ok(wanted) };
    let values = Carried::of(&config, |name, value| args.accepts(name, value));
    let text = serde_json::to_string(&values.taken)?;
    let wanted = render(args, None, Some((release.to_string(), text)), &args.default_image()?)?;
    Ok(Wanted { release: (!values.is_empty()).then_some(ReleaseValues { release, values }), ..wanted })
}

/// Renders what is installed, as it was asked for.
pub(super) async fn installed(cluster: &Cluster, args: &BundleArgs) -> Result<Option<Wanted>, Failure> {
    let wanted = wanted(cluster, args).await?;
    match wanted.record {
        None => Ok(None),
        Some(record) => {
            let image = record.run.settings.image.clone();
            render(args, Some(record), None, &image).map(Some)
        }
    }
}

fn render(
    args: &BundleArgs,
    record: Option<Record>,
    release: Option<(String, String)>,
    default_image: &str,
) -> Result<Wanted, Failure> {
    let recorded = match &record {
        Some(record) => Recorded {
            profile: Some(record.run.settings.profile.clone()),
            overrides: record.run.settings.overrides.clone(),
            release,
        },
        None => Recorded { release, ..Recorded::default() },
    };
    let profile = args.profile_name(&recorded).to_owned();
    let Bundled { values, rendered, .. } = args.render(recorded, default_image)?;
    let settings = Settings {
        profile,
        overrides: values.overrides().clone(),
        image: values.get(IMAGE).and_then(Value::as_str).unwrap_or(default_image).to_owned(),
    };
    Ok(Wanted { rendered, settings, values, record, release: None })
}

/// Where the installation is whose record is found; nothing when there is none.
pub(super) async fn namespace(cluster: &Cluster, args: &BundleArgs) -> Result<Option<String>, Failure> {
    let wanted = render(args, None, None, "unused/image:v0")?;
    let found = record::locate(cluster, &wanted.rendered.operator_namespace).await;
    found.map_err(session::record)
}
