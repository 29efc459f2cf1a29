//! Credentials of a farm on this host: what its state folder holds.
#![expect(clippy::disallowed_methods, reason = "shell: reads the state folder")]

use anyhow::Context as _;

use super::format::Credentials;
use super::{CredentialsArgs, Found, made, valid};
use crate::cli::exit::Failure;
use crate::client::BaseUrl;
use crate::local::certificates::read;
use crate::local::control::Info;

/// Reads them.
pub(super) fn gather(args: &CredentialsArgs, url: Option<BaseUrl>, info: &Info) -> Result<Credentials, Failure> {
    let folder = &info.certificates;
    let path = format!("\"{}\"", folder.display());
    let data = read(folder).map_err(anyhow::Error::new)?;
    let token = info
        .token
        .as_deref()
        .map(|path| std::fs::read_to_string(path).with_context(|| format!("cannot read \"{}\"", path.display())));
    let token = token.transpose()?.map(|token| token.trim().to_owned());
    let certificate = valid(&data, &path, "a running `bko-install up` renews it")?;
    let host = args.gateway_host.clone().filter(|host| !host.is_empty()).or_else(|| info.domain.clone());
    let port = args.gateway_port.unwrap_or(info.port);
    let url = match (url, &host) {
        (Some(url), _) => url.to_string(),
        (None, Some(host)) => format!("https://api.{host}:{port}"),
        (None, None) => info.api.clone(),
    };
    let mend = format!("end `bko-install up`, delete {path}, and start it again: it makes the files anew");
    let gateway = host.map(|host| (host, port));
    made(Found { url, token, gateway, path, expires: certificate.not_after, mend }, &data)
}
