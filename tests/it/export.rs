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

const SECRETS: &str = "made in the cluster, because they hold secrets: buildkit-operator/buildkit-operator-token, \
                       buildkit-operator/buildkit-operator-internal, \
                       buildkit-operator/buildkit-operator-api-certs, \
                       buildkit-operator/buildkit-operator-ca, buildkit-builds/buildkit-client-certs, \
                       buildkit-builds/buildkit-daemon-certs\n";

/// Every form, with what it needs to be told.
const FORMS: [&[&str]; 4] = [
    &["--format", "plain"],
    &["--format", "kustomize"],
    &["--format", "flux", "--path", "clusters/prod/farm"],
    &["--format", "argocd", "--repo", "https://git.example.org/farm.git"],
];

fn bko(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bko-install")).args(args).output().unwrap()
}

fn export(dir: &Path, more: &[&str]) -> Output {
    let args = [&["export", "--image", IMAGE, "--dir", dir.to_str().unwrap()], more].concat();
    bko(&args)
}

/// Every file below a folder, by its path.
fn files(dir: &Path) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for path in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            let inner = files(&path);
            assert!(!inner.is_empty(), "{} is empty", path.display());
            all.extend(inner.into_iter().map(|(inner, text)| (format!("{name}/{inner}"), text)));
        } else {
            all.insert(name, std::fs::read_to_string(&path).unwrap());
        }
    }
    all
}

/// Documents of the files whose names are chosen, in the order of the names.
fn objects(files: &BTreeMap<String, String>, chosen: impl Fn(&str) -> bool) -> Vec<Value> {
    let chosen = files.iter().filter(|(name, _)| name.ends_with(".yaml") && chosen(name));
    let documents = chosen.flat_map(|(_, text)| {
        serde_yaml::Deserializer::from_str(text).map(|document| Value::deserialize(document).unwrap())
    });
    documents.collect()
}

fn exported(more: &[&str]) -> BTreeMap<String, String> {
    let dir = tempfile::tempdir().unwrap();
    let output = export(dir.path(), more);
    assert!(output.status.success(), "{}", text(&output.stderr));
    files(dir.path())
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
            "03-rc1-certificates.yaml",
            "04-rc1-network-policies.yaml",
            "05-rc1-bootstrap.yaml",
            "06-rc3-server.yaml",
            "07-rc4-gateway.yaml",
            "README.md",
        ]
    );
    let exported = objects(&files, |name| !name.contains("bootstrap"));
    let bundle = Bundle::embedded().unwrap();
    let request = Request { image: Some(IMAGE.into()), ..Request::named("dev", "unused:1") };
    let (profile, values) = profile::resolve(bundle, &request).unwrap();
    let rendered = manifest::render(bundle, &profile, &values).unwrap();
    let by_name = |bodies: Vec<Value>| -> Vec<String> {
        let mut texts: Vec<String> = bodies.iter().map(ToString::to_string).collect();
        texts.sort();
        texts
    };
    let bodies: Vec<Value> = rendered.objects.into_iter().map(|object| Value::clone(&object.body)).collect();
    assert_eq!(by_name(exported), by_name(bodies));
}

#[test]
fn secrets_are_left_out_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let output = export(dir.path(), &[]);
    let stderr = text(&output.stderr);
    assert!(stderr.contains(SECRETS), "{stderr}");
    let note = &files(dir.path())["README.md"];
    assert!(note.contains("- `buildkit-builds/buildkit-daemon-certs`"), "{note}");
    assert!(note.contains("wait --for=condition=Complete --timeout=10m job/buildkit-operator-bootstrap-"), "{note}");
    assert!(export(dir.path(), &["--quiet"]).stderr.is_empty());
}

#[test]
fn no_form_holds_a_secret() {
    for form in FORMS {
        let files = exported(form);
        assert!(objects(&files, |_| true).iter().all(|object| object["kind"] != "Secret"));
        for (name, text) in &files {
            assert!(!text.contains("PRIVATE KEY") && !text.contains("BEGIN CERTIFICATE"), "{name}");
        }
    }
}

