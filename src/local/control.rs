//! The farm's own socket in the state folder: for `ps`, `logs`, `stop`, `rm`
//! and `prune` of whoever may open it. Plain HTTP.
#![expect(clippy::disallowed_methods, reason = "shell: judges entries at the time of asking")]

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path as Segment, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::time::{sleep, timeout};

use super::core::Core;
use super::farm::Farm;
use super::record::Record;
use super::storage;
use super::writer::{Change, WriteError};
use crate::client::shell::quote;
use crate::families::build_farm::ledger::Outcome;
use crate::families::build_farm::lifecycle;
use crate::key::ProjectKey;
use crate::provisioner::Provisioner as _;
use crate::provisioner::project::Selection;

/// How this farm is used.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Info {
    /// Its process.
    pub pid: u32,
    /// Its state folder.
    pub state: PathBuf,
    /// Whether that is the usual one of its user.
    pub usual: bool,
    /// Address of the routing API.
    pub api: String,
    /// Port that builds connect to.
    pub port: u16,
    /// Where its token is; none when anybody may call.
    pub token: Option<PathBuf>,
    /// Folder with `ca.pem`, `cert.pem` and `key.pem` of clients.
    pub certificates: PathBuf,
    /// Domain that daemons are reached under; by addresses without one.
    pub domain: Option<String>,
    /// Where this host reaches the gateway when daemons have names: DNS need not know them here.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
    /// What daemons run.
    pub buildkit: String,
    /// How caches are kept.
    pub storage: String,
}

impl Info {
    /// How its folder is named to commands, with a space before; nothing where it is the usual one.
    pub fn state_flag(&self) -> String {
        match self.usual {
            true => String::new(),
            false => format!(" --state-dir {}", quote(&self.state.display().to_string())),
        }
    }
}

/// What the handlers work with.
#[derive(Debug)]
pub struct Control {
    /// What is known and can be changed.
    pub core: Arc<Core>,
    /// The same projects as the routing API tells of.
    pub farm: Arc<Farm>,
    /// How it is used.
    pub info: Info,
}

/// Binds the socket, which only its owner may open. One that an earlier run left is replaced.
///
/// # Errors
/// The operating system's.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// The calls.
pub fn router(control: Control) -> Router {
    Router::new()
        .route("/info", get(info))
        .route("/projects", get(projects))
        .route("/projects/{key}", get(project).delete(remove))
        .route("/projects/{key}/stop", post(stop))
        .route("/projects/{key}/prune", post(prune))
        .with_state(Arc::new(control))
}

type Shared = State<Arc<Control>>;

/// How much later than its client a daemon may say that a build has ended.
const LATE: Duration = Duration::from_secs(2);

/// Pause between two looks at that.
const LOOK: Duration = Duration::from_millis(20);

/// How long the end of a daemon is waited for; whoever asks waits for 10 s.
const ENDED: Duration = Duration::from_secs(8);

async fn info(State(control): Shared) -> Json<Info> {
    Json(control.info.clone())
}

#[derive(Deserialize)]
struct Asked {
    #[serde(rename = "continue")]
    after: Option<String>,
}

async fn projects(State(control): Shared, Query(asked): Query<Asked>) -> Response {
    let after = asked.after.map(|key| key.parse::<ProjectKey>()).transpose();
    let Ok(after) = after else { return (StatusCode::BAD_REQUEST, "continue is no key\n").into_response() };
    let selection = Selection { repo: None, phase: None, after, limit: 500, visible: &|_| true };
    Json(control.farm.projects(&selection)).into_response()
}

/// Why a call about one project is refused.
enum Refusal {
    Unknown(String),
    Building(String),
    Failed(String),
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        match self {
            Self::Unknown(key) => (StatusCode::NOT_FOUND, format!("there is no project \"{key}\"\n")),
            Self::Building(why) => (StatusCode::CONFLICT, format!("{why}\n")),
            Self::Failed(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        }
        .into_response()
    }
}

impl Refusal {
    fn building(builds: usize) -> Self {
        let (many, are) = if builds == 1 { ("", "is") } else { ("s", "are") };
        Self::Building(format!("{builds} build{many} {are} in flight; --cut-builds ends them"))
    }
}

