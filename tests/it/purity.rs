//! The core turns values into values: its modules name nothing that does IO,
//! tells the time or draws randomness. `clippy.toml` bans the calls; this reads
//! the source, so that not even the types get in.

use std::path::{Path, PathBuf};

/// Files and folders of the core, below `src`.
const CORE: [&str; 55] = [
    "names.rs",
    "printable.rs",
    "key.rs",
    "identity.rs",
    "identity",
    "profile.rs",
    "profile",
    "manifest.rs",
    "manifest",
    "certificate.rs",
    "certificate/decide.rs",
    "certificate/declare.rs",
    "certificate/provided.rs",
    "certificate/rotate.rs",
    "plan.rs",
    "plan",
    "preflight.rs",
    "preflight/access.rs",
    "preflight/admission.rs",
    "preflight/blame.rs",
    "preflight/daemon.rs",
    "preflight/dns.rs",
    "preflight/facilities.rs",
    "preflight/images.rs",
    "preflight/namespaces.rs",
    "preflight/pods.rs",
    "preflight/role.rs",
    "preflight/schema.rs",
    "preflight/secrets.rs",
    "preflight/storage.rs",
    "preflight/understood.rs",
    "provisioner/project.rs",
    "readiness.rs",
    "readiness",
    "sni.rs",
    "gateway/proxy.rs",
    "gateway/source.rs",
    "runtime/network.rs",
    "families/build_farm/ledger.rs",
    "families/build_farm/lifecycle.rs",
    "families/build_farm/project.rs",
    "families/build_farm/status.rs",
    "families/build_farm/validate.rs",
    "families/build_farm/settings.rs",
    "families/build_farm/truth.rs",
    "families/build_farm/build.rs",
    "families/build_farm/build",
    "local/address.rs",
    "local/budget/plan.rs",
    "local/cgroup/place.rs",
    "local/configuration.rs",
    "local/layout.rs",
    "local/record.rs",
    "local/recovery.rs",
    "local/witness.rs",
];

const FORBIDDEN: [&str; 13] = [
    "kube::Client",
    "kube::Api",
    "kube::client",
    "kube::api",
    "tokio",
    "axum",
    "hyper",
    "std::env",
    "std::fs",
    "std::net::Tcp",
    "std::process",
    "::now(",
    "getrandom",
];

fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = std::fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    entries
        .flat_map(|entry| sources(&entry.unwrap().path()))
        .filter(|p| p.extension().is_some_and(|e| e == "rs"))
        .collect()
}

/// Code without comments and without its tests.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_core_names_nothing_that_touches_the_world() {
    let src = Path::new("src");
    let mut found = Vec::new();
    for path in CORE.iter().flat_map(|part| sources(&src.join(part))) {
        let code = code(&path);
        found.extend(FORBIDDEN.iter().filter(|f| code.contains(**f)).map(|f| format!("{}: {f}", path.display())));
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// `build` and `key` run wherever the builders do: what one system alone has is
/// in one file, behind conditions.
const PLATFORM: &str = "src/client/platform.rs";

#[test]
fn nothing_of_one_operating_system_is_called() {
    let parts = [
        "src/client.rs",
        "src/client",
        "src/cli/access.rs",
        "src/cli/build.rs",
        "src/cli/build",
        "src/cli/key.rs",
        "src/key.rs",
        "src/printable.rs",
    ];
    let files: Vec<_> = parts.iter().flat_map(|part| sources(Path::new(part))).collect();
    assert!(files.len() > 15 && files.iter().any(|file| file == Path::new(PLATFORM)), "{files:?}");
    for file in files.iter().filter(|file| *file != Path::new(PLATFORM)) {
        for forbidden in ["rustix", "std::os::", "signal::unix", "/proc", "libc", "nix::"] {
            assert!(!code(file).contains(forbidden), "{}: {forbidden}", file.display());
        }
    }
}

#[test]
fn what_is_of_one_system_has_a_counterpart_for_the_others() {
    let code = code(Path::new(PLATFORM));
    assert!(!code.contains("std::os::linux") && !code.contains("target_os"), "unix, not Linux");
    for name in ["impl Stops {", "pub fn forward(", "pub fn make_private("] {
        assert_eq!(code.matches(name).count(), 2, "{name}");
    }
}
