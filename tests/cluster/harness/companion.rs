//! What stands beside a played daemon: a companion that tells what a test wants.

use std::sync::{Arc, Mutex, PoisonError};

use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What every companion of one player says of its daemon.
#[derive(Clone, Default)]
pub(crate) struct Builds(Arc<Mutex<Vec<&'static str>>>);

impl Builds {
    /// These run from now on.
    pub(crate) fn set(&self, references: &[&'static str]) {
        *self.lock() = references.to_vec();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<&'static str>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self) -> Value {
        let active: Vec<_> = self.lock().iter().map(|reference| json!({"ref": reference})).collect();
        let idle = (!active.is_empty()).then_some(0);
        json!({
            "daemon": "answering", "identity": {"version": "v0.34.2", "snapshotter": "overlayfs"}, "draining": false,
            "heardMsAgo": 100, "idleMs": idle, "active": active, "finished": [],
        })
    }
}

/// Answers as long as it lives.
pub(crate) struct Companion(JoinHandle<()>);

impl Companion {
    /// Listens at a played pod's address.
    pub(crate) async fn start(address: &str, builds: Builds) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((address, 8080)).await?;
        let app = Router::new().route("/builds", get(move || async move { Json(builds.told()) }));
        Ok(Self(tokio::spawn(async move {
            let _ = axum::serve(listener, app).await;
        })))
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        self.0.abort();
    }
}
