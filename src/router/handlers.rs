//! The calls themselves.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use tokio::time::timeout_at;

use super::Shared;
use super::answer::{Answer, Refusal};
use super::audit::Call;
use super::entry::Entry;
use super::identity::{Denied, Identity};
use super::limit::Caller;
use super::metrics::{Outcome, RouteTimer};
use super::request::{self, BadRequest, Fields};
use super::serve::Arrival;
use crate::identity::Verified;
use crate::key::{Project, ProjectKey, Repo};
use crate::provisioner::{BuildId, Released};

/// `POST /route`: an endpoint for one build, once its daemon can take it.
pub(super) async fn route(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let mut call = shared.call("/route", &request);
    let result = shared.route(&mut call, request).await;
    call.answer(result)
}

/// `POST /prewarm`: wakes a project's daemon and waits for nothing.
pub(super) async fn prewarm(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let mut call = shared.call("/prewarm", &request);
    let result = shared.prewarm(&mut call, request).await;
    call.answer(result)
}

/// `POST /complete`: one build has ended.
pub(super) async fn complete(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let mut call = shared.call("/complete", &request);
    let result = shared.complete(&mut call, request).await;
    call.answer(result)
}

impl Shared {
    fn call(&self, path: &'static str, request: &Request) -> Call {
        let peer = request.extensions().get::<Arrival>().map(|arrival| arrival.peer.ip());
        Call::begin(path, peer.map(|peer| self.config.trusted_proxies.client(peer, request.headers())))
    }

    async fn route(&self, call: &mut Call, request: Request) -> Result<Answer, Refusal> {
        let project = self.admit(call, request).await?;
        call.wants(&project);
        let timer = self.metrics.route();
        let (key, entry) = self.register(call, &project).await?;
        let outcome = self.wait_ready(call, &key, &timer).await?;
        let outcome = if project.untrusted { Outcome::Untrusted } else { outcome };
        let (endpoint, namespace) = (self.provisioner.endpoint(&key), self.provisioner.namespace());
        let answer = Answer::routed(&key, entry.build(), endpoint, namespace, outcome.as_str())?;
        timer.succeed(outcome);
        entry.keep();
        Ok(answer)
    }

    /// Makes the project exist and registers a build of it.
    async fn register(&self, call: &mut Call, project: &Project) -> Result<(ProjectKey, Entry), Refusal> {
        let deadline = call.since() + self.config.route_wait;
        let key = timeout_at(deadline, self.provisioner.ensure(project))
            .await
            .map_err(|_| Refusal::out_of_time("ensure project"))?
            .map_err(|error| Refusal::provisioning("ensure project", error))?;
        call.about(&key);
        let build = BuildId::random().map_err(|error| Refusal::internal(format!("draw a build id: {error}")))?;
        let begin = Entry::begin(Arc::clone(&self.provisioner), key.clone(), build, self.releases.clone());
        let entry = timeout_at(deadline, begin)
            .await
            .map_err(|_| Refusal::out_of_time("register build"))?
            .map_err(|error| Refusal::provisioning("register build", error))?;
        Ok((key, entry))
    }

    /// Waits, if need be, until the daemon can take a build. Queue and wait
    /// share what is left of the route's budget.
    async fn wait_ready(&self, call: &Call, key: &ProjectKey, timer: &RouteTimer) -> Result<Outcome, Refusal> {
        if self.provisioner.ready(key) {
            return Ok(Outcome::Warm);
        }
        let budget = self.config.route_wait.saturating_sub(call.since().elapsed());
        let waiting = timer.cold_start();
        self.cold_starts.wait(self.provisioner.wait_ready(key, budget)).await?;
        waiting.succeed();
        Ok(Outcome::Cold)
    }

    async fn prewarm(&self, call: &mut Call, request: Request) -> Result<Answer, Refusal> {
        // Forks are born with their first build: there is nothing to prewarm.
        let project = Project { untrusted: false, ..self.admit(call, request).await? };
        call.wants(&project);
        let deadline = call.since() + self.config.route_wait;
        let prewarmed = async {
            let key =
                self.provisioner.ensure(&project).await.map_err(|e| Refusal::provisioning("ensure project", e))?;
            self.provisioner.touch(&key).await.map_err(|e| Refusal::provisioning("touch project", e))?;
            Ok::<_, Refusal>(key)
        };
        let key = timeout_at(deadline, prewarmed).await.map_err(|_| Refusal::out_of_time("ensure project"))??;
        let (endpoint, namespace) = (self.provisioner.endpoint(&key), self.provisioner.namespace());
        Answer::prewarmed(&key, endpoint, namespace, self.provisioner.ready(&key))
    }

    /// Who may have a daemon, and which: identify → rate → method → decode →
    /// bind → validate. The shared tokens and an open API trust what the body
    /// declares; an identity that names its repository replaces it here.
    async fn admit(&self, call: &mut Call, request: Request) -> Result<Project, Refusal> {
        let identity = self.identify(call, request.headers()).await.map_err(Refusal::from)?;
        let fields = self.fields(request, &Caller::of(&identity, call.client())).await?;
        let (project, ignored) = request::project(fields, identity.verified().map(|who| &**who))?;
        call.ignores(ignored);
        Ok(project?)
    }