impl From<WriteError> for Refusal {
    fn from(error: WriteError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Control {
    fn find(&self, key: &str) -> Result<(ProjectKey, Arc<Record>), Refusal> {
        let unknown = || Refusal::Unknown(key.to_owned());
        Ok((key.parse().map_err(|_| unknown())?, self.core.index.get(key).ok_or_else(unknown)?))
    }

    /// Builds that are registered, and builds that run.
    fn builds(&self, record: &Record) -> (usize, usize) {
        let status = record.project.status_or_default();
        let live = lifecycle::live_entries(&status, self.core.settings.max_build, Timestamp::now()).count();
        let observed = self.core.index.live(&record.project.spec.key).and_then(|live| live.observation);
        (live, observed.map_or(0, |observed| observed.borrow().active.len()))
    }

    /// Refuses while builds are in flight. A daemon says a moment after its client that one has ended.
    async fn free(&self, key: &ProjectKey) -> Result<(), Refusal> {
        let until = self.core.now() + LATE;
        loop {
            let (_, record) = self.find(key.as_str())?;
            let (registered, running) = self.builds(&record);
            if registered == 0 && running == 0 {
                return Ok(());
            }
            if registered > 0 || self.core.now() >= until {
                return Err(Refusal::building(registered.max(running)));
            }
            sleep(LOOK).await;
        }
    }

    /// Returns when no daemon of a project runs any more, or that takes too long.
    async fn ended(&self, key: &ProjectKey) {
        let (index, key) = (&self.core.index, key.as_str());
        let notify = index.listen(key);
        let ended = async {
            loop {
                let mut changed = std::pin::pin!(notify.notified());
                changed.as_mut().enable();
                let runs = index.get(key).is_some_and(|record| record.process.is_some());
                if !runs && index.live(key).is_none() {
                    return;
                }
                changed.await;
            }
        };
        if timeout(ENDED, ended).await.is_err() {
            tracing::warn!(project.key = key, "a daemon that was stopped still runs");
        }
    }
}

async fn project(State(control): Shared, Segment(key): Segment<String>) -> Result<Response, Refusal> {
    let (key, _) = control.find(&key)?;
    let detail = control.farm.project(&key).ok_or_else(|| Refusal::Unknown(key.to_string()))?;
    Ok(Json(detail).into_response())
}

#[derive(Deserialize)]
struct Manner {
    #[serde(default)]
    cut: bool,
    /// Seconds that the end of a cache is waited for.
    #[serde(default = "erase")]
    within: u64,
}

/// How long that is, unless the call says otherwise.
fn erase() -> u64 {
    120
}

/// Sends a daemon to zero before its time.
async fn stop(
    State(control): Shared,
    Segment(key): Segment<String>,
    Query(Manner { cut, .. }): Query<Manner>,
) -> Result<StatusCode, Refusal> {
    let (key, _) = control.find(&key)?;
    if !cut {
        control.free(&key).await?;
    }
    let core = &control.core;
    if core.writer.submit(key.as_str(), Change::Rest { cut }).await? == Outcome::StillWanted {
        return Err(Refusal::building(control.builds(&control.find(key.as_str())?.1).0));
    }
    if cut {
        // After its builds are forgotten: it would be started again for them.
        core.cut(key.as_str());
        core.index.poke(key.as_str());
        control.ended(&key).await;
        core.uncut(key.as_str());
    }
    Ok(StatusCode::ACCEPTED)
}

/// Removes a project with its cache: 200 when both are gone.
async fn remove(
    State(control): Shared,
    Segment(key): Segment<String>,
    Query(Manner { cut, within }): Query<Manner>,
) -> Result<StatusCode, Refusal> {
    let (key, _) = control.find(&key)?;
    match cut {
        true => control.core.cut(key.as_str()),
        false => control.free(&key).await?,
    }
    let core = &control.core;
    core.writer.submit(key.as_str(), Change::Remove).await?;
    let layout = &core.common.layout;
    let gone = async {
        while core.index.removals(key.as_str()) > 0 {
            sleep(LOOK).await;
        }
    };
    let gone = timeout(Duration::from_secs(within), gone).await.is_ok();
    core.uncut(key.as_str());
    match core.storage.left(&layout.cache(key.as_str())) {
        Some(why) => Err(Refusal::Failed(format!(
            "the project is removed, but not all of its cache, which is tried again every {} s: {why}",
            storage::AGAIN.as_secs()
        ))),
        None if gone => Ok(StatusCode::OK),
        None => Err(Refusal::Failed(format!(
            "the project is removed, but not yet its cache: that has taken {within} s and goes on"
        ))),
    }
}

/// What pruning one cache came to.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Pruned {
    /// Bytes that BuildKit freed; none are told of a cache that was removed whole.
    pub bytes: Option<u64>,
    /// Whether the cache was removed whole.
    pub removed: bool,
}

/// How long BuildKit may take to prune.
const PRUNE: Duration = Duration::from_secs(600);

/// Empties a cache: by BuildKit, which leaves what builds use, where a daemon
/// runs; whole, where none does.
async fn prune(State(control): Shared, Segment(key): Segment<String>) -> Result<Json<Pruned>, Refusal> {
    let (key, _) = control.find(&key)?;
    let core = &control.core;
    if let Some(_cache) = core.caches.try_take(key.as_str()) {
        core.clear(key.as_str()).await;
        let removed = core.storage.remove(&core.common.layout.cache(key.as_str())).await;
        removed.map_err(|error| Refusal::Failed(error.to_string()))?;
        return Ok(Json(Pruned { bytes: None, removed: true }));
    }
    let daemon = core.common.client(key.as_str()).map_err(Refusal::Failed)?;
    let pruned = daemon.prune(None, PRUNE).await.map_err(|error| Refusal::Failed(error.to_string()))?;
    Ok(Json(Pruned { bytes: Some(pruned.bytes), removed: false }))
}
