//! Where `ps` learns what runs: from the routing API, or from the projects
//! themselves.
#![expect(clippy::disallowed_methods, reason = "shell: a file with an authority is read, ages are told")]

use http::Uri;
use jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use super::super::exit::{Code, Failure};
use super::PsArgs;
use super::remote::Remote;
use crate::cli::{Global, host};
use crate::client::pem;
use crate::cluster::client::connect_as;
use crate::families::build_farm::api::{self, BuildProject};
use crate::families::build_farm::project::{Known, summary};
use crate::families::build_farm::settings::Settings;
use crate::local::layout::Layout;
use crate::names::INSTALLER_MANAGER;
use crate::provisioner::project::{Page, Summary};

/// Projects that the API server gives at once.
const CHUNK: u32 = 500;

pub(super) enum Source {
    Remote(Box<Remote>),
    /// A farm on this host.
    Host(Layout),
    Cluster(Box<Cluster>),
}

pub(super) struct Cluster {
    api: Api<BuildProject>,
    settings: Settings,
}

impl Source {
    pub(super) async fn new(args: &PsArgs, global: &Global) -> Result<Self, Failure> {
        if let Some(url) = args.buildd_url.as_deref().map(str::trim).filter(|url| !url.is_empty()) {
            return remote(args, url).map(|remote| Self::Remote(Box::new(remote)));
        }
        let elsewhere = args.state.state_dir.is_none() && (global.kubeconfig.is_some() || global.context.is_some());
        if !elsewhere && let Some((layout, _)) = host::running(&args.state).await? {
            return Ok(Self::Host(layout));
        }
        let client = connect_as(INSTALLER_MANAGER, global).await?;
        let settings = Settings { namespace: args.namespace.clone(), ..Settings::default() };
        let api = Api::namespaced(client, &args.namespace);
        Ok(Self::Cluster(Box::new(Cluster { api, settings })))
    }

    /// All projects, in the order of their keys.
    pub(super) async fn projects(&self) -> Result<Vec<Summary>, Failure> {
        match self {
            Self::Remote(remote) => pages(remote).await,
            Self::Host(layout) => host::projects(layout).await.map_err(host::refused),
            Self::Cluster(cluster) => objects(&cluster.api, &cluster.settings).await,
        }
    }
}

fn remote(args: &PsArgs, url: &str) -> Result<Remote, Failure> {
    let base = url.trim_end_matches('/');
    let base = base.strip_suffix("/route").unwrap_or(base);
    let uri: Option<Uri> = base.parse().ok();
    let fits = |uri: &Uri| uri.host().is_some() && matches!(uri.scheme_str(), Some("http" | "https"));
    let Some(uri) = uri.filter(fits).filter(|_| !base.contains('@')) else {
        let error = anyhow::anyhow!("--buildd-url is no address of a routing API");
        return Err(Failure::new(Code::Usage, error).hint("want http://HOST:PORT or https://HOST:PORT"));
    };
    let given = [("--api-ca", &args.api_ca), ("--ca", &args.ca)].into_iter();
    let given = given.filter_map(|(flag, value)| Some((flag, value.as_deref().filter(|v| !v.trim().is_empty())?)));
    let authority = given.map(|(flag, value)| pem(flag, value).map_err(anyhow::Error::new)).next();
    let bare = |token: &Option<String>| token.as_deref().map(str::trim).filter(|t| !t.is_empty()).map(str::to_owned);
    let authority = authority.transpose().map_err(|error| Failure::new(Code::Usage, error))?;
    Remote::new(uri, bare(&args.token), bare(&args.admin_token), authority.as_deref())
}

async fn pages(remote: &Remote) -> Result<Vec<Summary>, Failure> {
    let mut projects = Vec::new();
    let mut path = "/projects?limit=500".to_owned();
    loop {
        let page: Page = remote.get(&path).await?;
        projects.extend(page.projects);
        match page.next {
            Some(next) => path = format!("/projects?limit=500&continue={next}"),
            None => return Ok(projects),
        }
    }
}

async fn objects(api: &Api<BuildProject>, settings: &Settings) -> Result<Vec<Summary>, Failure> {
    let (mut objects, mut params) = (Vec::new(), ListParams::default().limit(CHUNK));
    loop {
        let list = api.list(&params).await.map_err(refused)?;
        objects.extend(list.items);
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => break,
        }
    }
    objects.sort_by_key(ResourceExt::name_any);
    let now = Timestamp::now();
    Ok(objects.iter().map(|project| of_object(project, settings, now)).collect())
}

fn of_object(project: &BuildProject, settings: &Settings, now: Timestamp) -> Summary {
    let status = project.status_or_default();
    let ready = status.phase == Some(api::Phase::Warm);
    summary(Known { project, ready, told: None }, status.endpoint, settings, now)
}

fn refused(error: kube::Error) -> Failure {
    let unknown = matches!(&error, kube::Error::Api(status) if status.code == 404);
    let forbidden = matches!(&error, kube::Error::Api(status) if status.code == 403);
    let failure = Failure::new(Code::Failed, anyhow::Error::new(error).context("cannot list the projects"));
    match (unknown, forbidden) {
        (true, _) => failure.hint("the cluster has no farm yet: install it with `bko-install cluster init`"),
        (_, true) => {
            failure.hint("use credentials that may list BuildProjects, or ask the routing API with --buildd-url")
        }
        _ => failure,
    }
}
