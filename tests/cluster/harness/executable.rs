//! The executable under test.

use std::path::{Path, PathBuf};

use anyhow::ensure;

/// The release executable: what users run, and what goes into the image.
/// `$BKO_EXECUTABLE` names another.
///
/// # Errors
/// It is not built.
pub(crate) fn executable() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("BKO_EXECUTABLE").map_or_else(
        // <target>/tmp is where cargo lets tests put their files.
        || Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("release").join("bko-install"),
        PathBuf::from,
    );
    ensure!(
        path.is_file(),
        "\"{}\" does not exist\n\nhint: run `make build`, or set BKO_EXECUTABLE to the executable to test",
        path.display()
    );
    Ok(path)
}
