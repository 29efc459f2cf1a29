//! However a build ends, it is released and nothing is left behind.

use std::time::Duration;

use super::farm::{Farm, Running, ends_with};
use crate::router::memory::Step;

/// A step that takes long, and says so. What it prints is not what it reads like.
const SLOW: &str = "RUN echo \"be\"gun && sleep 60 && echo x > /result";

/// Programs of the test's machine that still run.
fn left(farm: &Farm) -> Vec<String> {
    let machine = farm.machine.path().display().to_string();
    let mut left = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().map_while(Result::ok) {
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        if String::from_utf8_lossy(&environment).contains(&machine) {
            let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            left.push(String::from_utf8_lossy(&command).replace('\0', " "));
        }
    }
    left.retain(|command| !command.is_empty());
    left
}

async fn is_stopped(signal: &str, code: i32, builder: &str) {
    let farm = Farm::start().await;
    farm.dockerfile(SLOW);
    // A folder of its own for each, and no cache of another test's step.
    let mut build = Running::start(farm.build(&["--builder", builder, "--no-cache"]));
    build.until("begun").await;
    assert_eq!(farm.inflight(), 1);
    build.signal(signal);
    let (ended, printed) = build.ends().await;
    assert_eq!(ended, Some(code), "{printed}");
    farm.is_clean();
    assert_eq!(left(&farm), [""; 0], "the builder runs on");
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_the_builder_and_releases_the_build() {
    is_stopped("INT", 130, "buildx").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_the_builder_and_releases_the_build() {
    is_stopped("TERM", 143, "buildx").await;
    is_stopped("TERM", 143, "buildctl").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_stopped_while_it_waits_leaves_no_build() {
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let farm = Farm::start().await;
        farm.memory.hold(Step::Wait);
        let build = Running::start(farm.build(&[]));
        farm.memory.until(|seen| seen.calls.get(&Step::Wait) == Some(&1)).await;
        assert_eq!(farm.inflight(), 1);
        build.signal(signal);
        let (ended, printed) = build.ends().await;
        assert_eq!(ended, Some(code), "{printed}");
        farm.memory.until(|seen| seen.projects.values().all(|daemon| daemon.inflight.is_empty())).await;
        farm.is_clean();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_certificates_in_variables_nothing_is_left_either() {
    let farm = Farm::start().await;
    farm.dockerfile(SLOW);
    let mut command = farm.build(&["--no-cache"]);
    farm.certificates_in_variables(&mut command);
    let mut build = Running::start(command);
    build.until("begun").await;
    build.signal("INT");
    assert_eq!(build.ends().await.0, Some(130));
    farm.is_clean();
    assert!(farm.builders().is_empty(), "{:?}", farm.builders());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_fails_is_a_warning() {
    use bko_install::provisioner::ProvisionError;
    let farm = Farm::start().await;
    farm.memory.fail(Step::End, || ProvisionError::Refused("disk full".into()));
    let printed = ends_with(0, farm.build(&[])).await;
    assert!(printed.contains("warning: the build is not released (release build: disk full)"), "{printed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_tried_again() {
    use bko_install::provisioner::ProvisionError;
    let farm = Farm::start().await;
    let away = || ProvisionError::Unavailable { message: "away".into(), retry_after: Duration::from_secs(1) };
    farm.memory.fail(Step::End, away);
    let build = Running::start(farm.build(&[]));
    farm.memory.until(|seen| seen.calls.get(&Step::End) == Some(&1)).await;
    farm.memory.mend(Step::End);
    let (ended, printed) = build.ends().await;
    assert_eq!(ended, Some(0), "{printed}");
    farm.is_clean();
}
