//! Which bundle: the options that choose a profile and its values, shared by
//! every command that renders.

use std::path::PathBuf;

use clap::Args;

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
}
