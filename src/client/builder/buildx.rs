//! `docker buildx`, with its driver for remote daemons.

use std::ffi::OsString;

use sha2::{Digest as _, Sha256};

use super::{Command, Node, Spec, csv, words};
use crate::client::Paths;

/// One name for the same daemons and certificates, another for any other: two
/// builds at once never change one another's builder.
pub(super) fn name(nodes: &[Node], paths: &Paths) -> String {
    let mut hash = Sha256::new();
    for node in nodes {
        hash.update(format!("{}\0{}\0{}\0", node.arch, node.endpoint.url(), node.endpoint.host));
    }
    for path in [&paths.ca, &paths.cert, &paths.key] {
        hash.update(path.as_os_str().as_encoded_bytes());
        hash.update([0]);
    }
    let digest = hex::encode(hash.finalize());
    format!("bko-{}", digest.get(..16).unwrap_or_default())
}

/// With a node's name, creating is the same as bringing up to date.
pub(super) fn create(program: &[OsString], name: &str, nodes: &[Node], paths: &Paths) -> Vec<Command> {
    let several = nodes.len() > 1;
    // There are two architectures, and so at most two at one address.
    let url =
        |index: usize, node: &Node| match nodes.iter().position(|other| other.endpoint.url() == node.endpoint.url()) {
            Some(first) if first < index => node.endpoint.other_url(),
            _ => node.endpoint.url(),
        };
    let create = |(index, node): (usize, &Node)| {
        let mut command = program.to_vec();
        command.push("create".into());
        if index > 0 {
            command.push("--append".into());
        }
        let node_name = format!("{name}-{}", node.arch);
        command.extend(words(&["--name", name, "--node", &node_name, "--driver", "remote"]));
        if several {
            command.extend(words(&["--platform", &format!("linux/{}", node.arch)]));
        }
        command.extend(words(&["--driver-opt", &options(node, paths), &url(index, node)]));
        command
    };
    nodes.iter().enumerate().map(create).collect()
}

fn options(node: &Node, paths: &Paths) -> String {
    let files = [("cacert", &paths.ca), ("cert", &paths.cert), ("key", &paths.key)];
    let mut options: Vec<_> = files.map(|(name, path)| csv(&format!("{name}={}", path.display()))).into();
    options.extend(node.endpoint.server_name().map(|name| format!("servername={name}")));
    options.join(",")
}

pub(super) fn build(program: &[OsString], name: &str, spec: &Spec, nodes: &[Node]) -> Command {
    let mut command = program.to_vec();
    command.extend(words(&["build", "--builder", name]));
    let mut flag = |name: &str, value: &str| command.extend(words(&[name, value]));
    if nodes.len() > 1 {
        let platforms: Vec<_> = nodes.iter().map(|node| format!("linux/{}", node.arch)).collect();
        flag("--platform", &platforms.join(","));
    }
    let lists = [
        ("--tag", &spec.tags),
        ("--output", &spec.outputs),
        ("--build-arg", &spec.build_args),
        ("--label", &spec.labels),
        ("--secret", &spec.secrets),
        ("--ssh", &spec.ssh),
        ("--cache-from", &spec.cache_from),
        ("--cache-to", &spec.cache_to),
    ];
    for (name, values) in lists {
        values.iter().for_each(|value| flag(name, value));
    }
    let target = Some(&spec.target).filter(|target| !target.is_empty());
    let options = [
        ("--target", target),
        ("--provenance", spec.provenance.as_ref()),
        ("--sbom", spec.sbom.as_ref()),
        ("--progress", spec.progress.as_ref()),
    ];
    for (name, value) in options {
        value.into_iter().for_each(|value| flag(name, value));
    }
    for (name, path) in [("--file", &spec.file), ("--metadata-file", &spec.metadata_file)] {
        if let Some(path) = path {
            command.extend([name.into(), path.clone().into_os_string()]);
        }
    }
    let switches = [("--push", spec.push), ("--load", spec.load), ("--no-cache", spec.no_cache)];
    command.extend(switches.iter().filter(|(_, on)| *on).map(|(name, _)| OsString::from(name)));
    command.extend(spec.extra.iter().cloned());
    command.push((&spec.context).into());
    command
}

/// The daemon itself is not ours to stop.
pub(super) fn remove(program: &[OsString], name: &str) -> Command {
    [program, &words(&["rm", "--keep-daemon", name])].concat()
}
