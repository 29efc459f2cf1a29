//! The page on what went wrong for others names tests that exist.
#![allow(clippy::unwrap_used, reason = "a failed step fails the test")]

use std::path::Path;

/// `node::builds::daemon::a_changed_template` is a function of that name in
/// `tests/node/builds/daemon.rs`, and `src::key::…` one in `src/key.rs`.
#[test]
fn every_named_test_exists() {
    let page = include_str!("../../docs/failures.md");
    // Tests run in the folder of the package.
    let root = Path::new(".");
    let named = page.split('`').skip(1).step_by(2).filter(|word| word.contains("::"));
    let mut seen = 0;
    for name in named {
        let (module, function) = name.rsplit_once("::").unwrap();
        let path = format!("{}.rs", module.replace("::", "/"));
        let path = if path.starts_with("src/") { root.join(path) } else { root.join("tests").join(path) };
        let source = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(source.contains(&format!("fn {function}(")), "{name} is not in {}", path.display());
        seen += 1;
    }
    assert!(seen > 50, "{seen}");
}
