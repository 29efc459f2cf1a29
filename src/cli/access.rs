//! How commands reach the routing API: one set of options, and one way to say
//! what went wrong with it.

use std::error::Error as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use clap::Args;

use super::exit::{Code, Failure};
use crate::client::{
    self, Api, ApiError, BaseUrl, CertificatesError, Gateway, Http, HttpError, Mint, Pinned, Shown, TlsError, Token,
    TokenError, TokenSource, api_trust, pem,
};
use crate::local::control::Info;

/// A variable that is set to nothing counts as not set; clap reads the types by
/// their names, and would read `Option<Option<T>>` as an option without a value.
pub(super) type Maybe<T> = Option<T>;

/// How to get there: `bko-install credentials` prints all of it.
#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
pub(super) struct ApiArgs {
    /// Address of the routing API
    // Read later: clap shows a value that it refuses, and there may be a password in it.
    #[arg(long, env = "BUILDKIT_OPERATOR_BUILDD_URL", value_name = "URL", hide_env_values = true)]
    buildd_url: Option<String>,
    /// Folder with the client certificate: ca.pem, cert.pem, key.pem
    #[arg(long, env = "BUILDKIT_OPERATOR_CLIENT_CERTS", value_name = "DIR", value_parser = folder)]
    client_certs: Option<PathBuf>,
    /// Authority of the daemons, without a folder: PEM, PEM in base64, or a file
    #[arg(long, env = "BUILDKIT_OPERATOR_CA", value_name = "PEM|FILE", hide_env_values = true)]
    ca: Option<String>,
    /// Authority of the routing API, likewise [default: that of the daemons, and those of the system]
    #[arg(long, env = "BUILDKIT_OPERATOR_API_CA", value_name = "PEM|FILE", hide_env_values = true)]
    api_ca: Option<String>,
    /// Token of the routing API; better in the variable, since a command line can be read by others
    #[arg(long, env = "BUILDKIT_OPERATOR_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Token that lets its holder act for any repository
    #[arg(long, env = "BUILDKIT_OPERATOR_ADMIN_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    admin_token: Option<String>,
    /// Identity that the CI system made for this job, as GitLab's `id_tokens` do
    #[arg(long, env = "BUILDKIT_OPERATOR_ID_TOKEN", value_name = "JWT", hide_env_values = true)]
    id_token: Option<String>,
    /// Audience of identities that are asked of GitHub or Forgejo
    #[arg(long, env = "BUILDKIT_OPERATOR_OIDC_AUDIENCE", value_name = "AUDIENCE", default_value = AUDIENCE)]
    oidc_audience: String,
    /// Where GitHub and Forgejo give out identities
    #[arg(long, env = "ACTIONS_ID_TOKEN_REQUEST_URL", hide = true, hide_env_values = true)]
    id_token_request_url: Option<String>,
    /// What they want to see for it
    #[arg(long, env = "ACTIONS_ID_TOKEN_REQUEST_TOKEN", hide = true, hide_env_values = true)]
    id_token_request_token: Option<String>,
    /// Domain of the gateway, instead of the answer's
    #[arg(long, env = "BUILDKIT_OPERATOR_GATEWAY_HOST", value_name = "DOMAIN", value_parser = crate::names::domain_or_nothing)]
    gateway_host: Option<String>,
    /// Address of the gateway, when DNS does not know its names
    #[arg(long, env = "BUILDKIT_OPERATOR_GATEWAY_IP", value_name = "ADDRESS", value_parser = address)]
    gateway_ip: Option<Maybe<IpAddr>>,
}

const AUDIENCE: &str = "buildkit-operator";

/// Empty is none: clap's own parser of paths refuses what CI systems set.
fn folder(text: &str) -> Result<PathBuf, std::convert::Infallible> {
    Ok(PathBuf::from(text))
}

fn address(text: &str) -> Result<Option<IpAddr>, String> {
    or_nothing(text, |text| text.parse().map_err(|_| "want an IPv4 or IPv6 address".to_owned()))
}

