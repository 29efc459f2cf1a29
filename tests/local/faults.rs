//! What can be wrong with a host, and what is said of it.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use bko_install::local::layout::Layout;
use bko_install::local::store::Store;
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use crate::Machine;
use crate::host::{Farm, USER, Who, cached};

const REPO: &str = "github.com/acme/shop";

fn route(farm: &Farm) -> anyhow::Result<(u16, String)> {
    farm.post("/route", &json!({"repo": REPO, "arch": "amd64"}))
}

pub(crate) async fn the_second_on_a_folder_is_told_who_has_it(machine: Arc<Machine>) -> anyhow::Result<()> {
    let farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let second = Farm::at(&machine.tools, Who::Root, &[], farm.state.clone())?;
    let output = second.up_command().output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(5), "{output:?}");
    ensure!(said.contains("another `bko-install up` runs on") && said.contains("hint: "), "{said}");
    route(&farm).context("the first goes on")?;
    std::mem::forget(second);
    Ok(())
}

pub(crate) async fn a_taken_port_is_named_with_its_flag(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::new(&machine.tools, Who::Root, &[])?;
    for (port, flag) in
        [(farm.ports.gateway, "--listen"), (farm.ports.api, "--api-listen"), (farm.ports.admin, "--metrics-addr")]
    {
        let _taken = TcpListener::bind(("0.0.0.0", port))?;
        let output = farm.up_command().output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success() && said.contains(flag) && said.contains("hint: another program"), "{said}");
    }
    // The daemons' port is bound by daemons only: a route is told.
    let taken = TcpListener::bind(("0.0.0.0", farm.ports.daemon))?;
    farm.start().await?;
    let (status, said) = route(&farm)?;
    ensure!(status == 503 && said.contains("address already in use"), "{status} {said}");
    drop(taken);
    farm.until("the daemon starts", Duration::from_secs(20), |farm| Ok(route(farm)?.0 == 200)).await
}

pub(crate) async fn a_daemon_that_cannot_start_is_told_with_its_last_word(machine: Arc<Machine>) -> anyhow::Result<()> {
    let folder = std::path::Path::new("/tmp/hostpath_pv/broken");
    std::fs::create_dir_all(folder)?;
    let script = "#!/bin/sh\ncase $1 in --version) echo buildkitd broken;; *) echo 'buildkitd: no such luck' >&2; exit 7;; esac\n";
    std::fs::write(folder.join("buildkitd"), script)?;
    std::fs::set_permissions(folder.join("buildkitd"), std::fs::Permissions::from_mode(0o755))?;
    let farm = Farm::up(&machine.tools, Who::Root, &["--buildkit", "/tmp/hostpath_pv/broken"]).await?;
    let (status, said) = route(&farm)?;
    ensure!(status == 503 && said.contains("ended with exit code 7: buildkitd: no such luck"), "{status} {said}");
    let begun = std::time::Instant::now();
    ensure!(route(&farm)?.0 == 503 && begun.elapsed() < Duration::from_secs(5), "the next is told at once");
    let missing = Farm::new(&machine.tools, Who::Root, &["--buildkit", "/nowhere"])?;
    let output = missing.up_command().output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("\"/nowhere\" is no executable buildkitd") && said.contains("hint: "), "{said}");
    Ok(())
}

pub(crate) async fn a_state_folder_is_its_owners_alone(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::new(&machine.tools, Who::Root, &[])?;
    std::fs::set_permissions(&farm.state, std::fs::Permissions::from_mode(0o777))?;
    farm.start().await?;
    let mode = |path: &std::path::Path| anyhow::Ok(std::fs::metadata(path)?.permissions().mode() & 0o777);
    ensure!(mode(&farm.state)? == 0o700, "{:o}", mode(&farm.state)?);
    ensure!(farm.said().matches("was open to others (mode 0777)").count() == 1, "{}", farm.said());
    for entry in std::fs::read_dir(&farm.state)?.flatten().filter(|entry| entry.path().is_file()) {
        ensure!(mode(&entry.path())? == 0o600, "{}: {:o}", entry.path().display(), mode(&entry.path())?);
    }
    farm.stop().await?;
    std::os::unix::fs::chown(&farm.state, Some(USER), Some(USER))?;
    let output = farm.up_command().output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(2), "{output:?}");
    ensure!(said.contains("belongs to user 4242") && said.contains("hint: choose another folder"), "{said}");
    Ok(())
}

