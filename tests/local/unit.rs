//! The examples for systemd, as systemd reads them.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};

use crate::Machine;
use crate::harness::executable::executable;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/systemd");

/// What reaches the steps of builds, and one of them may need; each takes its values along.
const ABSENT: [&str; 20] = [
    "ProtectHostname",
    "ProtectClock",
    "ProtectKernel",
    "ProtectControlGroups",
    "ProtectProc",
    "ProcSubset",
    "PrivateDevices",
    "PrivateUsers",
    "PrivateNetwork",
    "DeviceAllow",
    "DevicePolicy",
    "RestrictRealtime",
    "RestrictNamespaces",
    "RestrictAddressFamilies",
    "RestrictSUIDSGID",
    "SystemCall",
    "LockPersonality",
    "MemoryDenyWriteExecute",
    "NoNewPrivileges",
    "CapabilityBoundingSet",
];

/// Inherited by daemons or steps, or gone with a restart that daemons outlive.
const INHERITED: [&str; 3] = ["OOMScoreAdjust", "UMask", "PrivateTmp"];

/// What only the system's manager knows or can do.
const OF_THE_SYSTEM: [&str; 6] = ["network-online", "multi-user", "Protect", "Private", "LimitNOFILE", "/var/lib"];

/// A unit's directives, without what is said about them.
fn directives(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';'])).collect()
}

pub(crate) async fn nothing_in_the_units_reaches_the_steps_of_builds(_machine: Arc<Machine>) -> anyhow::Result<()> {
    for name in ["bko.service", "user/bko.service"] {
        let text = std::fs::read_to_string(Path::new(FOLDER).join(name))?;
        let directives = directives(&text);
        for word in ABSENT.iter().chain(&INHERITED) {
            ensure!(!directives.iter().any(|line| line.starts_with(word)), "{name}: {word}");
        }
        for needed in ["KillMode=process", "Delegate=yes", "Restart=always", "TimeoutStopSec=3900"] {
            ensure!(directives.contains(&needed), "{name}: no {needed}");
        }
    }
    let root = std::fs::read_to_string(Path::new(FOLDER).join("bko.service"))?;
    for needed in ["Environment=HOME=/root", "ProtectHome=read-only"] {
        ensure!(directives(&root).contains(&needed), "root's credentials of Docker cannot be read: no {needed}");
    }
    let user = std::fs::read_to_string(Path::new(FOLDER).join("user/bko.service"))?;
    for word in OF_THE_SYSTEM {
        ensure!(!directives(&user).iter().any(|line| line.contains(word)), "user: {word}");
    }
    ensure!(directives(&user).contains(&"WantedBy=default.target"));
    Ok(())
}

pub(crate) async fn systemd_finds_nothing_wrong_with_the_units(_machine: Arc<Machine>) -> anyhow::Result<()> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        eprintln!("examples/systemd: systemd-analyze is not installed (Debian: systemd), left out");
        return Ok(());
    }
    for (name, program, flags) in [
        ("bko.service", "/usr/local/bin/bko-install", &["verify"][..]),
        ("user/bko.service", "%h/.local/bin/bko-install", &["--user", "verify"]),
    ] {
        let unit = std::fs::read_to_string(Path::new(FOLDER).join(name))?;
        ensure!(unit.contains(&format!("ExecStart={program} up")), "{unit}");
        let unit = unit.replace(program, &executable()?.display().to_string());
        let file = Path::new("/tmp/hostpath_pv/units").join(name);
        let folder = file.parent().context("no folder")?;
        std::fs::create_dir_all(folder)?;
        std::fs::write(&file, &unit)?;
        let mut command = Command::new("systemd-analyze");
        command.args(flags).arg("--man=no").arg(&file).env("XDG_RUNTIME_DIR", folder);
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        // What it says of other units of this machine is not about this one.
        let about = said.lines().filter(|line| line.contains("bko.service")).collect::<Vec<_>>();
        ensure!(output.status.success() && about.is_empty(), "{name}: {}\n{said}", output.status);
    }
    Ok(())
}
