//! `bko-install cluster unadopt`.

use std::time::Duration;

use clap::Args;

use super::super::exit::{Code, Failure};
use super::super::{Global, report};
use super::session;
use crate::install::{self, AdoptError, InstallError};
use crate::names::OPERATOR_NAMESPACE;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Let Helm know its release again.
#[derive(Debug, Args)]
pub struct UnadoptArgs {
    /// Namespace of the release
    #[arg(long, value_name = "NAME", default_value = OPERATOR_NAMESPACE)]
    pub namespace: String,
}

pub(super) async fn run(args: UnadoptArgs, global: &Global) -> Result<(), Failure> {
    let cluster = session::open(global, 16, TIMEOUT, report::warnings(global)).await?;
    match install::unadopt(&cluster, &args.namespace).await {
        Ok(names) => report::print(&format!("Helm knows again: {}", names.join(", "))),
        Err(InstallError::Adopt(error @ AdoptError::NoCopy(_))) => {
            Err(Failure::new(Code::Failed, error).hint("name the namespace of the release with --namespace"))
        }
        Err(error) => Err(session::failure(error)),
    }
}
