//! One request to the API server: its deadline and its repetitions.

use std::fmt;
use std::time::Duration;

use kube::core::{ApiResource, DynamicObject, Request, Resource as _, Status};
use serde_json::Value;
use tokio::time::Instant;

use super::refusal::{is_connection, lacking, may_pass, other_refusal, refusal, retry_after};
use super::{Cluster, Event, RequestError, admission, retry};
use crate::manifest::ObjectId;

/// No single attempt takes longer.
const ATTEMPT: Duration = Duration::from_secs(30);

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
