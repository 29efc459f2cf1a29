//! `bko-install up`.

use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;

use super::exit::{Code, Failure};
use super::log::LogArgs;
use super::{Global, report};
use crate::local::args::UpArgs;
use crate::local::control::Info;
use crate::local::up::{self, UpError};

/// Run the farm on this host; needs no cluster.
#[derive(Debug, Args)]
#[command(
    after_long_help = "Every project gets a buildkitd of its own, as a process of this host, with a cache below \
    the state folder. Ctrl-C lets builds end first, the second one does not. Killed in any other way, the daemons and \
    their builds go on, and the next `up` on the same folder takes them over."
)]
pub struct UpCommand {
    /// How it logs.
    #[command(flatten)]
    pub log: LogArgs,
    /// Everything else.
    #[command(flatten)]
    pub up: UpArgs,
}

/// Runs the command.
///
/// # Errors
/// The farm does not come up.
pub fn run(command: UpCommand, global: &Global) -> Result<(), Failure> {
    command.log.start(global);
    let quiet = global.quiet;
    super::block_on(async {
        let greet = |info: &Info| {
            if !quiet {
                // Whoever does not read it does not want it.
                let _ = report::print(&greeting(info));
            }
        };
        let said = AtomicU64::new(u64::MAX);
        let progress = |came: u64, total: u64| {
            let tenth = came * 10 / total.max(1);
            if !quiet && said.swap(tenth, Ordering::Relaxed) != tenth {
                report::complain(&format!("fetching BuildKit: {} of {} MiB", came >> 20, total.div_ceil(1 << 20)));
            }
        };
        up::run(command.up, &progress, greet).await.map_err(failure)
    })
}

fn failure(error: UpError) -> Failure {
    let code = match &error {
        UpError::Layout(_) | UpError::Route(_) | UpError::Domain(_) | UpError::NoDomain(_) | UpError::SamePort(_) => {
            Code::Usage
        }
        UpError::Lock(_) => Code::Refused,
        _ => Code::Failed,
    };
    let hint = error.hint();
    let failure = Failure::new(code, error);
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

fn greeting(info: &Info) -> String {
    let Info { api, certificates, buildkit, storage, .. } = info;
    let token = info.token.as_ref().map(|path| format!("\n  token          {}", path.display())).unwrap_or_default();
    let bearer =
        info.token.as_ref().map(|path| format!(" \\\n    -H \"Authorization: Bearer $(cat {})\"", path.display()));
    let bearer = bearer.unwrap_or_default();
    let state = if info.usual { String::new() } else { format!(" --state-dir {}", info.state.display()) };
    let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let certs = certificates.display();
    format!(
        "The farm is up.\n  \
         routing API    {api}{token}\n  \
         certificates   {certs}\n  \
         daemons        {buildkit}, caches: {storage}\n\n\
         Build with it, in any checkout (docker buildx or buildctl does the work):\n  \
         bko-install build{state} .\n\n\
         Or with any client: ask for the daemon of a repository,\n  \
         curl -fsS {api}/route -d '{{\"repo\":\"github.com/acme/shop\",\"arch\":\"{arch}\"}}'{bearer}\n\
         and build there:\n  \
         docker buildx create --name shop --driver remote ENDPOINT \\\n    \
         --driver-opt cacert={certs}/ca.pem,cert={certs}/cert.pem,key={certs}/key.pem\n  \
         docker buildx build --builder shop .\n\n\
         `bko-install ps{state}` shows what runs where. Ctrl-C ends the farm when its builds have ended."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greeting_says_what_to_type_next() {
        let info = Info {
            pid: 1,
            state: "/var/lib/bko".into(),
            usual: true,
            api: "http://127.0.0.1:8080".into(),
            token: Some("/var/lib/bko/token".into()),
            certificates: "/var/lib/bko/certs/client".into(),
            domain: None,
            buildkit: "buildkitd v0.34.2".into(),
            storage: "reflink".into(),
        };
        insta::assert_snapshot!(greeting(&info));
    }
}
