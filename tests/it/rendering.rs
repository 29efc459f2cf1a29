//! From profile and values to objects.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and, on request, rewrites what is generated"
)]

use bko_install::cli::{Cli, Command};
use bko_install::families::build_farm::api::BuildProject;
use bko_install::families::build_farm::build::config::{Base, buildkitd_toml};
use bko_install::gateway::Limits;
use bko_install::gateway::rules::Rules;
use bko_install::manifest::emit::to_yaml;
use bko_install::manifest::{self, Bundle, Faults, Rendered, Renderer};
use bko_install::preflight::images::images;
use bko_install::preflight::understood;
use bko_install::profile::{self, Request};
use bko_install::server::Plan;
use clap::Parser;
use kube::CustomResourceExt;
use proptest::prelude::*;
use serde_json::{Value, json};

const IMAGE: &str = "registry.example.com/bko-install:1.2.3";

fn embedded(profile: &str, set: &[&str]) -> Result<Rendered, Faults> {
    let request = Request { set: set.iter().map(|s| (*s).to_owned()).collect(), ..Request::named(profile, IMAGE) };
    let bundle = Bundle::embedded().unwrap();
    let (profile, values) = profile::resolve(bundle, &request)?;
    manifest::render(bundle, &profile, &values)
}

/// One component of one file, with one value of each kind of danger.
fn render_file(name: &str, text: &str, set: &[String]) -> Result<Rendered, Faults> {
    let component = "description: c\nimages: [image, other]\nvalues:\n  \
        name: {type: string, default: plain, description: d}\n  \
        number: {type: int, default: 5, description: d}\n  \
        flag: {type: bool, default: true, description: d}\n  \
        list: {type: list, default: [a, b], description: d}\n  \
        map: {type: map, default: {a: 1}, description: d}\n  \
        wait: {type: duration, default: 2m, description: d}\n  \
        other: {type: string, default: 'o:1', description: d}\n  \
        namespaces.operator: {type: string, default: op, description: d}\n";
    let files = [
        (
            "manifests/globals.yaml".to_owned(),
            "values:\n  image: {type: image, optional: true, default: '', description: d}\n".to_owned(),
        ),
        ("manifests/c/component.yaml".to_owned(), component.to_owned()),
        (format!("manifests/c/{name}"), text.to_owned()),
        ("profiles/p.yaml".to_owned(), "description: p\nrunlevels: {rc1: [c]}\n".to_owned()),
    ];
    let bundle = Bundle::parse(files)?;
    let request = Request { set: set.to_vec(), ..Request::named("p", "i:1") };
    let (profile, values) = profile::resolve(&bundle, &request)?;
    manifest::render(&bundle, &profile, &values)
}

fn template(text: &str) -> Result<Rendered, Faults> {
    render_file("t.yaml.j2", text, &[])
}

fn faults(text: &str) -> Vec<String> {
    template(text).unwrap_err().0.iter().map(ToString::to_string).collect()
}

fn config_map(data: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: n, namespace: ns}}\ndata:\n{data}")
}

fn data(text: &str) -> Value {
    template(&config_map(text)).unwrap().objects[0].body["data"].clone()
}

