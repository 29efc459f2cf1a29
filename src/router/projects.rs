//! What can be read of projects. Answered from memory, whoever asks how often.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{Query, RawPathParams, Request, State};
use axum::http::{HeaderMap, Method, Uri};
use axum::response::{IntoResponse, Response};

use super::Shared;
use super::answer::{Answer, IGNORED_FIELDS, Refusal, header_text};
use super::identity::{Identity, may_see};
use super::limit::Caller;
use super::request::BadRequest;
use super::serve::Arrival;
use crate::key::{ProjectKey, Repo};
use crate::provisioner::project::Selection;

/// Projects of a page unless the caller asks for fewer or more.
pub(super) const PAGE: usize = 100;

/// Most projects of a page.
pub(super) const LARGEST_PAGE: usize = 500;

/// `GET /projects`: what runs where, page by page.
pub(super) async fn list(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match shared.list(Asked::from(&request)).await {
        Ok((answer, ignored)) => {
            let mut response = answer.into_response();
            if !ignored.is_empty() {
                response.headers_mut().insert(IGNORED_FIELDS, header_text(&ignored.join(", ")));
            }
            response
        }
        Err(refusal) => refusal.into_response(),
    }
}

/// `GET /projects/{key}`: all that is known of one.
pub(super) async fn show(
    State(shared): State<Arc<Shared>>,
    path: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
) -> Response {
    let key = path.iter().flatten().find_map(|(name, key)| (name == "key").then(|| key.to_owned()));
    shared.show(Asked::from(&request), &key.unwrap_or_default()).await.into_response()
}

/// A request without its body, which is of no interest.
struct Asked {
    method: Method,
    headers: HeaderMap,
    uri: Uri,
    peer: Option<IpAddr>,
}

impl From<&Request> for Asked {
    fn from(request: &Request) -> Self {
        Self {
            method: request.method().clone(),
            headers: request.headers().clone(),
            uri: request.uri().clone(),
            peer: request.extensions().get::<Arrival>().map(|arrival| arrival.peer.ip()),
        }
    }
}

impl Shared {
    /// identify → rate → method.
    async fn reader(&self, asked: &Asked) -> Result<Identity, Refusal> {
        let client = asked.peer.map(|peer| self.config.trusted_proxies.client(peer, &asked.headers));
        let source = Caller::source(client);
        let identified = self.config.auth.identify(&asked.headers, || self.config.source_rate.take(&source)).await;
        let identity = identified.map_err(Refusal::from)?;
        self.config.rate.take(&Caller::of(&identity, client)).map_err(Refusal::rate_limited)?;
        let reads = asked.method == Method::GET || asked.method == Method::HEAD;
        if reads { Ok(identity) } else { Err(Refusal::read_only()) }
    }

    async fn list(&self, asked: Asked) -> Result<(Answer, Vec<String>), Refusal> {
        let identity = self.reader(&asked).await?;
        let visible = |repo: &str| may_see(&identity, repo);
        let (selection, ignored) = selection(&asked.uri, &visible)?;
        self.knows_all()?;
        Ok((Answer::shown(&self.provisioner.projects(&selection))?, ignored))
    }

    /// A list that is not complete yet looks like one that is.
    fn knows_all(&self) -> Result<(), Refusal> {
        if self.provisioner.is_synced() { Ok(()) } else { Err(Refusal::not_synced()) }
    }

    async fn show(&self, asked: Asked, key: &str) -> Result<Answer, Refusal> {
        let identity = self.reader(&asked).await?;
        self.knows_all()?;
        // Any text may be asked for; what is no key names no project.
        let project = key.parse::<ProjectKey>().ok().and_then(|key| self.provisioner.project(&key));
        // Whether a project exists that the caller may not see is none of its business.
        let project = project.filter(|project| may_see(&identity, &project.summary.repo));
        Answer::shown(&project.ok_or_else(Refusal::no_such_project)?)
    }
}

/// What a query asks for, and which of its parameters were ignored.
fn selection<'a>(
    uri: &Uri,
    visible: &'a (dyn Fn(&str) -> bool + Sync),
) -> Result<(Selection<'a>, Vec<String>), BadRequest> {
    let mut selection = Selection { repo: None, phase: None, after: None, limit: PAGE, visible };
    let (mut seen, mut ignored) = (Vec::new(), Vec::new());
    let query = Query::<Vec<(String, String)>>::try_from_uri(uri).map_err(BadRequest::Query)?;
    for (name, value) in query.0 {
        let Some(name) = PARAMETERS.into_iter().find(|known| *known == name) else {
            ignored.push(name);
            continue;
        };
        if seen.contains(&name) {
            return Err(BadRequest::Parameter { name, want: "given once" });
        }
        seen.push(name);
        let want = |want| move || BadRequest::Parameter { name, want };
        match name {
            "repo" => selection.repo = Some(Repo::normalize(&value).map_err(BadRequest::Key)?),
            "phase" => selection.phase = Some(value.parse().ok().ok_or_else(want(PHASES))?),
            "continue" => selection.after = Some(value.parse().ok().ok_or_else(want("what the page before gave"))?),
            _ => {
                let limit = value.parse().ok().filter(|limit| (1..=LARGEST_PAGE).contains(limit));
                selection.limit = limit.ok_or_else(want("a number from 1 to 500"))?;
            }
        }
    }
    Ok((selection, ignored))
}

const PARAMETERS: [&str; 4] = ["repo", "phase", "continue", "limit"];
const PHASES: &str = "one of Pending, Idle, Scaling, Warm, Failed";
