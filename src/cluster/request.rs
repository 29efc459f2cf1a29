//! One request to the API server: its deadline, its repetitions, its errors.

use std::fmt;
use std::time::Duration;

use kube::core::{ApiResource, DynamicObject, Request, Resource as _, Status};
use serde_json::Value;
use tokio::time::Instant;

use super::{Cluster, Event, admission, retry};
use crate::manifest::ObjectId;
use crate::plan::{Cause, Contested, FieldConflict, HelmRelease, Loss};

/// No single attempt takes longer.
const ATTEMPT: Duration = Duration::from_secs(30);

/// Why a request did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No connection, or it was lost.
    #[error("cannot {request}: the API server does not answer")]
    Unreachable {
        /// What was asked.
        request: String,
        /// Why.
        source: kube::Error,
    },
    /// The credentials are not accepted.
    #[error("cannot {request}: the API server does not accept the credentials")]
    Unauthorized {
        /// What was asked.
        request: String,
    },
    /// A permission is lacking.
    #[error("forbidden: {user} may not {permission}")]
    Forbidden {
        /// Who asked, as the API server calls them.
        user: String,
        /// `patch deployments.apps in namespace "x"`.
        permission: String,
    },
    /// Other managers own fields that would change.
    #[error("{object}: fields belong to other managers: {}", list(conflicts))]
    Conflict {
        /// The object.
        object: Box<ObjectId>,
        /// Each field and its manager.
        conflicts: Vec<FieldConflict>,
    },
    /// Other managers own fields that would change, and nobody has said that they may be taken.
    #[error("{object}: fields belong to other managers: {}", contested(fields))]
    Contested {
        /// The object.
        object: Box<ObjectId>,
        /// Each field, its manager, and both values.
        fields: Vec<Contested>,
    },
    /// A GitOps tool keeps the object as its repository says.
    #[error("{object} belongs to {owner}, which would undo what is done here")]
    Tracked {
        /// The object.
        object: Box<ObjectId>,
        /// `Argo CD application x`.
        owner: String,
    },
    /// Another installer's.
    #[error("{object} belongs to {release}")]
    Inherited {
        /// The object.
        object: Box<ObjectId>,
        /// The release.
        release: HelmRelease,
    },
    /// It cannot be changed, and may not be made anew.
    #[error("{object}: {why}, and making it anew is not allowed here: {loss}")]
    Immutable {
        /// The object.
        object: Box<ObjectId>,
        /// Which field.
        why: String,
        /// What would be lost.
        loss: Loss,
    },
    /// The API server refuses the object.
    #[error("{object}: {message}")]
    Refused {
        /// The object.
        object: Box<ObjectId>,
        /// The API server's words.
        message: String,
        /// Its HTTP status.
        code: u16,
        /// Field by field.
        causes: Vec<Cause>,
    },
    /// The API server's schema of the kind has no place for a field, or another
    /// type of value there.
    #[error("{object} does not fit the API server's schema: {why}")]
    Malformed {
        /// The object.
        object: Box<ObjectId>,
        /// `.spec.x: field not declared in schema`.
        why: String,
    },
    /// The kind is not served.
    #[error("{object}: the API server has no kind \"{}\" in \"{}\"", object.kind, object.api_version())]
    NotServed {
        /// The object.
        object: Box<ObjectId>,
    },
    /// A webhook could not be called until the deadline.
    #[error("{webhook} does not answer, and the API server refuses what it is to see: {why}")]
    Webhook {
        /// `webhook "a" of ValidatingWebhookConfiguration "b"`.
        webhook: String,
        /// The last reason.
        why: String,
    },
    /// The run's deadline has passed.
    #[error("cannot {request} before the deadline{}", last.as_ref().map(|l| format!(": {l}")).unwrap_or_default())]
    Deadline {
        /// What was asked.
        request: String,
        /// The last thing that went wrong.
        last: Option<String>,
    },
    /// The run was interrupted.
    #[error("interrupted")]
    Interrupted,
    /// An answer that makes no sense.
    #[error("cannot {request}")]
    Other {
        /// What was asked.
        request: String,
        /// Why.
        source: kube::Error,
    },
}

fn list(conflicts: &[FieldConflict]) -> String {
    let texts = conflicts.iter().map(|conflict| format!("{} of \"{}\"", conflict.field, conflict.manager));
    texts.collect::<Vec<_>>().join(", ")
}

fn contested(fields: &[Contested]) -> String {
    match fields {
        [one] => one.to_string(),
        many => many.iter().map(|field| format!("\n  {field}")).collect(),
    }
}

