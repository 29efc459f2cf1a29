//! The calls themselves.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::Method;
use axum::response::Response;
use tokio::time::timeout_at;

use super::Shared;
use super::answer::{Answer, Refusal};
use super::audit::Call;
use super::entry::Entry;
use super::identity::{Denied, Identity};
use super::metrics::{Outcome, RouteTimer};
use super::request::{self, BadRequest, Fields};
use super::serve::Arrival;
use crate::key::{Project, ProjectKey};
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
    /// validate. The shared tokens and an open API trust what the body
    /// declares; an identity that names its repository replaces it here.
    async fn admit(&self, call: &mut Call, request: Request) -> Result<Project, Refusal> {
        let identity = self.config.auth.identify(request.headers()).map_err(|_| Refusal::unauthorized())?;
        call.by(identity);
        let fields = self.fields(request).await?;
        let (project, ignored) = request::project(fields)?;
        call.ignores(ignored);
        Ok(project?)
    }

    async fn complete(&self, call: &mut Call, request: Request) -> Result<Answer, Refusal> {
        let identity = match self.config.auth.identify(request.headers()) {
            Ok(identity) => Some(identity),
            // A build may outlive its credential: whoever knows the id of a
            // live build may end it.
            Err(Denied::Unaccepted) => None,
            Err(Denied::Anonymous | Denied::WrongAdmin) => return Err(Refusal::unauthorized()),
        };
        if let Some(identity) = identity {
            call.by(identity);
        }
        let fields = self.fields(request).await?;
        let (completion, ignored) = request::completion(fields)?;
        call.ignores(ignored);
        let completion = completion?;
        let build = self.named_build(&completion.build_id, identity)?;
        // Any text may be sent; what is no key names no project.
        let Ok(key) = completion.key.parse::<ProjectKey>() else { return completed(identity, Released::Nothing) };
        call.about(&key);
        let released = self.release(call, key, build).await?;
        completed(identity, released)
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
    fn named_build(&self, id: &str, identity: Option<Identity>) -> Result<Option<BuildId>, Refusal> {
        match (id, identity) {
            ("", None) => Err(Refusal::unauthorized()),
            ("", Some(_)) if self.config.require_build_id => Err(BadRequest::NeedBuildId.into()),
            ("", Some(_)) => Ok(None),
            (id, _) => Ok(Some(BuildId::parse(id).map_err(|_| BadRequest::MalformedBuildId)?)),
        }
    }

    /// rate → method → decode.
    async fn fields(&self, request: Request) -> Result<Fields, Refusal> {
        self.config.rate.take().map_err(Refusal::rate_limited)?;
        if request.method() != Method::POST {
            return Err(Refusal::method_not_allowed());
        }
        let read_by = request.extensions().get::<Arrival>().map(|arrival| arrival.read_by);
        Ok(Fields::read(request.into_body(), read_by).await?)
    }
}

/// Without an identity, only an entry that was really there proves the right.
fn completed(identity: Option<Identity>, released: Released) -> Result<Answer, Refusal> {
    match (released, identity) {
        (Released::Entry, _) => Ok(Answer::completed("released")),
        (Released::Nothing, Some(_)) => Ok(Answer::completed("nothing to release")),
        (Released::Nothing, None) => Err(Refusal::unauthorized()),
    }
}