#[test]
fn a_second_export_gives_the_same_bytes_and_drops_what_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    for form in FORMS {
        // Into the folder of the form before.
        assert!(export(dir.path(), form).status.success());
        let first = files(dir.path());
        assert_eq!(first, exported(form));
        assert!(export(dir.path(), form).status.success());
        assert_eq!(files(dir.path()), first);
    }
    let less = [FORMS[1], &["--set", "networkPolicy.enabled=false"]].concat();
    assert!(export(dir.path(), &less).status.success());
    let files = files(dir.path());
    assert!(files.keys().all(|name| !name.contains("network-policies")), "{files:?}");
    assert!(!files["rc1/kustomization.yaml"].contains("network-policies"));
}

#[test]
fn every_form_holds_the_same_objects() {
    let of_level = |files: &BTreeMap<String, String>, is_plain: bool| {
        let mut all = objects(files, |name| {
            name.contains("rc") && !name.contains("kustomization") && !name.contains("flux/") && !name.contains("apps/")
        });
        for object in &mut all {
            let metadata = object["metadata"].as_object_mut().unwrap();
            metadata.remove("annotations");
            // The first step ends by itself where nobody prunes it.
            let is_mortal = is_plain && object["kind"] == "Job";
            if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
                assert_eq!(spec.remove("ttlSecondsAfterFinished").is_some(), is_mortal);
            }
        }
        let mut texts: Vec<String> = all.iter().map(ToString::to_string).collect();
        texts.sort();
        texts
    };
    let plain = of_level(&exported(FORMS[0]), true);
    for form in &FORMS[1..] {
        assert_eq!(of_level(&exported(form), false), plain, "{form:?}");
    }
}

