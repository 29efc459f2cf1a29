//! A rotation never leaves somebody out who did what the stage before asked:
//! proven by handshakes of every old and new daemon with every old and new client.

use bko_install::certificate::rotate::{self, Stage, StepError};

use super::*;

const HOST: &str = "x.a.example";

/// A farm whose certificates are brought to what is wanted.
struct Farm {
    specs: Vec<CertificateSpec>,
    live: LiveSecrets,
    at: Timestamp,
}

impl Farm {
    fn new() -> Self {
        let mut farm = Self { specs: specs(&["a.example"]), live: LiveSecrets::new(), at: now() };
        farm.settle();
        farm
    }

    fn data(&self, name: &str) -> SecretData {
        self.live[&key_of(spec(&self.specs, name))].data.clone()
    }

    /// One write, as `certs rotate` begins a stage, a day later.
    fn step(&mut self, to: impl FnOnce(&CertificateSpec, &SecretData, Timestamp) -> SecretData) {
        self.at = Timestamp::from_second(self.at.as_second() + DAY).unwrap();
        let spec = spec(&self.specs, "ca").clone();
        let data = to(&spec, &self.data("ca"), self.at);
        self.live.insert(key_of(&spec), LiveSecret { data, ..LiveSecret::default() });
    }

    fn begin(&mut self) {
        self.step(|spec, data, at| rotate::begin(spec, data, at).unwrap());
    }

    fn go_on(&mut self) {
        self.step(|_, data, at| rotate::go_on(data, at).unwrap());
    }

    /// What every run does, until there is nothing to do.
    fn settle(&mut self) {
        self.live.extend(written(&materialise(&self.specs, &self.live, self.at).unwrap()));
        let again = materialise(&self.specs, &self.live, self.at).unwrap();
        assert!(again.iter().all(|outcome| outcome.decision == Decision::Keep), "{:?}", words(&again));
    }

    fn stage(&self) -> Stage {
        rotate::stage(&self.data("ca"))
    }

    fn pair(&self) -> Pair {
        Pair { daemon: self.data("daemon"), client: self.data("client"), at: self.at }
    }
}

/// A daemon started, and a client exported, in one stage.
struct Pair {
    daemon: SecretData,
    client: SecretData,
    at: Timestamp,
}

/// Whether a client reaches a daemon of perhaps another stage, the later one's day.
fn reaches(client: &Pair, daemon: &Pair) -> bool {
    let at = client.at.max(daemon.at);
    handshake(client.client.get("ca.pem").unwrap(), &daemon.daemon, &client.client, HOST, at).is_ok()
}

fn count(pem: &[u8]) -> usize {
    CertificateDer::pem_slice_iter(pem).map(Result::unwrap).count()
}

#[test]
fn who_follows_by_one_stage_is_never_left_out() {
    let mut farm = Farm::new();
    assert_eq!(farm.stage(), Stage::Idle);
    let mut stages = vec![farm.pair()];
    farm.begin();
    farm.settle();
    assert_eq!(farm.stage(), Stage::Trust { since: farm.at });
    stages.push(farm.pair());
    farm.go_on();
    farm.settle();
    assert_eq!(farm.stage(), Stage::Sign { since: farm.at });
    stages.push(farm.pair());
    farm.go_on();
    assert_eq!(farm.stage(), Stage::Drop);
    farm.settle();
    farm.go_on();
    farm.settle();
    assert_eq!(farm.stage(), Stage::Idle);
    stages.push(farm.pair());
    for (number, pair) in stages.iter().enumerate() {
        for (other, daemon) in stages.iter().enumerate() {
            let near = number.abs_diff(other) <= 1;
            // Beyond one stage the old and the new know nothing of one another.
            assert!(reaches(pair, daemon) || !near, "client of stage {number}, daemon of stage {other}");
        }
    }
    let [before, trust, sign, after] = stages.try_into().ok().unwrap();
    assert!(!reaches(&before, &after) && !reaches(&after, &before), "the old authority is trusted no more");
    assert!(!reaches(&trust, &after), "what the old authority signed is refused in the end");
    assert!(!reaches(&before, &sign), "who never took the new ca.pem knows the new authority by nothing");
    for (pair, trusted) in [(&before, 1), (&trust, 2), (&sign, 2), (&after, 1)] {
        for data in [&pair.daemon, &pair.client] {
            assert_eq!(count(data.get("ca.pem").unwrap()), trusted);
        }
    }
    let names: Vec<_> = farm.data("ca").keys().map(str::to_owned).collect();
    assert_eq!(names, ["ca-key.pem", "ca.pem"], "nothing is left of the rotation");
}

