//! What cannot be built says what, where and how to mend it.

use std::time::Duration;

use bko_install::provisioner::ProvisionError;

use super::daemon::{Authority, daemon};
use super::farm::{Farm, Running, ends_with};
use crate::router::memory::Step;

pub(super) fn has(printed: &str, parts: &[&str]) {
    for part in parts {
        assert!(printed.contains(part), "no \"{part}\" in:\n{printed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_busy_is_asked_again_when_it_says() {
    let farm = Farm::start().await;
    let away = || ProvisionError::Unavailable { message: "etcd is away".into(), retry_after: Duration::from_secs(1) };
    farm.memory.fail(Step::Ensure, away);
    let mut build = Running::start(farm.build(&[]));
    build.until("waiting for a daemon for github.com/acme/shop amd64: ensure project: etcd is away").await;
    farm.memory.mend(Step::Ensure);
    let (code, printed) = build.ends().await;
    assert_eq!(code, Some(0), "{printed}");
    assert_eq!(farm.memory.seen().calls[&Step::Ensure], 2);
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_does_not_wake_is_told_with_its_reason() {
    let farm = Farm::asleep().await;
    farm.memory.fail(Step::Wait, || ProvisionError::Failed { reason: "ImagePullBackOff".into() });
    let printed = ends_with(4, farm.build(&["--route-wait", "3"])).await;
    has(
        &printed,
        &["no daemon for github.com/acme/shop amd64 after ", "daemon failed: ImagePullBackOff", "--route-wait"],
    );
    farm.memory.until(|seen| seen.projects.values().all(|daemon| daemon.inflight.is_empty())).await;
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_told_and_never_shown() {
    let farm = Farm::start().await;
    for (token, hint) in [("hunter2", "rotated"), ("", "fork"), ("a.hunter2.c", "takes no identities")] {
        let mut command = farm.build(&[]);
        command.env("BUILDKIT_OPERATOR_TOKEN", token);
        let printed = ends_with(1, command).await;
        has(&printed, &["error: no daemon", "caused by: the routing API answers 401: Unauthorized", hint]);
        assert!(!printed.contains("hunter2"), "{printed}");
    }
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_address_is_told() {
    let farm = Farm::start().await;
    for (url, code, parts) in [
        ("nonsense", 2, &["no address of a routing API: want http://HOST:PORT"][..]),
        ("", 2, &["no address of the routing API", "BUILDKIT_OPERATOR_BUILDD_URL"]),
        ("http://127.0.0.1:1", 4, &["cannot connect to 127.0.0.1:1", "BUILDKIT_OPERATOR_BUILDD_URL"]),
        ("http://nowhere.invalid", 4, &["cannot resolve \"nowhere.invalid\"", "BUILDKIT_OPERATOR_BUILDD_URL"]),
        (&format!("http://{}/else/where", farm.server.address), 1, &["answers 404", "is that the address"]),
    ] {
        let mut command = farm.build(&["--route-wait", "2s"]);
        command.env("BUILDKIT_OPERATOR_BUILDD_URL", url);
        has(&ends_with(code, command).await, parts);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_builder_all_three_are_named_and_nobody_is_woken() {
    let farm = Farm::start().await;
    farm.remove_tool("docker");
    farm.remove_tool("buildctl");
    let printed = ends_with(1, farm.build(&[])).await;
    has(
        &printed,
        &[
            "`docker buildx` is not on the PATH; `buildx` is not on the PATH; `buildctl` is",
            "install Docker with buildx",
        ],
    );
    assert!(farm.memory.seen().calls.is_empty());
    // Docker alone is not enough.
    std::fs::remove_file(farm.path("docker/cli-plugins/docker-buildx")).unwrap();
    farm.docker();
    let printed = ends_with(1, farm.build(&["--builder", "buildx"])).await;
    has(&printed, &["`docker buildx` fails (exit status: ", "`buildx` is not on the PATH"]);
    assert!(!printed.contains("buildctl` is"), "{printed}");
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_another_farm_are_told_apart() {
    let farm = Farm::start().await;
    let (ours, other) = (&daemon().authority, Authority::new());
    ours.client_folder(&other, &farm.path("distrusts"));
    other.client_folder(ours, &farm.path("distrusted"));
    for (folder, parts) in [
        ("distrusts", ["is not trusted", "the CA is not the daemon's"]),
        ("distrusted", ["refuses the client certificate", "it has expired, or comes from another farm"]),
    ] {
        let mut command = farm.build(&[]);
        command.env("BUILDKIT_OPERATOR_CLIENT_CERTS", farm.path(folder));
        let printed = ends_with(1, command).await;
        has(&printed, &parts);
        has(&printed, &["bko-install credentials", "buildkitd-p41bd34a2227aca39.builds.example.test"]);
        farm.is_clean();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_that_are_none_are_told_before_anybody_is_called() {
    let farm = Farm::start().await;
    std::fs::create_dir(farm.path("empty")).unwrap();
    let mut empty = farm.build(&[]);
    empty.env("BUILDKIT_OPERATOR_CLIENT_CERTS", farm.path("empty"));
    has(&ends_with(2, empty).await, &["holds no client certificate: want ca.pem"]);
    let mut nothing = farm.build(&[]);
    nothing.env_remove("BUILDKIT_OPERATOR_CLIENT_CERTS");
    has(&ends_with(2, nothing).await, &["no client certificate", "bko-install credentials"]);
    let mut half = farm.build(&[]);
    farm.certificates_in_variables(&mut half);
    half.env_remove("BUILDKIT_OPERATOR_KEY");
    has(&ends_with(2, half).await, &["BUILDKIT_OPERATOR_KEY is not set"]);
    let mut garbage = farm.build(&[]);
    farm.certificates_in_variables(&mut garbage);
    garbage.env("BUILDKIT_OPERATOR_KEY", "hunter2");
    let printed = ends_with(2, garbage).await;
    has(&printed, &["the key is neither PEM"]);
    assert!(!printed.contains("hunter2"));
    assert!(farm.memory.seen().calls.is_empty());
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_dns_does_not_know_is_told_with_both_ways_on() {
    let farm = Farm::start().await;
    let mut command = farm.build(&[]);
    command.env_remove("BUILDKIT_OPERATOR_GATEWAY_IP");
    let printed = ends_with(1, command).await;
    has(
        &printed,
        &[
            "cannot resolve \"buildkitd-p41bd34a2227aca39.builds.example.test\"",
            "*.builds.example.test",
            "--gateway-ip",
        ],
    );
    farm.is_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn arguments_that_make_no_sense_are_told() {
    let farm = Farm::start().await;
    for (args, part) in [
        (&["--push"][..], "--push without --tag"),
        (&["--arch", "riscv64"], "--arch amd64 or --arch arm64"),
        (&["--secret", "hunter2"], "--secret 1 is not NAME=VALUE"),
        (&["--context", ".", "."], "they are the same here"),
        (&["--builder", "buildctl", "--load", "--tag", "a"], "cannot load an image into Docker"),
        (&["--route-wait", "soon"], "invalid value 'soon'"),
        (&["--gateway-ip", "here"], "want an IPv4 or IPv6 address"),
    ] {
        let printed = ends_with(2, farm.build(args)).await;
        has(&printed, &[part]);
        assert!(!printed.contains("hunter2"), "{printed}");
    }
    farm.is_clean();
}
