//! From options to a build.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::anyhow;

use super::args::{AccessArgs, BuildArgs, HIDDEN};
use super::fail;
use crate::cli::exit::{Code, Failure};
use crate::cli::{Global, key};
use crate::client::builder::{Builder, Node, Spec, Wanted};
use crate::client::{
    Api, Build, Certificates, Endpoint, Gateway, Given, Http, Mint, Paths, Pinned, Private, RouteRequest, Token,
    TokenSource, api_trust, pem, shell,
};
use crate::image::native_arch;
use crate::key::Project;
use crate::names::{BUILDS_NAMESPACE, DAEMON_PORT};

/// What `client::run` needs.
pub(super) async fn plan(args: &BuildArgs, global: &Global) -> Result<Build, Failure> {
    let access = &args.access;
    let private = Private::new()?;
    let given = given(access)?.ok_or_else(|| {
        let error = anyhow!("no client certificate");
        Failure::new(Code::Usage, error).hint(
            "set BUILDKIT_OPERATOR_CLIENT_CERTS to a folder with ca.pem, cert.pem and key.pem, or \
             BUILDKIT_OPERATOR_CA, _CERT and _KEY: `bko-install credentials` prints them",
        )
    })?;
    let certificates = Certificates::open(&given, &private).map_err(fail::certificates)?;
    let token = token(access);
    let requests = requests(args, global, token.vouches()).await?;
    let spec =
        spec(args, global, &mut |name, value| private.write(name, value.as_bytes()).map_err(fail::certificates))?;
    Ok(Build {
        api: api(access, token, &certificates)?,
        requests,
        spec,
        certificates,
        private,
        builder: args.builder,
        gateway: gateway(access),
        route_wait: args.route.route_wait,
        retries: args.retries,
        digest_file: args.image.digest_file.clone(),
        hidden: &HIDDEN,
    })
}

/// The commands that would be run, for a shell; nobody is called.
pub(super) async fn rehearsal(args: &BuildArgs, global: &Global) -> Result<String, Failure> {
    let requests = requests(args, global, false).await?;
    let folder = match given(&args.access)? {
        Some(Given::Folder(folder)) => std::path::absolute(folder)?,
        _ => PathBuf::from("/path/to/certificates"),
    };
    let paths = Paths { ca: folder.join("ca.pem"), cert: folder.join("cert.pem"), key: folder.join("key.pem") };
    let gateway = gateway(&args.access);
    let mut nodes = Vec::new();
    let mut text = String::new();
    let base =
        args.access.buildd_url.clone().flatten().map_or("$BUILDKIT_OPERATOR_BUILDD_URL".into(), |u| u.to_string());
    for request in requests {
        let RouteRequest { repo, name, target, arch, untrusted } = &request;
        let project = Project::new(repo, name, target, arch, *untrusted).map_err(key::refuse)?;
        let endpoint = project.key().in_cluster_endpoint(BUILDS_NAMESPACE, DAEMON_PORT);
        let endpoint = Endpoint::parse(&endpoint).ok_or_else(|| anyhow!("no endpoint of {}", project.key()))?;
        writeln!(text, "# POST {base}/route {}", serde_json::to_string(&request)?)?;
        nodes.push(Node { arch: request.arch, endpoint: gateway.place(endpoint), cache: None });
    }
    let spec = spec(args, global, &mut |name, _| Ok(PathBuf::from("/path/to/private").join(name)))?;
    let builder = match args.builder {
        Wanted::Buildctl => Builder::Buildctl("buildctl".into()),
        Wanted::Auto | Wanted::Buildx => Builder::Buildx(vec!["docker".into(), "buildx".into()]),
    };
    let commands = builder.commands(&spec, &nodes, &paths, true).map_err(fail::unsupported)?;
    for command in commands.create.iter().chain([&commands.build]) {
        writeln!(text, "{}", shell::command_line(command))?;
    }
    writeln!(text, "# POST {base}/complete")?;
    Ok(text)
}

fn blank<T: AsRef<str>>(text: &T) -> bool {
    text.as_ref().trim().is_empty()
}

