//! Secrets of a build: values become files, so that no command line holds one.
//! No error shows any of what was given: it may be a value in the wrong place.
#![expect(clippy::disallowed_methods, reason = "looks whether files and variables that are named are there")]

use std::path::{Path, PathBuf};

use super::args::{HIDDEN, ImageArgs};
use crate::cli::exit::{Code, Failure};

/// Names on the builder's command line; a line of base64 is longer.
const LONGEST_NAME: usize = 63;

/// What is wrong with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("is not NAME=VALUE")]
    NoSecret,
    #[error("has a name, but no value")]
    NoValue,
    #[error("has neither src=FILE nor env=VARIABLE beside its id")]
    NoSource,
    #[error("names a file that is not there")]
    NoFile,
    #[error("names a folder, or something else that is no file")]
    NotFile,
    #[error("names a variable that is not set")]
    NoVariable,
    #[error("names a variable that is not handed to the builder")]
    Hidden,
    #[error("has the name of another")]
    Twice,
    #[error("is the path of a file that cannot be read")]
    Unreadable,
    #[error("looks like the path of a file, but there is no such file")]
    Missing,
}

#[derive(Debug, PartialEq, Eq)]
enum Secret<'a> {
    Value {
        id: &'a str,
        value: &'a str,
    },
    /// As the builders take it.
    Reference {
        id: String,
        text: &'a str,
    },
}

/// What the builder is told; `keep` makes a value a file.
pub(super) fn secrets(
    image: &ImageArgs,
    keep: &mut dyn FnMut(&str, &str) -> Result<PathBuf, Failure>,
) -> Result<Vec<String>, Failure> {
    let variable = image.secret_lines.as_deref().unwrap_or_default();
    let lines = file(variable).map_err(|fault| refuse("the variable BUILDKIT_OPERATOR_SECRETS", fault))?;
    let flags = image.secrets.iter().enumerate().map(|(i, text)| (format!("--secret {}", i + 1), text.as_str(), true));
    let lines = lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let lines = lines.map(|(i, line)| (format!("line {} of BUILDKIT_OPERATOR_SECRETS", i + 1), line, false));
    let (mut told, mut ids) = (Vec::new(), Vec::new());
    for (place, text, flag) in flags.chain(lines) {
        let secret = read(text, flag).map_err(|fault| refuse(&place, fault))?;
        let (id, text) = match secret {
            Secret::Reference { id, text } => (id, text.to_owned()),
            Secret::Value { id, value } => {
                let path = keep(&format!("secret-{}", told.len()), value)?;
                (id.to_owned(), crate::client::builder::secret_file(id, &path))
            }
        };
        if ids.contains(&id) {
            return Err(refuse(&place, Fault::Twice));
        }
        ids.push(id);
        told.push(text);
    }
    Ok(told)
}

fn refuse(place: &str, fault: Fault) -> Failure {
    Failure::new(Code::Usage, anyhow::anyhow!("{place} {fault}")).hint(
        "want NAME=VALUE, with a NAME of letters, digits, _ . and -; in the variable one on each line. A secret of several \
         lines is `id=NAME,src=FILE`, or `id=NAME,env=VARIABLE` with the value in a variable of its own",
    )
}

/// Some CI systems keep a variable in a file, and its path in the variable.
fn file(variable: &str) -> Result<String, Fault> {
    let path = variable.trim();
    if path.is_empty() || path.contains(['=', '\n']) {
        return Ok(variable.to_owned());
    }
    // No secret has no `=`, so nothing else can be meant.
    let told = path.starts_with(['/', '.', '~']);
    match Path::new(path) {
        path if path.is_file() => {}
        path if told && path.exists() => return Err(Fault::NotFile),
        _ if told => return Err(Fault::Missing),
        _ => return Ok(variable.to_owned()),
    }
    std::fs::read_to_string(path).map_err(|_| Fault::Unreadable)
}

/// One secret. On a command line it is never split: a value may have several
/// lines. In the variable, what could be the continuation of a value is refused.
fn read(text: &str, flag: bool) -> Result<Secret<'_>, Fault> {
    let (id, value) = text.split_once('=').ok_or(Fault::NoSecret)?;
    if ["id", "type", "src", "source", "env"].contains(&id) {
        return reference(text, flag);
    }
    match value.trim_matches(|c: char| c == '=' || c.is_whitespace()) {
        _ if !is_name(id) => Err(Fault::NoSecret),
        "" => Err(Fault::NoValue),
        _ => Ok(Secret::Value { id, value }),
    }
}