    /// Who calls, also for the audit log.
    async fn identify(&self, call: &mut Call, headers: &HeaderMap) -> Result<Identity, Denied> {
        let source = Caller::source(call.client());
        let identified = self.config.auth.identify(headers, || self.config.source_rate.take(&source)).await;
        match &identified {
            Ok(identity) => call.by(identity),
            Err(Denied::Unaccepted(Some(why)) | Denied::NotAllowed(why)) => call.refused(why),
            Err(_) => {}
        }
        identified
    }

    async fn complete(&self, call: &mut Call, request: Request) -> Result<Answer, Refusal> {
        let identity = match self.identify(call, request.headers()).await {
            Ok(identity) => Ok(identity),
            // A build may outlive its credential, or its provider's good days:
            // whoever knows the id of a live build may end it.
            Err(denied @ (Denied::Unaccepted(_) | Denied::Unavailable(_))) => Err(denied),
            Err(denied) => return Err(denied.into()),
        };
        let source = || Caller::source(call.client());
        let caller = identity.as_ref().map_or_else(|_| source(), |identity| Caller::of(identity, call.client()));
        let fields = self.fields(request, &caller).await?;
        let (completion, ignored) = request::completion(fields)?;
        call.ignores(ignored);
        let completion = completion?;
        let build = self.named_build(&completion.build_id, &identity)?;
        // Any text may be sent; what is no key names no project.
        let Ok(key) = completion.key.parse::<ProjectKey>() else { return completed(identity, Released::Nothing) };
        call.about(&key);
        if let Ok(Identity::Verified(who)) = &identity {
            self.may_complete(call, who, &key).await?;
        }
        let released = self.release(call, key, build).await?;
        completed(identity, released)
    }

    /// A job ends builds of its own repository alone; one of unreviewed code
    /// only those of forks, and of no other pull request's. Who cannot be told
    /// is refused.
    async fn may_complete(&self, call: &Call, who: &Verified, key: &ProjectKey) -> Result<(), Refusal> {
        let repo = timeout_at(call.since() + self.config.route_wait, self.provisioner.repo(key))
            .await
            .map_err(|_| Refusal::out_of_time("look up project"))?
            .map_err(|error| Refusal::provisioning("look up project", error))?;
        let Some(repo) = repo else { return Ok(()) };
        let own = Repo::normalize(&repo).is_ok_and(|repo| repo == who.repo);
        if own && who.may_touch(key) { Ok(()) } else { Err(Refusal::forbidden()) }
    }

    /// Runs to its end even if the caller leaves: half a release is none.
    async fn release(&self, call: &Call, key: ProjectKey, build: Option<BuildId>) -> Result<Released, Refusal> {
        let provisioner = Arc::clone(&self.provisioner);
        let released = self.releases.spawn(async move { provisioner.end(&key, build.as_ref()).await });
        timeout_at(call.since() + self.config.route_wait, released)
            .await
            .map_err(|_| Refusal::out_of_time("release build"))?
            .map_err(|error| Refusal::internal(format!("release build: {error}")))?
            .map_err(|error| Refusal::provisioning("release build", error))
    }

    /// The build that a `/complete` names; none means the oldest, which only
    /// an identity may end.
    fn named_build(&self, id: &str, identity: &Result<Identity, Denied>) -> Result<Option<BuildId>, Refusal> {
        match (id, identity) {
            ("", Err(denied)) => Err(denied.clone().into()),
            ("", Ok(_)) if self.config.require_build_id => Err(BadRequest::NeedBuildId.into()),
            ("", Ok(_)) => Ok(None),
            (id, _) => Ok(Some(BuildId::parse(id).map_err(|_| BadRequest::MalformedBuildId)?)),
        }
    }

    /// rate → method → decode.
    async fn fields(&self, request: Request, caller: &Caller) -> Result<Fields, Refusal> {
        self.config.rate.take(caller).map_err(Refusal::rate_limited)?;
        if request.method() != Method::POST {
            return Err(Refusal::method_not_allowed());
        }
        let read_by = request.extensions().get::<Arrival>().map(|arrival| arrival.read_by);
        Ok(Fields::read(request.into_body(), read_by).await?)
    }
}

/// Without an identity, only an entry that was really there proves the right.
fn completed(identity: Result<Identity, Denied>, released: Released) -> Result<Answer, Refusal> {
    match (released, identity) {
        (Released::Entry, _) => Ok(Answer::completed("released")),
        (Released::Nothing, Ok(_)) => Ok(Answer::completed("nothing to release")),
        (Released::Nothing, Err(denied)) => Err(denied.into()),
    }
}

impl From<Denied> for Refusal {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Anonymous | Denied::WrongAdmin | Denied::Unaccepted(None) => Self::unauthorized(),
            Denied::Unaccepted(Some(why)) => Self::invalid_token(&why),
            Denied::NotAllowed(_) => Self::forbidden(),
            Denied::Unavailable(wait) => Self::identity_unavailable(wait),
            Denied::TooMany(wait) => Self::rate_limited(wait),
        }
    }
}