pub(crate) async fn the_routing_api_without_tls_is_for_this_host(machine: Arc<Machine>) -> anyhow::Result<()> {
    let farm = Farm::new(&machine.tools, Who::Root, &[])?;
    for address in ["0.0.0.0:8080", ":8080", "[::]:8080", "192.0.2.1:8080"] {
        let output = farm.run("up", &[&format!("--api-listen={address}")])?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(2), "{output:?}");
        ensure!(
            said.contains(&format!("--api-listen {address}")) && said.contains("hint: other hosts reach"),
            "{said}"
        );
        ensure!(!farm.state.join("lock").exists(), "it began all the same");
    }
    Ok(())
}

pub(crate) async fn a_damaged_state_is_told_and_caches_are_found_again(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &[]).await?;
    let routed = farm.route(REPO)?;
    farm.build(&routed.endpoint, "damaged").await?;
    farm.complete(&routed)?;
    farm.stop().await?;
    let state = farm.state.join("state.redb");
    std::fs::write(&state, "this is no state")?;
    let output = farm.up_command().output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && said.contains("is damaged") && said.contains("hint: move it away"), "{said}");
    std::fs::rename(&state, state.with_extension("redb.damaged"))?;
    farm.start().await?;
    let again = farm.route(REPO)?;
    ensure!(again.endpoint == routed.endpoint);
    ensure!(cached(&farm.build(&again.endpoint, "damaged").await?), "the cache is lost");
    Ok(())
}

pub(crate) async fn a_full_disk_refuses_routes_and_loses_nothing(machine: Arc<Machine>) -> anyhow::Result<()> {
    let state = std::path::PathBuf::from("/tmp/hostpath_pv/small");
    std::fs::create_dir_all(&state)?;
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=24m", "tmpfs"]).arg(&state).status()?;
    ensure!(mounted.success());
    let mut farm = Farm::at(&machine.tools, Who::Root, &[], state.clone())?;
    farm.start().await?;
    let held = farm.route(REPO)?;
    let filler = state.join("filler");
    let _ = Command::new("dd").args(["if=/dev/zero", "bs=1M", &format!("of={}", filler.display())]).output()?;
    let refused =
        (0..2000).map(|_| route(&farm)).find(|answer| answer.as_ref().is_ok_and(|(status, _)| *status != 200));
    let (status, said) = refused.context("no route was refused on a full disk")??;
    ensure!(status == 503 && said.contains("No space left on device"), "{status} {said}");
    std::fs::remove_file(&filler)?;
    let after = farm.route(REPO)?;
    farm.kill()?;
    farm.start().await?;
    for routed in [held, after] {
        ensure!(farm.is_registered(&routed)?, "{routed:?} is lost");
    }
    Ok(())
}

/// What the state would say, had this host's clock been ahead by a day.
fn be_ahead(farm: &Farm) -> anyhow::Result<()> {
    let (mut store, records) = Store::open(&Layout::new(farm.state.clone())?)?;
    let late = |time: &mut Timestamp| *time += SignedDuration::from_hours(24);
    let mut changes = Vec::new();
    for (key, record) in records {
        let mut record = (*record).clone();
        let status = record.project.status.as_mut().context("no status")?;
        status.last_build_time.iter_mut().for_each(|time| late(&mut time.0));
        status.inflight.iter_mut().for_each(|entry| late(&mut entry.since.0));
        changes.push((key, Some(Arc::new(record))));
    }
    store.write(&changes)?;
    Ok(store.fold()?)
}

