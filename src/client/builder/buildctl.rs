//! `buildctl`, with the frontend for Dockerfiles.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::{Command, Node, Spec, csv, is_remote, words};
use crate::client::Paths;

/// What buildctl cannot do.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Unsupported {
    /// One daemon at a time.
    #[error("buildctl builds for one architecture at a time: several need `docker buildx`")]
    Architectures,
    /// Nor does buildx, when what comes out is one file.
    #[error(
        "an image of several architectures cannot be exported as one archive, as {0} asks: want --push, or --output type=local,dest=FOLDER"
    )]
    Archive(String),
    /// It knows no Docker.
    #[error("buildctl cannot load an image into Docker: that needs `docker buildx`")]
    Load,
    /// It reads neither a context nor a Dockerfile from a pipe.
    #[error("buildctl reads nothing from standard input: that needs `docker buildx`")]
    StandardInput,
    /// It does not read variables by itself.
    #[error("build argument \"{0}\" has no value, and buildctl takes none from the environment: want NAME=VALUE")]
    BuildArgument(String),
}

pub(super) fn build(program: &OsStr, spec: &Spec, nodes: &[Node], paths: &Paths) -> Result<Command, Unsupported> {
    let [node] = nodes else { return Err(Unsupported::Architectures) };
    if spec.load {
        return Err(Unsupported::Load);
    }
    let mut command: Command = vec![program.to_owned(), "--addr".into(), node.endpoint.url().into()];
    for (flag, path) in [("--tlscacert", &paths.ca), ("--tlscert", &paths.cert), ("--tlskey", &paths.key)] {
        command.extend([flag.into(), path.clone().into_os_string()]);
    }
    if let Some(name) = node.endpoint.server_name() {
        command.extend(words(&["--tlsservername", name]));
    }
    command.extend(words(&["build", "--frontend", "dockerfile.v0"]));
    command.extend(source(spec)?);
    for option in options(spec)? {
        command.extend(words(&["--opt", &option]));
    }
    for output in outputs(spec) {
        command.extend(words(&["--output", &output]));
    }
    let lists = [
        ("--secret", &spec.secrets),
        ("--ssh", &spec.ssh),
        ("--import-cache", &spec.cache_from),
        ("--export-cache", &spec.cache_to),
    ];
    for (flag, values) in lists {
        values.iter().for_each(|value| command.extend(words(&[flag, value])));
    }
    if let Some(progress) = &spec.progress {
        command.extend(words(&["--progress", progress]));
    }
    if let Some(path) = &spec.metadata_file {
        command.extend(["--metadata-file".into(), path.clone().into_os_string()]);
    }
    if spec.no_cache {
        command.push("--no-cache".into());
    }
    command.extend(spec.extra.iter().cloned());
    Ok(command)
}

/// The context, and the Dockerfile: its folder is a second source, its name an option.
fn source(spec: &Spec) -> Result<Command, Unsupported> {
    let context = spec.context.as_str();
    let file = spec.file.as_deref();
    if context == "-" || file == Some(Path::new("-")) {
        return Err(Unsupported::StandardInput);
    }
    if is_remote(context) {
        let mut words = words(&["--opt", &format!("context={context}")]);
        if let Some(file) = file {
            words.extend(["--opt".into(), OsString::from(format!("filename={}", file.display()))]);
        }
        return Ok(words);
    }
    let file = file.map_or_else(|| Path::new(context).join("Dockerfile"), PathBuf::from);
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut words = words(&["--local", &format!("context={context}")]);
    words.extend(["--local".into(), OsString::from(format!("dockerfile={}", folder.display()))]);
    if let Some(name) = file.file_name().filter(|name| *name != "Dockerfile") {
        words.extend(["--opt".into(), OsString::from(format!("filename={}", name.display()))]);
    }
    Ok(words)
}

fn options(spec: &Spec) -> Result<Vec<String>, Unsupported> {
    let mut options = Vec::new();
    if !spec.target.is_empty() {
        options.push(format!("target={}", spec.target));
    }
    for argument in &spec.build_args {
        if !argument.contains('=') {
            return Err(Unsupported::BuildArgument(argument.clone()));
        }
        options.push(format!("build-arg:{argument}"));
    }
    options.extend(spec.labels.iter().map(|label| match label.contains('=') {
        true => format!("label:{label}"),
        false => format!("label:{label}="),
    }));
    for (name, value) in [("provenance", &spec.provenance), ("sbom", &spec.sbom)] {
        match value.as_deref() {
            None | Some("false") => {}
            Some("true") => options.push(format!("attest:{name}=")),
            Some(value) => options.push(format!("attest:{name}={value}")),
        }
    }
    Ok(options)
}

/// In the words of buildctl, and with the names that buildx adds by itself.
fn outputs(spec: &Spec) -> Vec<String> {
    let names = csv(&format!("name={}", spec.tags.join(",")));
    let told = |output: &String| match output.as_str() {
        "-" => "type=tar,dest=-".to_owned(),
        folder if !folder.contains('=') => format!("type=local,{}", csv(&format!("dest={folder}"))),
        output => {
            let output = output.replace("type=registry", "type=image,push=true");
            let image = ["type=image", "type=oci", "type=docker"].iter().any(|kind| output.contains(kind));
            let named = spec.tags.is_empty() || output.contains("name=");
            if image && !named { format!("{output},{names}") } else { output }
        }
    };
    let mut outputs: Vec<_> = spec.outputs.iter().map(told).collect();
    if spec.push {
        outputs.insert(0, format!("type=image,{names},push=true"));
    }
    outputs
}
