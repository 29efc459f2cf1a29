//! `bko-install images`.

use clap::{Args, Subcommand};

use super::bundle::{BundleArgs, Recorded};
use super::exit::Failure;
use super::{Output, OutputArgs, report};
use crate::preflight::images::images;

/// List the images that an installation pulls.
#[derive(Debug, Subcommand)]
pub enum ImagesCommand {
    /// Print every image, one a line: for copying into a registry that the cluster reaches
    List(ListArgs),
}

/// Options of `images list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Of which bundle.
    #[command(flatten)]
    bundle: BundleArgs,
    /// How to print.
    #[command(flatten)]
    output: OutputArgs,
}

/// Runs the command.
///
/// # Errors
/// Faults of the profile or values.
pub fn run(command: ImagesCommand) -> Result<(), Failure> {
    let ImagesCommand::List(ListArgs { bundle, output }) = command;
    let rendered = bundle.render(Recorded::default(), &bundle.default_image()?)?.rendered;
    let images = images(&rendered);
    match output.output {
        Output::Json => report::print_json(&images),
        Output::Text => report::print(&images.iter().map(|image| image.image.as_str()).collect::<Vec<_>>().join("\n")),
    }
}