/// Where the certificate comes from; three values count for more than nothing
/// and less than a folder.
fn given(access: &AccessArgs) -> Result<Option<Given>, Failure> {
    if let Some(folder) = access.client_certs.as_ref().filter(|folder| !folder.as_os_str().is_empty()) {
        return Ok(Some(Given::Folder(folder.clone())));
    }
    let value = |value: &Option<String>| value.clone().filter(|value| !blank(value));
    match (value(&access.ca), value(&access.cert), value(&access.key)) {
        (Some(ca), Some(cert), Some(key)) => Ok(Some(Given::Values { ca, cert, key })),
        (_, None, None) => Ok(None),
        (ca, cert, _) => {
            let missing = if ca.is_none() {
                "_CA"
            } else if cert.is_none() {
                "_CERT"
            } else {
                "_KEY"
            };
            let error = anyhow!("BUILDKIT_OPERATOR{missing} is not set, but the rest of the client certificate is");
            Err(Failure::new(Code::Usage, error).hint("`bko-install credentials` prints all three"))
        }
    }
}

fn token(access: &AccessArgs) -> TokenSource {
    let token = |text: &Option<String>| text.as_deref().and_then(Token::new);
    if let Some(token) = token(&access.token).or_else(|| token(&access.id_token)) {
        return TokenSource::Fixed(token);
    }
    let url = access.id_token_request_url.clone().filter(|url| !blank(url));
    match (url, token(&access.id_token_request_token)) {
        (Some(url), Some(token)) => {
            let audience = if blank(&access.oidc_audience) { super::args::AUDIENCE } else { &access.oidc_audience };
            TokenSource::Minted(Mint { url, token, audience: audience.to_owned() })
        }
        _ => TokenSource::Nobody,
    }
}

fn gateway(access: &AccessArgs) -> Gateway {
    Gateway {
        host: access.gateway_host.clone().filter(|host| !host.is_empty()),
        port: access.gateway_port.flatten(),
        address: access.gateway_ip.flatten(),
    }
}

fn api(access: &AccessArgs, token: TokenSource, certificates: &Certificates) -> Result<Api, Failure> {
    let base = access.buildd_url.clone().flatten().ok_or_else(|| {
        Failure::new(Code::Usage, anyhow!("no address of the routing API"))
            .hint("set BUILDKIT_OPERATOR_BUILDD_URL, or pass --buildd-url: `bko-install credentials` prints it")
    })?;
    let own = access.api_ca.as_ref().filter(|ca| !blank(ca));
    let own = own.map(|ca| pem("CA of the routing API", ca)).transpose().map_err(fail::certificates)?;
    let trust = api_trust(Some(own.as_deref().unwrap_or(&certificates.ca))).map_err(fail::tls)?;
    let gateway = gateway(access);
    // The API has a name below the gateway's domain, and needs the same help.
    let text = base.to_string();
    let host = text.split("://").nth(1).and_then(|rest| rest.split([':', '/']).next()).unwrap_or_default();
    let domain = gateway.host.clone().or_else(|| host.strip_prefix("api.").map(str::to_owned));
    let pinned = gateway.address.zip(domain).map(|(address, domain)| Pinned { domain, address });
    let admin = access.admin_token.as_deref().and_then(Token::new);
    Ok(Api { base, http: Http::new(trust, pinned), token, admin })
}

/// One for each architecture.
async fn requests(args: &BuildArgs, global: &Global, vouched: bool) -> Result<Vec<RouteRequest>, Failure> {
    let route = &args.route;
    let text = |text: &Option<String>| text.as_deref().unwrap_or_default().trim().to_owned();
    let repo = match text(&route.repo) {
        repo if !repo.is_empty() => repo,
        _ => origin(&context(args, global)?).await.unwrap_or_default(),
    };
    if repo.is_empty() && !vouched {
        let error = anyhow!("no repository: the context has no git remote \"origin\"");
        return Err(Failure::new(Code::Usage, error)
            .hint("pass --repo, such as github.com/acme/shop: builds of one repository share a cache"));
    }
    let (name, target) = (text(&route.name), text(&route.target));
    let request = |arch: String| {
        // Normalised here: the URL of a checkout in CI often holds a token.
        let stand_in = if repo.is_empty() { "identity/of/the-job" } else { &repo };
        let project = Project::new(stand_in, &name, &target, &arch, route.untrusted).map_err(key::refuse)?;
        Ok(RouteRequest {
            repo: if repo.is_empty() { String::new() } else { project.repo.to_string() },
            name: name.clone(),
            target: target.clone(),
            arch: project.arch.to_string(),
            untrusted: route.untrusted,
        })
    };
    arches(&route.arches)?.into_iter().map(request).collect()
}

