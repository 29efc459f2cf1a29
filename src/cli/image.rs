//! `bko-install image`.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;

use super::exit::{Code, Failure};
use super::files::Replacement;
use super::{Global, report};
use crate::image::{self, ImageError, Platform, Written};
use crate::key::Arch;

/// Write this executable as an OCI image; needs no Docker.
#[derive(Debug, Args)]
#[command(after_long_help = "The archive is an OCI layout that `ctr images import`, `docker load`, `skopeo` and \
    `kind load image-archive` read. The same executables give the same bytes. Prints the reference and the digest.")]
pub struct ImageArgs {
    /// File to write; `-` is standard output, and the summary then goes to standard error
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Executable of one architecture (amd64 or arm64); repeat for an image of several. This one is included as its own architecture's unless another is named
    #[arg(long, value_name = "ARCH=PATH", value_parser = platform)]
    executable: Vec<Platform>,
    /// Name of the image, with a tag.
    #[arg(
        long,
        value_name = "REF",
        help = "Name of the image, with a tag [default: docker.io/library/bko-install:<version>-<12 hex of the executable's SHA-256>, which is also what `cluster init` installs]"
    )]
    reference: Option<String>,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

fn platform(text: &str) -> Result<Platform, String> {
    let (arch, path) = text.split_once('=').ok_or("want ARCH=PATH, for example arm64=./bko-install-arm64")?;
    let arch = arch.parse::<Arch>().map_err(|error| error.to_string())?;
    if path.is_empty() { Err("the path is empty".to_owned()) } else { Ok(Platform { arch, executable: path.into() }) }
}

/// Runs the command.
pub fn run(args: ImageArgs, global: &Global) -> Result<(), Failure> {
    let platforms = platforms(args.executable)?;
    let reference = args.reference.as_deref().map(image::normalize_reference).transpose();
    let reference = reference.map_err(|error| Failure::new(Code::Usage, error))?;
    let reference = reference.as_deref();
    if args.output == Path::new("-") {
        let mut out = report::stdout();
        if io::stdout().is_terminal() {
            let error = anyhow!("refusing to write an archive to a terminal");
            return Err(Failure::new(Code::Usage, error).hint("name a file with --output FILE"));
        }
        let written = image::write(&platforms, reference, &mut out).map_err(fail)?;
        out.flush()?;
        if !global.quiet {
            // Whether the summary is read is of no account for the archive.
            let _ = summary(&written, args.json, &mut io::stderr().lock());
        }
        return Ok(());
    }
    let place = || format!("cannot write \"{}\"", args.output.display());
    let mut file = Replacement::new(&args.output, 0o644).with_context(place)?;
    let written = image::write(&platforms, reference, file.writer()).map_err(fail)?;
    file.commit().with_context(place)?;
    Ok(summary(&written, args.json, &mut report::stdout())?)
}

/// The executables named, and this one unless its architecture is named.
fn platforms(mut named: Vec<Platform>) -> Result<Vec<Platform>, Failure> {
    for (i, one) in named.iter().enumerate() {
        if named[..i].iter().any(|other| other.arch == one.arch) {
            let error = anyhow!("--executable names {} twice", one.arch);
            return Err(Failure::new(Code::Usage, error));
        }
    }
    match image::native_arch() {
        Some(arch) if named.iter().all(|one| one.arch != arch) => {
            let executable = image::running_executable().context("cannot find the running executable")?;
            named.push(Platform { arch, executable });
        }
        None if named.is_empty() => {
            let error = anyhow!("this machine's architecture, {}, has no image", std::env::consts::ARCH);
            return Err(Failure::new(Code::Usage, error).hint("name executables with --executable ARCH=PATH"));
        }
        _ => {}
    }
    Ok(named)
}

fn fail(error: ImageError) -> Failure {
    let hint = error.hint();
    let failure = Failure::new(Code::Failed, error);
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

fn summary(written: &Written, json: bool, out: &mut dyn Write) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, written)?;
        return writeln!(out);
    }
    writeln!(out, "reference  {}", written.reference)?;
    writeln!(out, "digest     {}", written.digest)
}
