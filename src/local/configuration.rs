//! How a daemon is run: its `buildkitd.toml` and its command line. Pure.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use toml::{Table, Value};

use super::layout::Layout;
use super::process::Invocation;
use crate::companion::daemon::{Daemon, SocketAddress};
use crate::families::build_farm::build::config::{Base, buildkitd_toml};

/// The programs that daemons are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// `buildkitd`.
    pub buildkitd: PathBuf,
    /// `buildkit-runc`, or the `runc` of the host; found by buildkitd itself when absent.
    pub runc: Option<PathBuf>,
    /// `rootlesskit`, for an ordinary user.
    pub rootlesskit: Option<PathBuf>,
}

/// What all daemons have in common.
#[derive(Clone, Debug)]
pub struct Common {
    /// Where everything is.
    pub layout: Layout,
    /// What runs.
    pub programs: Programs,
    /// What the user gave for all daemons.
    pub base: Base,
    /// Port that daemons listen on, each on its own address.
    pub port: u16,
    /// `PATH` of daemons: theirs first, then this process's.
    pub path: OsString,
    /// Name of the user that runs them, where it is known.
    pub user: Option<String>,
}

/// One daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Its `buildkitd.toml`.
    pub toml: String,
    /// Its command line.
    pub invocation: Invocation,
}

impl Common {
    /// How the daemon of a project is run. `steps` is the cgroup that it puts its steps into.
    pub fn daemon(&self, key: &str, address: Ipv4Addr, cache_gi: i32, steps: Option<String>) -> Configuration {
        // An ordinary user's steps stay where their daemon is.
        let steps = steps.filter(|_| self.programs.rootlesskit.is_none());
        let toml = self.toml(key, address, cache_gi, steps);
        let mut words: Vec<OsString> = Vec::new();
        if let Some(rootlesskit) = &self.programs.rootlesskit {
            words.push(rootlesskit.into());
            // The network is the host's: what builds may reach is the host's business.
            words.extend(["--net=host", "--copy-up=/run"].map(OsString::from));
        }
        words.push((&self.programs.buildkitd).into());
        words.push("--config".into());
        words.push(self.layout.configuration(key).into());
        let mut environment = vec![("PATH".to_owned(), self.path.clone())];
        if self.programs.rootlesskit.is_some() {
            // Where runc keeps what runs, as long as it is told that this is no real root.
            environment.push(("XDG_RUNTIME_DIR".to_owned(), self.layout.daemon(key).join("runtime").into()));
            environment.push(("USER".to_owned(), self.user.clone().unwrap_or_else(|| "user".to_owned()).into()));
        }
        Configuration { toml, invocation: Invocation { words, environment } }
    }

    /// How a daemon is asked. Needs a runtime to run in.
    ///
    /// # Errors
    /// When its socket has no address.
    pub fn client(&self, key: &str) -> Result<Daemon, String> {
        let address = format!("unix://{}", self.layout.socket(key).display()).parse::<SocketAddress>();
        address.map(Daemon::new).map_err(|error| error.to_string())
    }

    fn toml(&self, key: &str, address: Ipv4Addr, cache_gi: i32, steps: Option<String>) -> String {
        let mut table: Table = buildkitd_toml(&self.base, cache_gi).parse().unwrap_or_default();
        let text = |path: &Path| Value::String(path.display().to_string());
        let certificates = self.layout.daemon(key).join("certs");
        let tls = [("ca", "ca.pem"), ("cert", "cert.pem"), ("key", "key.pem")];
        let tls: Table =
            tls.into_iter().map(|(name, file)| (name.to_owned(), text(&certificates.join(file)))).collect();
        let socket = format!("unix://{}", self.layout.socket(key).display());
        let addresses = [socket, format!("tcp://{address}:{}", self.port)].map(Value::String).to_vec();
        let grpc = table.entry("grpc").or_insert_with(|| Value::Table(Table::new()));
        if let Some(grpc) = grpc.as_table_mut() {
            grpc.insert("address".to_owned(), Value::Array(addresses));
            grpc.insert("tls".to_owned(), Value::Table(tls));
        }
        // Daemons must not share the one that is usual.
        let traces = [("socketPath".to_owned(), text(&self.layout.traces(key)))].into_iter().collect();
        table.insert("otel".to_owned(), Value::Table(traces));
        table.insert("root".to_owned(), text(&self.layout.cache(key)));
        let worker = table.entry("worker").or_insert_with(|| Value::Table(Table::new()));
        if let Some(worker) = worker.as_table_mut() {
            let containerd: Table = [("enabled".to_owned(), Value::Boolean(false))].into_iter().collect();
            worker.insert("containerd".to_owned(), Value::Table(containerd));
            let oci = worker.entry("oci").or_insert_with(|| Value::Table(Table::new()));
            if let Some(oci) = oci.as_table_mut() {
                oci.insert("enabled".to_owned(), Value::Boolean(true));
                if let Some(runc) = &self.programs.runc {
                    oci.insert("binary".to_owned(), text(runc));
                }
                if let Some(steps) = steps {
                    oci.insert("defaultCgroupParent".to_owned(), Value::String(steps));
                }
                if self.programs.rootlesskit.is_some() {
                    oci.insert("rootless".to_owned(), Value::Boolean(true));
                    // Steps cannot mount a /proc of their own there; they see one another's processes.
                    oci.insert("noProcessSandbox".to_owned(), Value::Boolean(true));
                }
            }
        }
        toml::to_string(&table).unwrap_or_default()
    }
}

