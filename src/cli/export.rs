//! `bko-install export`.

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::{Args, ValueEnum};

use crate::manifest::Rendered;
use crate::manifest::export::{self, Argo, Flux, FluxSource, Format};
use crate::names::dns_label;

use super::Global;
use super::bundle::{self, BundleArgs, Recorded};
use super::exit::{Code, Failure};
use super::report::complain;

/// Write the manifests for GitOps; needs no cluster.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// In which form
    #[arg(long, value_enum, default_value_t = Form::Plain)]
    format: Form,
    /// Folder to write to: empty, missing, or an earlier export
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Folder of the export within the repository, for flux and argocd
    #[arg(long, value_name = "PATH", default_value = ".")]
    path: String,
    /// Source of Flux that has the export: a GitRepository, an OCIRepository or a Bucket
    #[arg(long, value_name = "KIND/[NAMESPACE/]NAME", default_value = "GitRepository/flux-system")]
    flux_source: FluxSource,
    /// Namespace of Flux's objects
    #[arg(long, value_name = "NAME", default_value = "flux-system", value_parser = dns_label)]
    flux_namespace: String,
    /// URL of the repository that Argo CD reads; argocd needs it
    #[arg(long, value_name = "URL", required_if_eq("format", "argocd"))]
    repo: Option<String>,
    /// Branch, tag or commit that Argo CD reads
    #[arg(long, value_name = "REVISION", default_value = "HEAD")]
    revision: String,
    /// Namespace of Argo CD's applications
    #[arg(long, value_name = "NAME", default_value = "argocd", value_parser = dns_label)]
    argocd_namespace: String,
    /// Project of Argo CD's applications
    #[arg(long, value_name = "NAME", default_value = "default")]
    argocd_project: String,
    /// What to write
    #[command(flatten)]
    bundle: BundleArgs,
}

/// The forms of an export.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Form {
    /// One file of manifests for each component, numbered in the order of applying
    Plain,
    /// A folder for each runlevel, with a kustomization in each and above them
    Kustomize,
    /// The same, and Kustomizations of Flux, each of which waits for the level before it
    Flux,
    /// A folder for each runlevel, and Applications of Argo CD in sync waves
    Argocd,
}

impl ExportArgs {
    fn format(&self) -> Format {
        match self.format {
            Form::Plain => Format::Plain,
            Form::Kustomize => Format::Kustomize,
            Form::Flux => Format::Flux(Flux {
                source: self.flux_source.clone(),
                namespace: self.flux_namespace.clone(),
                path: self.path.clone(),
            }),
            Form::Argocd => Format::Argo(Argo {
                repository: self.repo.clone().unwrap_or_default(),
                revision: self.revision.clone(),
                path: self.path.clone(),
                namespace: self.argocd_namespace.clone(),
                project: self.argocd_project.clone(),
            }),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// Faults of the profile or values; a folder that holds somebody's own files.
pub fn run(args: ExportArgs, global: &Global) -> Result<(), Failure> {
    if args.path.split('/').any(|step| step == "..") {
        let error = anyhow!("--path \"{}\" leads out of the repository", args.path);
        return Err(Failure::new(Code::Usage, error).hint("name a folder within it, such as clusters/prod/farm"));
    }
    let rendered = rendered(&args.bundle)?;
    let files = export::files(&rendered, &args.format());
    let mut stale = Vec::new();
    earlier_files(&args.dir, &args.dir, &mut stale)?;
    write(&args.dir, &files, &stale)?;
    if !global.quiet {
        report(&args.dir, files.len(), &rendered);
    }
    Ok(())
}

/// The bundle with the step that makes what no export holds, if there is anything to make.
fn rendered(args: &BundleArgs) -> Result<Rendered, Failure> {
    let (mut profile, values) = args.resolve(Recorded::default(), &args.default_image()?)?;
    let bundle = bundle::bundle()?;
    let rendered = bundle::rendered(bundle, &profile, &values)?;
    if rendered.declarations().is_empty() {
        return Ok(rendered);
    }
    let (level, component) = export::BOOTSTRAP;
    profile.runlevels.entry(level).or_default().push(component.to_owned());
    bundle::rendered(bundle, &profile, &values)
}

/// The files of an earlier export, in all its folders.
#[expect(clippy::disallowed_methods, reason = "export writes files, and looks first whose it would replace")]
fn earlier_files(root: &Path, dir: &Path, paths: &mut Vec<PathBuf>) -> Result<(), Failure> {
    let shown = dir.display();
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(anyhow::Error::new(error).context(format!("cannot read folder \"{shown}\"")).into()),
    };
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot read folder \"{shown}\""))?;
        let (path, kind) = (entry.path(), entry.file_type().with_context(|| format!("cannot read \"{shown}\""))?);
        if kind.is_dir() {
            earlier_files(root, &path, paths)?;
            continue;
        }
        let ours = kind.is_file()
            && std::fs::read(&path).is_ok_and(|bytes| export::is_exported(&String::from_utf8_lossy(&bytes)));
        if !ours {
            let error = anyhow!("\"{}\" holds \"{}\", which no export wrote", root.display(), path.display());
            return Err(Failure::new(Code::Refused, error)
                .hint("choose an empty folder, a new one, or that of an earlier export"));
        }
        paths.push(path);
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "export writes files")]
fn write(dir: &Path, files: &[export::File], earlier: &[PathBuf]) -> Result<(), Failure> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make folder \"{}\"", dir.display()))?;
    let paths: Vec<PathBuf> = files.iter().map(|(name, _)| dir.join(name)).collect();
    for (path, (_, text)) in paths.iter().zip(files) {
        let folder = path.parent().unwrap_or(dir);
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make folder \"{}\"", folder.display()))?;
        std::fs::write(path, text).with_context(|| format!("cannot write \"{}\"", path.display()))?;
    }
    // A component that is gone must not be applied from a stale file.
    for path in earlier.iter().filter(|path| !paths.contains(path)) {
        std::fs::remove_file(path).with_context(|| format!("cannot remove \"{}\"", path.display()))?;
        // Nor a level from a stale folder; one that still holds something stays.
        for folder in path.ancestors().skip(1).take_while(|folder| *folder != dir) {
            if std::fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }
    Ok(())
}

fn report(dir: &Path, files: usize, rendered: &Rendered) {
    complain(&format!("wrote {files} files to \"{}\"", dir.display()));
    let made = export::made_in_cluster(rendered);
    if !made.is_empty() {
        complain(&format!("made in the cluster, because they hold secrets: {}", made.join(", ")));
    }
    let yours: Vec<String> = export::yours_to_make(rendered).into_iter().map(|(path, _)| path).collect();
    if !yours.is_empty() {
        complain(&format!("yours to make: {}", yours.join(", ")));
    }
    complain(&format!("\nhint: \"{}\" says how to apply it", dir.join(export::NOTE).display()));
}