pub(crate) async fn a_clock_that_was_put_back_is_told_and_keeps_no_daemon(machine: Arc<Machine>) -> anyhow::Result<()> {
    let flags = ["--idle-seconds=1", "--adaptive-idle-max-seconds=0", "--max-build-seconds=4"];
    let mut farm = Farm::up(&machine.tools, Who::Root, &flags).await?;
    let routed = farm.route(REPO)?;
    farm.kill()?;
    be_ahead(&farm)?;
    farm.start().await?;
    ensure!(farm.said().contains("clock was put back"), "{}", farm.said());
    ensure!(farm.is_registered(&routed)?, "{routed:?} is lost");
    // Neither its use nor a build that nobody releases lies a day ahead any more.
    farm.route(REPO)?;
    farm.kill()?;
    be_ahead(&farm)?;
    farm.start().await?;
    farm.until("the daemon goes to zero", Duration::from_secs(30), |farm| Ok(farm.daemons().is_empty())).await
}

pub(crate) async fn flags_that_cannot_work_are_refused_at_once(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::new(&machine.tools, Who::Root, &[])?;
    farm.ports.daemon = 0;
    let output = farm.up_command().output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(2) && said.contains("--daemon-port 0"), "{output:?}");
    for (flags, code, words) in [
        (&["--auth-token=x", "--auth-open"][..], 2, "--auth-open lets everybody call"),
        (&["--cache-budget=0"], 2, "want more than 0 bytes"),
        (&["--buildkit=/bin/ls"], 2, "/bin/ls\" is no buildkitd: asked"),
    ] {
        let farm = Farm::new(&machine.tools, Who::Root, &[])?;
        let mut command = farm.up_command();
        let output = command.args(flags).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(code) && said.contains(words), "{flags:?}: {output:?}");
    }
    for text in ["hunter2\nhunter3\n", "hunter2 hunter3\n"] {
        let farm = Farm::new(&machine.tools, Who::Root, &[])?;
        std::fs::write(farm.state.join("token"), text)?;
        let output = farm.up_command().output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && said.contains("holds several lines, blanks"), "{output:?}");
        ensure!(said.contains("hint: ") && !said.contains("hunter"), "{said}");
    }
    Ok(())
}

pub(crate) async fn a_given_token_is_handed_to_clients_on_the_host(machine: Arc<Machine>) -> anyhow::Result<()> {
    let mut farm = Farm::up(&machine.tools, Who::Root, &["--auth-token=a-given-token"]).await?;
    let handed = farm.state.join("run/token");
    ensure!(std::fs::metadata(&handed)?.permissions().mode() & 0o777 == 0o600);
    let credentials = crate::host::printed(farm.run("credentials", &["--format=json"])?)?;
    ensure!(credentials.contains("\"a-given-token\""), "{credentials}");
    let context = farm.state.with_extension("context");
    std::fs::create_dir_all(&context)?;
    std::fs::write(context.join("Dockerfile"), "FROM scratch\nCOPY Dockerfile /\n")?;
    let context = context.display().to_string();
    crate::host::printed(farm.run("build", &["--repo", REPO, "--builder", "buildctl", &context])?)?;
    let (status, said) = farm.request_as("a-given-token", "GET", "/projects", "")?;
    ensure!(status == 200, "{status} {said}");
    farm.stop().await?;
    ensure!(!handed.exists());
    farm.set_flags(&[]);
    farm.start().await?;
    let credentials = crate::host::printed(farm.run("credentials", &["--format=json"])?)?;
    ensure!(!credentials.contains("a-given-token"), "{credentials}");
    ensure!(farm.request_as("a-given-token", "GET", "/projects", "")?.0 == 401);
    Ok(())
}