/// CI systems set a variable to nothing as often as they leave it out.
pub(super) fn or_nothing<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    match text.trim() {
        "" => Ok(None),
        text => parse(text).map(Some),
    }
}

/// What is left of a value that counts.
pub(super) fn value(given: Option<&String>) -> Option<&str> {
    given.map(|text| text.trim()).filter(|text| !text.is_empty())
}

/// An address of the routing API, read without showing what is none.
pub(super) fn base_url(text: &str) -> Result<BaseUrl, Failure> {
    let parsed = text.parse::<BaseUrl>();
    parsed.map_err(|error| Failure::new(Code::Usage, error).hint("`bko-install credentials` prints it"))
}

impl ApiArgs {
    /// Everything that leads to a farm on this host, unless it was given; `certificate` says whether that was.
    #[expect(clippy::disallowed_methods, reason = "shell: reads the token of a farm on this host")]
    pub(super) fn use_host(&mut self, info: &Info, certificate: bool) -> anyhow::Result<()> {
        self.buildd_url = Some(info.api.clone());
        if !certificate && self.folder().is_none() && self.ca().is_none() {
            self.client_certs = Some(info.certificates.clone());
        }
        if let (None, Some(gateway)) = (self.gateway_ip.flatten(), info.gateway) {
            self.gateway_ip = Some(Some(gateway));
        }
        // Who says who it is means that.
        let given = value(self.token.as_ref()).or(value(self.id_token.as_ref()));
        if let (None, Some(path)) = (given, &info.token) {
            let token = std::fs::read_to_string(path).with_context(|| format!("cannot read \"{}\"", path.display()))?;
            self.token = Some(token.trim().to_owned());
        }
        Ok(())
    }

    /// Where the routing API is, if that is said.
    pub(super) fn base(&self) -> Result<Option<BaseUrl>, Failure> {
        value(self.buildd_url.as_ref()).map(base_url).transpose()
    }

    /// The folder with the client certificate, which counts before values.
    pub(super) fn folder(&self) -> Option<&PathBuf> {
        self.client_certs.as_ref().filter(|folder| !folder.as_os_str().is_empty())
    }

    /// The authority of the daemons as a value.
    pub(super) fn ca(&self) -> Option<&str> {
        value(self.ca.as_ref())
    }

    /// Where daemons are, if not where the answer says.
    pub(super) fn gateway(&self, port: Option<u16>) -> Gateway {
        let host = self.gateway_host.clone().filter(|host| !host.is_empty());
        Gateway { host, port, address: self.gateway_ip.flatten() }
    }

    /// The routing API.
    pub(super) fn api(&self, base: BaseUrl) -> Result<Api, Failure> {
        let authority = match (value(self.api_ca.as_ref()), self.folder(), self.ca()) {
            (Some(own), ..) => Some(pem("CA of the routing API", own)),
            (None, Some(folder), _) => Some(client::authority(folder)),
            (None, None, Some(ca)) => Some(pem("CA", ca)),
            (None, None, None) => None,
        };
        let authority = authority.transpose().map_err(certificates)?;
        let trust = api_trust(authority.as_deref()).map_err(tls)?;
        let gateway = self.gateway(None);
        // The API has a name below the gateway's domain, and needs the same help.
        let text = base.to_string();
        let host = text.split("://").nth(1).and_then(|rest| rest.split([':', '/']).next()).unwrap_or_default();
        let domain = gateway.host.or_else(|| host.strip_prefix("api.").map(str::to_owned));
        let pinned = gateway.address.zip(domain).map(|(address, domain)| Pinned { domain, address });
        let admin = token("BUILDKIT_OPERATOR_ADMIN_TOKEN", self.admin_token.as_ref())?;
        Ok(Api { base, http: Http::new(trust, pinned), token: self.token()?, admin })
    }

