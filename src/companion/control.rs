//! What changes something: over a unix socket that only the pod's own user can
//! open, in a volume that build steps do not have.

use std::fs::{DirBuilder, Permissions, remove_dir, remove_file, rename, set_permissions};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use tokio::net::UnixListener;

use super::daemon::{AskDaemon, Daemon};
use super::upkeep::PRUNE_LIMIT;
use super::watch::Watch;

/// How long the cache may take to tell what it holds.
const CACHE_LIMIT: Duration = Duration::from_secs(10);

/// What control acts on.
#[derive(Clone, Debug)]
pub struct Targets {
    /// The daemon and the gate.
    pub watch: Watch,
    /// Whose cache is pruned.
    pub daemon: Daemon,
    /// How long a drain waits unless it says otherwise.
    pub budget: Duration,
}

/// The endpoints.
pub fn router(targets: Targets) -> Router {
    Router::new()
        .route("/drain", post(drain))
        .route("/undrain", post(undrain))
        .route("/prune", post(prune))
        .route("/cache", get(cache))
        .with_state(targets)
}

/// Binds a socket that only this user can open, in place of what was there.
///
/// # Errors
/// When the folder is missing or not ours.
pub fn bind(path: &Path) -> std::io::Result<UnixListener> {
    // Made in a folder that nobody else can enter, so that it is never open to
    // others, not even between making it and restricting it.
    let parent = path.parent().unwrap_or(Path::new("."));
    let private = parent.join(format!(".{}", std::process::id()));
    let inner = private.join("s");
    let _ = remove_file(&inner);
    let _ = remove_dir(&private);
    DirBuilder::new().mode(0o700).create(&private)?;
    let bound = UnixListener::bind(&inner).and_then(|listener| {
        set_permissions(&inner, Permissions::from_mode(0o600))?;
        rename(&inner, path)?;
        Ok(listener)
    });
    let _ = remove_dir(&private);
    bound
}

#[derive(Debug, Deserialize)]
struct DrainQuery {
    /// How long to wait.
    seconds: Option<u64>,
    /// `process`: the gate opens again when another process serves.
    #[serde(default)]
    until: Until,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Until {
    #[default]
    Undrain,
    Process,
}

async fn drain(State(targets): State<Targets>, Query(query): Query<DrainQuery>) -> impl IntoResponse {
    let budget = query.seconds.map_or(targets.budget, Duration::from_secs);
    Json(targets.watch.drain(query.until == Until::Process, budget).await)
}

async fn undrain(State(targets): State<Targets>) -> StatusCode {
    targets.watch.open();
    StatusCode::NO_CONTENT
}

async fn prune(State(targets): State<Targets>) -> Response {
    match targets.watch.observation().running() {
        Some(0) => answer(targets.daemon.prune(None, PRUNE_LIMIT).await),
        Some(builds) => (StatusCode::CONFLICT, format!("{builds} builds are running\n")).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the daemon does not answer\n").into_response(),
    }
}

async fn cache(State(targets): State<Targets>) -> Response {
    answer(targets.daemon.cache(CACHE_LIMIT).await)
}

fn answer(result: Result<impl serde::Serialize, AskDaemon>) -> Response {
    match result {
        Ok(value) => Json(value).into_response(),
        Err(error @ AskDaemon::Silent(..)) => (StatusCode::GATEWAY_TIMEOUT, format!("{error}\n")).into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error}\n")).into_response(),
    }
}