/// What is asked of the API server, for its errors.
pub(super) struct Target<'a> {
    pub(super) verb: &'static str,
    pub(super) object: &'a ObjectId,
    pub(super) resource: &'a ApiResource,
}

impl fmt::Display for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.object)
    }
}

impl Target<'_> {
    /// The path of the collection that the object belongs to.
    pub(super) fn collection(&self) -> Request {
        Request::new(DynamicObject::url_path(self.resource, self.object.namespace.as_deref()))
    }
}

type Built = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

impl Cluster {
    /// The resource of an object's kind, or that it is not served.
    pub(super) async fn resource(&self, object: &ObjectId) -> Result<ApiResource, RequestError> {
        self.find_resource(object).await?.ok_or_else(|| RequestError::NotServed { object: Box::new(object.clone()) })
    }

    /// The resource of an object's kind; `None` when it is not served.
    pub(crate) async fn find_resource(&self, object: &ObjectId) -> Result<Option<ApiResource>, RequestError> {
        let request = format!("look up kind {} in {}", object.kind, object.api_version());
        self.repeat(&request, || self.kinds.find(object), |status| other_refusal(object, status)).await
    }

    /// One object; `None` when it does not exist.
    pub(crate) async fn get(&self, object: &ObjectId) -> Result<Option<Value>, RequestError> {
        let resource = self.resource(object).await?;
        let target = Target { verb: "get", object, resource: &resource };
        let built = target.collection().get(&object.name, &kube::api::GetParams::default());
        match self.send(&target, built).await {
            Ok(value) => Ok(Some(value)),
            Err(RequestError::Refused { code: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a request, again and again while what is wrong may pass.
    pub(super) async fn send(&self, target: &Target<'_>, built: Built) -> Result<Value, RequestError> {
        let request = target.to_string();
        let built = built.map_err(|source| RequestError::Other {
            request: request.clone(),
            source: kube::Error::BuildRequest(source),
        })?;
        let attempt = || self.client.request::<Value>(built.clone());
        self.repeat(&request, attempt, |status| refusal(target, status)).await
    }

    /// Sends a request that is about no single object.
    pub(super) async fn send_raw<T: serde::de::DeserializeOwned>(
        &self,
        request: &str,
        kind: &ObjectId,
        built: http::Request<Vec<u8>>,
    ) -> Result<T, RequestError> {
        self.repeat_plain(request, kind, || self.client.request::<T>(built.clone())).await
    }

    /// Asks again and again while what is wrong may pass; `kind` is what errors speak of.
    pub(super) async fn repeat_plain<T, F>(
        &self,
        request: &str,
        kind: &ObjectId,
        attempt: impl Fn() -> F,
    ) -> Result<T, RequestError>
    where
        F: Future<Output = Result<T, kube::Error>>,
    {
        let refusal = |status: &Status| match lacking(&status.message) {
            Some((user, _)) if status.code == 403 => RequestError::Forbidden { user, permission: request.to_owned() },
            _ => other_refusal(kind, status),
        };
        self.repeat(request, attempt, refusal).await
    }

    pub(super) async fn repeat<T, F>(
        &self,
        request: &str,
        attempt: impl Fn() -> F,
        refusal: impl Fn(&Status) -> RequestError,
    ) -> Result<T, RequestError>
    where
        F: Future<Output = Result<T, kube::Error>>,
    {
        let mut last = None;
        for count in 1.. {
            let (why, asked) = match self.attempt(attempt()).await {
                Some(Ok(value)) => return Ok(value),
                Some(Err(kube::Error::Api(status))) if !may_pass(&status) => {
                    return Err(if status.code == 401 {
                        RequestError::Unauthorized { request: request.into() }
                    } else {
                        refusal(&status)
                    });
                }
                Some(Err(kube::Error::Api(status))) => (status.message.clone(), retry_after(&status)),
                Some(Err(error)) if is_connection(&error) => {
                    if super::client::is_hopeless(&error) {
                        return Err(RequestError::Unreachable { request: request.into(), source: error });
                    }
                    (super::client::root_cause(&error), None)
                }
                Some(Err(source)) => return Err(RequestError::Other { request: request.into(), source }),
                None => ("no answer in time".to_owned(), None),
            };
            last = Some(why.clone());
            if !self.pause_for(request, why, retry::pause(count, asked)).await? {
                break;
            }
        }
        if let Some((webhook, why)) = last.as_deref().and_then(admission::failed) {
            let webhook = admission::named(webhook, &self.holders(webhook).await.0);
            return Err(RequestError::Webhook { webhook, why: why.to_owned() });
        }
        Err(RequestError::Deadline { request: request.into(), last })
    }

    /// Waits before the next attempt. A webhook that fails is told of once.
    async fn pause_for(&self, request: &str, why: String, delay: Duration) -> Result<bool, RequestError> {
        let Some((webhook, cause)) = admission::failed(&why) else { return self.pause(request, why, delay).await };
        let (holders, first) = self.holders(webhook).await;
        if !first {
            return self.rest(delay).await;
        }
        let why = format!("{} does not answer: {cause}", admission::named(webhook, &holders));
        self.pause(request, why, delay).await
    }

    pub(super) async fn attempt<T>(&self, attempt: impl Future<Output = T>) -> Option<T> {
        tokio::time::timeout_at(self.limits.deadline.min(now() + ATTEMPT), attempt).await.ok()
    }

    /// Waits before the next attempt; false when the deadline does not allow one.
    pub(super) async fn pause(&self, request: &str, why: String, delay: Duration) -> Result<bool, RequestError> {
        if now() + delay < self.limits.deadline {
            let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
            self.report(Event::Retrying { request: request.to_owned(), why, delay_ms });
        }
        self.rest(delay).await
    }

    async fn rest(&self, delay: Duration) -> Result<bool, RequestError> {
        let until = now() + delay;
        if until >= self.limits.deadline {
            return Ok(false);
        }
        tokio::select! {
            () = tokio::time::sleep_until(until) => Ok(true),
            () = self.interrupt.cancelled() => Err(RequestError::Interrupted),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "deadlines of requests are measured here")]
pub(super) fn now() -> Instant {
    Instant::now()
}

/// Too many requests, a server that is not itself, or a quota that is not
/// computed yet: the same request may succeed in a moment. Anything else of the
/// server's own is an answer, as is a 500 that complains about the object.
pub(super) fn may_pass(status: &Status) -> bool {
    let raced = status.code == 409 && status.reason == "AlreadyExists";
    let uncounted = status.code == 403 && status.message.contains("status unknown for quota");
    let overtaxed = matches!(status.code, 429 | 502 | 503 | 504);
    overtaxed || (status.code == 500 && malformed(&status.message).is_none()) || raced || uncounted
}

/// What the API server says of an object that does not fit its schema. It finds
/// this out too late to call it a bad request, and answers 500. What precedes
/// it names the object, as we do.
/// `failed to create typed patch object (farm/x; apps/v1, Kind=Deployment): .spec.y: field not declared in schema`
fn malformed(message: &str) -> Option<&str> {
    let begins = ["failed to create typed ", "failed to convert new object "];
    let rest = begins.into_iter().find_map(|begin| Some(message.split_once(begin)?.1))?;
    Some(rest.split_once("): ").map_or(message, |(_, rest)| rest))
}

fn retry_after(status: &Status) -> Option<Duration> {
    let seconds = status.details.as_ref()?.retry_after_seconds;
    (seconds > 0).then(|| Duration::from_secs(seconds.into()))
}

fn is_connection(error: &kube::Error) -> bool {
    matches!(error, kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_))
}

/// Turns a refusal into an error that says what to do about it.
fn refusal(target: &Target<'_>, status: &Status) -> RequestError {
    let conflicts = conflicts(status);
    if !conflicts.is_empty() {
        return RequestError::Conflict { object: Box::new(target.object.clone()), conflicts };
    }
    if status.code == 403
        && let Some((user, verb)) = lacking(&status.message)
    {
        return RequestError::Forbidden { user, permission: permission(target, verb) };
    }
    other_refusal(target.object, status)
}

fn other_refusal(object: &ObjectId, status: &Status) -> RequestError {
    let object = Box::new(object.clone());
    match malformed(&status.message) {
        Some(why) => RequestError::Malformed { object, why: why.to_owned() },
        None => {
            let details = status.details.iter().flat_map(|details| &details.causes);
            let causes = details.map(|cause| Cause {
                reason: cause.reason.clone(),
                field: cause.field.clone(),
                message: cause.message.clone(),
            });
            RequestError::Refused {
                object,
                message: status.message.clone(),
                code: status.code,
                causes: causes.collect(),
            }
        }
    }
}

fn permission(target: &Target<'_>, verb: &str) -> String {
    let ApiResource { plural, group, .. } = target.resource;
    let resource = if group.is_empty() { plural.clone() } else { format!("{plural}.{group}") };
    match &target.object.namespace {
        Some(namespace) => format!("{verb} {resource} in namespace \"{namespace}\""),
        None => format!("{verb} {resource} in the whole cluster"),
    }
}

/// Who lacks which verb; `None` when an admission plugin refused, which is
/// also 403. `… is forbidden: User "x" cannot patch resource "y" in API group …`
pub(super) fn lacking(message: &str) -> Option<(String, &str)> {
    let (_, rest) = message.split_once("User \"")?;
    let (user, rest) = rest.split_once("\" cannot ")?;
    let (verb, _) = rest.split_once(" resource")?;
    Some((format!("user \"{user}\""), verb))
}

fn conflicts(status: &Status) -> Vec<FieldConflict> {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes
        .filter(|cause| cause.reason == "FieldManagerConflict")
        .map(|cause| FieldConflict {
            manager: cause.message.split('"').nth(1).unwrap_or(&cause.message).to_owned(),
            field: cause.field.clone(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(json: &str) -> Status {
        serde_json::from_str(json).unwrap()
    }

    fn deployment() -> (ObjectId, ApiResource) {
        let id = ObjectId {
            group: "apps".into(),
            version: "v1".into(),
            kind: "Deployment".into(),
            namespace: Some("farm".into()),
            name: "server".into(),
        };
        let gvk = kube::core::GroupVersionKind::gvk("apps", "v1", "Deployment");
        (id, ApiResource::from_gvk_with_plural(&gvk, "deployments"))
    }

    #[test]
    fn a_lacking_permission_names_verb_resource_and_namespace() {
        let (object, resource) = deployment();
        let target = Target { verb: "apply", object: &object, resource: &resource };
        let status = status(
            r#"{"code":403,"reason":"Forbidden","message":"deployments.apps \"server\" is forbidden: User \"eve\" cannot patch resource \"deployments\" in API group \"apps\" in the namespace \"farm\""}"#,
        );
        assert_eq!(
            refusal(&target, &status).to_string(),
            "forbidden: user \"eve\" may not patch deployments.apps in namespace \"farm\""
        );
    }

    #[test]
    fn an_admission_denial_is_no_lacking_permission() {
        let (object, resource) = deployment();
        let target = Target { verb: "apply", object: &object, resource: &resource };
        let status = status(r#"{"code":403,"reason":"Forbidden","message":"exceeded quota: small"}"#);
        assert!(matches!(refusal(&target, &status), RequestError::Refused { code: 403, .. }));
    }

    #[test]
    fn a_conflict_names_every_manager_and_field() {
        let (object, resource) = deployment();
        let target = Target { verb: "apply", object: &object, resource: &resource };
        let status = status(
            r#"{"code":409,"reason":"Conflict","message":"Apply failed","details":{"causes":[
                {"reason":"FieldManagerConflict","message":"conflict with \"kubectl-edit\" using apps/v1","field":".spec.replicas"},
                {"reason":"FieldManagerConflict","message":"conflict with \"helm\" with subresource \"scale\"","field":".spec.paused"}]}}"#,
        );
        assert_eq!(
            refusal(&target, &status).to_string(),
            "Deployment farm/server: fields belong to other managers: .spec.replicas of \"kubectl-edit\", .spec.paused of \"helm\""
        );
    }

    #[test]
    fn an_object_that_does_not_fit_the_schema_is_named_with_its_field() {
        let (object, resource) = deployment();
        let target = Target { verb: "check", object: &object, resource: &resource };
        let status = status(
            r#"{"code":500,"message":"failed to create typed patch object (farm/server; apps/v1, Kind=Deployment): .spec.frobnicate: field not declared in schema"}"#,
        );
        assert_eq!(
            refusal(&target, &status).to_string(),
            "Deployment farm/server does not fit the API server's schema: .spec.frobnicate: field not declared in schema"
        );
    }

    #[test]
    fn only_what_can_pass_is_tried_again() {
        for (json, expected) in [
            (r#"{"code":429}"#, true),
            (r#"{"code":500}"#, true),
            (r#"{"code":500,"message":"etcdserver: leader changed"}"#, true),
            (
                r#"{"code":500,"message":"failed to create typed patch object (a/b; v1, Kind=Pod): .x: field not declared in schema"}"#,
                false,
            ),
            (r#"{"code":501}"#, false),
            (r#"{"code":502}"#, true),
            (r#"{"code":503}"#, true),
            (r#"{"code":504}"#, true),
            (r#"{"code":409,"reason":"AlreadyExists"}"#, true),
            (r#"{"code":409,"reason":"Conflict"}"#, false),
            (r#"{"code":403,"message":"exceeded quota: small"}"#, false),
            (r#"{"code":403,"message":"status unknown for quota: small, resources: pods"}"#, true),
            (
                r#"{"code":500,"message":"failed to convert new object (/x; v1, Kind=Secret) to proper version: illegal base64 data"}"#,
                false,
            ),
            (r#"{"code":422}"#, false),
            (r#"{"code":404}"#, false),
        ] {
            assert_eq!(may_pass(&status(json)), expected, "{json}");
        }
    }
}
