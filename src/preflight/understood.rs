//! Whether the servers that are to be installed understand what they are told:
//! their rendered arguments and files are read by their own parsers, so that
//! nothing is installed that refuses to start. Pure.

use clap::{Command, CommandFactory as _, FromArgMatches as _};
use serde_json::Value;

use crate::cli::Cli;
use crate::families::build_farm::defaults::ProjectDefaults;
use crate::gateway::rules::Rules;
use crate::identity::config::{Config, Sources};
use crate::manifest::{Fault, Faults, Object, Rendered};

/// Nothing, when all is understood.
///
/// # Errors
/// Every argument and file that a server would refuse.
pub fn check(rendered: &Rendered) -> Result<(), Faults> {
    let faults: Vec<Fault> = rendered.objects.iter().flat_map(object).collect();
    if faults.is_empty() { Ok(()) } else { Err(Faults(faults)) }
}

fn object(object: &Object) -> Vec<Fault> {
    match object.id.kind.as_str() {
        "Deployment" => arguments(object),
        "ConfigMap" => files(object),
        _ => Vec::new(),
    }
}

fn arguments(object: &Object) -> Vec<Fault> {
    let containers = object.body.pointer("/spec/template/spec/containers").and_then(Value::as_array);
    let lists = containers.into_iter().flatten().filter_map(|container| container["args"].as_array());
    let texts = lists.map(|list| list.iter().filter_map(Value::as_str).collect::<Vec<_>>());
    let servers = texts.filter(|arguments| arguments.first() == Some(&"server"));
    let refused = servers.filter_map(|arguments| read(&arguments).err());
    refused
        .map(|what| Fault::of(object.source.clone(), format!("{}: its server would refuse {what}", object.id)))
        .collect()
}

/// The server's own command line; what stands in this process's environment is not the server's.
fn read(arguments: &[&str]) -> Result<(), String> {
    let own = |command: Command| command.mut_args(|argument| argument.env(clap::builder::Resettable::Reset));
    let command = own(Cli::command().mut_subcommand("server", own));
    let matches = command.try_get_matches_from(std::iter::once(&crate::names::INSTALLER_MANAGER).chain(arguments));
    let read = matches.and_then(|matches| Cli::from_arg_matches(&matches));
    // `error: invalid value '-1' for '--x <N>': …`, and how to get help below.
    read.map(drop).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        format!("an argument: {}", first.strip_prefix("error: ").unwrap_or(first))
    })
}

type Parser = fn(&str) -> Result<(), String>;

/// The files that servers read, by the names of their ConfigMap and key.
const FILES: [(&str, &str, Parser); 3] = [
    ("buildkit-operator-gateway", "config.yaml", gateway),
    ("buildkit-operator-oidc", "oidc.yaml", identities),
    ("buildkit-operator-project-defaults", "rules.yaml", rules),
];

fn files(object: &Object) -> Vec<Fault> {
    let own = FILES.iter().filter(|(name, _, _)| object.id.name == *name);
    let read = own.filter_map(|(_, key, parse)| Some((key, parse(object.body["data"][*key].as_str()?).err()?)));
    read.map(|(key, what)| {
        Fault::of(object.source.clone(), format!("{}: its server would refuse \"{key}\": {what}", object.id))
    })
    .collect()
}

fn gateway(text: &str) -> Result<(), String> {
    Rules::default().with(text).map(drop).map_err(|error| error.to_string())
}

fn identities(text: &str) -> Result<(), String> {
    let file = Some(("oidc.yaml".to_owned(), text.to_owned()));
    Config::read(Sources { file, ..Sources::default() }).map(drop).map_err(|fault| fault.what)
}

fn rules(text: &str) -> Result<(), String> {
    ProjectDefaults::read(text).map(drop).map_err(|fault| fault.to_string())
}