#[test]
fn a_stage_that_is_cut_off_leaves_nobody_out_and_is_completed() {
    for steps in 1..=3 {
        for cut in ["daemon", "client"] {
            let mut farm = Farm::new();
            let mut before = farm.pair();
            for step in 1..=steps {
                before = farm.pair();
                if step == 1 {
                    farm.begin()
                } else {
                    farm.go_on()
                }
                if step < steps {
                    farm.settle();
                }
            }
            // Only one Secret of the stage is written.
            let outcomes = materialise(&farm.specs, &farm.live, farm.at).unwrap();
            let key = key_of(spec(&farm.specs, cut));
            farm.live.insert(key.clone(), written(&outcomes)[&key].clone());
            let between = farm.pair();
            assert!(reaches(&between, &between), "stage {steps}, cut after {cut}");
            assert!(reaches(&before, &between) && reaches(&between, &before), "stage {steps}, cut after {cut}");
            farm.settle();
            assert!(reaches(&farm.pair(), &between) && reaches(&between, &farm.pair()));
        }
    }
}

#[test]
fn a_rotation_is_given_up_as_long_as_the_old_one_signs() {
    let mut farm = Farm::new();
    let before = farm.pair();
    assert_eq!(rotate::abort(&farm.data("ca")), Err(StepError::Idle));
    assert_eq!(rotate::go_on(&farm.data("ca"), now()).map(drop), Err(StepError::Idle));
    farm.begin();
    farm.settle();
    let during = farm.pair();
    farm.step(|_, data, _| rotate::abort(data).unwrap());
    farm.settle();
    farm.go_on();
    farm.settle();
    let after = farm.pair();
    assert_eq!((farm.stage(), farm.data("ca").get("next-ca-key.pem")), (Stage::Idle, None));
    assert_eq!(after.client.get("ca.pem"), before.client.get("ca.pem"), "the very bytes");
    for (client, daemon) in [(&before, &after), (&after, &before), (&during, &after), (&after, &during)] {
        assert!(reaches(client, daemon));
    }
    farm.begin();
    farm.settle();
    farm.go_on();
    assert_eq!(rotate::abort(&farm.data("ca")), Err(StepError::TooLate));
}

#[test]
fn an_authority_whose_key_is_elsewhere_is_not_rotated() {
    let farm = Farm::new();
    let ca = spec(&farm.specs, "ca");
    let held = farm.data("ca");
    let theirs = renamed(&held, &[("ca.pem", "ca.pem")]);
    let error = rotate::begin(ca, &theirs, now()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the authority \"buildkit-operator/buildkit-operator-ca\" cannot be rotated: its private key is not held here"
    );
    let tls = renamed(&held, &[("ca.pem", "tls.crt"), ("ca-key.pem", "tls.key")]);
    assert!(rotate::begin(ca, &tls, now()).unwrap_err().to_string().ends_with("cert-manager keeps it"));
}

/// Both authorities have one subject: what was signed by either is verified by its key.
#[test]
fn openssl_finds_the_right_one_of_two_authorities() {
    let mut farm = Farm::new();
    let old = farm.data("daemon");
    farm.begin();
    farm.settle();
    farm.go_on();
    farm.settle();
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("both"), farm.data("client").get("ca.pem").unwrap()).unwrap();
    for (name, data) in [("old", &old), ("new", &farm.data("daemon"))] {
        std::fs::write(path(name), data.get("cert.pem").unwrap()).unwrap();
        let at = farm.at.as_second();
        openssl(&format!(
            "verify -x509_strict -attime {at} -purpose sslserver -CAfile {} {}",
            path("both"),
            path(name)
        ));
    }
}

#[test]
fn an_authority_that_is_renewed_during_a_rotation_goes_on_with_it() {
    let mut farm = Farm::new();
    farm.begin();
    farm.settle();
    let trusted = farm.pair();
    farm.at = after(3300);
    let outcomes = materialise(&farm.specs, &farm.live, farm.at).unwrap();
    assert_eq!(outcome(&outcomes, "ca").decision.word(), "renew");
    farm.live.extend(written(&outcomes));
    assert!(matches!(farm.stage(), Stage::Trust { .. }));
    assert_eq!(count(farm.data("ca").get("ca.pem").unwrap()), 2);
    farm.go_on();
    farm.settle();
    let signed = farm.pair();
    assert_eq!(count(signed.client.get("ca.pem").unwrap()), 2);
    // By the new authority, which was known before the other was renewed.
    let ca = trusted.client.get("ca.pem").unwrap();
    handshake(ca, &signed.daemon, &signed.client, HOST, farm.at).unwrap();
}

/// Whoever holds the first `ca.pem` is never broken by a run: neither by other
/// names, nor by the renewal of the authority, nor by both at once.
#[test]
fn no_run_breaks_a_client_that_holds_the_old_authority() {
    let mut farm = Farm::new();
    let ca = farm.data("client").get("ca.pem").unwrap().to_vec();
    for day in [100, 340, 700, 1060, 1420, 3290, 3500] {
        farm.at = after(day);
        farm.specs = specs(&["a.example", &format!("day-{day}.example")]);
        farm.settle();
        // Its own certificate ends after a year; the authority that it trusts is looked at.
        let host = format!("x.day-{day}.example");
        handshake(&ca, &farm.data("daemon"), &farm.data("client"), &host, farm.at).unwrap();
    }
}