fn is_name(id: &str) -> bool {
    id.len() <= LONGEST_NAME
        && id.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && id.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

/// The builders' own form: it goes to their command line as it is.
fn reference(text: &str, flag: bool) -> Result<Secret<'_>, Fault> {
    let (mut id, mut kind, mut source, mut variable) = (None, String::new(), None, None);
    for field in fields(text) {
        match field.split_once('=') {
            Some(("id", value)) if is_name(value) => id = Some(value.to_owned()),
            Some(("type", value @ ("file" | "env"))) => value.clone_into(&mut kind),
            Some(("src" | "source", value)) => source = Some(value.to_owned()),
            Some(("env", value)) => variable = Some(value.to_owned()),
            _ => return Err(Fault::NoSecret),
        }
    }
    let id = id.ok_or(Fault::NoSecret)?;
    if kind == "env" {
        variable = variable.or(source.take());
    }
    let file = |path: &str| Path::new(path).is_file();
    let set = |name: &str| !name.is_empty() && std::env::var_os(name).is_some();
    match (source, variable) {
        (Some(path), None) if !Path::new(&path).exists() => Err(Fault::NoFile),
        (Some(path), None) if !file(&path) => Err(Fault::NotFile),
        (_, Some(name)) if HIDDEN.contains(&name.as_str()) => Err(Fault::Hidden),
        (_, Some(name)) if !set(&name) => Err(Fault::NoVariable),
        // Docker looks for a variable and a file of that name. In a variable it is
        // as likely a value whose name is "id".
        (None, None) if !flag || !(set(&id) || file(&id)) => Err(Fault::NoSource),
        _ => Ok(Secret::Reference { id, text }),
    }
}

/// Split at commas, but not within quotes.
fn fields(text: &str) -> Vec<String> {
    let (mut fields, mut field, mut quoted) = (Vec::new(), String::new(), false);
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(std::mem::take(&mut field)),
            c => field.push(c),
        }
    }
    fields.push(field);
    fields
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of_line(text: &str) -> Result<Secret<'_>, Fault> {
        read(text, false)
    }

    #[test]
    fn a_value_is_taken_as_it_is() {
        for value in ["x", " x ", "a=b=", "a,b", "\"x\"", "-----BEGIN KEY-----\nAAAA=\n-----END KEY-----\n"] {
            assert_eq!(read(&format!("npm={value}"), true), Ok(Secret::Value { id: "npm", value }), "{value}");
        }
    }

    #[test]
    fn what_may_be_the_rest_of_a_value_is_no_secret() {
        for (line, fault) in [
            ("-----END KEY-----", Fault::NoSecret),
            ("MIIEvQIBADANBgkqhkiG9w0BAQEFAASC", Fault::NoSecret),
            ("abc=", Fault::NoValue),
            ("abc==", Fault::NoValue),
            ("abc= \t", Fault::NoValue),
            ("ab/c+d==", Fault::NoSecret),
            ("9bc==x", Fault::NoSecret),
            ("\"client\": \"a=b\"", Fault::NoSecret),
            ("//registry.npmjs.org/:_authToken=x", Fault::NoSecret),
            ("aws_key = x", Fault::NoSecret),
            ("  indented=x", Fault::NoSecret),
            ("export A=x", Fault::NoSecret),
            ("# A=x", Fault::NoSecret),
            ("\u{feff}A=x", Fault::NoSecret),
            ("=x", Fault::NoSecret),
            ("id=x", Fault::NoSource),
            ("env=production", Fault::NoSecret),
            ("type=x", Fault::NoSecret),
            ("id=x,password=y", Fault::NoSecret),
            ("id=x,env=NO_SUCH_VARIABLE", Fault::NoVariable),
            ("id=x,env=BUILDKIT_OPERATOR_TOKEN", Fault::Hidden),
            ("id=x,src=/no/such/file", Fault::NoFile),
            ("id=x,src=/", Fault::NotFile),
        ] {
            assert_eq!(of_line(line), Err(fault), "{line}");
        }
        let long = format!("{}=x", "a".repeat(64));
        assert_eq!(of_line(&long), Err(Fault::NoSecret));
    }

    #[test]
    fn the_variable_may_be_the_path_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("secrets"), "npm=x\n").unwrap();
        assert_eq!(file(&format!("{}\n", path("secrets"))).as_deref(), Ok("npm=x\n"));
        assert_eq!(file(&path("typo")), Err(Fault::Missing));
        assert_eq!(file("./typo"), Err(Fault::Missing));
        assert_eq!(file(&path("")), Err(Fault::NotFile));
        for text in ["npm=/x", "hunter2", ""] {
            assert_eq!(file(text).as_deref(), Ok(text));
        }
    }

    #[test]
    fn the_builders_own_form_stays() {
        for text in ["id=x,src=Cargo.toml", "type=env,id=x,src=PATH", "id=x,env=PATH", "id=x,\"src=Cargo.toml\""] {
            assert!(matches!(of_line(text), Ok(Secret::Reference { id, .. }) if id == "x"), "{text}");
        }
        assert!(matches!(read("id=PATH", true), Ok(Secret::Reference { .. })), "as Docker has it");
    }

    proptest! {
        #[test]
        fn no_line_of_base64_but_the_first_is_a_secret(bytes in proptest::collection::vec(any::<u8>(), 1..400)) {
            use base64::Engine as _;
            let packed = base64::engine::general_purpose::STANDARD.encode(bytes);
            for length in [64, 76] {
                for line in packed.as_bytes().chunks(length) {
                    prop_assert!(of_line(std::str::from_utf8(line).unwrap()).is_err());
                }
            }
        }
    }
}
