//! `bko-install credentials`.

mod format;
mod host;
pub(super) mod installed;

use anyhow::{Context as _, anyhow};
use clap::{Args, ValueEnum};
use jiff::Timestamp;

use super::access::base_url;
use super::certs::{export, fetch};
use super::exit::{Code, Failure};
use super::{Global, block_on, report};
use crate::certificate::LiveCertificate;
use crate::certificate::SecretData;
use crate::client::{self, Token};
use crate::cluster::client::connect;
use crate::local::args::StateArgs;
use crate::names::{OPERATOR_NAMESPACE, dns_label, domain_or_nothing, object_name};
use format::Credentials;
use installed::Installed;

/// Print what a CI system needs: address, token, certificate.
#[derive(Debug, Args)]
#[command(
    after_long_help = "Everything secret goes to standard output and nowhere else: redirect it to a file that only you \
                       can read (umask 077), or into the CI system's own command. Nothing is changed in the cluster. \
                       What cannot be read from the installation is named with the options."
)]
pub struct CredentialsArgs {
    /// For whom
    #[arg(long, value_enum, default_value_t = Format::Env)]
    format: Format,
    /// Address of the routing API [default: `api.DOMAIN` through the gateway, else the Service within the cluster]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Domain of the gateway [default: the installed one]
    #[arg(long, value_name = "DOMAIN", value_parser = domain_or_nothing)]
    gateway_host: Option<String>,
    /// Port of the gateway [default: the installed one]
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    gateway_port: Option<u16>,
    /// Secret with the client certificate
    #[arg(long, value_name = "SECRET", default_value = "buildkit-client-certs", value_parser = object_name)]
    client_secret: String,
    #[command(flatten)]
    place: Place,
    /// A farm on this host.
    #[command(flatten)]
    state: StateArgs,
}

/// Where the control plane is.
#[derive(Clone, Debug, Args)]
pub(super) struct Place {
    /// Namespace of the control plane
    #[arg(long, value_name = "NAMESPACE", default_value = OPERATOR_NAMESPACE, value_parser = dns_label)]
    pub(super) operator_namespace: String,
    /// Namespace of the daemons [default: the installed one]
    #[arg(long, value_name = "NAMESPACE", value_parser = dns_label)]
    pub(super) namespace: Option<String>,
    /// Secret with the token [default: the installed one]
    #[arg(long, value_name = "SECRET", value_parser = object_name)]
    pub(super) token_secret: Option<String>,
}

/// For whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A POSIX shell, to source.
    Env,
    /// GitHub: `gh` commands that set secrets and variables.
    Github,
    /// GitLab: `glab` commands that set variables, or change them.
    Gitlab,
    /// Programs, and whoever sets the variables by hand, as for Forgejo.
    Json,
}

/// Runs the command.
pub fn run(args: CredentialsArgs, global: &Global) -> Result<(), Failure> {
    let Handover { credentials, unread } = block_on(gather(&args, global))?;
    let outside = credentials.reachable_from_outside();
    if let Some(deployment) = unread.filter(|_| !outside) {
        report::message(
            global,
            &format!(
                "warning: not allowed to read Deployment \"{deployment}\", so the routing API's address is known within \
                 the cluster only; name another with --url, and the gateway with --gateway-host"
            ),
        );
    } else if !outside {
        report::message(
            global,
            "warning: the routing API's address is known within the cluster, or on this host, only; name another with \
             --url",
        );
    }
    let text = match args.format {
        Format::Env => format::env(&credentials),
        Format::Github => format::github(&credentials),
        Format::Gitlab => format::gitlab(&credentials),
        Format::Json => serde_json::to_string_pretty(&credentials)?,
    };
    report::print(&text)
}

/// What is handed over, and the Deployment that could have told more.
struct Handover {
    credentials: Credentials,
    unread: Option<String>,
}

