//! The example for systemd, as systemd reads it.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::ensure;

use crate::Machine;
use crate::harness::executable::executable;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/systemd/bko.service");

pub(crate) async fn systemd_finds_nothing_wrong_with_the_unit(_machine: Arc<Machine>) -> anyhow::Result<()> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        eprintln!("examples/systemd: systemd-analyze is not installed (Debian: systemd), left out");
        return Ok(());
    }
    let unit = std::fs::read_to_string(UNIT)?;
    ensure!(unit.contains("ExecStart=/usr/local/bin/bko-install up "), "{unit}");
    let unit = unit.replace("/usr/local/bin/bko-install", &executable()?.display().to_string());
    let (below, _) = unit.split_once("# Hardening").map_or((unit.as_str(), ""), |halves| halves);
    let install = "\n[Install]\nWantedBy=default.target\n";
    for (name, text, flags) in
        [("system", unit.clone(), &["verify"][..]), ("user", format!("{below}{install}"), &["--user", "verify"])]
    {
        let folder = Path::new("/tmp/hostpath_pv/units").join(name);
        std::fs::create_dir_all(&folder)?;
        let file = folder.join("bko.service");
        std::fs::write(&file, text)?;
        let mut command = Command::new("systemd-analyze");
        command.args(flags).arg("--man=no").arg(&file).env("XDG_RUNTIME_DIR", &folder);
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        // What it says of other units of this machine is not about this one.
        let about = said.lines().filter(|line| line.contains("bko.service")).collect::<Vec<_>>();
        ensure!(output.status.success() && about.is_empty(), "{name}: {}\n{said}", output.status);
    }
    Ok(())
}
