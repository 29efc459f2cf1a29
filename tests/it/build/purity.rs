//! `build` and `key` run wherever the builders do: what one system alone has is
//! in one file, behind conditions.

use std::path::{Path, PathBuf};

const PLATFORM: &str = "src/client/platform.rs";

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

fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn nothing_of_one_operating_system_is_called() {
    let parts = ["src/client.rs", "src/client", "src/cli/build.rs", "src/cli/build", "src/cli/key.rs", "src/key.rs"];
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
