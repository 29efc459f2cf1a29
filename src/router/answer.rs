//! Answers and refusals, and how they look on the wire. Pure; no IO.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::coldstart::{ColdStartError, Position};
use super::request::BadRequest;
use crate::identity::Refused;
use crate::key::ProjectKey;
use crate::provisioner::{BuildId, ProvisionError};

/// Names the fields of a body that were ignored.
pub(super) const IGNORED_FIELDS: HeaderName = HeaderName::from_static("x-buildkit-operator-ignored-fields");

/// What a daemon that did not become ready was last waiting for.
pub(super) const WAITING_FOR: HeaderName = HeaderName::from_static("x-buildkit-operator-waiting-for");

/// About one cold start: what a queue of one round takes.
const COLD_START: Duration = Duration::from_secs(10);

/// Builds of a saturated project end now and then.
const SATURATED: Duration = Duration::from_secs(30);

/// A server lists its projects within a moment of its start.
const SYNCED: Duration = Duration::from_secs(1);

/// Somebody has to mend something first.
const FAILED: Duration = Duration::from_secs(60);

/// A request that did what it asked for.
#[derive(Debug)]
pub(super) struct Answer {
    status: StatusCode,
    json: Option<String>,
    /// As the audit log calls it.
    pub(super) verdict: &'static str,
}

/// The body of `/route` and `/prewarm`; the order of the fields is part of it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Endpoint<'a> {
    /// Routing key of the project.
    #[schema(value_type = String)]
    key: &'a ProjectKey,
    /// For `/complete`; a capability. Absent from the answer to `/prewarm`.
    #[serde(rename = "buildId", skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[0-9a-f]{16}$", required = false, nullable = false)]
    build_id: Option<&'a str>,
    /// Where the client reaches the daemon.
    endpoint: String,
    /// Namespace of the daemon.
    namespace: &'a str,
    /// Whether the daemon takes builds now.
    ready: bool,
}

impl Answer {
    /// A build got its daemon.
    pub(super) fn routed(
        key: &ProjectKey,
        build: &BuildId,
        endpoint: String,
        namespace: &str,
        verdict: &'static str,
    ) -> Result<Self, Refusal> {
        let body = Endpoint { key, build_id: Some(build.reveal()), endpoint, namespace, ready: true };
        Self::json(StatusCode::OK, &body, verdict)
    }

    /// A daemon was woken.
    pub(super) fn prewarmed(key: &ProjectKey, endpoint: String, namespace: &str, ready: bool) -> Result<Self, Refusal> {
        let body = Endpoint { key, build_id: None, endpoint, namespace, ready };
        Self::json(StatusCode::ACCEPTED, &body, "prewarmed")
    }

    /// What is asked to be shown.
    pub(super) fn shown(body: &impl Serialize) -> Result<Self, Refusal> {
        Self::json(StatusCode::OK, body, "shown")
    }

    /// A build has ended.
    pub(super) fn completed(verdict: &'static str) -> Self {
        Self { status: StatusCode::NO_CONTENT, json: None, verdict }
    }

    fn json(status: StatusCode, body: &impl Serialize, verdict: &'static str) -> Result<Self, Refusal> {
        let json = serde_json::to_string(body).map_err(|e| Refusal::internal(format!("write the answer: {e}")))?;
        Ok(Self { status, json: Some(json + "\n"), verdict })
    }

    /// The status, as the audit log has it.
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        match self.json {
            Some(json) => (self.status, [(header::CONTENT_TYPE, "application/json")], json).into_response(),
            None => self.status.into_response(),
        }
    }
}

