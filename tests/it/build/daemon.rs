//! A real `buildkitd`, shared by all tests of this process and gone with it.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Arc, OnceLock};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};

/// The domain below which daemons have their names.
pub(crate) const DOMAIN: &str = "builds.example.test";

/// Where `make tools` puts them.
pub(crate) fn tools() -> PathBuf {
    let cache = std::env::var_os("BKO_CACHE").map(PathBuf::from);
    let bin = cache.unwrap_or_else(|| std::env::home_dir().unwrap().join(".cache/bko")).join("bin");
    for tool in ["buildkitd", "buildctl", "buildx"] {
        assert!(bin.join(tool).exists(), "{tool} is not in {}: run `make tools`", bin.display());
    }
    bin
}

/// A certificate authority.
#[derive(Clone)]
pub(crate) struct Authority(Arc<CertifiedIssuer<'static, KeyPair>>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(Arc::new(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()))
    }

    pub(crate) fn pem(&self) -> String {
        CertifiedIssuer::as_ref(&self.0).pem()
    }

    /// Certificate and key.
    pub(crate) fn issue(&self, names: &[&str], usage: ExtendedKeyUsagePurpose) -> (String, String) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, self.0.as_ref()).unwrap().pem(), key.serialize_pem())
    }

    /// `ca.pem`, `cert.pem`, `key.pem` of a client of ours who trusts `trusted`.
    pub(crate) fn client_folder(&self, trusted: &Self, folder: &Path) {
        let (cert, key) = self.issue(&["client"], ExtendedKeyUsagePurpose::ClientAuth);
        std::fs::create_dir_all(folder).unwrap();
        for (name, text) in [("ca.pem", trusted.pem()), ("cert.pem", cert), ("key.pem", key)] {
            std::fs::write(folder.join(name), text).unwrap();
        }
    }
}

/// The daemon, and its farm's authority.
pub(crate) struct Daemon {
    pub(crate) address: SocketAddr,
    pub(crate) authority: Authority,
    /// Of the process that watches over it; its end is the daemon's.
    _lifeline: ChildStdin,
}

/// Ends the daemon and removes its state when this process has ended, however it did.
const WATCH: &str = r#"
state=$1 buildkitd=$2
exec 3<&0
"$buildkitd" --root "$state/root" --addr tcp://127.0.0.1:0 --config "$state/none.toml" \
    --tlscacert "$state/ca.pem" --tlscert "$state/cert.pem" --tlskey "$state/key.pem" \
    --oci-worker-snapshotter=native --containerd-worker=false --oci-worker-net=host 3<&- </dev/null &
pid=$!
cat <&3 >/dev/null
kill "$pid"
wait "$pid"
# A step that was cut leaves its root mounted.
while read -r _ mount _; do case $mount in "$state"/*) umount "$mount" ;; esac; done </proc/mounts
rm -rf "$state"
"#;

static DAEMON: OnceLock<Daemon> = OnceLock::new();

/// The daemon, started by the first who asks.
pub(crate) fn daemon() -> &'static Daemon {
    DAEMON.get_or_init(|| start(Authority::new()))
}

/// Another of the same farm.
pub(crate) fn second() -> &'static Daemon {
    static SECOND: OnceLock<Daemon> = OnceLock::new();
    SECOND.get_or_init(|| start(daemon().authority.clone()))
}

fn start(authority: Authority) -> Daemon {
    let names = [&format!("*.{DOMAIN}"), "localhost", "127.0.0.1"];
    let (cert, key) = authority.issue(&names, ExtendedKeyUsagePurpose::ServerAuth);
    let state = tempfile::Builder::new().prefix("bko-buildkitd-").tempdir().unwrap().keep();
    for (name, text) in
        [("ca.pem", authority.pem()), ("cert.pem", cert), ("key.pem", key), ("none.toml", String::new())]
    {
        std::fs::write(state.join(name), text).unwrap();
    }
    let mut watch = Command::new("sh");
    watch.args(["-c", WATCH, "watch"]).arg(&state).arg(tools().join("buildkitd"));
    watch.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    // Ctrl-C at the terminal is for the tests: the watch sees their end.
    std::os::unix::process::CommandExt::process_group(&mut watch, 0);
    let mut child = watch.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut printed = String::new();
    let address = lines.by_ref().find_map(|line| {
        printed += &format!("{line}\n");
        line.split("running server on ").nth(1)?.trim_end_matches('"').parse().ok()
    });
    let address = address.unwrap_or_else(|| panic!("buildkitd does not start (it needs root):\n{printed}"));
    let lifeline = child.stdin.take().unwrap();
    std::thread::spawn(move || {
        lines.for_each(drop);
        child.wait()
    });
    Daemon { address, authority, _lifeline: lifeline }
}
