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

impl ChoiceArgs {
    fn is_empty(&self) -> bool {
        self.only.is_empty() && self.skip.is_empty()
    }
}

/// The options of a run.
///
/// # Errors
/// Exit code 2 for components that the profile does not have, and when no component is left.
pub(super) fn options(allow: AllowArgs, choice: &ChoiceArgs, rendered: &Rendered) -> Result<Options, Failure> {
    let known: Vec<&str> = rendered.policies.keys().map(String::as_str).collect();
    let wrong: Vec<String> = ["only", "skip"]
        .into_iter()
        .zip([&choice.only, &choice.skip])
        .flat_map(|(flag, names)| names.iter().map(move |name| (flag, name)))
        .filter(|(_, name)| !rendered.policies.contains_key(*name))
        .map(|(flag, name)| {
            let hint = did_you_mean(name, known.iter().copied());
            format!("--{flag} {name}: profile \"{}\" has no component \"{name}\"{hint}", rendered.profile)
        })
        .collect();
    if !wrong.is_empty() {
        let error = anyhow::anyhow!("{}", wrong.join("\n"));
        return Err(Failure::new(Code::Usage, error).hint(format!("its components are {}", known.join(", "))));
    }
    let AllowArgs { adopt, force_conflicts, confirm_prune } = allow;
    let (only, skip) = (choice.only.clone(), choice.skip.clone());
    let options = Options { force_conflicts, adopt, confirm_prune, only, skip, ..Options::default() };
    if !choice.is_empty() && known.iter().all(|name| options.leaves(name)) {
        let error = anyhow::anyhow!("--only and --skip leave no component");
        return Err(Failure::new(Code::Usage, error).hint("name one with --only that --skip does not name"));
    }
    Ok(options)
}
