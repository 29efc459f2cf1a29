//! Certificates: declarations, every branch of the decisions, and what comes
//! out, proven by a real handshake and by openssl.
#![allow(clippy::disallowed_methods, reason = "openssl reads files")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use bko_install::certificate::issue::{IssueError, LiveSecrets, Outcome, materialise};
use bko_install::certificate::{
    self, Authority, CertificateSpec, Decision, KeyState, LiveCertificate, LiveSecret, Malformed, Reason, SecretData,
    Usage, decide_authority, decide_leaf, secret_object,
};
use bko_install::manifest::Runlevel;
use jiff::Timestamp;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

mod provided;
mod rotation;

const DAY: i64 = 86_400;

fn now() -> Timestamp {
    "2030-06-01T12:00:00Z".parse().unwrap()
}

fn after(days: i64) -> Timestamp {
    Timestamp::from_second(now().as_second() + days * DAY).unwrap()
}

/// Renders with minijinja, as the bundle does, for the given gateway domains.
fn parse(files: &[(String, String)], domains: &[&str]) -> Result<Vec<CertificateSpec>, certificate::CertificateError> {
    let mut env = minijinja::Environment::new();
    env.set_undefined_behavior(minijinja::UndefinedBehavior::Strict);
    let render = |template: &str, item: Option<&str>| {
        let context = minijinja::context! {
            namespaces => minijinja::context! { operator => "buildkit-operator", builds => "buildkit-builds" },
            certs => minijinja::context! {
                daemonSecretName => "buildkit-daemon-certs",
                clientSecretName => "buildkit-client-certs",
                apiSecretName => "buildkit-operator-api-certs",
            },
            clusterDomain => "cluster.local",
            item => item,
        };
        env.render_str(template, context).map_err(|error| error.to_string())
    };
    let list = |name: &str| match name {
        "gateway.domains" => Ok(domains.iter().map(|&d| d.to_owned()).collect()),
        _ => Err(format!("\"{name}\" is no value")),
    };
    certificate::parse(files, &render, &list)
}

fn specs(domains: &[&str]) -> Vec<CertificateSpec> {
    // The reference's three; ours has tests of its own.
    let mut specs = parse(&certificate::embedded(), domains).unwrap();
    specs.retain(|spec| spec.name != "api");
    specs
}

fn spec<'a>(specs: &'a [CertificateSpec], name: &str) -> &'a CertificateSpec {
    specs.iter().find(|spec| spec.name == name).unwrap()
}

fn outcome<'a>(outcomes: &'a [Outcome], name: &str) -> &'a Outcome {
    outcomes.iter().find(|outcome| outcome.spec.name == name).unwrap()
}

fn data<'a>(outcomes: &'a [Outcome], name: &str) -> &'a SecretData {
    outcome(outcomes, name).data.as_ref().unwrap()
}

/// The cluster after the outcomes were written.
fn written(outcomes: &[Outcome]) -> LiveSecrets {
    let secret = |o: &Outcome| {
        let data = o.data.clone()?;
        let secret = LiveSecret { data, ..LiveSecret::default() };
        Some(((o.spec.namespace.clone(), o.spec.secret.clone()), secret))
    };
    outcomes.iter().filter_map(secret).collect()
}

fn key_of(spec: &CertificateSpec) -> (String, String) {
    (spec.namespace.clone(), spec.secret.clone())
}

fn fresh(domains: &[&str]) -> (Vec<CertificateSpec>, Vec<Outcome>) {
    let specs = specs(domains);
    let outcomes = materialise(&specs, &BTreeMap::new(), now()).unwrap();
    (specs, outcomes)
}

fn words(outcomes: &[Outcome]) -> Vec<(&str, &str)> {
    outcomes.iter().map(|o| (o.spec.name.as_str(), o.decision.word())).collect()
}

fn renamed(data: &SecretData, names: &[(&str, &str)]) -> SecretData {
    names.iter().map(|(from, to)| (*to, data.get(from).unwrap().to_vec())).collect()
}

// ── declarations ────────────────────────────────────────────────────────────

