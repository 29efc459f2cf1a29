//! Profiles and values: layers, sources, and every fault at once.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use bko_install::manifest::{Bundle, Runlevel};
use bko_install::profile::{self, ProfileSource, Request, Values};
use serde_json::json;

const IMAGE: &str = "registry.example.com/bko-install:1.2.3";

/// Two components, small enough to be read beside the tests.
fn small() -> Bundle {
    let files = [
        (
            "manifests/globals.yaml",
            "values:\n  image: {type: image, optional: true, default: '', description: Our image}\n",
        ),
        (
            "manifests/base/component.yaml",
            "description: The base\nvalues:\n  base.name: {type: string, format: label, default: base, description: A name}\n  \
             base.password: {type: string, secret: true, default: '', description: A secret}\n",
        ),
        (
            "manifests/web/component.yaml",
            "description: The web\nneeds: [base]\nvalues:\n  \
             web.replicas: {type: int, min: 1, default: 2, description: How many}\n  \
             web.labels: {type: map, items: string, default: {}, description: Labels}\n  \
             web.free: {type: map, default: {}, description: Free}\n  \
             web.hosts: {type: list, items: host, default: [], description: Hosts}\n",
        ),
        ("profiles/default.yaml", "description: All\nrunlevels:\n  rc0: [base]\n  rc3: [web]\n"),
        ("profiles/one.yaml", "description: One\nextends: default\nvalues:\n  web:\n    replicas: 1\n"),
    ];
    Bundle::parse(files.map(|(path, text)| (path.to_owned(), text.to_owned()))).unwrap()
}

fn request(profile: &str) -> Request {
    Request::named(profile, IMAGE)
}

fn of_file(text: &str) -> Request {
    Request { profile: ProfileSource::File { path: "my.yaml".into(), text: text.into() }, ..request("") }
}

fn faults(request: &Request) -> Vec<String> {
    profile::resolve(&small(), request).unwrap_err().0.iter().map(ToString::to_string).collect()
}

fn values(request: &Request) -> Values {
    profile::resolve(&small(), request).unwrap().1
}

fn source(values: &Values, name: &str) -> String {
    values.iter().find(|(n, _)| *n == name).unwrap().1.source.to_string()
}

#[test]
fn later_layers_win_and_each_value_knows_its_source() {
    let mut request = request("one");
    let replicas = |request: &Request| {
        let values = values(request);
        (values.get("web.replicas").unwrap().clone(), source(&values, "web.replicas"))
    };
    assert_eq!(replicas(&Request::named("default", IMAGE)), (json!(2), "default".into()));
    assert_eq!(replicas(&request), (json!(1), "profiles/one.yaml:5".into()));
    request.recorded = BTreeMap::from([("web.replicas".into(), json!(3))]);
    assert_eq!(replicas(&request), (json!(3), "recorded".into()));
    request.files = vec![("a.yaml".into(), "web:\n  replicas: 4\n".into())];
    assert_eq!(replicas(&request), (json!(4), "a.yaml:2".into()));
    request.files.push(("b.yaml".into(), "# dotted\nweb.replicas: 5\n".into()));
    assert_eq!(replicas(&request), (json!(5), "b.yaml:2".into()));
    request.set = vec!["web.replicas=6".into()];
    assert_eq!(replicas(&request), (json!(6), "--set".into()));
    assert_eq!(values(&request).overrides(), &BTreeMap::from([("web.replicas".to_owned(), json!(6))]));
}

#[test]
fn what_a_profile_says_is_no_override() {
    assert!(values(&request("one")).overrides().is_empty());
}

#[test]
fn the_image_is_that_of_the_executable_unless_somebody_names_one() {
    let plain = values(&request("one"));
    assert_eq!((plain.get("image").unwrap(), source(&plain, "image").as_str()), (&json!(IMAGE), "this executable"));
    assert!(plain.overrides().is_empty());
    let set = values(&Request { set: vec!["image=a/b:1".into()], image: Some("a/b:2".into()), ..request("one") });
    assert_eq!((set.get("image").unwrap(), source(&set, "image").as_str()), (&json!("a/b:2"), "--image"));
    assert_eq!(set.overrides()["image"], "a/b:2");
    assert_eq!(
        faults(&Request { image: Some("a/b".into()), ..request("one") }),
        ["--image: want an image with a digest, or a tag other than latest, found \"a/b\""]
    );
}

