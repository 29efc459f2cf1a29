//! `bko-install profile`.

use std::io::{self, Write};

use clap::{Args, Subcommand};
use serde_json::json;

use crate::manifest::{Bundle, emit};
use crate::profile::{self, Profile, Values};

use super::bundle::{self, BundleArgs, Recorded};
use super::exit::Failure;
use super::{Global, Output, OutputArgs, report};

/// List and show profiles.
#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// List the profiles of this executable
    List {
        /// How to print
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Show a profile's components and every value, with where it comes from
    Show(ShowArgs),
}

/// Options of `profile show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Profile to show: a name of `profile list`, or a file [default: default]
    #[arg(value_name = "NAME|FILE", conflicts_with = "profile")]
    name: Option<String>,
    /// Which values
    #[command(flatten)]
    bundle: BundleArgs,
    /// How to print
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
///
/// # Errors
/// Faults of a profile or of the values.
pub fn run(command: ProfileCommand, _global: &Global) -> Result<(), Failure> {
    let bundle = bundle::bundle()?;
    let mut out = report::stdout();
    match command {
        ProfileCommand::List { output } => list(&mut out, bundle, output.output),
        ProfileCommand::Show(ShowArgs { name, bundle: mut args, output }) => {
            args.profile = name.or(args.profile);
            let image = args.default_image()?;
            let (profile, values) = args.resolve(Recorded::default(), &image)?;
            match output.output {
                Output::Text => Ok(show_text(&mut out, bundle, &profile, &values)?),
                Output::Json => Ok(show_json(&mut out, bundle, &profile, &values)?),
            }
        }
    }
}

fn list(out: &mut impl Write, bundle: &Bundle, output: Output) -> Result<(), Failure> {
    let profiles = profile::list(bundle).map_err(bundle::usage)?;
    if output == Output::Json {
        let list: Vec<_> =
            profiles.iter().map(|(name, description)| json!({"name": name, "description": description})).collect();
        writeln!(out, "{}", serde_json::Value::from(list))?;
        return Ok(());
    }
    let width = profiles.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, description) in &profiles {
        writeln!(out, "{name:width$}  {description}")?;
    }
    Ok(())
}

/// A value is a line to copy into a values file, under what it is for.
fn show_text(out: &mut impl Write, bundle: &Bundle, profile: &Profile, values: &Values) -> io::Result<()> {
    writeln!(out, "profile {}: {}\n", profile.name, profile.description)?;
    for (level, components) in &profile.runlevels {
        for name in components {
            let description = bundle.components.get(name).map_or("", |component| &component.description);
            writeln!(out, "{level}  {name:16}  {description}")?;
        }
    }
    for (name, entry) in values.iter() {
        let shown = emit::to_flow(&entry.spec.show(&entry.value));
        writeln!(out, "\n# {} ({})", entry.spec.description, entry.spec.type_name())?;
        writeln!(out, "{name}: {shown}  # {}", entry.source)?;
    }
    Ok(())
}

fn show_json(out: &mut impl Write, bundle: &Bundle, profile: &Profile, values: &Values) -> io::Result<()> {
    let components: Vec<_> = profile
        .runlevels
        .iter()
        .flat_map(|(level, names)| names.iter().map(move |name| (level, name)))
        .map(|(level, name)| {
            let description = bundle.components.get(name).map_or("", |component| &component.description);
            json!({"name": name, "runlevel": level, "description": description})
        })
        .collect();
    let values: Vec<_> = values
        .iter()
        .map(|(name, entry)| {
            json!({
                "name": name,
                "component": entry.owner,
                "type": entry.spec.type_name(),
                "description": entry.spec.description,
                "default": entry.spec.show(&entry.spec.default),
                "value": entry.spec.show(&entry.value),
                "source": entry.source.to_string(),
            })
        })
        .collect();
    let document = json!({
        "name": profile.name,
        "description": profile.description,
        "components": components,
        "values": values,
    });
    writeln!(out, "{document}")
}
