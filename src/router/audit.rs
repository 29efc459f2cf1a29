//! One line in the log for each call, whatever becomes of it: who, what for,
//! how it ended. Never a token, never a build id.
#![expect(clippy::disallowed_methods, reason = "durations are measured here")]

use std::net::IpAddr;
use std::sync::Arc;

use axum::response::{IntoResponse, Response};
use tokio::time::Instant;
use tracing::info;

use super::answer::{Answer, IGNORED_FIELDS, Refusal, header_text};
use super::identity::Identity;
use crate::identity::{Refused, Verified};
use crate::key::{Project, ProjectKey};

/// Status of a call whose client left before the answer; only ever logged.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// One call, from its head to its answer. Dropped before its answer, it is
/// logged as left by its client.
#[derive(Debug)]
pub(super) struct Call {
    path: &'static str,
    client: Option<IpAddr>,
    since: Instant,
    who: &'static str,
    verified: Option<Arc<Verified>>,
    refused: Option<&'static str>,
    key: Option<ProjectKey>,
    repo: Option<String>,
    untrusted: bool,
    ignored: Vec<String>,
    answered: bool,
}

impl Call {
    pub(super) fn begin(path: &'static str, client: Option<IpAddr>) -> Self {
        Self {
            path,
            client,
            since: Instant::now(),
            who: "nobody",
            verified: None,
            refused: None,
            key: None,
            repo: None,
            untrusted: false,
            ignored: Vec::new(),
            answered: false,
        }
    }

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Where it comes from.
    pub(super) fn client(&self) -> Option<IpAddr> {
        self.client
    }

    pub(super) fn by(&mut self, identity: &Identity) {
        self.who = identity.as_str();
        self.verified = identity.verified().cloned();
    }

    /// Why its token gives no identity.
    pub(super) fn refused(&mut self, why: &Refused) {
        self.refused = Some(why.as_str());
        if let Refused::NotAllowed(repo) = why {
            self.repo = Some(repo.to_string());
        }
    }

    pub(super) fn about(&mut self, key: &ProjectKey) {
        self.key = Some(key.clone());
    }

    pub(super) fn wants(&mut self, project: &Project) {
        self.repo = Some(project.repo.as_str().to_owned());
        self.untrusted = project.untrusted;
        self.about(&project.key());
    }

    pub(super) fn ignores(&mut self, fields: Vec<String>) {
        self.ignored = fields;
    }

    /// Logs how it ended and makes the response.
    pub(super) fn answer(mut self, result: Result<Answer, Refusal>) -> Response {
        self.answered = true;
        match &result {
            Ok(answer) => self.log(answer.status().as_u16(), answer.verdict, None),
            Err(refusal) => self.log(refusal.status().as_u16(), refusal.verdict(), refusal.waiting_for()),
        }
        let mut response = result.into_response();
        if !self.ignored.is_empty() {
            response.headers_mut().insert(IGNORED_FIELDS, header_text(&self.ignored.join(", ")));
        }
        response
    }

    fn log(&self, status: u16, verdict: &str, waiting_for: Option<&str>) {
        info!(
            path = self.path,
            who = self.who,
            identity.provider = self.verified.as_ref().map(|who| who.provider.as_str()),
            identity.subject = self.verified.as_ref().map(|who| who.subject.as_str()),
            identity.refused = self.refused,
            client.addr = self.client.map(tracing::field::display),
            project.key = self.key.as_ref().map(ProjectKey::as_str),
            repo = self.repo.as_deref(),
            untrusted = self.untrusted,
            status,
            verdict,
            waiting_for,
            duration_ms = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            "call"
        );
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.answered {
            self.log(CLIENT_CLOSED_REQUEST, "client left", None);
        }
    }
}