#[test]
fn all_faults_come_at_once_with_file_and_line() {
    let mut request = of_file(
        "extends: one\ndescripton: typo\ndescription: Mine\nrunlevels:\n  rc3: [web, wbe]\n  rc5: []\n  rc4: web\n\
         values:\n  web:\n    replicas: 0\n    replcas: 2\n  base: 1\n  nothing:\n    alike: 1\n",
    );
    request.files = vec![
        ("v.yaml".into(), "web:\n  hosts:\n    - a.example.com\n    - '*.example.com'\n".into()),
        ("w.yaml".into(), "web: [\n".into()),
        ("x.yaml".into(), "web.replicas: 1\nweb:\n  replicas: 2\n".into()),
        ("y.yaml".into(), "- a\n".into()),
    ];
    request.set = vec!["web.replicas".into(), "web.replicas=two".into(), "web.replica=2".into(), "base=1".into()];
    assert_eq!(
        faults(&request),
        [
            "--set base: \"base\" is a group of values: want a mapping of base.name, base.password",
            "--set web.replica: unknown value \"web.replica\"; did you mean \"web.replicas\"?",
            "--set web.replicas: value \"web.replicas\": want an integer of at least 1, found \"two\"",
            "--set web.replicas: want NAME=VALUE",
            "my.yaml:2: unknown key \"descripton\" of a profile; did you mean \"description\"?",
            "my.yaml:5: unknown component \"wbe\"; did you mean \"web\"?",
            "my.yaml:6: unknown runlevel \"rc5\": want rc0 to rc4",
            "my.yaml:7: want a list of components, found a string",
            "my.yaml:10: value \"web.replicas\": want an integer of at least 1, found 0",
            "my.yaml:11: unknown value \"web.replcas\"; did you mean \"web.replicas\"?",
            "my.yaml:12: \"base\" is a group of values: want a mapping of base.name, base.password",
            "my.yaml:13: unknown value \"nothing\"",
            "v.yaml:2: value \"web.hosts\": want a DNS name in lower case, without scheme, port or wildcard, \
             found \"*.example.com\" as item 1",
            "w.yaml:2: did not find expected node content",
            "x.yaml:3: value \"web.replicas\" is given in line 1 already",
            "y.yaml:1: want a mapping, found a list",
        ]
    );
}

#[test]
fn a_profile_is_checked_as_a_whole() {
    for (text, expected) in [
        (
            "description: d\nrunlevels: {rc3: [web]}\n",
            vec!["my.yaml:2: component \"web\" needs \"base\" in rc3 or before it"],
        ),
        (
            "description: d\nextends: default\nrunlevels:\n  rc0: []\n  rc4: [base]\n",
            vec!["profiles/default.yaml:4: component \"web\" needs \"base\" in rc3 or before it"],
        ),
        (
            "description: d\nextends: default\nrunlevels:\n  rc4:\n    - web\n",
            vec!["my.yaml:5: component \"web\" is in rc3 already"],
        ),
        (
            "extends: devv\n",
            vec!["my.yaml: has no description", "my.yaml:1: unknown profile \"devv\": there are default, one"],
        ),
        (
            "description: 1\nextends: [a]\nrunlevels: 1\nvalues: 1\n",
            vec![
                "my.yaml:1: want a string, found a number",
                "my.yaml:2: want the name of a profile, found a list",
                "my.yaml:3: want a mapping of rc0 to rc4, found a number",
                "my.yaml:4: want a mapping of values, found a number",
            ],
        ),
    ] {
        assert_eq!(faults(&of_file(text)), expected, "{text}");
    }
    assert_eq!(
        faults(&request("on")),
        ["--profile: unknown profile \"on\": there are default, one; did you mean \"one\"?"]
    );
}

#[test]
fn a_profile_that_extends_itself_is_refused() {
    let files =
        [("profiles/a.yaml", "description: a\nextends: b\n"), ("profiles/b.yaml", "description: b\nextends: a\n")];
    let bundle = Bundle::parse(files.map(|(path, text)| (path.to_owned(), text.to_owned()))).unwrap();
    let faults = profile::resolve(&bundle, &request("a")).unwrap_err();
    assert_eq!(faults.to_string(), "profiles/b.yaml:2: profile \"a\" extends itself");
}

#[test]
fn a_level_of_a_profile_replaces_that_of_its_base() {
    let (profile, _) =
        profile::resolve(&small(), &of_file("description: d\nextends: default\nrunlevels: {rc3: []}\n")).unwrap();
    assert_eq!(profile.runlevels[&Runlevel::Rc0], ["base"]);
    assert!(profile.runlevels[&Runlevel::Rc3].is_empty());
}

#[test]
fn set_takes_single_entries_of_a_map() {
    let values = values(&Request {
        files: vec![("v.yaml".into(), "web:\n  labels: {a: b}\n".into())],
        set: vec!["web.labels.example.com/c=d=e".into()],
        ..request("default")
    });
    assert_eq!(values.get("web.labels").unwrap(), &json!({"a": "b", "example.com/c": "d=e"}));
}

#[test]
fn dots_nest_below_a_map_that_is_free_in_form() {
    let values = values(&Request {
        set: [
            "web.free.a.disk=ssd",
            "web.free.a.gpu=\"true\"",
            "web.free.pin=false",
            "web.free.a.x\\.y/z=1",
            "web.free.b=[1]",
        ]
        .map(str::to_owned)
        .to_vec(),
        ..request("default")
    });
    assert_eq!(
        values.get("web.free").unwrap(),
        &json!({"a": {"disk": "ssd", "gpu": "true", "x.y/z": 1}, "pin": false, "b": [1]})
    );
    for (set, want) in [
        ("web.free.a..b=1", "\"a..b\" has an empty key"),
        ("web.free.pin.x=1", "\"pin\" of \"pin.x\" is false, no mapping"),
        ("web.free.a={x: 1, x: 2}", "duplicate entry with key \"x\""),
    ] {
        let set = vec!["web.free.pin=false".to_owned(), set.to_owned()];
        let found = faults(&Request { set, ..request("default") });
        assert!(found.len() == 1 && found[0].contains(want), "{found:?}");
    }
}

