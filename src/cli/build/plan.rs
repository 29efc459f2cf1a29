//! From options to a build: everything that can be known here is, before
//! anybody is called.
#![expect(clippy::disallowed_methods, reason = "whether a certificate has ended depends on the time")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use jiff::Timestamp;

use super::args::{AccessArgs, BuildArgs, HIDDEN};
use super::check::check;
use super::fail;
use super::origin::repository;
use super::secrets::secrets;
use crate::cli::access::{self, value};
use crate::cli::exit::{Code, Failure};
use crate::cli::{Global, key};
use crate::client::builder::{self, Builder, Commands, Node, Spec};
use crate::client::{self, Build, Certificates, Endpoint, Given, Narrator, Paths, Private, RouteRequest, shell};
use crate::image::native_arch;
use crate::key::Project;
use crate::names::{BUILDS_NAMESPACE, DAEMON_PORT};
use crate::printable::printable;

/// What `client::run` needs.
pub(super) async fn plan(args: &BuildArgs, global: &Global, narrator: &Narrator) -> Result<Build, Failure> {
    let access = &args.access;
    let base = access.api.base()?.ok_or_else(|| {
        Failure::new(Code::Usage, anyhow!("no address of the routing API"))
            .hint("set BUILDKIT_OPERATOR_BUILDD_URL, or pass --buildd-url: `bko-install credentials` prints it")
    })?;
    let private = Private::new()?;
    let certificates = certificates(access, &private)?.ok_or_else(|| {
        let error = anyhow!("no client certificate");
        Failure::new(Code::Usage, error).hint(
            "set BUILDKIT_OPERATOR_CLIENT_CERTS to a folder with ca.pem, cert.pem and key.pem, or \
             BUILDKIT_OPERATOR_CA, _CERT and _KEY: `bko-install credentials` prints them",
        )
    })?;
    let api = access.api.api(base)?;
    let spec = spec(args, global, narrator, &mut |name, value| {
        private.write(name, value.as_bytes()).map_err(access::certificates)
    })?;
    let requests = requests(args, &spec.context, api.token.vouches()).await?;
    let nodes: Vec<_> = requests.iter().map(|request| node(request, "tcp://daemon:1234")).collect();
    let (builder, _) = commands(args, &spec, &nodes, &certificates.paths).await?;
    Ok(Build {
        api,
        requests,
        spec,
        certificates,
        private,
        builder,
        gateway: access.api.gateway(access.gateway_port.flatten()),
        route_wait: args.route.route_wait,
        retries: args.retries,
        digest_file: args.image.digest_file.clone(),
        hidden: &HIDDEN,
    })
}

/// The commands that would be run, for a shell; nobody is called. What is not
/// known yet stands in `<>`.
pub(super) async fn rehearsal(args: &BuildArgs, global: &Global, narrator: &Narrator) -> Result<String, Failure> {
    let access = &args.access;
    let certificates = certificates(access, &Private::new()?)?;
    let folder = PathBuf::from("<certificates>");
    let paths = certificates.filter(|certificates| certificates.lasting).map(|certificates| certificates.paths);
    let paths = paths.unwrap_or_else(|| Paths {
        ca: folder.join("ca.pem"),
        cert: folder.join("cert.pem"),
        key: folder.join("key.pem"),
    });
    let spec = spec(args, global, narrator, &mut |name, _| Ok(Path::new("<private>").join(name)))?;
    let token = access.api.token()?;
    let requests = requests(args, &spec.context, token.vouches()).await?;
    let base = match access.api.base()? {
        Some(base) => access.api.api(base)?.base.to_string(),
        None => "<address of the routing API>".to_owned(),
    };
    let gateway = access.api.gateway(access.gateway_port.flatten());
    let mut text =
        "# What stands in <> is not known yet, and where a daemon is, /route answers: this is where most are.\n"
            .to_owned();
    let (mut nodes, mut ends) = (Vec::new(), String::new());
    for request in &requests {
        let repo = if request.repo.is_empty() { UNKNOWN } else { &request.repo };
        let key = project(request, repo)?.key();
        let node = node(request, &key.in_cluster_endpoint(BUILDS_NAMESPACE, DAEMON_PORT));
        nodes.push(Node { endpoint: gateway.place(node.endpoint), ..node });
        writeln!(text, "# POST {base}/route {}", serde_json::to_string(request)?)?;
        writeln!(ends, "# POST {base}/complete {{\"key\":\"{key}\",\"buildId\":\"<of the answer>\"}}")?;
    }
    let (_, commands) = commands(args, &spec, &nodes, &paths).await?;
    for command in commands.create.iter().chain([&commands.build]) {
        writeln!(text, "{}", shell::command_line(command))?;
    }
    Ok(printable(&(text + &ends)))
}

