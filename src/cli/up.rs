//! `bko-install up`.

mod view;

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args;

use super::exit::{Code, Failure};
use super::log::LogArgs;
use super::screen::{self, Screen, TerminalArgs};
use super::{Global, report};
use crate::client::shell;
use crate::local::args::UpArgs;
use crate::local::control::Info;
use crate::local::farm::Farm;
use crate::local::fetch::FetchError;
use crate::local::up::{self, UpError};

/// Run the farm on this host; needs no cluster.
#[derive(Debug, Args)]
#[command(
    after_long_help = "Every project gets a buildkitd of its own, as a process of this host, with a cache below \
    the state folder. Ctrl-C lets builds end first, the second one does not. Killed in any other way, clients lose \
    their builds; daemons and caches stay, and the next `up` on the same folder takes them over.\n\n\
    On a terminal its last lines show every project with its builds; elsewhere, and with --plain, a line tells of \
    everything that begins and ends."
)]
pub struct UpCommand {
    /// How it logs.
    #[command(flatten)]
    pub log: LogArgs,
    /// Lines that only scroll, on a terminal too
    #[arg(long)]
    plain: bool,
    /// What it is shown on.
    #[command(flatten)]
    terminal: TerminalArgs,
    /// Everything else.
    #[command(flatten)]
    pub up: UpArgs,
}

impl UpCommand {
    /// The terminal, if there is one that can be drawn on.
    fn screen(&self, global: &Global) -> Option<Screen> {
        self.terminal.screen(global).filter(|_| !self.plain)
    }
}

/// Runs the command.
///
/// # Errors
/// The farm does not come up.
pub fn run(command: UpCommand, global: &Global) -> Result<(), Failure> {
    let (screen, quiet) = (command.screen(global), global.quiet);
    let colour = command.terminal.colour(global);
    match &screen {
        // Both lead to the one terminal.
        Some(screen) if std::io::stderr().is_terminal() => {
            let screen = screen.clone();
            command.log.start_to(global, move || screen.clone());
        }
        _ => command.log.start(global),
    }
    super::block_on(async {
        let mut shown = None;
        let greet = |info: &Info, farm: Arc<Farm>| {
            shown = match &screen {
                Some(screen) => {
                    screen.show(vec![]);
                    screen.say(&greeting(info));
                    Some(tokio::spawn(view::draw(farm, screen.clone(), colour)))
                }
                None if quiet => None,
                None => {
                    // Whoever does not read it does not want it.
                    let _ = report::print(&greeting(info));
                    Some(tokio::spawn(view::tell(farm)))
                }
            };
        };
        let said = AtomicU64::new(u64::MAX);
        let progress = |came: u64, total: u64| fetched(screen.as_ref(), quiet, &said, came, total);
        let ended = up::run(command.up, &progress, greet).await.map_err(failure);
        if let Some(shown) = shown {
            shown.abort();
            let _ = shown.await;
        }
        if let Some(screen) = &screen {
            screen.show(vec![]);
        }
        ended
    })
}

/// A bar on a terminal, a line for every tenth elsewhere.
fn fetched(screen: Option<&Screen>, quiet: bool, said: &AtomicU64, came: u64, total: u64) {
    let (total, came) = (total.max(1), came.min(total));
    // A bar moves by halves of a hundredth.
    let step = came * if screen.is_some() { 200 } else { 10 } / total;
    if quiet || said.swap(step, Ordering::Relaxed) == step {
        return;
    }
    let text = format!("fetching BuildKit: {} of {} MiB", came >> 20, total.div_ceil(1 << 20));
    match screen {
        Some(screen) => {
            let room = usize::from(screen::size().columns).saturating_sub(text.len() + 4).min(40);
            let full = usize::try_from(came * room as u64 / total).unwrap_or(room);
            screen.show(vec![format!("{text}  {}{}", "█".repeat(full), "░".repeat(room - full))]);
        }
        None => report::complain(&text),
    }
}

fn failure(error: UpError) -> Failure {
    let code = match &error {
        UpError::Layout(_)
        | UpError::Owner(..)
        | UpError::Route(_)
        | UpError::Domain(_)
        | UpError::NoDomain(_)
        | UpError::PlainApi(_)
        | UpError::SamePort(_)
        | UpError::NoPort
        | UpError::OpenWithToken
        | UpError::Fetch(FetchError::Mirror(_))
        | UpError::NotBuildkitd { .. } => Code::Usage,
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
    let bearer = info.token.as_ref().map(|path| {
        let path = shell::quote(&path.display().to_string());
        format!(" \\\n    -H \"Authorization: Bearer $(cat {path})\"")
    });
    let bearer = bearer.unwrap_or_default();
    let state = info.state_flag();
    let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let certs = certificates.display();
    let options = format!("cacert={certs}/ca.pem,cert={certs}/cert.pem,key={certs}/key.pem");
    let options = shell::quote(&options);
    let elsewhere = info.domain.as_ref().map(|domain| {
        format!(
            "Other hosts build here, too, once *.{domain} leads to this host, with what this prints:\n  \
             bko-install credentials{state}\n\n"
        )
    });
    let elsewhere = elsewhere.unwrap_or_default();
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
         --driver-opt {options}\n  \
         docker buildx build --builder shop .\n\
         and say that the build has ended, with what was answered (the daemon is kept for it until then):\n  \
         curl -fsS {api}/complete -d '{{\"key\":\"KEY\",\"buildId\":\"BUILD_ID\"}}'{bearer}\n\n\
         {elsewhere}\
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
            port: 1234,
            token: Some("/var/lib/bko/token".into()),
            certificates: "/var/lib/bko/certs/client".into(),
            domain: None,
            gateway: None,
            buildkit: "buildkitd v0.34.2".into(),
            storage: "reflink".into(),
        };
        insta::assert_snapshot!(greeting(&info));
        let named = greeting(&Info { domain: Some("builds.example.org".into()), ..info.clone() });
        assert!(
            named.contains("once *.builds.example.org leads to this host")
                && named.contains("\n  bko-install credentials\n")
        );
        let odd = |path: &str| std::path::PathBuf::from(format!("/it's here/{path}"));
        let info =
            Info { usual: false, state: odd("bko"), token: Some(odd("token")), certificates: odd("client"), ..info };
        let text = greeting(&info);
        for want in [
            r"bko-install build --state-dir '/it'\''s here/bko' .",
            r#""Authorization: Bearer $(cat '/it'\''s here/token')""#,
            r"--driver-opt 'cacert=/it'\''s here/client/ca.pem,cert=",
            r"`bko-install ps --state-dir '/it'\''s here/bko'`",
        ] {
            assert!(text.contains(want), "{want} is not in\n{text}");
        }
    }
}