#[test]
fn a_recorded_override_that_is_wrong_by_now_can_be_given_anew() {
    let recorded = BTreeMap::from([("web.replicas".into(), json!(0)), ("web.free".into(), json!("no map"))]);
    let mut request = Request { recorded, ..request("default") };
    assert_eq!(faults(&request).len(), 2);
    // One entry is not the whole value.
    request.set = vec!["web.replicas=3".into(), "web.free.a=1".into()];
    assert_eq!(faults(&request).len(), 1);
    request.files = vec![("v.yaml".into(), "web.free: {}\n".into())];
    let values = values(&request);
    assert_eq!((values.get("web.replicas"), values.get("web.free")), (Some(&json!(3)), Some(&json!({"a": 1}))));
}

#[test]
fn secrets_are_neither_recorded_nor_shown() {
    let mut request = request("default");
    request.set = vec!["base.password=hush".into()];
    let resolved = values(&request);
    assert_eq!(resolved.get("base.password").unwrap(), "hush");
    assert!(resolved.overrides().is_empty());
    let (_, entry) = resolved.iter().find(|(name, _)| *name == "base.password").unwrap();
    assert_eq!(entry.spec.show(&entry.value), "(secret)");
    request.files = vec![("v.yaml".into(), "base:\n  password: [hush]\n".into())];
    assert_eq!(
        faults(&request),
        ["v.yaml:2: value \"base.password\": want a string, found something else (the value is secret and not shown)"]
    );
}

#[test]
fn an_override_that_this_version_does_not_know_is_dropped_and_named() {
    let mut request = request("default");
    request.recorded = BTreeMap::from([("gone.value".into(), json!(1)), ("base.name".into(), json!("kept"))]);
    let resolved = values(&request);
    assert_eq!(resolved.forgotten(), ["gone.value"]);
    assert_eq!(resolved.overrides(), &BTreeMap::from([("base.name".to_owned(), json!("kept"))]));
    request.recorded = BTreeMap::from([("web.replicas".into(), json!("two"))]);
    assert_eq!(
        faults(&request),
        [
            "recorded override: value \"web.replicas\": want an integer of at least 1, found \"two\"; give it anew with --set"
        ]
    );
}

#[test]
fn values_files_may_end_lines_as_windows_does() {
    let values = values(&Request {
        files: vec![("v.yaml".into(), "web:\r\n  labels:\r\n    a: b\r\n  replicas: 7\r\n".into())],
        ..request("default")
    });
    assert_eq!(values.get("web.labels").unwrap(), &json!({"a": "b"}));
    assert_eq!(source(&values, "web.replicas"), "v.yaml:4");
}

#[test]
fn every_profile_of_the_bundle_is_listed() {
    let profiles = profile::list(Bundle::embedded().unwrap()).unwrap();
    let names: Vec<_> = profiles.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["default", "dev", "eks", "gitops", "gke", "ha", "ovh"]);
    assert!(profiles.iter().all(|(_, description)| !description.is_empty()));
}

#[test]
fn faults_of_a_bundle_name_its_files() {
    let files = [
        (
            "manifests/a/component.yaml",
            "description: a\nneeds: [z]\nimages: [nothing]\nvalues:\n  a: {type: int, default: x, description: d}\n",
        ),
        ("manifests/b/component.yaml", "description: b\nvalus: {}\n"),
        (
            "manifests/c/component.yaml",
            "description: c\nvalues:\n  c.d: {type: int, default: 1, description: d}\n  c.d.e: {type: int, default: 1, description: d}\n",
        ),
        ("manifests/d/x.yaml", "a: 1\n"),
        ("manifests/e/component.yaml", "description: e\nvalues:\n  c.d: {type: int, default: 1, description: d}\n"),
        ("other.txt", ""),
    ];
    let faults = Bundle::parse(files.map(|(path, text)| (path.to_owned(), text.to_owned()))).unwrap_err();
    let faults: Vec<_> = faults.0.iter().map(ToString::to_string).collect();
    assert_eq!(
        faults,
        [
            "manifests/a/component.yaml: default of \"a\": want an integer, found \"x\"",
            "manifests/a/component.yaml: image value \"nothing\" is not declared",
            "manifests/a/component.yaml: needs \"z\", which does not exist",
            "manifests/b/component.yaml:2: unknown field `valus`, expected one of `description`, `needs`, `enabled`, `images`, `values`, `generated`, `policy`",
            "manifests/c: value \"c.d.e\" lies within value \"c.d\"",
            "manifests/d/x.yaml: has no component.yaml beside it",
            "manifests/e/component.yaml: value \"c.d\" is declared twice",
            "other.txt: no part of a bundle",
        ]
    );
}
