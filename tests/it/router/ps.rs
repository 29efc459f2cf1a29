//! `bko-install ps` against a server on a real socket.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use super::memory::Memory;
use super::{Server, tokens};
use crate::answering::answering;
use bko_install::key::Project;
use bko_install::provisioner::{BuildId, Provisioner};
use bko_install::router::Timeouts;

fn ps(server: &Server, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    command.arg("ps").args(args).env_clear().env("BUILDKIT_OPERATOR_BUILDD_URL", format!("http://{}", server.address));
    command
        .env("BUILDKIT_OPERATOR_TOKEN", "s3cret\n")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command.kill_on_drop(true);
    command
}

async fn farm() -> (Server, Arc<Memory>) {
    let memory = Arc::new(Memory::ready());
    let server = Server::start(tokens(), &memory, Timeouts::new(Duration::from_secs(5))).await;
    (server, memory)
}

async fn add(memory: &Memory, repo: &str) -> bko_install::key::ProjectKey {
    let key = memory.ensure(&Project::new(repo, "", "", "amd64", false).unwrap()).await.unwrap();
    memory.make_ready(key.as_str());
    key
}

async fn run(server: &Server, args: &[&str]) -> (Option<i32>, String, String) {
    let output = timeout(Duration::from_secs(20), ps(server, args).output()).await.unwrap().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn all_pages_are_shown_as_a_table_and_as_json() {
    let (server, memory) = farm().await;
    assert_eq!(run(&server, &[]).await.1, "no daemon is up; --all shows those at zero, too\n");
    assert_eq!(run(&server, &["--all"]).await.1, "there is no project yet\n");
    for i in 0..501 {
        add(&memory, &format!("acme/p{i}")).await;
    }
    let (code, table, _) = run(&server, &[]).await;
    assert_eq!((code, table.lines().count()), (Some(0), 502));
    assert!(table.starts_with("PROJECT") && table.lines().skip(1).all(|line| line.contains("warm")), "{table}");
    assert!(!table.contains('\x1b'), "no colour off a terminal");
    let (_, json, _) = run(&server, &["--format", "json"]).await;
    let projects: Vec<Value> = serde_json::from_str(&json).unwrap();
    let keys: Vec<_> = projects.iter().map(|project| project["key"].as_str().unwrap().to_owned()).collect();
    assert_eq!(keys, memory.seen().projects.into_keys().collect::<Vec<_>>());
    server.stop().await;
}

#[tokio::test]
async fn a_list_that_is_not_complete_is_no_list() {
    let (server, memory) = farm().await;
    memory.begin_to_list();
    let (code, _, said) = run(&server, &[]).await;
    assert_eq!(code, Some(1));
    assert!(said.contains("answers 503: the projects are not known yet"), "{said}");
    server.stop().await;
}

#[tokio::test]
async fn who_cannot_be_asked_is_an_error_that_says_what_to_do() {
    let (server, _) = farm().await;
    let output = ps(&server, &[]).env("BUILDKIT_OPERATOR_TOKEN", "s3cret-but-wrong").output().await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("answers 401: Unauthorized") && said.contains("hint: the token is wrong"), "{said}");
    assert!(!said.contains("s3cret"), "{said}");
    for (url, code, part) in [
        ("http://u:s3cret@h", 2, "want http://HOST:PORT"),
        ("http://127.0.0.1:1", 1, "error: cannot ask http://127.0.0.1:1\ncaused by: no answer from the routing API\n"),
    ] {
        let output = ps(&server, &["--buildd-url", url]).output().await.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(part) && !said.contains("s3cret"), "{said}");
    }
    server.stop().await;
}

