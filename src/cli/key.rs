//! `bko-install key`.

use std::io::{self, Write};

use anyhow::anyhow;
use clap::Args;
use serde::Serialize;

use super::exit::{Code, Failure};
use super::{Global, Output, OutputArgs, report};
use crate::image::native_arch;
use crate::key::{KeyError, Project};
use crate::names::{BUILDS_NAMESPACE, DAEMON_PORT, dns_label, domain_or_nothing};

/// Print the project key of a repository; needs no cluster.
#[derive(Debug, Args)]
#[command(after_long_help = "Builds with the same key share a daemon and its cache.")]
pub struct KeyArgs {
    /// Repository: a URL, user@host:path, host/path or a bare name
    #[arg(long, env = "BUILDKIT_OPERATOR_REPO", value_name = "REPO", hide_env_values = true)]
    repo: String,
    /// Component of a monorepo
    #[arg(long, env = "BUILDKIT_OPERATOR_NAME", value_name = "NAME", default_value = "", hide_default_value = true)]
    name: String,
    /// Dockerfile target
    #[arg(
        long,
        env = "BUILDKIT_OPERATOR_TARGET",
        value_name = "TARGET",
        default_value = "",
        hide_default_value = true
    )]
    target: String,
    /// Architecture to build natively, amd64 or arm64 [default: this machine's]
    #[arg(long, env = "BUILDKIT_OPERATOR_ARCH", value_name = "ARCH")]
    arch: Option<String>,
    /// The build comes from code that nobody has reviewed: a fork
    #[arg(long, env = "BUILDKIT_OPERATOR_UNTRUSTED", value_parser = yes_or_no)]
    untrusted: bool,
    /// Domain of the gateway, for the endpoint outside of the cluster
    #[arg(long, value_name = "DOMAIN", value_parser = domain_or_nothing)]
    gateway_host: Option<String>,
    /// Port of the gateway
    #[arg(long, value_name = "PORT", default_value_t = DAEMON_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    gateway_port: u16,
    /// Namespace of the daemons
    #[arg(long, value_name = "NAMESPACE", default_value = BUILDS_NAMESPACE, value_parser = dns_label)]
    namespace: String,
    /// Port of the daemons
    #[arg(long, value_name = "PORT", default_value_t = DAEMON_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
    #[command(flatten)]
    output: OutputArgs,
}

/// CI systems set a variable to nothing as often as they leave it out.
pub(super) fn yes_or_no(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "" | "0" | "f" | "false" | "n" | "no" | "off" => Ok(false),
        "1" | "t" | "true" | "y" | "yes" | "on" => Ok(true),
        _ => Err("want true or false".to_owned()),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Key {
    key: String,
    daemon: String,
    normalized: String,
    in_cluster: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    off_cluster: Option<String>,
}

/// Runs the command.
pub fn run(args: KeyArgs, _global: &Global) -> Result<(), Failure> {
    let arch = match (&args.arch, native_arch()) {
        (Some(arch), _) => arch.clone(),
        (None, Some(native)) => native.to_string(),
        (None, None) => {
            let error = anyhow!("no daemon builds for this machine's architecture, {}", std::env::consts::ARCH);
            return Err(Failure::new(Code::Usage, error).hint("name one with --arch amd64 or --arch arm64"));
        }
    };
    let project = Project::requested(&args.repo, &args.name, &args.target, &arch, args.untrusted).map_err(refuse)?;
    let key = project.key();
    let domain = args.gateway_host.as_deref().map(str::trim).filter(|domain| !domain.is_empty());
    let result = Key {
        daemon: key.daemon(),
        normalized: project.repo.to_string(),
        in_cluster: key.in_cluster_endpoint(&args.namespace, args.port),
        off_cluster: domain.map(|domain| key.gateway_endpoint(domain, args.gateway_port)),
        key: key.to_string(),
    };
    Ok(print(&result, args.output.output, &mut report::stdout())?)
}

pub(super) fn refuse(error: KeyError) -> Failure {
    let hint = match &error {
        KeyError::UnsupportedArch(_) => "want --arch amd64 or --arch arm64",
        KeyError::TooLong(_) => "at most 512 bytes of a repository, 128 of a name or a target",
        KeyError::ControlCharacter { .. } => "remove the control character; is a variable cut or joined wrongly?",
        _ => "want a repository such as https://github.com/acme/shop.git, git@github.com:acme/shop or acme/shop",
    };
    Failure::new(Code::Usage, error).hint(hint)
}

fn print(key: &Key, output: Output, out: &mut dyn Write) -> io::Result<()> {
    if output == Output::Json {
        serde_json::to_writer_pretty(&mut *out, key)?;
        return writeln!(out);
    }
    writeln!(out, "key         {}", key.key)?;
    writeln!(out, "daemon      {}", key.daemon)?;
    writeln!(out, "normalized  {}", key.normalized)?;
    writeln!(out, "inCluster   {}", key.in_cluster)?;
    key.off_cluster.as_ref().map_or(Ok(()), |endpoint| writeln!(out, "offCluster  {endpoint}"))
}
