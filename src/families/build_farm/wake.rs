//! Wakes daemons that clients have dialled. The gateway asks; the decision is
//! made and written here, on any replica, where routes are written too.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};

use super::ledger::{Operation, Outcome};
use super::writer::{WriteError, Writer};
use crate::gateway::wake::{Dialled, PATH, Verdict};
use crate::names::DaemonName;

/// How long an outage of the API server is waited out; the gateway asks again.
const BUDGET: Duration = Duration::from_secs(3);

/// What a dial of `daemon` comes to. When this returns [`Verdict::Starting`], the
/// daemon is kept for [`super::lifecycle::WAKE`], or is wanted for longer anyway.
///
/// # Errors
/// When the API server cannot be reached, or refuses.
pub async fn wake(writer: &Arc<Writer>, daemon: &DaemonName) -> Result<Verdict, WriteError> {
    match writer.submit(daemon.key(), Operation::Wake, BUDGET).await {
        Ok(Outcome::Forgotten) => Ok(Verdict::Asleep),
        Ok(outcome) => {
            if outcome == Outcome::Done {
                tracing::info!(project.key = daemon.key(), "woken by a client of the gateway");
            }
            Ok(Verdict::Starting)
        }
        Err(WriteError::Gone) => Ok(Verdict::Unknown),
        Err(error) => Err(error),
    }
}

/// Takes wakes over HTTP: `{"daemon": "buildkitd-p…"}`, answered `{"verdict": "starting"}`.
pub fn router(writer: Arc<Writer>) -> Router {
    Router::new().route(PATH, post(dialled)).with_state(writer)
}

async fn dialled(State(writer): State<Arc<Writer>>, Json(Dialled { daemon }): Json<Dialled>) -> Response {
    match wake(&writer, &daemon).await {
        Ok(verdict) => Json(verdict.told()).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")).into_response(),
    }
}
