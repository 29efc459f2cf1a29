//! What stands beside a played daemon: a companion that tells what a test wants.

use std::sync::{Arc, Mutex, PoisonError};

use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What every companion of one player says of its daemon.
#[derive(Clone, Default)]
pub(crate) struct Builds(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    active: Vec<&'static str>,
    /// Newest first.
    finished: Vec<Value>,
}

impl Builds {
    /// These run from now on.
    pub(crate) fn set(&self, references: &[&'static str]) {
        self.lock().active = references.to_vec();
    }

    /// One has ended, after all others.
    pub(crate) fn end(&self, build: Value) {
        self.lock().finished.insert(0, build);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn told(&self) -> Value {
        let told = self.lock();
        let build = |reference: &&str| {
            json!({
                "ref": reference, "started": "2026-11-30T08:00:00Z", "completed": null, "error": null,
                "stepsTotal": 5, "stepsCached": 1, "stepsCompleted": 2, "step": "[build 2/3] RUN",
            })
        };
        let active: Vec<_> = told.active.iter().map(build).collect();
        let idle = (!active.is_empty()).then_some(0);
        json!({
            "daemon": "answering", "identity": {"version": "v0.34.2", "snapshotter": "overlayfs"}, "draining": false,
            "heardMsAgo": 100, "idleMs": idle, "active": active, "finished": told.finished,
        })
    }
}

/// Answers as long as it lives.
pub(crate) struct Companion(JoinHandle<()>);

impl Companion {
    /// Listens at a played pod's address.
    pub(crate) async fn start(address: &str, builds: Builds) -> anyhow::Result<Self> {
        let listener = TcpListener::bind((address, 8080)).await?;
        let usage = json!({"bytesUsed": 3_u64 << 30, "bytesTotal": 60_u64 << 30, "inodeRatio": 0.1});
        let app = Router::new()
            .route("/builds", get(move || async move { Json(builds.told()) }))
            .route("/usage", get(move || async move { Json(usage) }));
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
