//! `bko-install export`.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};

use crate::manifest::export;

use super::Global;
use super::bundle::{BundleArgs, Recorded};
use super::exit::{Code, Failure};
use super::report::complain;

/// Write the manifests for GitOps; needs no cluster.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// In which form
    #[arg(long, value_enum, default_value_t = Format::Plain)]
    format: Format,
    /// Folder to write to: empty, missing, or an earlier export
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// What to write
    #[command(flatten)]
    bundle: BundleArgs,
}

/// The forms of an export.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// One file of manifests for each component, numbered in the order of applying
    Plain,
}

/// Runs the command.
///
/// # Errors
/// Faults of the profile or values; a folder that holds somebody's own files.
pub fn run(args: ExportArgs, global: &Global) -> Result<(), Failure> {
    let rendered = args.bundle.render(Recorded::default(), &args.bundle.default_image()?)?.rendered;
    let files = match args.format {
        Format::Plain => export::plain(&rendered),
    };
    let stale = earlier_files(&args.dir)?;
    write(&args.dir, &files, &stale)?;
    if !global.quiet {
        let left_out = export::left_out(&rendered);
        report(&args.dir, files.len(), &left_out);
    }
    Ok(())
}

/// The files of an earlier export.
#[expect(clippy::disallowed_methods, reason = "export writes files, and looks first whose it would replace")]
fn earlier_files(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let shown = dir.display();
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(anyhow::Error::new(error).context(format!("cannot read folder \"{shown}\"")).into()),
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read folder \"{shown}\""))?.path();
        let ours = path.is_file()
            && std::fs::read(&path).is_ok_and(|bytes| export::is_exported(&String::from_utf8_lossy(&bytes)));
        if !ours {
            let error = anyhow::anyhow!("\"{shown}\" holds \"{}\", which no export wrote", path.display());
            return Err(Failure::new(Code::Refused, error)
                .hint("choose an empty folder, a new one, or that of an earlier export"));
        }
        paths.push(path);
    }
    Ok(paths)
}

#[expect(clippy::disallowed_methods, reason = "export writes files")]
fn write(dir: &Path, files: &[(String, String)], earlier: &[PathBuf]) -> Result<(), Failure> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make folder \"{}\"", dir.display()))?;
    for (name, text) in files {
        let path = dir.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write \"{}\"", path.display()))?;
    }
    // A component that is gone must not be applied from a stale file.
    for path in earlier.iter().filter(|path| !files.iter().any(|(name, _)| path.ends_with(name))) {
        std::fs::remove_file(path).with_context(|| format!("cannot remove \"{}\"", path.display()))?;
    }
    Ok(())
}

fn report(dir: &Path, files: usize, left_out: &[String]) {
    complain(&format!("wrote {files} files to \"{}\"", dir.display()));
    if !left_out.is_empty() {
        complain(&format!("left out, because they hold secrets: {}", left_out.join(", ")));
        complain(&format!("\nhint: \"{}\" says how to make them", dir.join(export::NOTE).display()));
    }
}
