//! Embedding reads whole folders: a file that is added or removed must rebuild
//! the bundle too. And `tests/mutants` needs a copy of the decision code that
//! can be broken; without that folder nothing is done for it.
#![expect(clippy::disallowed_methods, reason = "reads sources and writes their copy")]

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

/// The broken variants, in the format that its head describes.
const VARIANTS: &str = "tests/mutants/variants.diff";

/// What the copy is made of, and the modules that it takes from the library.
const ROOTS: [&str; 2] = ["families/build_farm", "runtime/lease"];
const FROM_LIBRARY: [&str; 5] = ["api", "args", "defaults", "directory", "scheduling"];

fn main() {
    for folder in ["manifests", "profiles", "certs"] {
        println!("cargo::rerun-if-changed={folder}");
    }
    if let Ok(variants) = fs::read_to_string(VARIANTS) {
        println!("cargo::rerun-if-changed={VARIANTS}");
        weave(&variants);
    }
}

/// One way to be wrong.
#[derive(Default)]
struct Variant<'a> {
    name: &'a str,
    file: &'a str,
    find: Vec<&'a str>,
    replace: Vec<&'a str>,
}

fn parse(text: &str) -> Vec<Variant<'_>> {
    let mut variants: Vec<Variant<'_>> = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("# ") {
            variants.push(Variant { name, ..Variant::default() });
        }
        let Some(last) = variants.last_mut() else { continue };
        if let Some(file) = line.strip_prefix("@ ") {
            last.file = file;
        } else if let Some(find) = line.strip_prefix('-') {
            last.find.push(find);
        } else if let Some(replace) = line.strip_prefix('+') {
            last.replace.push(replace);
        }
    }
    variants
}

/// Writes `product.rs` into the build's folder: the copy, with every variant
/// behind a switch, so that one build tries them all. What does not fit any more
/// is left out and named in `UNWOVEN`, so that a test fails and not the build.
fn weave(variants: &str) {
    let variants = parse(variants);
    let mut unwoven = Vec::new();
    let [farm, lease] = ROOTS.map(|root| module(root, &variants, &mut unwoven));
    let names: Vec<&str> = variants.iter().map(|variant| variant.name).collect();
    let mut text = String::from("pub use bko_install::*;\n");
    let _ = write!(text, "pub mod families {{ pub mod build_farm {{\n{farm}\n}} }}\n");
    let _ = write!(text, "pub mod runtime {{ pub use bko_install::runtime::*;\npub mod lease {{\n{lease}\n}} }}\n");
    let _ = writeln!(text, "pub const VARIANTS: &[&str] = &{names:?};\npub const UNWOVEN: &[&str] = &{unwoven:?};");
    let out = env::var("OUT_DIR").unwrap_or_default();
    if let Err(error) = fs::write(Path::new(&out).join("product.rs"), text) {
        println!("cargo::error=write product.rs: {error}");
    }
}

/// The source of a module with its submodules in place.
fn module<'a>(path: &str, variants: &[Variant<'a>], unwoven: &mut Vec<&'a str>) -> String {
    let file = format!("{path}.rs");
    println!("cargo::rerun-if-changed=src/{file}");
    let source = fs::read_to_string(format!("src/{file}")).unwrap_or_default();
    // Tests stand at the end.
    let source = source.split("#[cfg(test)]\n").next().unwrap_or_default();
    let text = mutate(&file, source, variants, unwoven).replace("crate::", "crate::product::");
    let text = text.replace("crate::product::mutant::", "crate::mutant::");
    let mut whole = String::new();
    for line in text.lines() {
        let name =
            line.strip_prefix("pub mod ").or_else(|| line.strip_prefix("mod ")).and_then(|l| l.strip_suffix(';'));
        let _ = match name {
            Some(name) if FROM_LIBRARY.contains(&name) => {
                writeln!(whole, "pub use bko_install::families::build_farm::{name};")
            }
            Some(name) => {
                let inner = module(&format!("{path}/{name}"), variants, unwoven);
                write!(whole, "pub mod {name} {{\n{inner}\n}}\n")
            }
            None => writeln!(whole, "{line}"),
        };
    }
    whole
}

fn mutate<'a>(file: &str, source: &str, variants: &[Variant<'a>], unwoven: &mut Vec<&'a str>) -> String {
    let mut text = source.to_owned();
    for (number, variant) in variants.iter().enumerate().filter(|(_, variant)| variant.file == file) {
        let find = variant.find.join("\n");
        if text.matches(&find).count() != 1 {
            unwoven.push(variant.name);
            continue;
        }
        let switch = format!("crate::mutant::is({number})");
        text = text.replace(&find, &variant.replace.join("\n").replace("BROKEN", &switch));
    }
    text
}
