//! What a run may do, and to which components.

use clap::Args;

use super::super::exit::{Code, Failure};
use crate::install::Options;
use crate::manifest::Rendered;
use crate::profile::did_you_mean;

/// What needs consent.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct AllowArgs {
    /// Take over an installation that Helm, kubectl or the reference's controller made
    #[arg(long)]
    pub adopt: bool,
    /// Take over fields that other managers own
    #[arg(long)]
    pub force_conflicts: bool,
    /// Delete what is deleted with consent only: namespaces that hold anything else, definitions with live objects, volumes, more than a third of all
    #[arg(long)]
    pub confirm_prune: bool,
}

/// Which components a run touches.
#[derive(Clone, Debug, Default, Args)]
pub struct ChoiceArgs {
    /// Only this component; may be repeated
    #[arg(long, value_name = "COMPONENT")]
    pub only: Vec<String>,
    /// All but this component; may be repeated
    #[arg(long, value_name = "COMPONENT")]
    pub skip: Vec<String>,
}

/// The options of a run.
///
/// # Errors
/// Exit code 2 for a component that the profile does not have.
pub(super) fn options(allow: AllowArgs, choice: &ChoiceArgs, rendered: &Rendered) -> Result<Options, Failure> {
    for name in choice.only.iter().chain(&choice.skip) {
        if !rendered.policies.contains_key(name) {
            let known: Vec<&str> = rendered.policies.keys().map(String::as_str).collect();
            let hint = did_you_mean(name, known.iter().copied());
            let error = anyhow::anyhow!("profile \"{}\" has no component \"{name}\"{hint}", rendered.profile);
            return Err(Failure::new(Code::Usage, error).hint(format!("its components are {}", known.join(", "))));
        }
    }
    let AllowArgs { adopt, force_conflicts, confirm_prune } = allow;
    let (only, skip) = (choice.only.clone(), choice.skip.clone());
    Ok(Options { force_conflicts, adopt, confirm_prune, only, skip, ..Options::default() })
}