#[test]
fn levels_wait_for_one_another_in_flux() {
    let set = ["--flux-source", "OCIRepository/infra/farm", "--flux-namespace", "infra", "--profile", "dev"];
    let files = exported(&[FORMS[2], &set].concat());
    let levels = objects(&files, |name| name.starts_with("flux/rc"));
    let names: Vec<_> = levels.iter().map(|level| level["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["rc0", "rc1", "rc3", "rc4"].map(|level| format!("buildkit-operator-{level}")));
    for (before, level) in levels.iter().zip(&levels[1..]) {
        assert_eq!(level["spec"]["dependsOn"], serde_json::json!([{"name": before["metadata"]["name"]}]));
    }
    for level in &levels {
        assert_eq!((&level["spec"]["wait"], &level["metadata"]["namespace"]), (&true.into(), &"infra".into()));
        let source = serde_json::json!({"kind": "OCIRepository", "name": "farm", "namespace": "infra"});
        assert_eq!(level["spec"]["sourceRef"], source);
        let folder = level["spec"]["path"].as_str().unwrap().strip_prefix("./clusters/prod/farm/").unwrap();
        assert!(files.contains_key(&format!("{folder}/kustomization.yaml")), "{folder}");
    }
    assert_eq!(levels[0]["spec"]["prune"], false);
    assert_eq!(levels[1]["spec"]["healthChecks"][0]["kind"], "Job");
}

#[test]
fn objects_and_applications_of_argo_cd_are_in_waves() {
    let files = exported(&[FORMS[3], &["--path", "farm", "--revision", "v1", "--profile", "dev"]].concat());
    let wave = |object: &Value| object["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"].clone();
    for (level, number) in [("rc0", "0"), ("rc1", "1"), ("rc3", "3"), ("rc4", "4")] {
        let inside = objects(&files, |name| name.starts_with(&format!("{level}/")));
        assert!(!inside.is_empty() && inside.iter().all(|object| wave(object) == number), "{level}");
        let application = &objects(&files, |name| name == format!("apps/{level}.yaml"))[0];
        assert_eq!(wave(application), number);
        let source = serde_json::json!({
            "repoURL": "https://git.example.org/farm.git", "targetRevision": "v1", "path": format!("farm/{level}"),
        });
        assert_eq!(application["spec"]["source"], source);
        assert_eq!(application["spec"]["syncPolicy"]["syncOptions"], serde_json::json!(["ServerSideApply=true"]));
    }
    assert_eq!(objects(&files, |name| name == "root.yaml")[0]["spec"]["source"]["path"], "farm/apps");
    let kept = objects(&files, |name| name.starts_with("rc0/"));
    assert!(kept.iter().all(|object| {
        object["metadata"]["annotations"]["argocd.argoproj.io/sync-options"] == "Prune=false,Delete=false"
    }));
}

/// Least privilege: by name, and what the step makes, nothing else.
#[test]
fn the_step_may_touch_the_secrets_that_it_makes_and_no_others() {
    for set in [&[][..], &["auth.open=true"], &["certs.mode=cert-manager"], &["certs.daemonSecretName=other"]] {
        let set: Vec<&str> = set.iter().flat_map(|value| ["--set", value]).collect();
        let files = exported(&[FORMS[0], &set].concat());
        let all = objects(&files, |_| true);
        let find = |kind: &'static str| all.iter().filter(move |object| object["kind"] == kind);
        let map = find("ConfigMap").find(|map| map["metadata"]["name"] == "buildkit-operator-secrets").unwrap();
        let declared: Value = serde_json::from_str(map["data"]["secrets.json"].as_str().unwrap()).unwrap();
        let names = |list: &str, name: &str| -> Vec<(String, String)> {
            let list = declared[list].as_array().unwrap().iter();
            list.map(|one| (one["namespace"].as_str().unwrap().into(), one[name].as_str().unwrap().into())).collect()
        };
        let mut made = [names("certificates", "secret"), names("generated", "name")].concat();
        made.sort();
        let roles = find("Role").filter(|role| role["metadata"]["name"] == "buildkit-operator-bootstrap");
        let mut allowed: Vec<(String, String)> = roles
            .flat_map(|role| {
                assert_eq!(role["rules"].as_array().unwrap().len(), 1);
                let names = role["rules"][0]["resourceNames"].as_array().unwrap().iter();
                names
                    .map(|name| (role["metadata"]["namespace"].as_str().unwrap().into(), name.as_str().unwrap().into()))
            })
            .collect();
        allowed.sort();
        assert_eq!(allowed, made, "{set:?}");
    }
}

#[test]
fn the_step_runs_again_when_something_is_to_be_made_anew_and_only_then() {
    let job = |set: &[&str]| {
        let files = exported(&[FORMS[0], &["--set", "gateway.domains=a.example.org"], set].concat());
        let jobs = objects(&files, |name| name.contains("bootstrap"));
        jobs.iter().find(|object| object["kind"] == "Job").unwrap()["metadata"]["name"].as_str().unwrap().to_owned()
    };
    let first = job(&[]);
    assert_eq!(job(&["--set", "server.replicas=3"]), first);
    assert_ne!(job(&["--set", "gateway.domains=a.example.org,b.example.org"]), first);
    assert_ne!(job(&["--set", "imagePullSecrets=other"]), first);
}

#[test]
fn where_others_make_everything_there_is_no_step() {
    let dir = tempfile::tempdir().unwrap();
    let set = ["--set", "certs.mode=provided", "--set", "auth.generate=false"];
    let stderr = text(&export(dir.path(), &set).stderr);
    let yours = "yours to make: buildkit-operator/buildkit-operator-token, buildkit-operator/buildkit-operator-internal, \
                 buildkit-builds/buildkit-client-certs, buildkit-builds/buildkit-daemon-certs\n";
    assert!(stderr.contains(yours) && !stderr.contains("made in the cluster"), "{stderr}");
    let files = files(dir.path());
    assert!(files.keys().all(|name| !name.contains("bootstrap") && !name.contains("certificates")), "{files:?}");
    assert!(files["README.md"].contains("- `buildkit-operator/buildkit-operator-token`: `token`"));
}

#[test]
fn what_an_option_lacks_is_a_usage_error() {
    let dir = tempfile::tempdir().unwrap();
    for (args, why) in [
        (&["--format", "argocd"][..], "--repo"),
        (&["--format", "flux", "--flux-source", "HelmRepository/x"], "GitRepository, OCIRepository or Bucket"),
        (&["--format", "flux", "--path", "../else"], "leads out of the repository"),
    ] {
        let output = export(&dir.path().join("out"), args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(text(&output.stderr).contains(why), "{}", text(&output.stderr));
    }
    assert!(!dir.path().join("out").exists());
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
        "error: /nowhere/values.yaml: cannot read it: No such file or directory (os error 2)\n"
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
