//! `bko-install certs export`.
#![expect(clippy::disallowed_methods, reason = "reads the files that it would overwrite")]

use std::fs::DirBuilder;
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;

use super::{Namespaces, declared, fetch};
use crate::certificate::{LiveCertificate, Role, SecretData, Usage};
use crate::cli::exit::{Code, Failure};
use crate::cli::files::Replacement;
use crate::cli::{Global, report};

/// Where to write.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Directory to write to; made if it is not there
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Overwrite files with other content
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    namespaces: Namespaces,
}

pub(super) async fn run(args: ExportArgs, client: kube::Client, global: &Global) -> Result<(), Failure> {
    let specs = declared(&args.namespaces)?;
    let is_client = |role: &Role| matches!(role, Role::Leaf { usages, .. } if usages.contains(&Usage::ClientAuth));
    let spec = specs.iter().find(|spec| is_client(&spec.role)).context("no client certificate is declared")?;
    let secret = fetch(&client, &spec.namespace, &spec.secret).await?.ok_or_else(|| {
        Failure::new(Code::Failed, anyhow!("there is no Secret \"{}\"", spec.secret_path()))
            .hint("`bko-install cluster init` issues it; another namespace is named with --namespace")
    })?;
    LiveCertificate::read_leaf(&secret.data)
        .with_context(|| format!("Secret \"{}\" holds no client certificate", spec.secret_path()))?;
    write(&args.dir, &files(&secret.data), args.force)?;
    if !global.quiet {
        let mut out = report::stdout();
        for (name, _) in files(&secret.data) {
            writeln!(out, "{}", args.dir.join(name).display())?;
        }
    }
    Ok(())
}

/// File name and content, from either way to name a Secret's keys.
pub(in crate::cli) fn files(data: &SecretData) -> Vec<(&'static str, &[u8])> {
    [("ca.pem", "ca.crt"), ("cert.pem", "tls.crt"), ("key.pem", "tls.key")]
        .into_iter()
        .filter_map(|(ours, theirs)| Some((ours, data.get(ours).or_else(|| data.get(theirs))?)))
        .collect()
}

/// Writes all files or, where one would be overwritten, none.
fn write(dir: &Path, files: &[(&str, &[u8])], force: bool) -> Result<(), Failure> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .with_context(|| format!("cannot make directory \"{}\"", dir.display()))?;
    for (name, content) in files {
        let path = dir.join(name);
        match std::fs::read(&path) {
            Ok(existing) if existing == *content || force => {}
            Ok(_) => {
                let error = anyhow!("\"{}\" is there and holds something else", path.display());
                return Err(Failure::new(Code::Refused, error).hint("choose another --dir, or overwrite with --force"));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(cannot_write(&path, error)),
        }
    }
    let mut ready = Vec::new();
    for (name, content) in files {
        let path = dir.join(name);
        let open = || -> io::Result<Replacement> {
            let mut file = Replacement::new(&path, 0o600)?;
            file.writer().write_all(content)?;
            Ok(file)
        };
        ready.push((open().map_err(|error| cannot_write(&path, error))?, path));
    }
    for (file, path) in ready {
        file.commit().map_err(|error| cannot_write(&path, error))?;
    }
    Ok(())
}

fn cannot_write(path: &Path, error: io::Error) -> Failure {
    anyhow::Error::new(error).context(format!("cannot write \"{}\"", path.display())).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const FILES: [(&str, &[u8]); 3] = [("ca.pem", b"a"), ("cert.pem", b"c"), ("key.pem", b"k")];

    fn code(result: Result<(), Failure>) -> Option<Code> {
        result.err().map(|failure| failure.code)
    }

    #[test]
    fn files_are_private_and_a_second_export_is_no_conflict() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("new").join("certs");
        for _ in 0..2 {
            assert_eq!(code(write(&dir, &FILES, false)), None);
        }
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&dir), 0o700);
        for (name, content) in FILES {
            assert_eq!(std::fs::read(dir.join(name)).unwrap(), content);
            assert_eq!(mode(&dir.join(name)), 0o600);
        }
        assert_eq!(dir.read_dir().unwrap().count(), 3, "no temporary file stays");
    }

    #[test]
    fn a_file_with_other_content_is_kept_and_nothing_is_written_unless_forced() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path();
        std::fs::write(dir.join("key.pem"), "mine").unwrap();
        assert_eq!(code(write(dir, &FILES, false)), Some(Code::Refused));
        assert_eq!(dir.read_dir().unwrap().count(), 1);
        assert_eq!(std::fs::read(dir.join("key.pem")).unwrap(), b"mine");
        assert_eq!(code(write(dir, &FILES, true)), None);
        assert_eq!(std::fs::read(dir.join("key.pem")).unwrap(), b"k");
        assert_eq!(dir.join("key.pem").metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_directory_that_cannot_be_made_says_so() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("file");
        std::fs::write(&file, "").unwrap();
        let failure = write(&file.join("below"), &FILES, false).unwrap_err();
        assert!(failure.error.unwrap().to_string().starts_with("cannot make directory"));
    }

    #[test]
    fn cert_manager_s_names_are_exported_under_ours() {
        let data: SecretData =
            [("ca.crt", "a"), ("tls.crt", "c"), ("tls.key", "k"), ("other", "o")].into_iter().collect();
        assert_eq!(files(&data), FILES);
    }
}