    /// Who asks: a token counts before an identity.
    pub(super) fn token(&self) -> Result<TokenSource, Failure> {
        let fixed = token("BUILDKIT_OPERATOR_TOKEN", self.token.as_ref())?;
        let identity = token("BUILDKIT_OPERATOR_ID_TOKEN", self.id_token.as_ref())?;
        if let Some(token) = fixed.or(identity) {
            return Ok(TokenSource::Fixed(token));
        }
        let permit = token("ACTIONS_ID_TOKEN_REQUEST_TOKEN", self.id_token_request_token.as_ref())?;
        Ok(match (value(self.id_token_request_url.as_ref()), permit) {
            (Some(url), Some(token)) => {
                let audience = value(Some(&self.oidc_audience)).unwrap_or(AUDIENCE);
                TokenSource::Minted(Mint { url: url.to_owned(), token, audience: audience.to_owned() })
            }
            _ => TokenSource::Nobody,
        })
    }
}

fn token(variable: &str, given: Option<&String>) -> Result<Option<Token>, Failure> {
    let token = given.and_then(|text| Token::new(text));
    // As some CI systems hand over variables of type file.
    if given.is_some_and(|text| text.trim().starts_with('/') && Path::new(text.trim()).is_file()) {
        let error = anyhow!("{variable} is the path of a file, and not what is in it");
        return Err(Failure::new(Code::Usage, error).hint("make it a variable that holds the token itself"));
    }
    if token.as_ref().is_none_or(Token::is_well_formed) {
        return Ok(token);
    }
    let error = anyhow!("{variable} holds white space or characters that no token has");
    Err(Failure::new(Code::Usage, error).hint("it is the token alone, without a name, quotes or \"Bearer\" before it"))
}

/// No client certificate.
pub(super) fn certificates(error: CertificatesError) -> Failure {
    Failure::new(Code::Usage, error)
        .hint("`bko-install credentials` prints the certificate, `bko-install certs export` writes its files")
}

/// No certificate that can be used.
pub(super) fn tls(error: TlsError) -> Failure {
    Failure::new(Code::Usage, error).hint(RENEW)
}

/// How to get another certificate.
pub(super) const RENEW: &str = "fetch it anew: `bko-install credentials`";

/// What to do about a call that failed, by who was shown to be calling.
pub(super) fn hint(error: &ApiError, shown: Shown) -> Option<String> {
    Some(match error {
        ApiError::Refused { status, text, .. } => match status.as_u16() {
            401 => unauthorized(text, shown).into(),
            // Any other reason speaks for itself.
            403 if text.starts_with("Forbidden") => {
                "this repository is not among those that the farm lets this caller build: docs/identity.md".into()
            }
            404 => "is that the address of the routing API? `bko-install credentials` prints it".into(),
            _ => return None,
        },
        ApiError::Http(error) => match (error.innermost(), error) {
            (HttpError::NotTrusted { why, .. }, _) => distrusted(why).into(),
            (HttpError::Proxy(status), _) if status.as_u16() == 407 => {
                "the proxy's URL wants USER:PASSWORD@ before its host".into()
            }
            (HttpError::UnknownProxy(_), _) | (_, HttpError::Through { .. }) => {
                "is that the proxy to use? A host that is named in no_proxy is reached without one".into()
            }
            _ => "check BUILDKIT_OPERATOR_BUILDD_URL: `bko-install credentials` prints it".into(),
        },
        ApiError::Token(TokenError::Refused { .. } | TokenError::NoToken) => {
            "the job needs the permission `id-token: write`".into()
        }
        ApiError::Token(error) => return error.source().map(|_| "is the CI system reachable from the job?".into()),
        ApiError::Foreign(_) => "use the address that answers by itself; redirections are not followed".into(),
    })
}

/// In the words of the TLS library.
fn distrusted(why: &str) -> &'static str {
    let why = why.to_lowercase();
    if why.contains("expired") {
        "`bko-install cluster init` renews the farm's own certificates; is the clock of this machine right?"
    } else if why.contains("not valid for") || why.contains("notvalidforname") {
        "use a name that the certificate has: `bko-install credentials` prints the address"
    } else {
        "pass the CA of the routing API with --api-ca; `bko-install credentials` hands it over"
    }
}