/// A request that did not do what it asked for: one line of text.
#[derive(Debug)]
pub(super) struct Refusal {
    status: StatusCode,
    text: String,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Refusal {
    fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), headers: Vec::new() }
    }

    fn with(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Whole seconds, rounded up: who comes back when told to should succeed.
    fn retry_after(self, wait: Duration) -> Self {
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        self.with(header::RETRY_AFTER, seconds.max(1).into())
    }

    /// Nobody we know, or nobody who may.
    pub(super) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized")
            .with(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"buildkit-operator\""))
    }

    /// The same, with what is wrong with the token; none of it is shown.
    pub(super) fn invalid_token(why: &Refused) -> Self {
        let description = header_text(&format!(
            "Bearer realm=\"buildkit-operator\", error=\"invalid_token\", error_description=\"{why}\""
        ));
        Self::new(StatusCode::UNAUTHORIZED, "Unauthorized").with(header::WWW_AUTHENTICATE, description)
    }

    /// Somebody we know, who may not.
    pub(super) fn forbidden() -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden")
    }

    /// Nobody can tell yet who it is.
    pub(super) fn identity_unavailable(wait: Duration) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the keys of the token's issuer are not known yet").retry_after(wait)
    }

    /// Too many calls; the next is welcome after `wait`.
    pub(super) fn rate_limited(wait: Duration) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate limited").retry_after(wait)
    }

    /// Anything but POST.
    pub(super) fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "POST only").with(header::ALLOW, HeaderValue::from_static("POST"))
    }

    /// Anything but GET, of what can only be read.
    pub(super) fn read_only() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "GET only").with(header::ALLOW, HeaderValue::from_static("GET, HEAD"))
    }

    /// A method that not even a probe may use.
    pub(super) fn unknown_method(allowed: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "unknown method").with(header::ALLOW, header_text(allowed))
    }

    /// No such project, or none that the caller may know of.
    pub(super) fn no_such_project() -> Self {
        Self::new(StatusCode::NOT_FOUND, "no such project")
    }

    /// We are at fault.
    pub(super) fn internal(text: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, text)
    }

    /// The provisioner failed at `step`, for example `ensure project`.
    pub(super) fn provisioning(step: &str, error: ProvisionError) -> Self {
        match error {
            ProvisionError::Refused(why) => Self::internal(format!("{step}: {why}")),
            ProvisionError::Forbidden(why) => Self::new(StatusCode::FORBIDDEN, why),
            ProvisionError::Unavailable { message, retry_after } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, format!("{step}: {message}")).retry_after(retry_after)
            }
            ProvisionError::NotReady { ref last } => {
                let refusal = Self::new(StatusCode::GATEWAY_TIMEOUT, format!("daemon not ready: {error}"));
                match last {
                    Some(last) => refusal.with(WAITING_FOR, header_text(last)),
                    None => refusal,
                }
            }
            ProvisionError::Saturated { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, error.to_string()).retry_after(SATURATED)
            }
            ProvisionError::Failed { reason } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, format!("daemon failed: {reason}")).retry_after(FAILED)
            }
        }
    }

    /// Not all projects are known yet.
    pub(super) fn not_synced() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the projects are not known yet").retry_after(SYNCED)
    }

    /// The store did not answer within the budget of the whole route.
    pub(super) fn out_of_time(step: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, format!("{step}: no answer in time")).retry_after(COLD_START)
    }

    /// What the audit log says of it.
    pub(super) fn verdict(&self) -> &str {
        &self.text
    }

    /// The status, as the audit log has it.
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    /// What a daemon was last waiting for, if that is why.
    pub(super) fn waiting_for(&self) -> Option<&str> {
        self.headers.iter().find(|(name, _)| *name == WAITING_FOR).and_then(|(_, value)| value.to_str().ok())
    }
}

impl From<BadRequest> for Refusal {
    fn from(error: BadRequest) -> Self {
        let refusal = Self::new(StatusCode::BAD_REQUEST, format!("bad request: {error}"));
        if error.closes() { refusal.with(header::CONNECTION, HeaderValue::from_static("close")) } else { refusal }
    }
}

impl From<ColdStartError> for Refusal {
    fn from(error: ColdStartError) -> Self {
        match error {
            ColdStartError::Provision(error) => Self::provisioning("daemon not ready", error),
            ColdStartError::Queued(Position { place, slots }) => {
                let text = format!("too many cold starts: place {place} in the queue for {slots} slots");
                let rounds = u32::try_from(place.div_ceil(slots)).unwrap_or(u32::MAX);
                let wait = COLD_START.saturating_mul(rounds).min(Duration::from_secs(300));
                Self::new(StatusCode::SERVICE_UNAVAILABLE, text).retry_after(wait)
            }
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (
            self.status,
            [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")],
            self.text + "\n",
        )
            .into_response();
        response.headers_mut().extend(self.headers);
        response
    }
}

/// Any other path.
pub(super) async fn not_found() -> Response {
    Refusal::new(StatusCode::NOT_FOUND, "404 page not found").into_response()
}

/// Text of any origin as a header's value: what does not belong there becomes `?`.
pub(super) fn header_text(text: &str) -> HeaderValue {
    let visible = text.chars().take(256).map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' });
    HeaderValue::from_str(&visible.collect::<String>()).unwrap_or(HeaderValue::from_static("?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_takes_no_line_breaks() {
        assert_eq!(header_text("a\r\nSet-Cookie: é").to_str().unwrap(), "a??Set-Cookie: ?");
        assert_eq!(header_text(&"x".repeat(1000)).len(), 256);
    }

    #[test]
    fn seconds_are_rounded_up_and_never_nought() {
        for (millis, want) in [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (999_001, "1000")] {
            let refusal = Refusal::rate_limited(Duration::from_millis(millis)).into_response();
            assert_eq!(refusal.headers()[header::RETRY_AFTER], want, "{millis}");
        }
    }

    #[test]
    fn a_long_queue_is_told_to_wait_longer() {
        for (place, want) in [(1, "10"), (8, "10"), (9, "20"), (10_000, "300")] {
            let refusal = Refusal::from(ColdStartError::Queued(Position { place, slots: 8 })).into_response();
            assert_eq!(refusal.headers()[header::RETRY_AFTER], want, "{place}");
        }
    }
}
