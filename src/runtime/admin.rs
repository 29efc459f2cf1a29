//! One admin listener per process: `/metrics`, `/healthz`, `/readyz`, and what
//! our own processes ask one another.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// What must hold before this process takes traffic. Each part reports for
/// itself; the process is ready when all of them are.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, bool>>>);

impl Readiness {
    /// Reports one part, for example `("caches", true)`. A part that has once
    /// reported counts from then on.
    pub fn set(&self, part: &'static str, ready: bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(part, ready);
    }

    /// The parts that are not ready.
    pub fn missing(&self) -> Vec<&'static str> {
        let parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.iter().filter(|(_, ready)| !**ready).map(|(part, _)| *part).collect()
    }
}

/// Serves the admin endpoints, and `internal` beside them, until `shutdown`.
///
/// # Errors
/// When the listener fails.
pub async fn serve(
    listener: TcpListener,
    registry: Arc<Registry>,
    readiness: Readiness,
    internal: Router,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let app = Router::new()
        .route("/healthz", get(|| async { StatusCode::OK }))
        .route("/readyz", get(ready).with_state(readiness))
        .route("/metrics", get(metrics).with_state(registry))
        .merge(internal);
    axum::serve(listener, app).with_graceful_shutdown(shutdown.cancelled_owned()).await
}

async fn ready(State(readiness): State<Readiness>) -> impl IntoResponse {
    let missing = readiness.missing();
    if missing.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {}\n", missing.join(", ")))
    }
}

async fn metrics(State(registry): State<Arc<Registry>>) -> impl IntoResponse {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => (
            StatusCode::OK,
            [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")],
            text,
        ),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], String::new()),
    }
}