async fn gather(args: &CredentialsArgs, global: &Global) -> Result<Handover, Failure> {
    let address = |failure: Failure| failure.hint("--url is the address under which a CI reaches the routing API");
    let url = args.url.as_deref().map(base_url).transpose().map_err(address)?;
    let elsewhere = args.state.state_dir.is_none() && (global.kubeconfig.is_some() || global.context.is_some());
    if !elsewhere && let Some((_, info)) = super::host::running(&args.state).await? {
        return Ok(Handover { credentials: host::gather(args, url, &info)?, unread: None });
    }
    let client = connect(global).await?;
    let installed = installed::read(&client, &args.place).await?;
    let token = token(&client, &args.place, &installed).await?;
    let namespace = args.place.namespace.as_ref().unwrap_or(&installed.namespace);
    let path = format!("{namespace}/{}", args.client_secret);
    let secret = fetch(&client, namespace, &args.client_secret).await?.ok_or_else(|| {
        Failure::new(Code::Failed, anyhow!("there is no Secret \"{path}\""))
            .hint("`bko-install cluster init` issues it; name another with --namespace and --client-secret")
    })?;
    let certificate = valid(&secret.data, &format!("Secret \"{path}\""), "`bko-install cluster init` renews it")?;
    let gateway_host = args.gateway_host.clone().filter(|host| !host.is_empty()).or(installed.gateway_host.clone());
    let gateway_port = args.gateway_port.unwrap_or(installed.gateway_port);
    let url = match (url, &gateway_host) {
        (Some(url), _) => url.to_string(),
        (None, Some(host)) if installed.api_tls => format!("https://api.{host}:{gateway_port}"),
        (None, _) => {
            format!("http://buildkit-operator-buildd.{}.svc:8080", args.place.operator_namespace)
        }
    };
    let gateway = gateway_host.map(|host| (host, gateway_port));
    let mend = format!("delete Secret \"{path}\", and let whoever made it make it anew: `bko-install cluster init`");
    let found = Found { url, token, gateway, path: format!("Secret \"{path}\""), expires: certificate.not_after, mend };
    Ok(Handover { credentials: made(found, &secret.data)?, unread: installed.unread })
}

/// All but the certificate, and where that is.
struct Found {
    url: String,
    token: Option<String>,
    gateway: Option<(String, u16)>,
    path: String,
    expires: Timestamp,
    /// What to do if it is none.
    mend: String,
}

fn made(found: Found, data: &SecretData) -> Result<Credentials, Failure> {
    let Found { url, token, gateway, path, expires, mend } = found;
    let mut files = export::files(data).into_iter();
    let mut pem = || -> Result<String, Failure> {
        let (_, bytes) = files.next().ok_or_else(|| anyhow!("{path} lacks a key"))?;
        let text = String::from_utf8(bytes.to_vec()).with_context(|| format!("{path} holds no PEM"))?;
        // Around the PEM there may be anything.
        let odd = text.chars().any(|c| c.is_control() && !c.is_ascii_whitespace());
        if odd { Err(anyhow!("{path} holds control characters, which are no PEM").into()) } else { Ok(text) }
    };
    let (gateway_host, gateway_port) = gateway.unzip();
    let (ca, cert, key) = (pem()?, pem()?, pem()?);
    // No daemon takes a certificate whose key is another's.
    client::check_pair(ca.as_bytes(), cert.as_bytes(), key.as_bytes())
        .map_err(|error| anyhow::Error::new(error).context(format!("{path} holds no client certificate that works")))
        .map_err(|error| Failure::from(error).hint(mend))?;
    Ok(Credentials { version: 1, url, token, ca, cert, key, expires, gateway_host, gateway_port })
}

/// The token; none where everybody may call.
async fn token(client: &kube::Client, place: &Place, installed: &Installed) -> Result<Option<String>, Failure> {
    let Some(name) = place.token_secret.as_ref().or(installed.token_secret.as_ref()) else { return Ok(None) };
    let path = format!("{}/{name}", place.operator_namespace);
    let secret = fetch(client, &place.operator_namespace, name).await?.ok_or_else(|| {
        Failure::new(Code::Failed, anyhow!("there is no Secret \"{path}\""))
            .hint("`bko-install cluster init` makes it; name another with --operator-namespace and --token-secret")
    })?;
    let bytes = secret.data.get("token").map_or(&[][..], |token| token.trim_ascii());
    let token = std::str::from_utf8(bytes).ok().map(Token::new);
    match token {
        Some(None) => Err(anyhow!("Secret \"{path}\" has no token under the key \"token\"").into()),
        Some(Some(token)) if token.is_well_formed() => Ok(Some(String::from_utf8_lossy(bytes).into_owned())),
        _ => Err(anyhow!("Secret \"{path}\" holds a token with white space or characters that no token has").into()),
    }
}

/// The client's certificate, as long as it is valid.
#[expect(clippy::disallowed_methods, reason = "whether a certificate has ended depends on the time")]
fn valid(data: &SecretData, path: &str, hint: &str) -> Result<LiveCertificate, Failure> {
    let certificate =
        LiveCertificate::read_leaf(data).with_context(|| format!("{path} holds no client certificate"))?;
    if certificate.not_after > Timestamp::now() {
        return Ok(certificate);
    }
    let error = anyhow!("the certificate in {path} has expired on {}", certificate.not_after);
    Err(Failure::new(Code::Failed, error).hint(hint))
}
