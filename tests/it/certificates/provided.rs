//! Certificates that somebody else makes: what is told of them.

use bko_install::certificate::{Gap, provided};

use super::*;

fn gaps(change: impl FnOnce(&mut SecretData), at: Timestamp) -> Vec<Gap> {
    let (specs, outcomes) = fresh(&["a.example"]);
    let mut live = written(&outcomes);
    change(&mut live.get_mut(&key_of(spec(&specs, "daemon"))).unwrap().data);
    provided(&specs, &live, at)
}

fn told(gaps: &[Gap]) -> Vec<(bool, &str)> {
    gaps.iter()
        .map(|gap| {
            let (_, rest) = gap.message.split_once("\": ").unwrap();
            (gap.fatal, rest.split_once("; make it with:\n").unwrap().0)
        })
        .collect()
}

#[test]
fn what_is_as_wanted_is_not_spoken_of_and_the_authority_is_nobody_s_business() {
    assert_eq!(gaps(|_| {}, now()), []);
    let (specs, outcomes) = fresh(&["a.example"]);
    let mut live = written(&outcomes);
    live.remove(&key_of(spec(&specs, "ca")));
    assert_eq!(provided(&specs, &live, now()), []);
}

#[test]
fn what_cannot_work_is_fatal_and_what_will_end_is_told() {
    let (_, other) = fresh(&["a.example"]);
    let other = data(&other, "daemon").clone();
    let cases: [(&str, bool, Vec<Gap>); 6] = [
        ("key \"cert.pem\" is missing", true, gaps(|data| drop(data.remove("cert.pem")), now())),
        ("key \"key.pem\" is missing", true, gaps(|data| drop(data.remove("key.pem")), now())),
        (
            "its private key belongs to another certificate",
            true,
            gaps(|data| data.insert("key.pem", other.get("key.pem").unwrap()), now()),
        ),
        (
            "has keys of cert-manager, want \"ca.pem\", \"cert.pem\" and \"key.pem\"",
            true,
            gaps(
                |data| *data = renamed(data, &[("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")]),
                now(),
            ),
        ),
        ("another authority signed it", false, gaps(|data| data.insert("ca.pem", other.get("ca.pem").unwrap()), now())),
        ("key \"ca.pem\" holds no PEM certificate", true, gaps(|data| data.insert("ca.pem", "nothing"), now())),
    ];
    for (why, fatal, gaps) in &cases {
        assert_eq!(told(gaps), [(*fatal, *why)]);
    }
    let ended = gaps(|_| {}, after(400));
    assert!(told(&ended).iter().all(|(fatal, why)| *fatal && why.starts_with("it expired at")), "{ended:?}");
    let ending = gaps(|_| {}, after(340));
    assert!(told(&ending).iter().all(|(fatal, why)| !fatal && why.starts_with("it expires at")), "{ending:?}");
}

/// The commands are those that a shell takes: up to the signature, which is another's to give.
#[test]
fn a_gap_comes_with_commands_that_make_what_is_wanted() {
    let (_, outcomes) = fresh(&["a.example"]);
    let wanted = specs(&["a.example", "b.example"]);
    let gaps = provided(&wanted, &written(&outcomes), now());
    assert_eq!(told(&gaps), [(false, "it does not cover *.b.example")]);
    assert_eq!(gaps[0].secret, "buildkit-builds/buildkit-daemon-certs");
    let dir = tempfile::tempdir().unwrap();
    let request = gaps[0].message.lines().find(|line| line.contains("openssl req")).unwrap();
    let made = Command::new("sh").args(["-c", request]).current_dir(dir.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("ca.pem"), data(&outcomes, "ca").get("ca.pem").unwrap()).unwrap();
    std::fs::write(path("ca-key.pem"), data(&outcomes, "ca").get("ca-key.pem").unwrap()).unwrap();
    openssl(&format!(
        "x509 -req -in {} -CA {} -CAkey {} -CAcreateserial -days 3650 -copy_extensions copyall \
         -out {}",
        path("request.csr"),
        path("ca.pem"),
        path("ca-key.pem"),
        path("cert.pem"),
    ));
    let read = |name: &str| (name.to_owned(), std::fs::read(path(name)).unwrap());
    let secret: SecretData = ["ca.pem", "cert.pem", "key.pem"].into_iter().map(read).collect();
    let mut live = written(&outcomes);
    live.insert(key_of(spec(&wanted, "daemon")), LiveSecret { data: secret, ..LiveSecret::default() });
    assert_eq!(provided(&wanted, &live, now()), []);
}

#[test]
fn a_secret_that_is_missing_is_fatal_unless_it_is_optional() {
    let all = parse(&certificate::embedded(), &["a.example"]).unwrap();
    let gaps = provided(&all, &LiveSecrets::new(), now());
    let secrets: Vec<_> = gaps.iter().map(|gap| (gap.fatal, gap.secret.as_str())).collect();
    assert_eq!(
        secrets,
        [(true, "buildkit-builds/buildkit-client-certs"), (true, "buildkit-builds/buildkit-daemon-certs")]
    );
    assert!(
        gaps[0].message.contains("kubectl --namespace buildkit-builds create secret generic buildkit-client-certs")
    );
}
