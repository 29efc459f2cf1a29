//! Embedding reads whole folders: a file that is added or removed must rebuild
//! the bundle too.

fn main() {
    for folder in ["manifests", "profiles", "certs"] {
        println!("cargo::rerun-if-changed={folder}");
    }
}