/// The builder, and what it would be told: it refuses what it cannot do.
async fn commands(
    args: &BuildArgs,
    spec: &Spec,
    nodes: &[Node],
    paths: &Paths,
) -> Result<(Builder, Commands), Failure> {
    let builder = builder::find(args.builder).await.map_err(fail::no_builder)?;
    let commands = builder.commands(spec, nodes, paths, true).map_err(fail::unsupported)?;
    Ok((builder, commands))
}

fn node(request: &RouteRequest, endpoint: &str) -> Node {
    let unknown = Endpoint { host: "daemon".to_owned(), port: DAEMON_PORT, address: None };
    Node { arch: request.arch.clone(), endpoint: Endpoint::parse(endpoint).unwrap_or(unknown), cache: None }
}

/// Three values count for more than nothing and less than a folder.
fn certificates(access: &AccessArgs, private: &Private) -> Result<Option<Certificates>, Failure> {
    let given = match (access.api.folder(), access.api.ca(), value(access.cert.as_ref()), value(access.key.as_ref())) {
        (Some(folder), ..) => Given::Folder(folder.clone()),
        (None, Some(ca), Some(cert), Some(key)) => Given::Values { ca: ca.into(), cert: cert.into(), key: key.into() },
        (None, _, None, None) => return Ok(None),
        (None, ca, cert, _) => {
            let missing = if ca.is_none() {
                "_CA"
            } else if cert.is_none() {
                "_CERT"
            } else {
                "_KEY"
            };
            let error = anyhow!("BUILDKIT_OPERATOR{missing} is not set, but the rest of the client certificate is");
            return Err(Failure::new(Code::Usage, error).hint("`bko-install credentials` prints all three"));
        }
    };
    let certificates = Certificates::open(&given, private).map_err(access::certificates)?;
    client::check(&certificates, Timestamp::now()).map_err(access::tls)?;
    Ok(Some(certificates))
}

/// Stands for a repository that only the identity names.
const UNKNOWN: &str = "identity/of/the-job";

/// One for each architecture.
async fn requests(args: &BuildArgs, context: &str, vouched: bool) -> Result<Vec<RouteRequest>, Failure> {
    let route = &args.route;
    let repo = match repository(value(route.repo.as_ref()), context).await {
        Err(_) if vouched && value(route.repo.as_ref()).is_none() => None,
        repo => Some(repo?),
    };
    let text = |text: &Option<String>| value(text.as_ref()).unwrap_or_default().to_owned();
    let request = |arch: String| {
        let (repo, untrusted) = (repo.clone().unwrap_or_default(), route.untrusted);
        let request = RouteRequest { repo, name: text(&route.name), target: text(&route.target), arch, untrusted };
        if request.repo.is_empty() {
            let arch = project(&request, UNKNOWN)?.arch.to_string();
            return Ok(RouteRequest { arch, ..request });
        }
        // Normalised here: the URL of a checkout in CI often holds a token.
        let Project { repo, arch, .. } = project(&request, &request.repo)?;
        Ok(RouteRequest { repo: repo.to_string(), arch: arch.to_string(), ..request })
    };
    arches(&route.arches)?.into_iter().map(request).collect()
}

/// As the server will read it.
fn project(request: &RouteRequest, repo: &str) -> Result<Project, Failure> {
    let RouteRequest { name, target, arch, untrusted, .. } = request;
    let repo = crate::key::Repo::normalize(repo).map_err(key::refuse)?;
    Project::requested(repo.as_str(), name, target, arch, *untrusted).map_err(key::refuse)
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

fn spec(
    args: &BuildArgs,
    global: &Global,
    narrator: &Narrator,
    keep: &mut dyn FnMut(&str, &str) -> Result<PathBuf, Failure>,
) -> Result<Spec, Failure> {
    let image = &args.image;
    if image.push && image.tags.is_empty() {
        let error = anyhow!("--push without --tag: where to?");
        return Err(Failure::new(Code::Usage, error).hint("name the image with --tag registry.example.org/shop:1"));
    }
    let spec = Spec {
        context: context(args, global)?,
        file: image.file.clone(),
        target: value(args.route.target.as_ref()).unwrap_or_default().to_owned(),
        tags: image.tags.clone(),
        push: image.push,
        load: image.load,
        outputs: image.outputs.clone(),
        build_args: image.build_args.clone(),
        labels: image.labels.clone(),
        secrets: secrets(image, keep)?,
        ssh: image.ssh.clone(),
        provenance: image.provenance.clone(),
        sbom: image.sbom.clone(),
        cache_from: image.cache_from.clone(),
        cache_to: image.cache_to.clone(),
        metadata_file: image.metadata_file.clone(),
        progress: args.progress.clone(),
        no_cache: image.no_cache,
        extra: args.extra.clone(),
    };
    check(args, &spec)?.iter().for_each(|warning| narrator.warn(warning));
    Ok(spec)
}
