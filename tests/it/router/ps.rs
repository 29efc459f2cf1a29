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
async fn who_cannot_be_asked_is_an_error_that_says_what_to_do() {
    let (server, _) = farm().await;
    let output = ps(&server, &[]).env("BUILDKIT_OPERATOR_TOKEN", "s3cret-but-wrong").output().await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("401 Unauthorized") && said.contains("hint: set BUILDKIT_OPERATOR_TOKEN"), "{said}");
    assert!(!said.contains("s3cret"), "{said}");
    let output = ps(&server, &["--buildd-url", "http://u:s3cret@h"]).output().await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("want http://HOST:PORT") && !said.contains("s3cret"), "{said}");
    server.stop().await;
    let output = ps(&Server { address: "127.0.0.1:1".parse().unwrap(), ..farm().await.0 }, &[]).output().await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("cannot ask http://127.0.0.1:1"), "{said}");
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