#[test]
fn both_profiles_render_as_reviewed() {
    for profile in ["default", "dev"] {
        let rendered =
            embedded(profile, if profile == "default" { &["gateway.domains=builds.example.com"] } else { &[] })
                .unwrap();
        let documents: Vec<_> = rendered
            .objects
            .iter()
            .map(|object| {
                format!("# {} {} from {}\n{}", object.runlevel, object.component, object.source, to_yaml(&object.body))
            })
            .collect();
        let settings = &mut insta::Settings::clone_current();
        settings.add_filter(r#"(app.kubernetes.io/version: )"[^"]*""#, r#"$1"[version]""#);
        settings.add_filter(r#"(app.kubernetes.io/version\\":\\")[^"]*\\""#, r#"$1[version]\""#);
        settings.add_filter("(kubernetes.io/arch: \"|--companion-architectures=)(amd64|arm64)", "$1[own]");
        settings.bind(|| insta::assert_snapshot!(format!("profile-{profile}"), documents.join("---\n")));
    }
}

/// Its certificates are objects, and what it needs besides is named.
#[test]
fn gitops_generates_nothing() {
    let rendered = embedded("gitops", &["gateway.domains=builds.example.com"]).unwrap();
    assert!(rendered.declarations().is_empty() && rendered.certificates.is_empty());
    let expected: Vec<_> = rendered.expected.iter().map(|value| value.name.as_str()).collect();
    assert_eq!(expected, ["buildkit-operator-token", "buildkit-operator-internal"]);
    let ids: Vec<String> = rendered.objects.iter().map(|object| object.id.to_string()).collect();
    for id in [
        "ClusterIssuer buildkit-operator-selfsigned",
        "ClusterIssuer buildkit-operator-ca",
        "Certificate cert-manager/buildkit-operator-ca",
        "Certificate buildkit-builds/buildkit-daemon-certs",
        "Certificate buildkit-builds/buildkit-client-certs",
        "Certificate buildkit-operator/buildkit-operator-api-certs",
    ] {
        assert!(ids.iter().any(|other| other == id), "{id} in {ids:#?}");
    }
    assert!(!ids.iter().any(|id| id.contains("buildkit-operator-secrets")), "{ids:#?}");
    let daemon = rendered.objects.iter().find(|object| object.id.name == "buildkit-daemon-certs").unwrap();
    insta::assert_snapshot!("gitops-daemon-certificate", to_yaml(&daemon.body["spec"]));
}

/// An issuer that was named signs every leaf, and its authority is its own affair.
#[test]
fn an_issuer_that_was_named_signs_all() {
    let set = ["certs.mode=cert-manager", "certs.issuerRef.name=vault", "certs.issuerRef.kind=Issuer"];
    let rendered = embedded("default", &set).unwrap();
    assert!(rendered.objects.iter().all(|object| !object.id.kind.ends_with("Issuer")));
    let certificates: Vec<_> = rendered.objects.iter().filter(|object| object.id.kind == "Certificate").collect();
    assert_eq!(certificates.len(), 3);
    for certificate in certificates {
        let issuer = serde_json::json!({"group": "cert-manager.io", "kind": "Issuer", "name": "vault"});
        assert_eq!(certificate.body["spec"]["issuerRef"], issuer);
    }
}

/// What each further profile changes in `default` with a gateway.
#[test]
fn profiles_differ_from_the_default_as_reviewed() {
    let set = ["gateway.domains=builds.example.com"];
    let default = embedded("default", &set).unwrap();
    for profile in ["ha", "eks", "gke", "ovh"] {
        let rendered = embedded(profile, &set).unwrap();
        let new = rendered.objects.iter().filter(|o| default.objects.iter().all(|d| d.body != o.body));
        let documents: Vec<_> = new
            .map(|object| match default.objects.iter().find(|d| d.id == object.id) {
                None => format!("+ {}\n{}", object.id, to_yaml(&object.body)),
                Some(before) => {
                    let (before, after) = (to_yaml(&before.body), to_yaml(&object.body));
                    let diff = similar::TextDiff::from_lines(&before, &after);
                    format!("~ {}\n{}", object.id, diff.unified_diff().context_radius(1))
                }
            })
            .collect();
        let settings = &mut insta::Settings::clone_current();
        settings.add_filter(r#"(app.kubernetes.io/version: )"[^"]*""#, r#"$1"[version]""#);
        settings.add_filter("(kubernetes.io/arch: \"|--companion-architectures=)(amd64|arm64)", "$1[own]");
        settings.bind(|| insta::assert_snapshot!(format!("profile-{profile}"), documents.join("\n")));
    }
}

/// The pods of the server and of the gateway.
fn own_pods(rendered: &Rendered) -> Vec<&Value> {
    rendered.objects.iter().filter_map(|object| object.body.pointer("/spec/template/spec")).collect()
}

#[test]
fn our_own_pods_run_where_their_image_does() {
    let set = ["gateway.domains=a.test", "server.nodeSelector.disk=ssd"];
    let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let rendered = embedded("default", &set).unwrap();
    for pod in own_pods(&rendered) {
        assert_eq!(pod["nodeSelector"]["kubernetes.io/arch"], here);
    }
    assert!(rendered.objects.iter().any(|o| o.body.to_string().contains(&format!("--companion-architectures={here}"))));
    // Somebody else's image may be of any architecture.
    let rendered = embedded("default", &[&set[..], &["image=registry.example.com/bko-install:2"]].concat()).unwrap();
    let pods = own_pods(&rendered);
    assert_eq!((&pods[0]["nodeSelector"], pods[1].get("nodeSelector")), (&json!({"disk": "ssd"}), None));
    let rendered = embedded("default", &[&set[..], &["images.architectures=amd64,arm64"]].concat()).unwrap();
    for pod in own_pods(&rendered) {
        let term =
            pod.pointer("/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0");
        assert_eq!(term.unwrap()["matchExpressions"][0]["values"], json!(["amd64", "arm64"]));
    }
}

#[test]
fn images_come_from_one_registry_but_for_those_that_are_named() {
    let list = |set: &[&str]| -> Vec<String> {
        images(&embedded("dev", set).unwrap()).into_iter().map(|image| image.image).collect()
    };
    let registry = "images.registry=mirror.example.com/hub";
    assert_eq!(list(&[]), ["docker.io/moby/buildkit:v0.34.2-rootless", IMAGE]);
    assert_eq!(
        list(&[registry]),
        ["mirror.example.com/hub/bko-install:1.2.3", "mirror.example.com/hub/moby/buildkit:v0.34.2-rootless"]
    );
    assert_eq!(
        list(&[registry, "daemon.image=else.where/buildkit:1-rootless", "forks.sandbox.runtimeClass=kata"]),
        ["else.where/buildkit:1", "else.where/buildkit:1-rootless", "mirror.example.com/hub/bko-install:1.2.3"]
    );
}

#[test]
fn daemons_hear_of_proxies_mirrors_and_authorities() {
    let authority = authority();
    let values = json!({
        "proxy": {"http": "http://proxy.test:3128", "https": "http://proxy.test:3128", "noProxy": ["git.test"]},
        "network": {"serviceCidrs": ["10.96.0.0/16"]},
        "clusterDomain": "corp.local",
        "registries": {"caBundle": authority, "mirrors": {"docker.io": ["mirror.test/hub", "b.test"], "quay.io": ["c.test"]}},
    });
    let request = Request { files: vec![("v.yaml".into(), values.to_string())], ..Request::named("dev", IMAGE) };
    let bundle = Bundle::embedded().unwrap();
    let (profile, values) = profile::resolve(bundle, &request).unwrap();
    let rendered = manifest::render(bundle, &profile, &values).unwrap();
    let settings = bko_install::preflight::daemon::settings(&rendered).unwrap();
    let excepted = "localhost,127.0.0.1,::1,.svc,.corp.local,10.96.0.0/16,git.test";
    let proxy = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(
        settings.proxy,
        [
            proxy("HTTP_PROXY", "http://proxy.test:3128"),
            proxy("HTTPS_PROXY", "http://proxy.test:3128"),
            proxy("NO_PROXY", excepted),
        ]
    );
    let server = own_pods(&rendered)[0].to_string();
    assert!(
        server.contains(excepted) && server.contains("--registry-ca-file=/etc/buildkit-operator/registries/ca.pem")
    );
    let data = |name: &str, key: &str| {
        let map = rendered.objects.iter().find(|o| o.id.name == name && o.id.kind == "ConfigMap").unwrap();
        map.body["data"][key].as_str().unwrap().to_owned()
    };
    assert_eq!(data("buildkit-operator-registries", "ca.pem"), authority);
    let base = Base::parse(&data("buildkitd-config", "buildkitd.toml"), None).unwrap();
    let toml: toml::Table = buildkitd_toml(&base, 1).parse().unwrap();
    assert_eq!(toml["registry"]["docker.io"]["mirrors"], toml::Value::from(vec!["mirror.test/hub", "b.test"]));
    assert_eq!(toml["registry"]["quay.io"]["mirrors"], toml::Value::from(vec!["c.test"]));

    let secret = "http://user:hush@proxy.test:3128";
    let refused = embedded("dev", &[&format!("proxy.https={secret}")]).unwrap_err().to_string();
    assert!(refused.contains("without user and password") && !refused.contains("hush"), "{refused}");
}

#[test]
fn the_same_input_gives_the_same_objects() {
    let (first, second) = (embedded("dev", &[]).unwrap(), embedded("dev", &[]).unwrap());
    assert_eq!(first.objects, second.objects);
    assert_eq!(first.generated, second.generated);
}

#[test]
fn without_a_domain_there_is_no_gateway() {
    let rendered = embedded("default", &[]).unwrap();
    assert!(rendered.objects.iter().all(|object| !object.id.name.contains("gateway")));
    let server = rendered.objects.iter().find(|object| object.id.kind == "Deployment").unwrap();
    assert!(!server.body.to_string().contains("--gateway-host"));
}

/// A gateway that is given a file which it cannot read never starts.
#[test]
fn the_gateway_understands_its_configuration() {
    let set = ["gateway.domains=a.test,b.test", "gateway.maxConnsPerSource=7", "gateway.proxyFrom=10.0.0.0/8"];
    let rendered = embedded("default", &set).unwrap();
    let map = rendered.objects.iter().find(|object| object.body.pointer("/data/config.yaml").is_some()).unwrap();
    let text = map.body.pointer("/data/config.yaml").and_then(Value::as_str).unwrap();
    let rules = Rules::default().with(text).unwrap();
    assert_eq!(rules.domains.to_string(), "a.test,b.test");
    assert_eq!(rules.limits, Limits { connections: 1024, per_source: 7, ..Limits::default() });
    assert!(rules.proxy_from.contains("10.1.2.3".parse().unwrap()));
    for (domains, wrong) in [
        ("a.test,b.a.test", "gateway domains \"a.test\" and \"b.a.test\" overlap: keep one of them"),
        ("a.test,a.test", "gateway domains \"a.test\" and \"a.test\" overlap: keep one of them"),
    ] {
        let error = embedded("default", &[&format!("gateway.domains={domains}")]).unwrap_err().to_string();
        assert_eq!(error, format!("--set gateway.domains: value \"gateway.domains\": {wrong}"));
    }
    let long = format!("{}.test", ["a"; 95].join("."));
    let error = embedded("default", &[&format!("gateway.domains={long}")]).unwrap_err().to_string();
    assert!(error.ends_with("longer than 189 bytes"), "{error}");
}

#[test]
fn the_api_presents_its_own_certificate_or_the_one_that_is_named() {
    for (set, secret, files) in [
        (vec![], "buildkit-operator-api-certs", ["cert.pem", "key.pem"]),
        (vec!["api.tlsSecret=ours"], "ours", ["tls.crt", "tls.key"]),
    ] {
        let rendered = embedded("default", &set).unwrap();
        let mut objects = rendered.objects.iter();
        let server =
            objects.find(|object| object.id.name == "buildkit-operator-buildd" && object.id.kind == "Deployment");
        let pod = server.unwrap().body.pointer("/spec/template/spec").unwrap();
        assert_eq!(pod.pointer("/volumes/0/secret/secretName").unwrap(), secret, "{pod}");
        let arguments = pod.pointer("/containers/0/args").unwrap().to_string();
        for (flag, file) in ["--api-tls-cert", "--api-tls-key"].into_iter().zip(files) {
            assert!(arguments.contains(&format!("{flag}=/etc/buildkit-operator/api/{file}")), "{arguments}");
        }
    }
    let rendered = embedded("default", &["gateway.domains=a.test,b.test"]).unwrap();
    let api = rendered.certificates.iter().find(|spec| spec.name == "api").unwrap();
    let service = "buildkit-operator-buildd.buildkit-operator.svc";
    let cluster = format!("{service}.cluster.local");
    assert_eq!(api.dns_names, [service, &cluster, "localhost", "api.a.test", "api.b.test"]);
}

#[test]
fn the_token_is_generated_unless_the_api_is_open() {
    let rendered = embedded("default", &["auth.tokenSecret=mine"]).unwrap();
    let [token, internal] = rendered.generated.as_slice() else { panic!("{:?}", rendered.generated) };
    assert_eq!(
        (token.namespace.as_str(), token.name.as_str(), token.key.as_str()),
        ("buildkit-operator", "mine", "token")
    );
    assert_eq!((internal.name.as_str(), internal.bytes), ("buildkit-operator-internal", 32));
    assert_eq!(token.labels["bko-install/component"], "auth");
    let open = embedded("default", &["auth.open=true"]).unwrap();
    assert!(open.generated.iter().all(|secret| secret.name == "buildkit-operator-internal"));
    let all = open.objects.iter().map(|object| object.body.to_string()).collect::<String>();
    assert!(all.contains("--auth-open") && !all.contains("--auth-token-dir"));
}

/// The server's pod template, and the file of its identity providers.
fn identities(set: &[&str]) -> (serde_json::Value, Option<serde_json::Value>) {
    let rendered = embedded("default", set).unwrap();
    let find = |kind: &str, name: &str| rendered.objects.iter().find(|o| o.id.kind == kind && o.id.name == name);
    let file = find("ConfigMap", "buildkit-operator-oidc").map(|map| map.body["data"]["oidc.yaml"].clone());
    (find("Deployment", "buildkit-operator-buildd").unwrap().body["spec"]["template"].clone(), file)
}

fn authority() -> String {
    rcgen::generate_simple_self_signed(["ca.example.com".to_owned()]).unwrap().cert.pem()
}

#[test]
fn what_would_stop_a_pod_later_is_refused_now() {
    for (set, want) in [
        ("daemon.scheduling={nodeSelectr: {}}", "nodeSelectr: unknown field, want one of nodeSelector, tolerations"),
        ("daemon.scheduling.pinArch=maybe", "pinArch: want true or false, found \"maybe\""),
        ("daemon.scheduling.nodeSelector.gpu=true", "nodeSelector.gpu: want a string, found true"),
        ("daemon.scheduling.tolerations=[{kee: a}]", "tolerations[0].kee: unknown field"),
        (
            "api.trustedProxies=10.0.0.0/33",
            "an address, or a network such as 10.0.0.0/8, found \"10.0.0.0/33\" as item 0",
        ),
        ("gateway.proxyFrom=10.0.0.1,balancer", "found \"balancer\" as item 1"),
        (
            "gateway.service.loadBalancerSourceRanges=192.0.2.1",
            "want a network such as 10.0.0.0/8, found \"192.0.2.1\"",
        ),
        ("server.service.loadBalancerSourceRanges=192.0.2.0/40", "found \"192.0.2.0/40\" as item 0"),
        ("server.tolerations=[{efect: NoSchedule}]", "item 0: efect: unknown field"),
        ("gateway.tolerations=[{key: 1}]", "item 0: key: want a string, found 1"),
        ("oidc.caBundle=/etc/ssl/ca.pem", "want certificates in PEM, at least one, that can be used, found none"),
        ("oidc.providers=[{type: github, caFile: /ca.pem}]", "item 0: caFile: nothing mounts such a file"),
        ("oidc.repoAllowlist=github.com/acme/*", "oidc.repoAllowlist restricts the identities of oidc.providers"),
        ("registries.mirrors={https://docker.io: [a.test]}", "want registries such as docker.io"),
        ("registries.mirrors={docker.io: a.test}", "\"docker.io\": want a list of mirrors, found \"a.test\""),
        ("images.registry=https://mirror.test", "want a registry such as registry.example.com/mirror"),
        ("images.architectures=x86", "want one of amd64, arm64, found \"x86\" as item 0"),
        ("storage.class.create=true", "storage.class.create needs the CSI driver"),
        ("networkPolicy.extraEgress=[{}, {too: []}]", "item 1: too: unknown field"),
        ("networkPolicy.extraEgress=[{to: [{ipBlock: {cidr: 10.0.0.1}}]}]", "item 0: to[0].ipBlock: want networks"),
        ("projects.defaults=[{tier: hot, tier: warm}]", "duplicate entry with key \"tier\""),
        ("projects.defaults=[{teir: hot}, {tier: 1}]", "rules[0].teir: unknown field, want some of match, tier"),
        ("projects.defaults=[{teir: hot}, {tier: 1}]", "; rules[1].tier: want hot or warm, found 1"),
    ] {
        let found = embedded("default", &[set]).unwrap_err().to_string();
        let name = set.split(['=', '[']).next().unwrap();
        assert!(found.contains(want), "{set}: {found}");
        let of = name.split_once("scheduling").map_or(name, |(before, _)| before);
        assert!(found.contains(of), "{set}: {found}");
    }
    let bundle = format!("oidc.caBundle={}", authority());
    let right = [
        "daemon.scheduling.nodeSelector.disk=ssd",
        "daemon.scheduling.pinArch=false",
        "networkPolicy.extraEgress=[{to: [{ipBlock: {cidr: 10.1.0.0/16}}], ports: [{port: 5000, endPort: 5001}]}]",
        "gateway.tolerations=[{key: builds, operator: Exists}]",
        "gateway.service.loadBalancerSourceRanges=192.0.2.0/24,2001:db8::/32",
        "oidc.disable=true",
        "oidc.repoAllowlist=github.com/acme/*",
        &bundle,
    ];
    let rendered = embedded("default", &right).unwrap();
    let all = rendered.objects.iter().map(|object| object.body.to_string()).collect::<String>();
    let asked =
        serde_json::to_string(r#"--daemon-scheduling={"nodeSelector":{"disk":"ssd"},"pinArch":false}"#).unwrap();
    assert!(all.contains(&asked), "{all}");
}

#[test]
fn identity_providers_reach_the_server_and_a_change_restarts_it() {
    const CHECKSUM: &str = "buildkit-operator.socialgouv.github.io/oidc-checksum";
    let (without, file) = identities(&[]);
    assert!(file.is_none() && !without.to_string().contains("oidc"));
    let providers = "oidc.providers=[{type: github}, {type: gitlab, issuer: 'https://git.acme.example'}]";
    let (one, file) = identities(&[providers, "server.podAnnotations.a/b=x: \"y\""]);
    let file = file.unwrap();
    let config = bko_install::identity::config::Config::read(bko_install::identity::config::Sources {
        file: Some(("oidc.yaml".to_owned(), file.as_str().unwrap().to_owned())),
        ..Default::default()
    });
    assert_eq!(config.unwrap().unwrap().providers.len(), 2, "the server reads what is mounted");
    let args = one["spec"]["containers"][0]["args"].to_string();
    assert!(args.contains("--oidc-config=/etc/buildkit-operator/oidc/oidc.yaml"), "{args}");
    assert_eq!(one["metadata"]["annotations"]["a/b"], "x: \"y\"");
    let (two, _) = identities(&[providers, "oidc.repoAllowlist=github.com/acme/*"]);
    let checksum =
        |template: &serde_json::Value| template["metadata"]["annotations"][CHECKSUM].as_str().unwrap().to_owned();
    assert_eq!(checksum(&one).len(), 64);
    assert_ne!(checksum(&one), checksum(&two));
    let authority = format!("oidc.caBundle={}", authority());
    let events =
        [providers, "oidc.trustEvents=workflow_run,issue_comment", &authority, "api.trustedProxies=10.0.0.0/8"];
    let args = identities(&events).0["spec"]["containers"][0]["args"].to_string();
    for flag in [
        "--trust-events=workflow_run,issue_comment",
        "--oidc-ca-file=/etc/buildkit-operator/oidc/ca.pem",
        "--trusted-proxies=10.0.0.0/8",
    ] {
        assert!(args.contains(flag), "{flag} in {args}");
    }
    let open = embedded("default", &[providers, "auth.open=true"]).unwrap_err().to_string();
    assert!(open.contains("auth.open lets anybody act for any repository"), "{open}");
}

#[test]
fn rules_for_new_projects_reach_the_server_and_a_change_restarts_it() {
    use bko_install::families::build_farm::defaults::ProjectDefaults;
    const CHECKSUM: &str = "checksum/project-defaults";
    let rule = "projects.defaults=[{match: {repo: 'github.com/acme/*'}, tier: hot}]";
    let rendered = embedded("default", &[rule]).unwrap();
    let find = |kind: &str, name: &str| rendered.objects.iter().find(|o| o.id.kind == kind && o.id.name == name);
    let file = &find("ConfigMap", "buildkit-operator-project-defaults").unwrap().body["data"]["rules.yaml"];
    let read = ProjectDefaults::read(file.as_str().unwrap()).unwrap();
    assert_ne!(read, ProjectDefaults::default(), "the server reads what is mounted");
    let one = identities(&[rule]).0;
    let args = one["spec"]["containers"][0]["args"].to_string();
    assert!(args.contains("--project-defaults-config=/etc/buildkit-operator/project-defaults/rules.yaml"), "{args}");
    let two = identities(&["projects.defaults=[{tier: hot}]"]).0;
    let checksum = |template: &Value| template["metadata"]["annotations"][CHECKSUM].as_str().map(str::to_owned);
    assert!(checksum(&one).is_some() && checksum(&one) != checksum(&two));
    assert!(!identities(&[]).0.to_string().contains("project-defaults"));
    let wrong = embedded("default", &["projects.defaults=[{tier: hot}, {tier: cold}]"]).unwrap_err().to_string();
    assert!(wrong.contains("rules[1].tier: want hot or warm, found \"cold\""), "{wrong}");
}

/// Clients reach daemons through the gateway alone, so no role needs more.
#[test]
fn nobody_may_exec_into_pods() {
    let rendered = embedded("default", &[]).unwrap();
    let roles = rendered.objects.iter().filter(|object| matches!(object.id.kind.as_str(), "Role" | "ClusterRole"));
    let rules: Vec<String> = roles.map(|role| role.body["rules"].to_string()).collect();
    assert!(!rules.is_empty());
    for broad in ["pods/exec", "pods/attach", "pods/portforward", "\"*\""] {
        assert!(rules.iter().all(|rules| !rules.contains(broad)), "{broad} in {rules:?}");
    }
}

#[test]
fn daemons_are_pulled_with_the_same_secrets() {
    let args = identities(&["imagePullSecrets=registry,other.mirror"]).0["spec"]["containers"][0]["args"].to_string();
    assert!(args.contains("\"--daemon-pull-secrets=registry,other.mirror\""), "{args}");
}

#[test]
fn an_argument_in_json_is_one_argument() {
    let rendered = embedded("default", &["daemon.scheduling={pinArch: true, nodeSelector: {a: \"b'c\"}}"]).unwrap();
    let all =
        rendered.objects.iter().map(|object| object.body.clone()).find(|body| body["kind"] == "Deployment").unwrap();
    let args = all["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
    let scheduling = args.iter().find_map(|arg| arg.as_str().unwrap().strip_prefix("--daemon-scheduling=")).unwrap();
    assert_eq!(scheduling, r#"{"pinArch":true,"nodeSelector":{"a":"b'c"}}"#);
}

#[test]
fn wrong_identity_providers_are_named_before_anything_is_installed() {
    let wrong = "oidc.providers=[{type: github}, {type: github}]";
    assert_eq!(
        embedded("default", &[wrong]).unwrap_err().to_string(),
        "--set oidc.providers: value \"oidc.providers\": want identity providers, found a wrong one as item 1: issuer: \
         \"https://token.actions.githubusercontent.com\" is that of providers[0] too"
    );
}

#[test]
fn the_shared_token_is_a_folder_so_that_it_can_be_rotated() {
    let (template, _) = identities(&["auth.tokenSecret=mine"]);
    let container = &template["spec"]["containers"][0];
    assert!(container["args"].to_string().contains("--auth-token-dir=/etc/buildkit-operator/auth"));
    assert!(!container["env"].to_string().contains("AUTH_TOKEN"));
    let named =
        |list: &serde_json::Value| list.as_array().unwrap().iter().find(|v| v["name"] == "token").cloned().unwrap();
    assert_eq!(named(&container["volumeMounts"])["mountPath"], "/etc/buildkit-operator/auth");
    assert_eq!(named(&template["spec"]["volumes"])["secret"]["secretName"], "mine");
}

#[test]
fn a_load_balancer_for_the_api_needs_source_ranges_and_a_token() {
    let set = ["server.service.type=LoadBalancer", "server.service.loadBalancerSourceRanges=192.0.2.0/24"];
    assert!(embedded("default", &set).is_ok());
    let expected = "manifests/server/service.yaml.j2:2: server.service.type LoadBalancer puts the routing API on a \
                    network: set server.service.loadBalancerSourceRanges, and leave auth.open false";
    assert_eq!(embedded("default", &set[..1]).unwrap_err().to_string(), expected);
    assert_eq!(embedded("default", &[set[0], set[1], "auth.open=true"]).unwrap_err().to_string(), expected);
}

#[test]
fn no_argument_is_written_as_another_language_would() {
    let all = ["api.requireBuildId=true", "cache.storageClass=fast", "auth.adminTokenSecret=admin"];
    for object in embedded("dev", &all).unwrap().objects {
        let args = object.body.pointer("/spec/template/spec/containers/0/args").and_then(Value::as_array);
        for arg in args.into_iter().flatten().map(|arg| arg.as_str().unwrap()) {
            assert!(!["True", "False", "None", "none"].iter().any(|word| arg.ends_with(word)), "{arg}");
        }
    }
}

/// A pod that is given a flag which its program does not know never starts.
#[test]
fn the_server_understands_every_argument() {
    let all = [
        "api.requireBuildId=true",
        "cache.storageClass=fast",
        "auth.open=true",
        "gateway.domains=a.example.com,b.example.com",
        r#"daemon.scheduling={"pinArch": true, "nodeSelector": {"disk": "fast"}}"#,
        "routeWait=1m 30s",
    ];
    let identities =
        ["oidc.providers=[{type: github}]", "oidc.trustEvents=workflow_run", "api.trustedProxies=10.0.0.0/8"];
    let sets: [(&str, &[&str]); 4] = [("default", &[]), ("dev", &[]), ("default", &all), ("default", &identities)];
    let mut parsed = 0;
    // What a pod finds mounted.
    let mounted = tempfile::tempdir().unwrap();
    for (file, text) in [
        ("auth/token", "t"),
        ("oidc/oidc.yaml", "providers: [{type: github}]"),
        ("gateway/config.yaml", "domains: [a.example.com]"),
    ] {
        let path = mounted.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let mounted = mounted.path().to_str().unwrap();
    for (profile, set) in sets {
        for object in embedded(profile, set).unwrap().objects.iter().filter(|object| object.id.kind == "Deployment") {
            let args = object.body.pointer("/spec/template/spec/containers/0/args").and_then(Value::as_array).unwrap();
            let args = args.iter().map(|arg| arg.as_str().unwrap().replace("/etc/buildkit-operator", mounted));
            let cli = Cli::try_parse_from(std::iter::once("bko-install".to_owned()).chain(args)).unwrap();
            let Command::Server(command) = cli.command else { panic!("{:?}", cli.command) };
            Plan::try_from(command.server).map(drop).unwrap();
            parsed += 1;
        }
    }
    assert_eq!(parsed, 6);
}

#[test]
fn certificates_cover_every_gateway_domain_and_carry_the_common_labels() {
    let set = ["gateway.domains=a.example.com,b.example.com", "namespaces.builds=b", "certs.daemonSecretName=d"];
    let rendered = embedded("default", &set).unwrap();
    let daemon = rendered.certificates.iter().find(|spec| spec.name == "daemon").unwrap();
    assert_eq!(daemon.secret_path(), "b/d");
    assert_eq!(
        daemon.dns_names,
        ["*.b.svc", "*.b.svc.cluster.local", "localhost", "*.a.example.com", "*.b.example.com"]
    );
    assert_eq!(daemon.labels["bko-install/component"], "certificates");
    let names: Vec<_> = rendered.certificates.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["api", "ca", "client", "daemon"]);
}

/// The manifest is generated from the type. After a change:
/// `BKO_UPDATE=1 cargo test --test it rendering::the_custom_resource`.
#[test]
fn the_custom_resource_definition_is_that_of_the_type() {
    let path = std::path::Path::new("manifests/crd/crd.yaml");
    let mut crd = serde_json::to_value(BuildProject::crd()).unwrap();
    as_the_api_server_says(&mut crd);
    let generated = to_yaml(&crd);
    let generated = format!("# Generated from src/families/build_farm/api.rs by a test.\n{generated}");
    if std::env::var_os("BKO_UPDATE").is_some() {
        std::fs::write(path, &generated).unwrap();
    }
    assert!(std::fs::read_to_string(path).unwrap() == generated, "{} is stale: set BKO_UPDATE=1", path.display());
}

/// Whole numbers have no point, so that an applied object has no drift; and
/// the essays on Kubernetes' own types are left out.
fn as_the_api_server_says(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(whole) = number.as_f64().filter(|f| f.fract() == 0.0) {
                *value = json!(whole as i64);
            }
        }
        Value::Array(list) => list.iter_mut().for_each(as_the_api_server_says),
        Value::Object(map) => {
            map.retain(|key, text| key != "description" || text.as_str().is_none_or(|text| text.len() < 300));
            map.values_mut().for_each(as_the_api_server_says);
        }
        _ => {}
    }
}

/// A value that nothing reads would only seem to do something.
#[test]
fn every_declared_value_is_used() {
    let bundle = Bundle::embedded().unwrap();
    // Where images come from is settled before anything is rendered.
    let mut read: String = "images.registry ".to_owned();
    read.extend(bundle.certificates.iter().map(|(_, text)| text.as_str()));
    for component in bundle.components.values() {
        read.extend(component.files.iter().map(|(_, text)| text.as_str()));
        read.extend(component.enabled.as_deref());
        for generated in &component.generated {
            read.extend([generated.namespace.as_str(), &generated.secret]);
            read.extend([&generated.when, &generated.make].into_iter().flatten().map(String::as_str));
        }
    }
    for name in bundle.values.keys() {
        let used = read.match_indices(name.as_str()).any(|(at, _)| {
            let beside = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '.');
            beside(read[..at].chars().next_back()) && beside(read[at + name.len()..].chars().next())
        });
        assert!(used, "{name}");
    }
}

#[test]
fn objects_are_ordered_by_level_then_kind_then_name() {
    let ids: Vec<String> =
        embedded("dev", &["server.replicas=2"]).unwrap().objects.iter().map(|o| o.id.to_string()).collect();
    let at = |id: &str| ids.iter().position(|other| other == id).unwrap_or_else(|| panic!("{id} in {ids:#?}"));
    for pair in [
        "Namespace buildkit-system",
        "CustomResourceDefinition buildprojects.buildkit-operator.socialgouv.github.io",
        "ServiceAccount buildkit-operator/buildkit-operator-buildd",
        "Role buildkit-builds/buildkit-operator-buildd",
        "RoleBinding buildkit-builds/buildkit-operator-buildd",
        "NetworkPolicy buildkit-builds/buildkit-operator-fork-egress",
        "PodDisruptionBudget buildkit-operator/buildkit-operator-buildd",
        "Service buildkit-operator/buildkit-operator-buildd",
        "Deployment buildkit-operator/buildkit-operator-buildd",
        "Service buildkit-operator/buildkit-operator-gateway",
        "Deployment buildkit-operator/buildkit-operator-gateway",
    ]
    .windows(2)
    {
        assert!(at(pair[0]) < at(pair[1]), "{pair:?}");
    }
}

#[test]
fn expressions_that_are_whole_scalars_come_out_as_values() {
    for (text, expected) in [
        ("  a: {{ name }}\n", json!({"a": "plain"})),
        ("  a: {{ '*.' ~ name ~ '.svc' }} # why\n", json!({"a": "*.plain.svc"})),
        ("  a: [{{ name }}, {{ number }}]\n", json!({"a": ["plain", 5]})),
        ("  a: { b: {{ flag }}, c: {{ name }} }\n", json!({"a": {"b": true, "c": "plain"}})),
        ("  a:\n    - {{ list }}\n    -   {{ map }}\n", json!({"a": [["a", "b"], {"a": 1}]})),
        ("  {{ name }}: 1\n", json!({"plain": 1})),
        ("  a: {{- ' ' if false else name }}\n", Value::Null),
        ("{%- for item in list %}\n  {{ item }}: {{ loop.index }}\n{%- endfor %}\n", json!({"a": 1, "b": 2})),
        ("  a: {% if flag %}yes{% else %}no{% endif %}-{% if flag %}b{% endif %}\n", json!({"a": "yes-b"})),
        ("  a:\n    {{ name }}\n", json!({"a": "plain"})),
        ("  a: {{ wait }}\n  b: {{ wait|seconds + 30 }}\n", json!({"a": "120s", "b": 150})),
        ("  a: {{ name|safe }}\n", json!({"a": "plain"})),
    ] {
        if expected.is_null() {
            assert!(template(&config_map(text)).is_err(), "{text}");
        } else {
            assert_eq!(data(text), expected, "{text}");
        }
    }
}

#[test]
fn an_expression_within_a_scalar_is_an_error_with_its_line() {
    for (text, expression) in [
        ("  a: *.{{ name }}.svc\n", "name"),
        ("  a: x{{ name }}\n", "name"),
        ("  a: {{ name }}x\n", "name"),
        ("  a: {{ name }} x\n", "name"),
        ("  a: \"{{ name }}\"\n", "name"),
        ("  a: '{{ number }}'\n", "number"),
        ("  a: {{ name }}{{ number }}\n", "name"),
        ("  a:{{ name }}\n", "name"),
        ("  a: {{- name }}\n", "name"),
        ("  a: -{{ number }}\n", "number"),
        ("  a: |\n    {{ name }}\n", "name"),
        ("  a: >-\n    text\n    {{ number }}\n", "number"),
        ("  a: text\n    {{ number }}\n", "number"),
        ("  a: 'text\n    {{ number }}'\n", "number"),
        ("  a: text - {{ number }}\n", "number"),
        ("  {{ name }}-x: 1\n", "name"),
        ("  a: {{ name }}#x\n", "name"),
        ("  a: [x{{ name }}]\n", "name"),
        ("  a: {% if flag %}x-{% endif %}{{ name }}\n", "name"),
        ("  a: http://{{ name }}/\n", "name"),
        ("  a: !x{{ name }}\n", "name"),
    ] {
        let line = 5 + text[..text.find("{{").unwrap()].matches('\n').count();
        let found = faults(&config_map(text));
        let expected = format!(
            "manifests/c/t.yaml.j2:{line}: \"{{{{ {expression} }}}}\" is only a part of a scalar: write the whole scalar as \
             one expression, as in {{{{ '*.' ~ name ~ '.svc' }}}}"
        );
        assert_eq!(found.first(), Some(&expected), "{text}");
    }
}

#[test]
fn faults_of_templates_have_file_and_line() {
    for (text, expected) in [
        ("  a: 1\n  b: {{ nothing }}\n", "6: `nothing` is undefined"),
        ("  a: {{ map.nothing }}\n", "5: `map.nothing` is undefined"),
        ("  a: {{ name if false }}\n", "5: an expression without a value"),
        ("  a: {{ name\n", "5: template: unexpected end of input, expected end of variable block"),
        ("  a: 1\n{% if %}\n", "6: template: unexpected end of block"),
        ("  a: {{ fail('no: ' ~ name) }}\n", "5: no: plain"),
        ("  a: {{ name|seconds }}\n", "5: \"plain\" is no duration"),
        ("{% for i in list %}\n  c: 1\n{% endfor %}\n", "6: data: duplicate entry with key \"c\""),
    ] {
        let found = faults(&config_map(text));
        let expected = format!("manifests/c/t.yaml.j2:{expected}");
        assert_eq!(found, [expected], "{text}");
    }
}

#[test]
fn faults_of_objects_have_file_line_and_name() {
    let pod =
        |spec: &str| format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: n\n  namespace: ns\nspec:\n{spec}");
    for (text, expected) in [
        ("kind: ConfigMap\nmetadata: {name: n}\n".to_owned(), vec!["1: object without apiVersion"]),
        ("apiVersion: v1\nmetadata: {name: n}\n".to_owned(), vec!["1: object without kind"]),
        ("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  namespace: n\n".to_owned(), vec!["3: object without metadata.name"]),
        ("---\n\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: n\n".to_owned(), vec!["3: ConfigMap n: has no namespace"]),
        (
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: n, namespace: m}\n".to_owned(),
            vec!["1: Namespace m/n: a Namespace has no namespace"],
        ),
        (
            "apiVersion: v1\nkind: Deploymet\nmetadata: {name: n, namespace: m}\n".to_owned(),
            vec!["1: unknown kind \"Deploymet\" of v1; a kind of your own needs its CustomResourceDefinition in the bundle"],
        ),
        (
            "apiVersion: v1\nkind: Deployment\nmetadata: {name: n, namespace: m}\n".to_owned(),
            vec!["1: unknown kind \"Deployment\" of v1; its group is apps"],
        ),
        (
            "{% for i in list %}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: n, namespace: m}\n{% endfor %}\n".to_owned(),
            vec!["3: ConfigMap m/n: is in manifests/c/t.yaml.j2:3 already"],
        ),
        (
            pod("  containers:\n  - name: a\n    image: i\n  - name: b\n    image: x:1\n  - name: c\n    image: 'i:1'\n  - name: a\n    image: o:1\n"),
            vec![
                "9: ConfigMap ns/n: image \"i\" is not pinned: give it a digest, or a tag other than latest",
                "11: ConfigMap ns/n: image \"x:1\" is none of those that component.yaml lists under images",
                "14: ConfigMap ns/n: containers: a is given twice, which server-side apply refuses",
            ],
        ),
        (
            pod("  env:\n  - name: A\n  - name: B\n  - name: A\n"),
            vec!["10: ConfigMap ns/n: env: A is given twice, which server-side apply refuses"],
        ),
        (
            pod("  ports:\n  - containerPort: 1\n  - containerPort: 1\n    protocol: UDP\n  - containerPort: 1\n    protocol: TCP\n"),
            vec!["11: ConfigMap ns/n: ports: 1/TCP is given twice, which server-side apply refuses"],
        ),
        (
            pod("  volumes: [{name: a}, {name: a}]\n  volumeMounts:\n  - {name: a, mountPath: /a}\n  - {name: a, mountPath: /a}\n"),
            vec![
                "7: ConfigMap ns/n: volumes: a is given twice, which server-side apply refuses",
                "10: ConfigMap ns/n: volumeMounts: /a is given twice, which server-side apply refuses",
            ],
        ),
        (
            pod("  secret:\n    defaultMode: 0644\n    items:\n    - mode: 0400\n    - mode: 0o644\n    - mode: 420\n    - mode: rw\n"),
            vec![
                "8: ConfigMap ns/n: defaultMode: 0644 is read differently by different parsers: write 420 or 0o644",
                "10: ConfigMap ns/n: mode: 0400 is read differently by different parsers: write 256 or 0o400",
                "13: ConfigMap ns/n: mode: want a number such as 420 or 0o644, found \"rw\"",
            ],
        ),
    ] {
        let expected: Vec<_> = expected.iter().map(|fault| format!("manifests/c/t.yaml.j2:{fault}")).collect();
        assert_eq!(faults(&text), expected, "{text}");
    }
}

#[test]
fn lines_stay_right_below_loops_and_conditions() {
    let text = "{# a comment\nof two lines #}\n{%- for item in list %}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  \
                name: {{ item }}\n  namespace: ns\n{% if not flag %}\nspec:\n{% else %}\nspec:\n  mode: 0755\n{% endif %}\n{% endfor %}\n";
    assert_eq!(
        faults(text),
        [
            "manifests/c/t.yaml.j2:14: ConfigMap ns/a: mode: 0755 is read differently by different parsers: write 493 or 0o755",
            "manifests/c/t.yaml.j2:14: ConfigMap ns/b: mode: 0755 is read differently by different parsers: write 493 or 0o755",
        ]
    );
}

#[test]
fn files_that_are_no_templates_are_taken_as_they_are() {
    let rendered = render_file("t.yaml", &config_map("  a: '{{ name }}'\n"), &[]).unwrap();
    assert_eq!(rendered.objects[0].body["data"]["a"], "{{ name }}");
}

#[test]
fn labels_of_the_object_win_over_the_common_ones() {
    let text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: n\n  namespace: ns\n  labels: {app.kubernetes.io/name: own, z: y}\n";
    let rendered = template(text).unwrap();
    assert_eq!(
        rendered.objects[0].body["metadata"]["labels"],
        json!({
            "app.kubernetes.io/instance": "buildkit-operator",
            "app.kubernetes.io/managed-by": "bko-install",
            "app.kubernetes.io/name": "own",
            "app.kubernetes.io/version": bko_install::VERSION,
            "bko-install/component": "c",
            "z": "y",
        })
    );
}

#[test]
fn objects_of_a_kind_that_the_bundle_defines_come_after_all_others() {
    let text = "apiVersion: e.x/v1\nkind: Thing\nmetadata: {name: a, namespace: ns}\n---\n\
                apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: z, namespace: ns}\n---\n\
                apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: things.e.x}\n\
                spec: {group: e.x, scope: Namespaced, names: {kind: Thing}}\n";
    let rendered = template(text).unwrap();
    let kinds: Vec<_> = rendered.objects.iter().map(|object| object.id.kind.as_str()).collect();
    assert_eq!(kinds, ["CustomResourceDefinition", "Deployment", "Thing"]);
}

const INJECTED: &str = "  a: {{ name }}\n  b: [{{ name }}]\n  c: {{ 'x-' ~ name }}\n  {{ 'k' ~ name }}: 1\n  d: {{ [name, {'n': name}] }}\n";

fn survives(value: &str) -> Result<(), TestCaseError> {
    let rendered = render_file("t.yaml.j2", &config_map(INJECTED), &[format!("name={value}")]).unwrap();
    prop_assert_eq!(rendered.objects.len(), 1);
    let expected = json!({
        "a": value,
        "b": [value],
        "c": format!("x-{value}"),
        format!("k{value}"): 1,
        "d": [value, {"n": value}],
    });
    prop_assert_eq!(&rendered.objects[0].body["data"], &expected);
    let written: Value = serde_yaml::from_str(&to_yaml(&rendered.objects[0].body)).unwrap();
    prop_assert_eq!(&written, &*rendered.objects[0].body);
    Ok(())
}

#[test]
fn hostile_values_stay_one_string() {
    for value in [
        "a\nkind: Secret",
        "\"",
        "'",
        "{{ name }}",
        "{% raw %}",
        "{# x",
        "${HOME}",
        "$(POD_NAME)",
        "é ✓ 🦀",
        "a\r\nb",
        "\u{85}",
        "\u{2028}",
        "\u{feff}",
        "\0",
        "---\napiVersion: v1",
        "# x",
        ": ",
        "- ",
        "|",
        "\\",
        "\\n",
        "bko-interpolation-0-",
        "",
        " ",
        "yes",
        "0644",
        "~",
    ] {
        survives(value).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_value_injects_yaml(value in any::<String>()) {
        survives(&value)?;
    }
}

#[test]
fn scalars_are_rendered_unescaped() {
    let bundle = Bundle::embedded().unwrap();
    let request = Request { set: vec!["gateway.domains=a.b,c.d".into()], ..Request::named("default", IMAGE) };
    let (_, values) = profile::resolve(bundle, &request).unwrap();
    let renderer = Renderer::new(&values);
    let scalar = |text: &str| renderer.scalar(text).map_err(|error| (error.line, error.to_string()));
    assert_eq!(scalar("*.{{ namespaces.builds }}.svc").unwrap(), "*.buildkit-builds.svc");
    assert_eq!(scalar("{% for d in gateway.domains %}*.{{ d }} {% endfor %}").unwrap(), "*.a.b *.c.d ");
    assert_eq!(scalar("{{ auth.open }} {{ server.replicas }}").unwrap(), "false 2");
    let (line, message) = scalar("a\n{{ nothing }}").unwrap_err();
    assert_eq!(line, 2);
    assert!(message.contains("`nothing` is undefined"), "{message}");
}

/// What a value may be and what its server takes differ where the value has no
/// bounds of its own: whatever comes of it is refused before it is installed.
#[test]
fn what_a_server_would_refuse_is_not_rendered() {
    let domain = "gateway.domains=a.test";
    for (set, flag) in [
        ("gateway.wakesPerSource=99999999999", "--wakes-per-source"),
        ("cache.sizeGi=99999999999", "--cache-volume-gi"),
        ("projects.idleSeconds=99999999999", "--idle-seconds"),
        ("api.rateBurst=99999999999", "--api-rate-burst"),
    ] {
        let faults = understood::check(&embedded("default", &[domain, set]).unwrap()).unwrap_err().to_string();
        assert!(faults.contains("its server would refuse an argument") && faults.contains(flag), "{faults}");
        assert!(!faults.contains('\n'), "{faults}");
    }
    for (profile, _) in profile::list(Bundle::embedded().unwrap()).unwrap() {
        understood::check(&embedded(&profile, &[domain]).unwrap()).unwrap();
    }
}