impl Configuration {
    /// What identifies it, with the certificate that the daemon reads at its start.
    pub fn fingerprint(&self, certificate: &[u8]) -> String {
        let mut hash = Sha256::new();
        hash.update(&self.toml);
        for word in &self.invocation.words {
            hash.update(b"\0");
            hash.update(word.as_encoded_bytes());
        }
        hash.update(certificate);
        hex::encode(&hash.finalize()[..16])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(rootless: bool) -> Common {
        Common {
            layout: Layout::new("/var/lib/bko".into()).unwrap(),
            programs: Programs {
                buildkitd: "/usr/bin/buildkitd".into(),
                runc: rootless.then(|| "/var/lib/bko/bin/buildkit-runc".into()),
                rootlesskit: rootless.then(|| "/usr/bin/rootlesskit".into()),
            },
            base: Base::parse("[registry.\"docker.io\"]\nmirrors = [\"m\"]\n[grpc]\nuid = 5\n", None).unwrap(),
            port: 1235,
            path: "/usr/bin".into(),
            user: Some("ci".into()),
        }
    }

    #[test]
    fn a_daemon_is_told_everything_by_its_file() {
        let daemon = common(false).daemon("p1", [127, 1, 2, 3].into(), 60, Some("/bko/p1".into()));
        insta::assert_snapshot!(daemon.toml, @r#"
        root = "/var/lib/bko/caches/p1"

        [grpc]
        address = ["unix:///var/lib/bko/run/p1.sock", "tcp://127.1.2.3:1235"]
        uid = 5

        [grpc.tls]
        ca = "/var/lib/bko/daemons/p1/certs/ca.pem"
        cert = "/var/lib/bko/daemons/p1/certs/cert.pem"
        key = "/var/lib/bko/daemons/p1/certs/key.pem"

        [otel]
        socketPath = "/var/lib/bko/run/p1.otel"

        [registry."docker.io"]
        mirrors = ["m"]

        [worker.containerd]
        enabled = false

        [worker.oci]
        defaultCgroupParent = "/bko/p1"
        enabled = true
        gc = true

        [[worker.oci.gcpolicy]]
        all = true
        maxUsedSpace = "54760833024"
        minFreeSpace = "6442450944"
        reservedSpace = "25769803776"
        "#);
        assert_eq!(
            daemon.invocation.words,
            ["/usr/bin/buildkitd", "--config", "/var/lib/bko/daemons/p1/buildkitd.toml"]
        );
    }

    #[test]
    fn an_ordinary_user_runs_it_within_a_user_namespace() {
        let daemon = common(true).daemon("p1", [127, 1, 2, 3].into(), 60, Some("/bko/p1".into()));
        let words: Vec<_> = daemon.invocation.words.iter().map(|w| w.to_string_lossy()).collect();
        assert_eq!(words[0], "/usr/bin/rootlesskit");
        let environment: Vec<_> = daemon.invocation.environment.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(environment, ["PATH", "XDG_RUNTIME_DIR", "USER"]);
        let table: Table = daemon.toml.parse().unwrap();
        let oci = &table["worker"]["oci"];
        assert_eq!(oci["noProcessSandbox"].as_bool(), Some(true));
        assert!(oci.get("defaultCgroupParent").is_none());
        assert_eq!(oci["binary"].as_str(), Some("/var/lib/bko/bin/buildkit-runc"));
        assert_ne!(daemon.fingerprint(b"a"), daemon.fingerprint(b"b"));
        assert_ne!(
            daemon.fingerprint(b"a"),
            common(false).daemon("p1", [127, 1, 2, 3].into(), 60, Some("/bko/p1".into())).fingerprint(b"a")
        );
    }
}