#[test]
fn the_embedded_declarations_ask_for_the_reference_s_certificates() {
    let specs = specs(&["builds.example.org", "Builds.Other.example.", "builds.example.org"]);
    assert_eq!(specs.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["ca", "client", "daemon"]);
    let ca = spec(&specs, "ca");
    assert_eq!(ca.secret_path(), "buildkit-operator/buildkit-operator-ca");
    assert_eq!(ca.lifetime, Duration::from_secs(3650 * 86_400));
    let daemon = spec(&specs, "daemon");
    assert_eq!(daemon.secret_path(), "buildkit-builds/buildkit-daemon-certs");
    assert_eq!(
        daemon.dns_names,
        [
            "*.buildkit-builds.svc",
            "*.buildkit-builds.svc.cluster.local",
            "localhost",
            "*.builds.example.org",
            "*.builds.other.example"
        ]
    );
    assert_eq!(daemon.ip_addresses, ["127.0.0.1".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!((daemon.lifetime, daemon.renew_before), (days(365), days(30)));
    let client = spec(&specs, "client");
    assert_eq!(client.secret_path(), "buildkit-builds/buildkit-client-certs");
    assert_eq!(
        (client.common_name.as_str(), client.dns_names.as_slice()),
        ("client", ["client".to_owned()].as_slice())
    );
}

#[test]
fn an_authority_is_written_a_level_before_what_it_signs() {
    let specs = specs(&[]);
    let authority = spec(&specs, "ca").runlevel;
    assert!(specs.iter().filter(|s| !s.is_authority()).all(|s| s.runlevel > authority));
}

#[test]
fn an_authority_outlives_what_it_signs_even_on_the_last_day_before_its_renewal() {
    let specs = specs(&[]);
    let window = spec(&specs, "ca").renew_before;
    assert!(specs.iter().filter(|s| !s.is_authority()).all(|s| s.lifetime < window));
}

fn days(n: u64) -> Duration {
    Duration::from_secs(n * 86_400)
}

#[test]
fn a_value_cannot_inject_structure_into_a_declaration() {
    let error = parse(&certificate::embedded(), &["a.example\"\nauthority: true"]).unwrap_err();
    assert_eq!(error.0.len(), 2, "{error}");
    assert!(error.0.iter().all(|fault| fault.problem.contains("control character")), "{error}");
}

#[test]
fn all_faults_are_reported_at_once_with_file_and_field() {
    let files = [
        (
            "certs/a.yaml".to_owned(),
            "name: a\ncomponent: c\nrunlevel: rc9\nsecret: {namespace: n, nam: s}\nisuer: ca\nusages: [serverauth]\n\
             commonName: 7\ndnsNames: ['{{ nope }}', 'a..b', '*.1.2.3.4', {each: gone, value: '{{ item }}'}, \
             {each: gateway.domains, value: '-{{ item }}'}]\nipAddresses: [localhost]\nlifetime: 30d\nrenewBefore: 30d\n"
                .to_owned(),
        ),
        ("certs/b.yaml".to_owned(), "- a list".to_owned()),
        ("certs/c.yaml".to_owned(), "name: [".to_owned()),
        (
            "certs/d.yaml".to_owned(),
            "name: d\ncomponent: c\nrunlevel: rc1\nsecret: {namespace: n, name: s}\nauthority: true\nissuer: x\n\
             commonName: ' '\nlifetime: soon\nrenewBefore: 0s\n"
                .to_owned(),
        ),
    ];
    let error = parse(&files, &["x.example"]).unwrap_err().to_string();
    insta::assert_snapshot!(error, @r#"
    certs/a.yaml: isuer: unknown field, did you mean "issuer"?
    certs/a.yaml: runlevel: "rc9" is no runlevel, want rc0 to rc4
    certs/a.yaml: secret.nam: unknown field, did you mean "name"?
    certs/a.yaml: secret.name: is missing
    certs/a.yaml: commonName: want text, got a number; quote it
    certs/a.yaml: issuer: is missing
    certs/a.yaml: usages[0]: "serverauth" is no usage, want serverAuth or clientAuth
    certs/a.yaml: usages: want serverAuth, clientAuth or both
    certs/a.yaml: dnsNames[0]: undefined value: `nope` is undefined (in <string>:1)
    certs/a.yaml: dnsNames[3].each: "gone" is no value
    certs/a.yaml: dnsNames[1]: "a..b" is no DNS name, nor a wildcard such as *.example.org
    certs/a.yaml: dnsNames[2]: "*.1.2.3.4" is no DNS name, nor a wildcard such as *.example.org
    certs/a.yaml: dnsNames[4]: "-x.example" is no DNS name, nor a wildcard such as *.example.org
    certs/a.yaml: ipAddresses[0]: want an address such as 127.0.0.1, got "localhost"
    certs/a.yaml: renewBefore: must be shorter than lifetime, or every run would renew
    certs/b.yaml: want a mapping, got a list
    certs/c.yaml: not YAML: did not find expected node content at line 2 column 1, while parsing a flow node
    certs/d.yaml: commonName: " " renders to nothing
    certs/d.yaml: issuer: an authority has none
    certs/d.yaml: lifetime: want a duration from 1h to 36500d such as 365d, got "soon"
    certs/d.yaml: renewBefore: want a duration from 1h to 36500d such as 365d, got "0s"
    "#);
}

#[test]
fn declarations_that_disagree_with_one_another_are_refused() {
    let leaf = |name: &str, secret: &str, issuer: &str| {
        format!(
            "name: {name}\ncomponent: c\nrunlevel: rc1\nsecret: {{namespace: n, name: {secret}}}\nissuer: {issuer}\n\
             usages: [clientAuth]\ncommonName: x\nlifetime: 30d\nrenewBefore: 3d\n"
        )
    };
    let files = [("certs/a.yaml".to_owned(), leaf("a", "s", "ca")), ("certs/b.yaml".to_owned(), leaf("a", "s", "a"))];
    let error = parse(&files, &[]).unwrap_err().to_string();
    insta::assert_snapshot!(error, @r#"
    certs/a.yaml: issuer: "ca" is no authority declared here
    certs/b.yaml: name: "a" is declared in certs/a.yaml already
    certs/b.yaml: secret: "n/s" is the Secret of certs/a.yaml already
    certs/b.yaml: issuer: "a" is no authority declared here
    "#);
}

// ── decisions ───────────────────────────────────────────────────────────────

struct Case {
    specs: Vec<CertificateSpec>,
    ca: LiveCertificate,
    daemon: SecretData,
}

impl Case {
    fn new() -> Self {
        let (specs, outcomes) = fresh(&["builds.example.org"]);
        let ca = LiveCertificate::read_authority(data(&outcomes, "ca")).unwrap();
        Self { ca, daemon: data(&outcomes, "daemon").clone(), specs }
    }

    fn decide(&self, data: &SecretData, at: Timestamp) -> Decision {
        let live = LiveCertificate::read_leaf(data);
        decide_leaf(spec(&self.specs, "daemon"), Some(&live), Authority::Held(&self.ca), at)
    }

    fn not_held(&self, data: &SecretData, at: Timestamp) -> Decision {
        let live = LiveCertificate::read_leaf(data);
        decide_leaf(spec(&self.specs, "daemon"), Some(&live), Authority::NotHeld, at)
    }

    fn with(&self, key: &str, value: &[u8]) -> SecretData {
        let mut data = self.daemon.clone();
        data.insert(key, value);
        data
    }

    fn without(&self, key: &str) -> SecretData {
        self.daemon.keys().filter(|k| *k != key).map(|k| (k, self.daemon.get(k).unwrap())).collect()
    }
}

#[test]
fn a_leaf_is_kept_renewed_or_issued_by_its_age() {
    let case = Case::new();
    let end = LiveCertificate::read_leaf(&case.daemon).unwrap().not_after;
    assert_eq!(end, after(365));
    for (at, want) in [
        (now(), Decision::Keep),
        (after(334), Decision::Keep),
        (after(335), Decision::Renew(Reason::Expiring(end))),
        (after(364), Decision::Renew(Reason::Expiring(end))),
        (after(365), Decision::Issue(Reason::Expired(end))),
        (after(400), Decision::Issue(Reason::Expired(end))),
        (after(-1), Decision::Issue(Reason::NotYetValid(before_by(now(), 300)))),
    ] {
        assert_eq!(case.decide(&case.daemon, at), want, "{at}");
    }
}

fn before_by(at: Timestamp, seconds: i64) -> Timestamp {
    Timestamp::from_second(at.as_second() - seconds).unwrap()
}

#[test]
fn a_leaf_that_is_not_as_wanted_is_issued_anew() {
    let case = Case::new();
    let (_, other) = fresh(&["builds.example.org"]);
    let (_, narrow) = fresh(&[]);
    let other_key = data(&other, "daemon").get("key.pem").unwrap();
    let both = [data(&other, "ca").get("ca.pem").unwrap(), case.daemon.get("ca.pem").unwrap()].concat();
    for (data, want) in [
        (case.without("cert.pem"), Reason::Malformed(Malformed::KeyMissing("cert.pem"))),
        (case.without("key.pem"), Reason::Malformed(Malformed::KeyMissing("key.pem"))),
        (case.without("ca.pem"), Reason::Malformed(Malformed::KeyMissing("ca.pem"))),
        (case.with("cert.pem", b"garbage"), Reason::Malformed(Malformed::NoCertificate("cert.pem"))),
        (
            case.with("cert.pem", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            Reason::Malformed(Malformed::NotX509("cert.pem")),
        ),
        (case.with("key.pem", b"garbage"), Reason::KeyUnreadable),
        (case.with("key.pem", other_key), Reason::KeyDiffers),
        (data(&other, "daemon").clone(), Reason::OtherAuthority),
    ] {
        assert_eq!(case.decide(&data, now()), Decision::Issue(want.clone()), "{want}");
    }
    assert_eq!(case.decide(&case.with("ca.pem", &both), now()), Decision::Keep, "it may trust more than one");
    let stale = data(&other, "ca").get("ca.pem").unwrap();
    assert_eq!(case.decide(&case.with("ca.pem", stale), now()), Decision::Renew(Reason::AuthorityChanged));

    let ca = LiveCertificate::read_authority(data(&narrow, "ca")).unwrap();
    let live = LiveCertificate::read_leaf(data(&narrow, "daemon"));
    let missing = Reason::NamesMissing(vec!["*.builds.example.org".to_owned()]);
    assert_eq!(
        decide_leaf(spec(&case.specs, "daemon"), Some(&live), Authority::Held(&ca), now()),
        Decision::Issue(missing)
    );
    let client = LiveCertificate::read_leaf(data(&narrow, "client"));
    let mut wanted = spec(&case.specs, "daemon").clone();
    wanted.dns_names = vec!["client".to_owned()];
    wanted.ip_addresses.clear();
    assert_eq!(
        decide_leaf(&wanted, Some(&client), Authority::Held(&ca), now()),
        Decision::Issue(Reason::UsageMissing(Usage::ServerAuth))
    );
    assert_eq!(
        decide_leaf(spec(&case.specs, "daemon"), None, Authority::Held(&ca), now()),
        Decision::Issue(Reason::Missing)
    );
}

#[test]
fn more_names_than_wanted_are_no_reason_to_issue() {
    let case = Case::new();
    let narrow = specs(&[]);
    let live = LiveCertificate::read_leaf(&case.daemon);
    let daemon = spec(&narrow, "daemon");
    assert_eq!(decide_leaf(daemon, Some(&live), Authority::Held(&case.ca), now()), Decision::Keep);
    let mut wanted = daemon.clone();
    wanted.dns_names = vec!["one.builds.example.org".to_owned()];
    assert_eq!(decide_leaf(&wanted, Some(&live), Authority::Held(&case.ca), now()), Decision::Keep);
    wanted.dns_names = vec!["two.one.builds.example.org".to_owned()];
    assert_eq!(decide_leaf(&wanted, Some(&live), Authority::Held(&case.ca), now()).word(), "issue");
}

#[test]
fn a_leaf_whose_authority_s_key_is_elsewhere_is_never_written() {
    let case = Case::new();
    let (_, other) = fresh(&[]);
    let end = after(365);
    let narrow = data(&other, "daemon").clone();
    let missing = Reason::NamesMissing(vec!["*.builds.example.org".to_owned()]);
    for (data, at, want) in [
        (case.daemon.clone(), now(), Decision::Provided(vec![])),
        (case.daemon.clone(), after(340), Decision::Provided(vec![Reason::Expiring(end)])),
        (case.daemon.clone(), after(366), Decision::Provided(vec![Reason::Expired(end)])),
        (narrow.clone(), now(), Decision::Provided(vec![missing.clone()])),
        (narrow, after(340), Decision::Provided(vec![Reason::Expiring(end), missing])),
        (
            case.with("ca.pem", data(&other, "ca").get("ca.pem").unwrap()),
            now(),
            Decision::Provided(vec![Reason::OtherAuthority]),
        ),
        (
            case.with("key.pem", data(&other, "daemon").get("key.pem").unwrap()),
            now(),
            Decision::Provided(vec![Reason::KeyDiffers]),
        ),
        (case.without("cert.pem"), now(), Decision::Blocked(Reason::Malformed(Malformed::KeyMissing("cert.pem")))),
    ] {
        assert_eq!(case.not_held(&data, at), want);
    }
    let daemon = spec(&case.specs, "daemon");
    assert_eq!(decide_leaf(daemon, None, Authority::NotHeld, now()), Decision::Blocked(Reason::Missing));
    let tls = renamed(&case.daemon, &[("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")]);
    assert_eq!(case.decide(&tls, now()), Decision::Provided(vec![]), "cert-manager keeps it");
}

#[test]
fn an_authority_is_issued_once_renewed_if_ours_and_else_left_alone() {
    let (specs, outcomes) = fresh(&[]);
    let ca = spec(&specs, "ca");
    let full = data(&outcomes, "ca").clone();
    let keyless = renamed(&full, &[("ca.pem", "ca.pem")]);
    let (_, other) = fresh(&[]);
    let mut differs = full.clone();
    differs.insert("ca-key.pem", data(&other, "ca").get("ca-key.pem").unwrap());
    let leaf = renamed(data(&outcomes, "daemon"), &[("cert.pem", "ca.pem"), ("key.pem", "ca-key.pem")]);
    let tls = renamed(&full, &[("ca.pem", "tls.crt"), ("ca-key.pem", "tls.key")]);
    let garbage: SecretData = [("ca.pem", "garbage")].into_iter().collect();
    let malformed = || Reason::Malformed(Malformed::NoCertificate("ca.pem"));
    let end = after(3650);
    for (name, data, adopted, at, want) in [
        ("nothing there", None, false, now(), Decision::Issue(Reason::Missing)),
        ("leaves of another", None, true, now(), Decision::Provided(vec![])),
        ("garbage", Some(&garbage), false, now(), Decision::Issue(malformed())),
        ("garbage, in use", Some(&garbage), true, now(), Decision::Provided(vec![malformed()])),
        ("ours", Some(&full), true, now(), Decision::Keep),
        ("ours, aging", Some(&full), true, after(3300), Decision::Renew(Reason::Expiring(end))),
        ("ours, past", Some(&full), true, after(3651), Decision::Renew(Reason::Expired(end))),
        ("no key", Some(&keyless), true, now(), Decision::Provided(vec![])),
        ("no key, not in use", Some(&keyless), false, now(), Decision::Provided(vec![])),
        ("no key, aging", Some(&keyless), true, after(3300), Decision::Provided(vec![Reason::Expiring(end)])),
        ("another's key", Some(&differs), true, now(), Decision::Provided(vec![Reason::KeyDiffers])),
        (
            "no authority",
            Some(&leaf),
            true,
            now(),
            Decision::Provided(vec![Reason::NotAuthority, Reason::Expiring(after(365))]),
        ),
        ("cert-manager's", Some(&tls), true, now(), Decision::Provided(vec![])),
    ] {
        let live = data.map(LiveCertificate::read_authority);
        assert_eq!(decide_authority(ca, live.as_ref(), adopted, at), want, "{name}");
    }
    let mut theirs = ca.clone();
    theirs.common_name = "somebody else".to_owned();
    let live = LiveCertificate::read_authority(&full);
    assert_eq!(
        decide_authority(&theirs, Some(&live), true, after(3300)),
        Decision::Provided(vec![Reason::Expiring(end)]),
        "one that was handed over stays as it is"
    );
}

// ── issuing ─────────────────────────────────────────────────────────────────

#[test]
fn a_first_run_issues_all_and_the_second_changes_no_byte() {
    let (specs, first) = fresh(&["builds.example.org"]);
    assert_eq!(words(&first), [("ca", "issue"), ("client", "issue"), ("daemon", "issue")]);
    let second = materialise(&specs, &written(&first), after(100)).unwrap();
    assert_eq!(words(&second), [("ca", "keep"), ("client", "keep"), ("daemon", "keep")]);
    assert_eq!(written(&first), written(&second));
}

#[test]
fn a_run_cut_after_any_write_is_completed_without_a_second_authority() {
    let (specs, first) = fresh(&["builds.example.org"]);
    let order = [spec(&specs, "ca"), spec(&specs, "daemon"), spec(&specs, "client")];
    let all = written(&first);
    for cut in 0..=order.len() {
        let live: LiveSecrets = order[..cut].iter().map(|s| (key_of(s), all[&key_of(s)].clone())).collect();
        let again = materialise(&specs, &live, now()).unwrap();
        for kept in &order[..cut] {
            assert_eq!(data(&again, &kept.name), &all[&key_of(kept)].data, "cut after {cut}");
        }
        let (ca, daemon, client) = (data(&again, "ca"), data(&again, "daemon"), data(&again, "client"));
        let server_name = "buildkitd-p1.builds.example.org";
        handshake(ca.get("ca.pem").unwrap(), daemon, client, server_name, now()).unwrap();
    }
}

#[test]
fn another_gateway_domain_issues_the_daemon_s_certificate_alone() {
    let (_, first) = fresh(&["one.example"]);
    let wider = specs(&["one.example", "two.example"]);
    let second = materialise(&wider, &written(&first), after(1)).unwrap();
    assert_eq!(words(&second), [("ca", "keep"), ("client", "keep"), ("daemon", "issue")]);
    assert_eq!(outcome(&second, "daemon").decision.to_string(), "issue: it does not cover *.two.example");
    let (old, new) = (data(&first, "daemon"), data(&second, "daemon"));
    assert_ne!(old.get("key.pem"), new.get("key.pem"));
    let ca = data(&first, "ca").get("ca.pem").unwrap();
    handshake(ca, new, data(&first, "client"), "buildkitd-p1.two.example", after(1)).unwrap();
    assert!(handshake(ca, old, data(&first, "client"), "buildkitd-p1.two.example", after(1)).is_err());
}

#[test]
fn a_renewed_authority_keeps_its_key_so_that_old_and_new_trust_one_another() {
    let (specs, first) = fresh(&["a.example"]);
    let at = after(3300);
    // Leaves were renewed along the way: take those of a year before the end.
    let before = materialise(&specs, &written(&first), after(3000)).unwrap();
    let renewed = materialise(&specs, &written(&before), at).unwrap();
    assert_eq!(words(&renewed), [("ca", "renew"), ("client", "renew"), ("daemon", "renew")]);
    let (old, new) = (data(&before, "ca"), data(&renewed, "ca"));
    assert_eq!(old.get("ca-key.pem"), new.get("ca-key.pem"));
    assert_ne!(old.get("ca.pem"), new.get("ca.pem"));
    assert_eq!(LiveCertificate::read_authority(new).unwrap().not_after, after(3300 + 3650));
    for (trust, daemon, client) in [
        (old, data(&renewed, "daemon"), data(&before, "client")),
        (new, data(&before, "daemon"), data(&renewed, "client")),
        (new, data(&renewed, "daemon"), data(&renewed, "client")),
    ] {
        handshake(trust.get("ca.pem").unwrap(), daemon, client, "x.a.example", at).unwrap();
    }
    let third = materialise(&specs, &written(&renewed), at).unwrap();
    assert_eq!(written(&third), written(&renewed));
}

#[test]
fn a_leaf_never_outlives_its_authority_and_is_not_renewed_in_vain() {
    let (mut specs, _) = fresh(&[]);
    for spec in &mut specs {
        if spec.is_authority() {
            spec.common_name = "first".to_owned();
            spec.lifetime = days(20);
            spec.renew_before = days(1);
        }
    }
    let first = materialise(&specs, &BTreeMap::new(), now()).unwrap();
    assert_eq!(LiveCertificate::read_leaf(data(&first, "client")).unwrap().not_after, after(20));
    let second = materialise(&specs, &written(&first), after(1)).unwrap();
    assert_eq!(words(&second), [("ca", "keep"), ("client", "keep"), ("daemon", "keep")]);
}

#[test]
fn an_adopted_installation_is_left_alone_and_its_gaps_are_told_with_a_command() {
    let (_, theirs) = fresh(&["old.example"]);
    let mut live = written(&theirs);
    let wanted = specs(&["old.example"]);
    live.remove(&key_of(spec(&wanted, "ca")));
    let adopted = materialise(&wanted, &live, now()).unwrap();
    assert_eq!(words(&adopted), [("ca", "provided"), ("client", "provided"), ("daemon", "provided")]);
    assert!(adopted.iter().all(|o| o.data.is_none() && o.warnings.is_empty()));

    let wider = specs(&["old.example", "new.example"]);
    let adopted = materialise(&wider, &live, now()).unwrap();
    assert!(adopted.iter().all(|o| o.data.is_none()));
    let warnings: Vec<_> = adopted.iter().flat_map(|o| &o.warnings).collect();
    insta::assert_snapshot!(warnings[0], @r#"
    certificate "buildkit-builds/buildkit-daemon-certs": it does not cover *.new.example; hand its authority over, and the next run issues it:
      kubectl --namespace buildkit-operator create secret generic buildkit-operator-ca --from-file=ca.pem=ca.pem --from-file=ca-key.pem=ca-key.pem --dry-run=client --output=yaml | kubectl apply --server-side --filename=-
    "#);
    assert_eq!(warnings.len(), 1);

    // What the command does: the key is held from then on.
    live.extend(written(&theirs).into_iter().filter(|(key, _)| *key == key_of(spec(&wider, "ca"))));
    let taken = materialise(&wider, &live, now()).unwrap();
    assert_eq!(words(&taken), [("ca", "keep"), ("client", "keep"), ("daemon", "issue")]);
}

#[test]
fn a_missing_secret_that_nobody_can_sign_fails_with_the_command() {
    let (specs, theirs) = fresh(&[]);
    let mut live = written(&theirs);
    live.remove(&key_of(spec(&specs, "ca")));
    live.remove(&key_of(spec(&specs, "client")));
    let error = materialise(&specs, &live, now()).unwrap_err();
    assert!(matches!(error, IssueError::AuthorityKeyMissing { .. }));
    insta::assert_snapshot!(format!("{error}\n{}", error.hint().unwrap()), @r#"
    certificate Secrets "buildkit-builds/buildkit-client-certs" (there is no such Secret) must be issued, and no usable key of their authority is held
    hand the authority over, then run this again:
      kubectl --namespace buildkit-operator create secret generic buildkit-operator-ca --from-file=ca.pem=ca.pem --from-file=ca-key.pem=ca-key.pem --dry-run=client --output=yaml | kubectl apply --server-side --filename=-
    "#);
}

/// An installation that was adopted goes on without TLS for its API.
#[test]
fn the_api_s_certificate_is_issued_where_that_can_be_and_is_missed_nowhere() {
    let all = parse(&certificate::embedded(), &["a.example"]).unwrap();
    let first = materialise(&all, &BTreeMap::new(), now()).unwrap();
    let made = LiveCertificate::read_leaf(data(&first, "api")).unwrap();
    assert_eq!(made.not_after, after(365));
    let (_, theirs) = fresh(&["a.example"]);
    let mut live = written(&theirs);
    live.remove(&key_of(spec(&all, "ca")));
    let adopted = materialise(&all, &live, now()).unwrap();
    assert_eq!(outcome(&adopted, "api").decision.word(), "provided");
    let warnings: Vec<_> = adopted.iter().flat_map(|o| &o.warnings).collect();
    assert!(warnings[0].starts_with("certificate \"buildkit-operator/buildkit-operator-api-certs\": there is no such Secret; hand its authority over"), "{warnings:?}");
    assert_eq!(warnings.len(), 1);
}

#[test]
fn cert_manager_s_secrets_are_read_and_their_gap_names_its_certificate() {
    let (_, theirs) = fresh(&[]);
    let wanted = specs(&["new.example"]);
    let tls = |name: &str| LiveSecret {
        data: renamed(data(&theirs, name), &[("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")]),
        certificate_name: Some(format!("buildkit-operator-{name}")),
        ..LiveSecret::default()
    };
    let mut wanted_ip = wanted.clone();
    let daemon = wanted_ip.iter_mut().find(|s| s.name == "daemon").unwrap();
    daemon.ip_addresses.push("10.0.0.1".parse().unwrap());
    let live: LiveSecrets =
        ["daemon", "client"].into_iter().map(|name| (key_of(spec(&wanted, name)), tls(name))).collect();
    let adopted = materialise(&wanted_ip, &live, now()).unwrap();
    insta::assert_snapshot!(outcome(&adopted, "daemon").warnings.join("\n"), @r#"
    certificate "buildkit-builds/buildkit-daemon-certs": it does not cover *.new.example, 10.0.0.1; add it to its Certificate:
      kubectl --namespace buildkit-builds patch certificate buildkit-operator-daemon --type=json --patch='[{"op":"add","path":"/spec/dnsNames/-","value":"*.new.example"},{"op":"add","path":"/spec/ipAddresses/-","value":"10.0.0.1"}]'
    "#);
}

#[test]
fn an_authority_made_elsewhere_signs_whatever_its_key_s_encoding() {
    let dir = tempfile::tempdir().unwrap();
    let specs = specs(&["a.example"]);
    for (name, make) in [
        ("sec1", "ecparam -name prime256v1 -genkey -noout -out K"),
        ("pkcs8", "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-384 -out K"),
        ("pkcs1", "genrsa -traditional -out K 2048"),
        ("ed25519", "genpkey -algorithm ed25519 -out K"),
    ] {
        let (key, cert) = (dir.path().join(format!("{name}.key")), dir.path().join(format!("{name}.pem")));
        openssl(&make.replace('K', key.to_str().unwrap()));
        openssl(&format!(
            "req -x509 -new -key {} -out {} -subj /O=acme/CN=acme -days 30000",
            key.display(),
            cert.display()
        ));
        let at = Timestamp::now();
        let at = Timestamp::from_second(at.as_second() + 60).unwrap();
        let authority: SecretData =
            [("ca.pem", std::fs::read(&cert).unwrap()), ("ca-key.pem", std::fs::read(&key).unwrap())]
                .into_iter()
                .collect();
        assert_eq!(LiveCertificate::read_authority(&authority).unwrap().key, KeyState::Matches, "{name}");
        let secret = LiveSecret { data: authority.clone(), ..LiveSecret::default() };
        let live = [(key_of(spec(&specs, "ca")), secret)].into_iter().collect();
        let outcomes = materialise(&specs, &live, at).unwrap();
        assert_eq!(words(&outcomes), [("ca", "keep"), ("client", "issue"), ("daemon", "issue")], "{name}");
        let trust = authority.get("ca.pem").unwrap();
        handshake(trust, data(&outcomes, "daemon"), data(&outcomes, "client"), "x.a.example", at).unwrap();
    }
}

#[test]
fn openssl_verifies_chain_purpose_and_extensions() {
    let (_, outcomes) = fresh(&["builds.example.org"]);
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("ca"), data(&outcomes, "ca").get("ca.pem").unwrap()).unwrap();
    for (name, purpose, host) in
        [("daemon", "sslserver", "buildkitd-p1.builds.example.org"), ("client", "sslclient", "client")]
    {
        std::fs::write(path(name), data(&outcomes, name).get("cert.pem").unwrap()).unwrap();
        let at = now().as_second();
        openssl(&format!(
            "verify -x509_strict -attime {at} -purpose {purpose} -verify_hostname {host} -CAfile {} {}",
            path("ca"),
            path(name)
        ));
        let wrong = if purpose == "sslserver" { "sslclient" } else { "sslserver" };
        let refused = Command::new("openssl")
            .args(["verify", "-attime", &at.to_string(), "-purpose", wrong, "-CAfile", &path("ca"), &path(name)])
            .output()
            .unwrap();
        assert!(!refused.status.success(), "{name} must not serve as {wrong}");
    }
    let ca = openssl(&format!("x509 -noout -text -in {}", path("ca")));
    assert!(ca.contains("CA:TRUE, pathlen:0") && ca.contains("Certificate Sign, CRL Sign"), "{ca}");
    let daemon = openssl(&format!("x509 -noout -text -in {}", path("daemon")));
    for want in [
        "prime256v1",
        "CA:FALSE",
        "Digital Signature",
        "TLS Web Server Authentication",
        "X509v3 Subject Key Identifier",
        "X509v3 Authority Key Identifier",
        "DNS:*.buildkit-builds.svc, DNS:*.buildkit-builds.svc.cluster.local, DNS:localhost, \
         DNS:*.builds.example.org, IP Address:127.0.0.1",
    ] {
        assert!(daemon.contains(want), "{want} in {daemon}");
    }
    assert!(!daemon.contains("TLS Web Client"), "{daemon}");
}

#[test]
fn serial_numbers_differ_even_for_one_key() {
    let (specs, first) = fresh(&[]);
    let renewed = materialise(&specs, &written(&first), after(3300)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let serial = |outcomes: &[Outcome]| {
        let path = dir.path().join("c");
        std::fs::write(&path, data(outcomes, "ca").get("ca.pem").unwrap()).unwrap();
        openssl(&format!("x509 -noout -serial -in {}", path.display()))
    };
    assert_ne!(serial(&first), serial(&renewed));
}

#[test]
fn mutual_tls_works_for_every_name_and_refuses_strangers() {
    let (_, ours) = fresh(&["builds.example.org"]);
    let (_, strangers) = fresh(&["builds.example.org"]);
    let ca = data(&ours, "ca").get("ca.pem").unwrap();
    let (daemon, client) = (data(&ours, "daemon"), data(&ours, "client"));
    for name in
        ["buildkitd-p1.buildkit-builds.svc", "buildkitd-p1.buildkit-builds.svc.cluster.local", "localhost", "127.0.0.1"]
    {
        handshake(ca, daemon, client, name, now()).unwrap();
    }
    for (name, daemon, client, at) in [
        ("elsewhere.example", daemon, client, now()),
        ("localhost", data(&strangers, "daemon"), client, now()),
        ("localhost", daemon, data(&strangers, "client"), now()),
        ("localhost", client, client, now()),
        ("localhost", daemon, daemon, now()),
        ("localhost", daemon, client, after(366)),
    ] {
        handshake(ca, daemon, client, name, at).unwrap_err();
    }
}

// ── objects ─────────────────────────────────────────────────────────────────

#[test]
fn a_secret_object_reads_back_as_the_data_it_was_made_of() {
    let (_, outcomes) = fresh(&[]);
    let mut spec = outcome(&outcomes, "client").spec.clone();
    spec.labels.insert("app.kubernetes.io/part-of".to_owned(), "farm".to_owned());
    let object = secret_object(&spec, data(&outcomes, "client"));
    assert_eq!(object.id.to_string(), "Secret buildkit-builds/buildkit-client-certs");
    assert_eq!((object.runlevel, object.component.as_str()), (Runlevel::Rc2, "certificates"));
    assert_eq!(object.body["type"], "Opaque");
    assert_eq!(object.body["metadata"]["labels"]["app.kubernetes.io/part-of"], "farm");
    let back = LiveSecret::from_manifest(&object.body).unwrap();
    assert_eq!(&back.data, data(&outcomes, "client"));
    let typed: k8s_openapi::api::core::v1::Secret =
        serde_json::from_value(serde_json::Value::clone(&object.body)).unwrap();
    assert_eq!(LiveSecret::from(typed), back);
}

#[test]
fn a_private_key_is_never_debug_printed() {
    let (_, outcomes) = fresh(&[]);
    let printed = format!("{outcomes:?}");
    assert!(printed.contains("\"key.pem\": \"") && printed.contains(" bytes"), "{printed}");
    assert!(!printed.contains("BEGIN"), "{printed}");
}

// ── the commands ────────────────────────────────────────────────────────────

/// An API server that knows these Secrets alone, and a kubeconfig for it.
async fn api_server(outcomes: &[Outcome], dir: &std::path::Path) -> String {
    use axum::extract::{Path, State};
    use axum::http::StatusCode;
    use axum::{Json, Router, routing::get};
    use serde_json::{Value, json};

    let mut secrets = HashMap::new();
    for outcome in outcomes {
        let object = secret_object(&outcome.spec, outcome.data.as_ref().unwrap());
        secrets.insert(key_of(&outcome.spec), Value::clone(&object.body));
    }
    let version = json!({
        "major": "1", "minor": "36", "gitVersion": "v1.36.3", "gitCommit": "", "gitTreeState": "", "buildDate": "",
        "goVersion": "", "compiler": "", "platform": "",
    });
    let status = |code: StatusCode, reason: &str| {
        let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason,
            "message": reason, "code": code.as_u16()});
        (code, Json(body))
    };
    let secret = move |State(secrets): State<Arc<HashMap<(String, String), Value>>>,
                       Path(key): Path<(String, String)>| {
        let answer = match secrets.get(&key) {
            _ if key.0 == "forbidden" => status(StatusCode::FORBIDDEN, "Forbidden"),
            Some(body) => (StatusCode::OK, Json(body.clone())),
            None => status(StatusCode::NOT_FOUND, "NotFound"),
        };
        async move { answer }
    };
    let app = Router::new()
        .route("/version", get(move || async move { Json(version) }))
        .route("/api/v1/namespaces/{namespace}/secrets/{name}", get(secret))
        .with_state(Arc::new(secrets));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    let path = dir.join("kubeconfig");
    let config = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: t\ncontexts: [{{name: t, context: {{cluster: t, user: t}}}}]\n\
         clusters: [{{name: t, cluster: {{server: \"http://{address}\"}}}}]\nusers: [{{name: t, user: {{}}}}]\n"
    );
    std::fs::write(&path, config).unwrap();
    path.display().to_string()
}

async fn certs(kubeconfig: &str, args: &[&str]) -> std::process::Output {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_bko-install"));
    command.arg("certs").args(args).args(["--kubeconfig", kubeconfig]).env_clear();
    command.output().await.unwrap()
}

#[tokio::test]
async fn the_list_shows_what_is_in_the_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let specs = parse(&certificate::embedded(), &["builds.example.org"]).unwrap();
    let an_hour_ago = before_by(Timestamp::now(), 3600);
    let outcomes = materialise(&specs, &BTreeMap::new(), an_hour_ago).unwrap();
    let kubeconfig = api_server(&outcomes, dir.path()).await;
    let output = certs(&kubeconfig, &["list", "--output", "json"]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 4);
    assert!(rows.as_array().unwrap().iter().all(|row| row["verdict"] == "keep"), "{rows}");
    let daemon = rows.as_array().unwrap().iter().find(|row| row["name"] == "daemon").unwrap();
    assert_eq!(
        (&daemon["name"], &daemon["secret"]),
        (&"daemon".into(), &"buildkit-builds/buildkit-daemon-certs".into())
    );
    assert_eq!((&daemon["subject"], &daemon["issuer"]), (&"CN=buildkitd".into(), &"CN=buildkit-operator CA".into()));
    assert_eq!(daemon["daysLeft"], 364);
    assert!(daemon["names"].as_array().unwrap().contains(&"*.builds.example.org".into()), "{daemon}");
    assert!(daemon["notAfter"].as_str().unwrap().parse::<Timestamp>().is_ok());

    let output = certs(&kubeconfig, &["list", "--namespace", "elsewhere"]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("client  elsewhere/buildkit-client-certs  issue: there is no such Secret"), "{text}");
    let output = certs(&kubeconfig, &["list", "--operator-namespace", "forbidden"]).await;
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("not allowed to read Secret \"forbidden/buildkit-operator-ca\""), "{text}");
    assert!(text.contains("hint: "), "{text}");
}

#[tokio::test]
async fn the_export_writes_what_a_client_needs_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (_, outcomes) = fresh(&[]);
    let kubeconfig = api_server(&outcomes, dir.path()).await;
    let out = dir.path().join("client");
    let out_text = out.to_str().unwrap();
    let output = certs(&kubeconfig, &["export", "--dir", out_text]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = ["ca.pem", "cert.pem", "key.pem"];
    let want: String = names.iter().map(|name| format!("{out_text}/{name}\n")).collect();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), want);
    for name in names {
        assert_eq!(std::fs::read(out.join(name)).unwrap(), data(&outcomes, "client").get(name).unwrap());
    }
    assert_eq!(out.read_dir().unwrap().count(), 3);

    std::fs::write(out.join("cert.pem"), "another").unwrap();
    let output = certs(&kubeconfig, &["export", "--dir", out_text]).await;
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(5), "{text}");
    assert!(text.contains("--force") && !text.contains("BEGIN"), "{text}");
    let output = certs(&kubeconfig, &["export", "--dir", out_text, "--force", "--quiet"]).await;
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 0));

    let output = certs(&kubeconfig, &["export", "--dir", out_text, "--namespace", "elsewhere"]).await;
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.starts_with("error: there is no Secret \"elsewhere/buildkit-client-certs\"\n\nhint: "), "{text}");
}

// ── tools ───────────────────────────────────────────────────────────────────

fn openssl(line: &str) -> String {
    let output = Command::new("openssl").args(line.split_whitespace()).output().expect("openssl is installed");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "openssl {line}\n{text}");
    text
}

#[derive(Debug)]
struct At(Timestamp);

impl rustls::time_provider::TimeProvider for At {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs(self.0.as_second().try_into().unwrap())))
    }
}

