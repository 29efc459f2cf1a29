//! Where `ps` learns what runs: from the routing API, or from the projects
//! themselves.
#![expect(clippy::disallowed_methods, reason = "shell: ages are told")]

use std::time::Duration;

use jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, ResourceExt};

use super::PsArgs;
use crate::cli::exit::{Code, Failure};
use crate::cli::{Global, access, host};
use crate::client::Api as RoutingApi;
use crate::cluster::client::{connect_as, plain};
use crate::families::build_farm::api::{self, BuildProject};
use crate::families::build_farm::project::{Known, summary};
use crate::families::build_farm::settings::Settings;
use crate::local::layout::Layout;
use crate::names::INSTALLER_MANAGER;
use crate::provisioner::project::{Page, Summary};

/// How long one answer of the routing API may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Projects that the API server gives at once.
const CHUNK: u32 = 500;

pub(super) enum Source {
    Remote(Box<RoutingApi>),
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
        if let Some(base) = args.access.base()? {
            return Ok(Self::Remote(Box::new(args.access.api(base)?)));
        }
        let elsewhere = args.state.state_dir.is_none() && (global.kubeconfig.is_some() || global.context.is_some());
        if !elsewhere && let Some((layout, _)) = host::running(&args.state).await? {
            return Ok(Self::Host(layout));
        }
        let client = connect_as(INSTALLER_MANAGER, global).await.map_err(|failure| {
            let hint = failure.hint.clone().unwrap_or_default();
            failure.hint(format!("{hint}; or set BUILDKIT_OPERATOR_BUILDD_URL, to ask the routing API"))
        })?;
        let settings = Settings { namespace: args.namespace.clone(), ..Settings::default() };
        let api = Api::namespaced(client, &args.namespace);
        Ok(Self::Cluster(Box::new(Cluster { api, settings })))
    }

    /// All projects, in the order of their keys.
    pub(super) async fn projects(&self) -> Result<Vec<Summary>, Failure> {
        match self {
            Self::Remote(api) => pages(api).await,
            Self::Host(layout) => host::projects(layout).await.map_err(host::refused),
            Self::Cluster(cluster) => objects(&cluster.api, &cluster.settings).await,
        }
    }
}

/// One answer, or why there is none, with how to mend it.
async fn ask(api: &RoutingApi, path: &str) -> Result<Page, Failure> {
    let answer = tokio::time::timeout(PATIENCE, api.get(path)).await;
    let error = match answer {
        Ok(Ok(page)) => return Ok(page),
        Ok(Err(error)) => error,
        Err(late) => {
            let what = format!("no answer from {} within {PATIENCE:?}", api.base);
            return Err(anyhow::Error::new(late).context(what).into());
        }
    };
    let hint = access::hint(&error, api.token.shown());
    let failure = Failure::new(Code::Failed, anyhow::Error::new(error).context(format!("cannot ask {}", api.base)));
    Err(Failure { hint, ..failure })
}

async fn pages(api: &RoutingApi) -> Result<Vec<Summary>, Failure> {
    let mut projects: Vec<Summary> = Vec::new();
    let mut path = "/projects?limit=500".to_owned();
    loop {
        let page = ask(api, &path).await?;
        let begins = page.projects.first().map(|project| project.key.clone());
        // Pages go on in the order of their keys, or they would never end.
        let goes_on = match (&begins, projects.last()) {
            (Some(first), Some(last)) => *first > last.key,
            (first, _) => first.is_some() || page.next.is_none(),
        };
        if !goes_on {
            let error = anyhow::anyhow!("{} repeats its list of projects without an end", api.base);
            return Err(Failure::new(Code::Failed, error).hint("is this the address of the routing API itself?"));
        }
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
    let failure = Failure::new(Code::Failed, plain(&error).context("cannot list the projects"));
    match (unknown, forbidden) {
        (true, _) => failure.hint("the cluster has no farm yet: install it with `bko-install cluster init`"),
        (_, true) => {
            failure.hint("use credentials that may list BuildProjects, or ask the routing API with --buildd-url")
        }
        _ => failure,
    }
}