#[tokio::test]
async fn no_answer_commands_the_terminal() {
    let project = r#"{"projects":[{"key":"p1\u001b[2J","repo":"a\u009b31m","name":"\u202eb","target":"t\nu","arch":"amd64",
        "fork":false,"endpoint":"e","phase":"Failed","since":null,"reason":"r\u001b]0;x\u0007","ready":false,
        "inFlight":{"count":1,"since":null},"activeBuilds":[],"lastBuild":null,"lastUsed":null,"keptBy":null,
        "idleAt":null,"cache":null}]}"#;
    let page: &'static str =
        Box::leak(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{project}", project.len()).into_boxed_str());
    let newer: &'static str = Box::leak(page.replace("\"Failed\"", "\"Frozen\"").into_boxed_str());
    let more = project.replace("}]}", r#"}],"continue":"p1"}"#);
    let endless: &'static str =
        Box::leak(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{more}", more.len()).into_boxed_str());
    for (answer, code, part) in [
        (page, 0, "failed"),
        // A word that this version does not know.
        (newer, 0, "p1"),
        (endless, 1, "repeats its list of projects"),
        ("HTTP/1.1 500 No\r\ncontent-length: 7\r\n\r\n\x1b[31mno", 1, "answers 500: \u{fffd}[31mno"),
        (
            "HTTP/1.1 302 No\r\nlocation: http://u:s3cret@h\r\ncontent-length: 0\r\n\r\n",
            1,
            "redirects (302) to \"http://…@h\"",
        ),
        ("HTTP/1.1 502 No\r\ncontent-length: 6\r\n\r\n<html>", 1, "answers 502: Bad Gateway, with a page in HTML"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", 1, "this is no routing API"),
        (
            "HTTP/1.1 401 No\r\ncontent-length: 0\r\nwww-authenticate: Bearer error_description=\"the token has expired\"\r\n\r\n",
            1,
            "answers 401: Unauthorized: the token has expired\n\nhint: an identity lives for minutes",
        ),
        ("\x15\x03\x01\x00\x02\x02\x16", 1, "does not speak HTTP"),
    ] {
        let url = format!("http://{}", answering(move |_: &str| answer.to_owned()).await);
        for args in [&[][..], &["--format=json"]] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_bko-install"));
            command.arg("ps").args(args).env_clear().env("BUILDKIT_OPERATOR_BUILDD_URL", &url);
            let output = timeout(Duration::from_secs(20), command.output()).await.unwrap().unwrap();
            let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
            assert_eq!(output.status.code(), Some(code), "{said}");
            assert!(said.to_lowercase().contains(&part.to_lowercase()), "no {part:?} in {said}");
            let odd = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
            assert!(!said.contains(odd) && !said.contains("s3cret"), "{said:?}");
        }
    }
    let mut watched = Command::new(env!("CARGO_BIN_EXE_bko-install"));
    watched.args(["ps", "--watch"]).env_clear().stdout(Stdio::piped()).kill_on_drop(true);
    watched.env("BUILDKIT_OPERATOR_BUILDD_URL", format!("http://{}", answering(move |_: &str| page.to_owned()).await));
    let mut child = watched.spawn().unwrap();
    let line = next(&mut BufReader::new(child.stdout.take().unwrap()).lines()).await;
    assert!(line.contains("failed (r\u{fffd}]0;x\u{fffd})") && !line.contains(char::is_control), "{line:?}");
}

type Watched = (Child, Lines<BufReader<ChildStdout>>);

fn watch(server: &Server, args: &[&str]) -> Watched {
    let mut child = ps(server, args).stderr(Stdio::inherit()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

async fn next(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    timeout(Duration::from_secs(20), lines.next_line()).await.unwrap().unwrap().unwrap()
}

#[tokio::test]
async fn off_a_terminal_a_watched_farm_tells_what_changes() {
    let (server, memory) = farm().await;
    add(&memory, "acme/first").await;
    let (mut child, mut lines) = watch(&server, &["--watch"]);
    let line = next(&mut lines).await;
    assert!(line.ends_with("Z  acme/first  warm"), "{line}");
    add(&memory, "acme/second").await;
    let line = next(&mut lines).await;
    assert!(line.ends_with("Z  acme/second  warm"), "{line}");
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let status = timeout(Duration::from_secs(20), child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(0), "Ctrl-C is how it ends");

    let (mut child, mut lines) = watch(&server, &["--watch", "--format=json"]);
    for _ in 0..2 {
        let project: Value = serde_json::from_str(&next(&mut lines).await).unwrap();
        assert_eq!(project["inFlight"]["count"], 0);
    }
    let key = add(&memory, "acme/first").await;
    memory.begin(&key, &BuildId::random().unwrap()).await.unwrap();
    let project: Value = serde_json::from_str(&next(&mut lines).await).unwrap();
    assert_eq!((&project["repo"], &project["inFlight"]["count"]), (&"acme/first".into(), &1.into()));
    // A reader that goes away ends it with the next change.
    drop(lines);
    add(&memory, "acme/third").await;
    let status = timeout(Duration::from_secs(20), child.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(0));
    server.stop().await;
}