/// In the server's words as `identity::Refused` has them.
fn unauthorized(text: &str, shown: Shown) -> &'static str {
    let says = |words: &str| text.contains(words);
    match shown {
        _ if says("malformed token") || says("the token's claim") => {
            "what BUILDKIT_OPERATOR_TOKEN or BUILDKIT_OPERATOR_ID_TOKEN holds is no identity as docs/identity.md wants it"
        }
        _ if says("expired") => {
            "an identity lives for minutes: let the job that builds ask for its own, and not hand it on"
        }
        _ if says("audience") => {
            "ask for the audience that the farm expects: --oidc-audience, in GitLab `aud:` of the id_token; \
             `buildkit-operator` unless the farm says otherwise"
        }
        _ if says("issuer is not configured") => {
            "the farm does not know this CI system: add it to `oidc.providers` of the installation, docs/identity.md"
        }
        _ if says("signature") || says("key of the issuer") => {
            "forged, or the CI system's keys have just changed: try again in a minute"
        }
        _ if says("not valid yet") => "the clocks of the CI system and of the farm differ",
        Shown::Nothing => {
            "set BUILDKIT_OPERATOR_TOKEN (`bko-install credentials`), or let the job have an identity (GitHub: \
             `permissions: id-token: write`; Forgejo: `enable-openid-connect: true`; GitLab: `id_tokens`). A pull \
             request from a fork has neither: see docs/build.md"
        }
        Shown::Token => {
            "the token is wrong, or has been rotated: `bko-install credentials` prints the one that is valid. An \
             --admin-token that is wrong is not made good by another"
        }
        Shown::Identity | Shown::FreshIdentity => {
            "the farm takes no identities of CI systems yet (`oidc.providers`, docs/identity.md): set \
             BUILDKIT_OPERATOR_TOKEN, `bko-install credentials` prints it"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Refused;

    #[test]
    fn a_401_has_the_hint_for_its_reason() {
        for (refused, want) in [
            (Refused::Expired, "lives for minutes"),
            (Refused::Audience, "--oidc-audience"),
            (Refused::UnknownIssuer, "oidc.providers"),
            (Refused::Signature, "try again in a minute"),
            (Refused::UnknownKey, "try again in a minute"),
            (Refused::TooEarly, "clocks"),
            (Refused::Malformed("it has no signature"), "is no identity"),
            (Refused::Claim("\"ref\" is missing".into()), "is no identity"),
        ] {
            let hint = unauthorized(&format!("Unauthorized: {refused}"), Shown::Identity);
            assert!(hint.contains(want), "{refused}: {hint}");
        }
        for (shown, want) in [
            (Shown::Nothing, "let the job have an identity"),
            (Shown::Token, "has been rotated"),
            (Shown::FreshIdentity, "takes no identities"),
        ] {
            assert!(unauthorized("Unauthorized", shown).contains(want), "{shown:?}");
        }
    }

    #[test]
    fn a_certificate_has_the_hint_for_its_fault() {
        use rustls::CertificateError::{Expired, NotValidForName, UnknownIssuer};
        for (fault, want) in [(Expired, "cluster init"), (NotValidForName, "a name that"), (UnknownIssuer, "--api-ca")]
        {
            assert!(distrusted(&fault.to_string()).contains(want), "{fault}");
        }
    }

    #[test]
    fn a_token_with_something_else_in_it_is_refused_and_not_shown() {
        for given in ["Bearer hunter2", "hunter2\nhunter3", "\u{feff}hunter2", "hunter2\u{1b}"] {
            let failure = token("VARIABLE", Some(&given.to_owned())).unwrap_err();
            let error = failure.error.unwrap().to_string();
            assert!(error.contains("VARIABLE") && !error.contains("hunter"), "{error}");
        }
        assert!(token("VARIABLE", Some(&" hunter2\n".to_owned())).unwrap().is_some());
        assert!(token("VARIABLE", Some(&" ".to_owned())).unwrap().is_none());
    }
}
