//! `bko-install export` and `profile`, as people run them.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and looks at files"
)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};

use bko_install::manifest::{self, Bundle};
use bko_install::profile::{self, Request};
use serde::Deserialize;
use serde_json::Value;

const IMAGE: &str = "registry.example.com/bko-install:1.2.3";

const SECRETS: &str = "left out, because they hold secrets: buildkit-operator/buildkit-operator-token, \
                       buildkit-operator/buildkit-operator-internal, \
                       buildkit-operator/buildkit-operator-api-certs, \
                       buildkit-operator/buildkit-operator-ca, buildkit-builds/buildkit-client-certs, \
                       buildkit-builds/buildkit-daemon-certs\n";

fn bko(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bko-install")).args(args).output().unwrap()
}

fn export(dir: &Path, more: &[&str]) -> Output {
    let args = [&["export", "--format", "plain", "--image", IMAGE, "--dir", dir.to_str().unwrap()], more].concat();
    bko(&args)
}

fn files(dir: &Path) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(&path).unwrap()))
        .collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn an_export_holds_the_objects_of_an_installation_in_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("new/folder");
    let output = export(&target, &["--profile", "dev"]);
    assert!(output.status.success(), "{output:?}");
    assert!(output.stdout.is_empty());
    let files = files(&target);
    let names: Vec<_> = files.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "00-rc0-namespaces.yaml",
            "01-rc0-crd.yaml",
            "02-rc1-rbac.yaml",
            "03-rc1-network-policies.yaml",
            "04-rc3-server.yaml",
            "05-rc4-gateway.yaml",
            "README.md",
        ]
    );
    let exported: Vec<Value> = files
        .iter()
        .filter(|(name, _)| name.ends_with(".yaml"))
        .flat_map(|(_, text)| {
            serde_yaml::Deserializer::from_str(text).map(|document| Value::deserialize(document).unwrap())
        })
        .collect();
    let bundle = Bundle::embedded().unwrap();
    let request = Request { image: Some(IMAGE.into()), ..Request::named("dev", "unused:1") };
    let (profile, values) = profile::resolve(bundle, &request).unwrap();
    let rendered = manifest::render(bundle, &profile, &values).unwrap();
    let bodies: Vec<Value> = rendered.objects.into_iter().map(|object| object.body).collect();
    assert_eq!(exported, bodies);
}

#[test]
fn secrets_are_left_out_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let output = export(dir.path(), &[]);
    let stderr = text(&output.stderr);
    assert!(stderr.contains(SECRETS), "{stderr}");
    let files = files(dir.path());
    assert!(
        files.iter().filter(|(name, _)| name.ends_with(".yaml")).all(|(_, text)| !text.contains("kind: \"Secret\""))
    );
    assert!(files["README.md"].contains("create secret generic buildkit-operator-token --from-literal=token="));
    assert!(files["README.md"].contains("- `buildkit-builds/buildkit-daemon-certs`"));
    assert!(export(dir.path(), &["--quiet"]).stderr.is_empty());
}

#[test]
fn a_second_export_gives_the_same_bytes_and_drops_what_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    assert!(export(dir.path(), &["--profile", "dev"]).status.success());
    let first = files(dir.path());
    assert!(export(dir.path(), &["--profile", "dev"]).status.success());
    assert_eq!(files(dir.path()), first);
    assert!(export(dir.path(), &["--profile", "dev", "--set", "networkPolicy.enabled=false"]).status.success());
    let names: Vec<_> = files(dir.path()).into_keys().collect();
    assert_eq!(names.len(), first.len() - 1);
    assert!(names.iter().all(|name| !name.contains("network-policies")), "{names:?}");
}

#[test]
fn a_folder_with_other_files_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("precious.yaml"), "a: 1\n").unwrap();
    let output = export(dir.path(), &[]);
    assert_eq!(output.status.code(), Some(5));
    let shown = dir.path().display();
    assert_eq!(
        text(&output.stderr),
        format!(
            "error: \"{shown}\" holds \"{shown}/precious.yaml\", which no export wrote\n\n\
             hint: choose an empty folder, a new one, or that of an earlier export\n"
        )
    );
    assert_eq!(files(dir.path()).len(), 1);
}

#[test]
fn a_wrong_value_is_a_usage_error_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("out");
    let output = export(&target, &["--set", "server.replica=1", "--set", "server.replicas=0"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        text(&output.stderr),
        "error: 2 faults\n  --set server.replica: unknown value \"server.replica\"; did you mean \"server.replicas\"?\n  \
         --set server.replicas: value \"server.replicas\": want an integer from 1 to 16, found 0\n"
    );
    assert!(!target.exists());
}

#[test]
fn a_values_file_that_is_missing_is_named() {
    let output = bko(&["profile", "show", "--image", IMAGE, "-f", "/nowhere/values.yaml"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        text(&output.stderr),
        "error: cannot read \"/nowhere/values.yaml\"\ncaused by: No such file or directory (os error 2)\n"
    );
}

#[test]
fn show_prints_every_value_with_its_source() {
    let dir = tempfile::tempdir().unwrap();
    let profile = dir.path().join("mine.yaml");
    std::fs::write(&profile, "description: Mine\nextends: dev\nvalues:\n  server:\n    replicas: 3\n").unwrap();
    let path = profile.to_str().unwrap();
    let output = bko(&["profile", "show", path, "--image", IMAGE, "--set", "cache.sizeGi=7"]);
    assert!(output.status.success(), "{output:?}");
    let shown = text(&output.stdout);
    for line in [
        format!("server.replicas: 3  # {path}:5"),
        "cache.sizeGi: 7  # --set".to_owned(),
        "gateway.replicas: 1  # profiles/dev.yaml:13".to_owned(),
        "auth.open: false  # default".to_owned(),
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line} in {shown}");
    }
    // What is shown is itself a values file.
    let values = dir.path().join("values.yaml");
    std::fs::write(&values, shown.lines().filter(|line| line.contains("  # ")).collect::<Vec<_>>().join("\n")).unwrap();
    let again = bko(&["profile", "show", "--image", IMAGE, "--output", "json", "-f", values.to_str().unwrap()]);
    assert!(again.status.success(), "{}", text(&again.stderr));
    let json: Value = serde_json::from_slice(&again.stdout).unwrap();
    let value =
        |name: &str| json["values"].as_array().unwrap().iter().find(|value| value["name"] == name).unwrap().clone();
    assert_eq!(json["values"].as_array().unwrap().len(), Bundle::embedded().unwrap().values.len());
    assert_eq!(value("server.replicas")["value"], 3);
    assert_eq!(value("server.replicas")["default"], 2);
    assert_eq!(value("server.replicas")["component"], "server");
}

#[test]
fn list_prints_names_and_descriptions() {
    let output = bko(&["profile", "list", "--output", "json"]);
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list[1]["name"], "dev");
    assert!(text(&bko(&["profile", "list"]).stdout).starts_with("default  Any cluster"));
}
