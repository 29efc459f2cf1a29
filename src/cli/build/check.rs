//! What can be known of a build before a daemon is woken for it.

#![expect(clippy::disallowed_methods, reason = "looks for an SSH agent, as builders do")]

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};

use super::args::BuildArgs;
use crate::cli::exit::{Code, Failure};
use crate::client::builder::{Spec, is_remote};

/// Refuses what cannot work, and returns what to warn of.
pub(super) fn check(args: &BuildArgs, spec: &Spec) -> Result<Vec<String>, Failure> {
    if !is_remote(&spec.context) && spec.context != "-" {
        sources(spec)?;
    }
    spec.tags.iter().try_for_each(|tag| named(tag))?;
    spec.ssh.iter().try_for_each(|ssh| reachable(ssh))?;
    for (flag, path) in [("--metadata-file", &spec.metadata_file), ("--digest-file", &args.image.digest_file)] {
        if let Some(path) = path {
            writable(path)
                .map_err(|error| Failure::new(Code::Usage, error.context(format!("{flag} cannot be written"))))?;
        }
    }
    exports(args, spec)
}

fn usage(error: anyhow::Error, hint: &str) -> Failure {
    Failure::new(Code::Usage, error).hint(hint)
}

fn sources(spec: &Spec) -> Result<(), Failure> {
    let folder = Path::new(&spec.context);
    if !folder.is_dir() {
        let error = anyhow!("there is no folder \"{}\" to build", folder.display());
        return Err(usage(
            error,
            "CONTEXT is a folder, the URL of a repository or an archive, or - for standard input",
        ));
    }
    let missing = |path: &Path| anyhow!("there is no Dockerfile \"{}\"", path.display());
    match &spec.file {
        None if gives(&spec.extra, "f", "file") => Ok(()),
        None if ["Dockerfile", "dockerfile"].iter().any(|name| folder.join(name).is_file()) => Ok(()),
        None => Err(usage(missing(&folder.join("Dockerfile")), "name another with --file")),
        Some(file) if file.is_file() || file == Path::new("-") || is_remote(&file.to_string_lossy()) => Ok(()),
        Some(file) if folder.join(file).is_file() => {
            let hint =
                format!("--file counts from here and not from the context: --file {}", folder.join(file).display());
            Err(usage(missing(file), &hint))
        }
        Some(file) => Err(usage(missing(file), "--file counts from here and not from the context")),
    }
}

/// Whether the builder's own arguments hold this one.
fn gives(extra: &[OsString], short: &str, long: &str) -> bool {
    extra.iter().any(|word| {
        let word = word.to_string_lossy();
        let whole = word.strip_prefix("--").is_some_and(|rest| rest.split('=').next() == Some(long));
        whole || word.strip_prefix('-').is_some_and(|rest| !rest.starts_with('-') && rest.starts_with(short))
    })
}

/// Mistakes that builders find only once they are connected.
fn named(tag: &str) -> Result<(), Failure> {
    let repository = tag.split('@').next().unwrap_or_default();
    let path = repository.split_once('/').map_or(repository, |(_, path)| path);
    let colons = path.matches(':').count();
    let path = path.split(':').next().unwrap_or_default();
    let odd =
        colons > 1 || tag.is_empty() || tag.contains("://") || tag.chars().any(|c| c.is_whitespace() || c.is_control());
    if !odd && !path.is_empty() && !path.chars().any(|c| c.is_ascii_uppercase()) {
        return Ok(());
    }
    let error = anyhow!("--tag \"{tag}\" is no name of an image");
    Err(usage(error, "want registry.example.org/shop:1, in lower case, without https:// before it"))
}

/// An agent, or the files of keys.
fn reachable(ssh: &str) -> Result<(), Failure> {
    let error = match ssh.split_once('=') {
        None if std::env::var_os("SSH_AUTH_SOCK").is_none_or(|socket| socket.is_empty()) => {
            anyhow!("--ssh \"{ssh}\" without an SSH agent: SSH_AUTH_SOCK is not set")
        }
        // With `=` it is an option such as raw=true.
        Some((_, paths)) => match paths.split(',').find(|path| !path.contains('=') && !Path::new(path).exists()) {
            Some(path) => anyhow!("--ssh \"{ssh}\": there is no \"{path}\""),
            None => return Ok(()),
        },
        None => return Ok(()),
    };
    Err(usage(error, "want default with an agent (ssh-agent, ssh-add), or NAME=KEY with the file of a key"))
}

/// Leaves what is there as it is.
fn writable(path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        return Err(anyhow!("\"{}\" is a folder", path.display()));
    }
    // Not a pipe: opening one waits for its reader.
    if path.is_file() {
        let file = OpenOptions::new().append(true).open(path);
        return file.map(drop).with_context(|| format!("cannot write \"{}\"", path.display()));
    }
    if path.exists() {
        return Ok(());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.map_or_else(|| PathBuf::from("."), Path::to_owned);
    tempfile::tempfile_in(&folder).map(drop).with_context(|| format!("cannot write to folder \"{}\"", folder.display()))
}

fn exports(args: &BuildArgs, spec: &Spec) -> Result<Vec<String>, Failure> {
    let flags = [("\0", "push"), ("\0", "load"), ("o", "output")];
    let further = flags.iter().any(|(short, long)| gives(&spec.extra, short, long));
    let image = |output: &String| {
        ["image", "registry", "oci", "docker"].iter().any(|kind| output.contains(&format!("type={kind}")))
    };
    let digested = spec.push || spec.load || further || spec.outputs.iter().any(image);
    if args.image.digest_file.is_some() && !digested {
        let error = anyhow!(
            "--digest-file without --push, --load, or --output of type image, registry, oci or docker: nothing else has a digest"
        );
        return Err(usage(error, "add one of them"));
    }
    if digested || !spec.outputs.is_empty() {
        return Ok(Vec::new());
    }
    let tagged = !spec.tags.is_empty();
    let warning = "nothing is exported, and --tag names nothing: add --push, --load or --output";
    Ok(tagged.then(|| warning.to_owned()).into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_images_are_told_from_mistakes() {
        for tag in ["shop", "shop:1", "localhost:5000/a/b:V1", "r.example.org/a@sha256:ab", "LOCALHOST:1/a"] {
            assert!(named(tag).is_ok(), "{tag}");
        }
        for tag in
            ["", "https://r.example.org/a", "r.example.org/Shop:1", "a b", "a\n", "r.example.org/", ":1", "a:b:c"]
        {
            assert!(named(tag).is_err(), "{tag}");
        }
    }

    #[test]
    fn the_builder_s_own_arguments_are_read() {
        let extra = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        assert!(gives(&extra(&["--output=x"]), "o", "output") && gives(&extra(&["-o", "x"]), "o", "output"));
        assert!(!gives(&extra(&["--outputs", "--o"]), "o", "output"));
    }
}
