//! What the Kubernetes side says when `credentials`, `token` and `ps` fail,
//! against a server on loopback that refuses.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "this is a test, also outside of #[test] functions"
)]

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use serde_json::json;
use tokio::process::Command;

use super::answering::answering;

/// Knows its version, and refuses everything else so.
async fn refusing(code: u16, message: &'static str) -> String {
    serving(move |path| if path == "/version" { version() } else { status(code, message) }).await
}

fn version() -> (u16, serde_json::Value) {
    let version = json!({"major": "1", "minor": "34", "gitVersion": "v1.34.0", "gitCommit": "", "gitTreeState": "",
        "buildDate": "", "goVersion": "", "compiler": "", "platform": ""});
    (200, version)
}

fn status(code: u16, message: &str) -> (u16, serde_json::Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code,
        "reason": "Forbidden", "message": message});
    (code, status)
}

async fn serving(answer: impl Fn(&str) -> (u16, serde_json::Value) + Send + 'static) -> String {
    let answer = move |path: &str| {
        let (code, body) = answer(path);
        let body = body.to_string();
        let head = "content-type: application/json\r\nconnection: close";
        format!("HTTP/1.1 {code} X\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    };
    format!("http://{}", answering(answer).await)
}

fn kubeconfig(folder: &Path, server: &str, user: &serde_json::Value) -> String {
    let path = folder.join("kubeconfig");
    let config = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]});
    std::fs::write(&path, config.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

async fn run(args: &[&str], kubeconfig: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    command.args(args).args(["--kubeconfig", kubeconfig]).env_clear().env("PATH", "/usr/bin:/bin").kill_on_drop(true);
    let Output { status, stdout, stderr } =
        tokio::time::timeout(Duration::from_secs(30), command.output()).await.unwrap().unwrap();
    assert!(stdout.is_empty(), "{}", String::from_utf8_lossy(&stdout));
    (status.code(), String::from_utf8(stderr).unwrap())
}

const COMMANDS: [&[&str]; 3] = [&["credentials"], &["token", "rotate"], &["ps"]];

#[tokio::test]
async fn a_plugin_that_fails_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for (command, args, part) in [
        ("no-such-plugin", json!([]), "No such file"),
        (
            "sh",
            json!(["-c", "echo hunter2; echo >&2 'log \x1b[31min first'; exit 3"]),
            "exit status: 3: log \u{fffd}[31min first",
        ),
        ("sh", json!(["-c", "echo hunter2"]), "its output is no ExecCredential"),
    ] {
        let exec = json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": command, "args": args,
            "interactiveMode": "Never"}});
        let kubeconfig = kubeconfig(folder.path(), "http://127.0.0.1:1", &exec);
        for args in COMMANDS {
            let (code, said) = run(args, &kubeconfig).await;
            let what = format!("error: the credential plugin \"{command}\" gives none for http://127.0.0.1:1: ");
            assert!(code == Some(1) && said.starts_with(&what) && said.contains(part), "{args:?}: {said}");
            assert!(said.contains("hint: ") && !said.contains("hunter2") && !said.contains('\x1b'), "{said}");
            assert_eq!(said.matches(part).count(), 1, "{said}");
        }
    }
}

#[tokio::test]
async fn a_refusal_is_said_once_without_commands_for_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let server = refusing(500, "etcd \x1b[2Jis away").await;
    let kubeconfig = kubeconfig(folder.path(), &server, &json!({}));
    for args in COMMANDS {
        let (code, said) = run(args, &kubeconfig).await;
        assert_eq!(code, Some(1), "{said}");
        assert!(said.starts_with("error: cannot ") && said.contains("answers 500: etcd \u{fffd}[2Jis away"), "{said}");
        assert_eq!(said.matches("is away").count(), 1, "{args:?}: {said}");
    }
}

#[tokio::test]
async fn who_may_not_is_told_how_to_check() {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = kubeconfig(folder.path(), &refusing(403, "no").await, &json!({}));
    for args in &COMMANDS[..2] {
        let (code, said) = run(args, &kubeconfig).await;
        assert_eq!(code, Some(1), "{said}");
        let secret = "buildkit-operator/buildkit-operator-token";
        assert!(said.contains(&format!("not allowed to read Secret \"{secret}\"")), "{said}");
        assert!(
            said.contains("hint: check with: kubectl --namespace buildkit-operator auth can-i get secret/"),
            "{said}"
        );
    }
}

#[tokio::test]
async fn who_may_not_even_ask_for_the_version_is_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = kubeconfig(folder.path(), &serving(|_| status(403, "anonymous is nobody")).await, &json!({}));
    for args in COMMANDS {
        let (code, said) = run(args, &kubeconfig).await;
        assert!(code == Some(1) && said.contains("forbids asking for its version: anonymous is nobody"), "{said}");
        assert!(said.contains("auth can-i get /version"), "{said}");
    }
}

/// Secrets as they are installed, in a cluster whose Deployments may not be read.
async fn handing_over(cert: String, key: String) -> String {
    serving(move |path| {
        let packed = |text: &str| base64::Engine::encode(&base64::engine::general_purpose::STANDARD, text);
        let data = match path.rsplit('/').next().unwrap() {
            "version" => return version(),
            "buildkit-operator-token" => json!({"token": packed("hunter2")}),
            "buildkit-client-certs" => {
                json!({"ca.pem": packed(&cert), "cert.pem": packed(&cert), "key.pem": packed(&key)})
            }
            _ => return status(403, "no"),
        };
        (200, json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": data}))
    })
    .await
}

#[tokio::test]
async fn what_is_handed_over_fits_together_and_what_is_not_known_is_told_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let pair = || rcgen::generate_simple_self_signed(["client".to_owned()]).unwrap();
    let (ours, other) = (pair(), pair());
    let server = handing_over(ours.cert.pem(), other.signing_key.serialize_pem()).await;
    let (code, said) = run(&["credentials"], &kubeconfig(folder.path(), &server, &json!({}))).await;
    assert!(code == Some(1) && said.contains("does not belong to its certificate"), "{said}");
    assert!(said.contains("hint: delete Secret \"buildkit-builds/buildkit-client-certs\""), "{said}");

    let server = handing_over(ours.cert.pem(), ours.signing_key.serialize_pem()).await;
    for (args, warned) in [(&["credentials"][..], true), (&["credentials", "--url=https://api.example.org"], false)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bko-install"));
        command.args(args).args(["--kubeconfig", &kubeconfig(folder.path(), &server, &json!({}))]);
        let output = command.env_clear().env("PATH", "/usr/bin:/bin").output().await.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && !said.contains("hunter2"), "{said}");
        let reason = "not allowed to read Deployment \"buildkit-operator/buildkit-operator-buildd\"";
        assert!(said.contains(reason) == warned && said.contains("--url") == warned, "{said}");
    }
}

#[tokio::test]
async fn an_address_that_is_none_is_mended_where_it_was_given() {
    let (code, said) = run(&["credentials", "--url", "foo"], "/no/such/file").await;
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("hint: --url is the address") && !said.contains("`bko-install credentials`"), "{said}");
}

#[tokio::test]
async fn what_is_no_name_is_asked_of_nobody() {
    for args in [
        &["credentials", "--client-secret", "../a"][..],
        &["credentials", "--token-secret", ""],
        &["token", "rotate", "--token-secret", "A b"],
        &["credentials", "--url", "https://user:hunter2@h"],
    ] {
        let (code, said) = run(args, "/no/such/file").await;
        assert_eq!(code, Some(2), "{said}");
        assert!(!said.contains("hunter2") && !said.contains("kubeconfig"), "{said}");
    }
}
