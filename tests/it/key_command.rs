//! `bko-install key`, through the real executable.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use std::process::{Command, Output};

use serde_json::{Value, json};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    command.arg("key").args(args).env_clear();
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn every_recorded_key_comes_out_of_the_command() {
    let vectors: Vec<Value> = serde_json::from_str(include_str!("../vectors/key-vectors.json")).unwrap();
    assert!(vectors.len() >= 30);
    for vector in vectors {
        let text = |name: &str| vector[name].as_str().unwrap_or_default();
        let args = ["--repo", text("repo"), "--name", text("name"), "--target", text("target"), "--arch", text("arch")];
        let got = json_of(&command(&args).args(["--output", "json"]).output().unwrap());
        let key = text("key");
        let want = json!({
            "key": key,
            "daemon": format!("buildkitd-{key}"),
            "normalized": text("normalized"),
            "inCluster": format!("tcp://buildkitd-{key}.buildkit-builds.svc:1234"),
        });
        assert_eq!(got, want, "{vector}");
    }
}

#[test]
fn endpoints_follow_namespace_ports_and_gateway() {
    let got = json_of(&run(&[
        "--repo=acme/shop",
        "--arch=amd64",
        "--untrusted",
        "--namespace=ns",
        "--port=99",
        "--gateway-host=builds.example.org",
        "--gateway-port=443",
        "--output=json",
    ]));
    let daemon = "buildkitd-forkp280ada3d8fae4e39";
    assert_eq!(got["daemon"], daemon);
    assert_eq!(got["inCluster"], format!("tcp://{daemon}.ns.svc:99"));
    assert_eq!(got["offCluster"], format!("tcp://{daemon}.builds.example.org:443"));
}

#[test]
fn text_is_a_line_a_value() {
    let output = run(&["--repo", "acme/shop", "--arch", "amd64", "--gateway-host", "b.example"]);
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "key         p280ada3d8fae4e39\n\
         daemon      buildkitd-p280ada3d8fae4e39\n\
         normalized  acme/shop\n\
         inCluster   tcp://buildkitd-p280ada3d8fae4e39.buildkit-builds.svc:1234\n\
         offCluster  tcp://buildkitd-p280ada3d8fae4e39.b.example:1234\n"
    );
}

#[test]
fn the_environment_names_what_no_flag_does() {
    let environment = |untrusted: &str| {
        let mut command = command(&["--output", "json"]);
        command
            .env("BUILDKIT_OPERATOR_REPO", "github.com/acme/shop")
            .env("BUILDKIT_OPERATOR_NAME", "web/front")
            .env("BUILDKIT_OPERATOR_TARGET", "prod")
            .env("BUILDKIT_OPERATOR_ARCH", "arm64")
            .env("BUILDKIT_OPERATOR_UNTRUSTED", untrusted);
        command
    };
    for (untrusted, want) in [
        ("true", "forkp66511f68215fcf56"),
        ("1", "forkp66511f68215fcf56"),
        ("false", "p66511f68215fcf56"),
        ("0", "p66511f68215fcf56"),
        ("", "p66511f68215fcf56"),
    ] {
        assert_eq!(json_of(&environment(untrusted).output().unwrap())["key"], want, "{untrusted:?}");
    }
    let flag_wins = environment("").args(["--name=", "--target=", "--arch=amd64"]).output().unwrap();
    assert_eq!(json_of(&flag_wins)["key"], "p41bd34a2227aca39");
}

#[test]
fn this_machine_s_architecture_is_the_default() {
    let native = bko_install::image::native_arch().unwrap().to_string();
    let args = ["--repo", "acme/shop", "--output", "json"];
    assert_eq!(json_of(&run(&args)), json_of(&command(&args).args(["--arch", &native]).output().unwrap()));
}

#[test]
fn what_has_no_key_is_a_usage_error_with_reason_and_hint() {
    let long = "a".repeat(600);
    for (args, want) in [
        (["--repo", &long], "repo is too long"),
        (["--repo", "file:///srv/x"], "scheme \"file\""),
        (["--repo", " "], "repo is required"),
        (["--repo", "https:///x"], "without a host"),
        (["--repo", "a\u{7}b"], "control character (U+0007)"),
        (["--repo=x", "--arch=riscv64"], "unsupported arch \"riscv64\""),
        (["--repo=x", "--name=\t\u{1}"], "name contains a control character"),
    ] {
        let output = run(&args);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
        assert!(text.starts_with("error: ") && text.contains(want) && text.contains("\n\nhint: "), "{text}");
        assert!(output.stdout.is_empty());
    }
    for args in [["--repo=x", "--port=0"], ["--repo=x", "--gateway-port=65536"], ["--name=x", "--arch=amd64"]] {
        assert_eq!(run(&args).status.code(), Some(2), "{args:?}");
    }
}