fn arches(given: &[String]) -> Result<Vec<String>, Failure> {
    let mut arches: Vec<String> = Vec::new();
    for arch in given.iter().map(|arch| arch.trim()).filter(|arch| !arch.is_empty()) {
        let arch = arch.strip_prefix("linux/").unwrap_or(arch).to_owned();
        if !arches.contains(&arch) {
            arches.push(arch);
        }
    }
    if arches.is_empty() {
        let native = native_arch().ok_or_else(|| {
            let error = anyhow!("no daemon builds for this machine's architecture, {}", std::env::consts::ARCH);
            Failure::new(Code::Usage, error).hint("name one with --arch amd64 or --arch arm64")
        })?;
        arches.push(native.to_string());
    }
    Ok(arches)
}

/// The reference's `--context` names what to build; ours, on every command,
/// a context of the kubeconfig, which a build has no use for.
fn context(args: &BuildArgs, global: &Global) -> Result<String, Failure> {
    match (&args.source, &global.context) {
        (Some(_), Some(_)) => {
            Err(Failure::new(Code::Usage, anyhow!("--context and CONTEXT are both given: they are the same here")))
        }
        (Some(context), None) | (None, Some(context)) => Ok(context.clone()),
        (None, None) => Ok(".".to_owned()),
    }
}

/// The remote "origin" of the repository that the context is in.
async fn origin(context: &str) -> Option<String> {
    let folder = Path::new(context);
    let mut git = tokio::process::Command::new("git");
    git.current_dir(if folder.is_dir() { folder } else { Path::new(".") });
    git.args(["remote", "get-url", "origin"]).stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let output = git.output().await.ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

fn spec(
    args: &BuildArgs,
    global: &Global,
    keep: &mut dyn FnMut(&str, &str) -> Result<PathBuf, Failure>,
) -> Result<Spec, Failure> {
    let image = &args.image;
    if image.push && image.tags.is_empty() {
        let error = anyhow!("--push without --tag: where to?");
        return Err(Failure::new(Code::Usage, error).hint("name the image with --tag registry.example.org/shop:1"));
    }
    Ok(Spec {
        context: context(args, global)?,
        file: image.file.clone(),
        target: args.route.target.as_deref().unwrap_or_default().trim().to_owned(),
        tags: image.tags.clone(),
        push: image.push,
        load: image.load,
        outputs: image.outputs.clone(),
        build_args: image.build_args.clone(),
        labels: image.labels.clone(),
        secrets: secrets(&image.secrets, keep)?,
        ssh: image.ssh.clone(),
        provenance: image.provenance.clone(),
        sbom: image.sbom.clone(),
        cache_from: image.cache_from.clone(),
        cache_to: image.cache_to.clone(),
        metadata_file: image.metadata_file.clone(),
        progress: args.progress.clone(),
        no_cache: image.no_cache,
        extra: args.extra.clone(),
    })
}

/// Values become files; what names a file or a variable stays.
fn secrets(
    given: &[String],
    keep: &mut dyn FnMut(&str, &str) -> Result<PathBuf, Failure>,
) -> Result<Vec<String>, Failure> {
    let mut secrets = Vec::new();
    for (index, secret) in given.iter().map(|secret| secret.trim_matches('\r')).enumerate() {
        if blank(&secret) {
            continue;
        }
        if ["id=", "type=", "src=", "env="].iter().any(|start| secret.starts_with(start)) {
            secrets.push(secret.to_owned());
            continue;
        }
        let id = |id: &&str| !id.is_empty() && id.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c));
        let Some((id, value)) = secret.split_once('=').map(|(id, value)| (id.trim(), value)).filter(|(i, _)| id(i))
        else {
            // Not shown: it may be a value whose name was forgotten.
            let error = anyhow!("secret {} has no name", index + 1);
            return Err(Failure::new(Code::Usage, error).hint("want NAME=VALUE, or id=NAME,src=FILE"));
        };
        let path = keep(&format!("secret-{index}"), value)?;
        secrets.push(format!("id={id},src={}", path.display()));
    }
    Ok(secrets)
}