fn chain(data: &SecretData) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
    let certificates = CertificateDer::pem_slice_iter(data.get("cert.pem").unwrap()).map(Result::unwrap).collect();
    (certificates, PrivateKeyDer::from_pem_slice(data.get("key.pem").unwrap()).unwrap())
}

/// A mutual-TLS handshake in memory and one byte each way; the daemon trusts
/// the `ca.pem` of its own Secret, as buildkitd does.
fn handshake(
    ca: &[u8],
    daemon: &SecretData,
    client: &SecretData,
    name: &str,
    at: Timestamp,
) -> Result<(), Box<dyn std::error::Error>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let time = Arc::new(At(at));
    let roots = |pem: &[u8]| {
        let mut roots = rustls::RootCertStore::empty();
        CertificateDer::pem_slice_iter(pem).for_each(|c| roots.add(c.unwrap()).unwrap());
        Arc::new(roots)
    };
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
        roots(daemon.get("ca.pem").unwrap()),
        Arc::clone(&provider),
    )
    .build()?;
    let (certificates, key) = chain(daemon);
    let server = rustls::ServerConfig::builder_with_details(Arc::clone(&provider), time.clone())
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates, key)?;
    let (certificates, key) = chain(client);
    let config = rustls::ClientConfig::builder_with_details(provider, time)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(ca))
        .with_client_auth_cert(certificates, key)?;
    let mut server = rustls::ServerConnection::new(Arc::new(server))?;
    let mut client = rustls::ClientConnection::new(Arc::new(config), ServerName::try_from(name.to_owned())?)?;
    client.writer().write_all(b"?")?;
    server.writer().write_all(b"!")?;
    let (mut got, mut wire) = (HashMap::new(), Vec::new());
    for _ in 0..8 {
        while client.wants_write() {
            client.write_tls(&mut wire)?;
        }
        server.read_tls(&mut wire.as_slice())?;
        server.process_new_packets()?;
        wire.clear();
        while server.wants_write() {
            server.write_tls(&mut wire)?;
        }
        client.read_tls(&mut wire.as_slice())?;
        client.process_new_packets()?;
        wire.clear();
        for (who, reader) in [("server", &mut server.reader() as &mut dyn Read), ("client", &mut client.reader())] {
            let mut byte = [0];
            if matches!(reader.read(&mut byte), Ok(1)) {
                got.insert(who, byte[0]);
            }
        }
    }
    let want = HashMap::from([("server", b'?'), ("client", b'!')]);
    if got == want { Ok(()) } else { Err(format!("exchanged {got:?}").into()) }
}
