//! A client of BuildKit's Control API over the daemon's socket. Every call has
//! a deadline, which the caller gives.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use bollard_buildkit_proto::google::protobuf::Timestamp as ProtoTimestamp;
use bollard_buildkit_proto::moby::buildkit::v1::control_client::ControlClient;
use bollard_buildkit_proto::moby::buildkit::v1::{
    BuildHistoryEventType, BuildHistoryRecord, BuildHistoryRequest, DiskUsageRequest, InfoRequest, ListWorkersRequest,
    PruneRequest, StatusRequest, Vertex as ProtoVertex,
};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use super::observation::{Build, Identity};
use super::progress::Vertex;

/// Finished builds that are asked for, and kept where more are told.
const HISTORY: usize = 50;
const LIMIT: i32 = 50;

/// Largest answer that is read. BuildKit itself sends 16 MiB at most.
const MESSAGE_MAX: usize = 16 << 20;

/// Label of a worker that names its snapshotter.
const SNAPSHOTTER: &str = "org.mobyproject.buildkit.worker.snapshotter";

/// Where a daemon serves: `unix:///path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAddress(PathBuf);

/// Not the address of a socket.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("\"{0}\" is not the address of a socket; want \"unix:///PATH\"")]
pub struct ParseSocketAddress(String);

impl FromStr for SocketAddress {
    type Err = ParseSocketAddress;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let path = s.strip_prefix("unix://").filter(|path| path.starts_with('/') && path.len() > 1);
        path.map(|path| Self(PathBuf::from(path))).ok_or_else(|| ParseSocketAddress(s.to_owned()))
    }
}

impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}

/// Why the daemon did not answer.
#[derive(Debug, thiserror::Error)]
pub enum AskDaemon {
    /// No process listens on the socket.
    #[error("nothing listens on \"{0}\"")]
    Gone(SocketAddress),
    /// There was no answer in time.
    #[error("the daemon on \"{0}\" did not answer \"{1}\" within {2:?}")]
    Silent(SocketAddress, &'static str, Duration),
    /// It answered with an error.
    #[error("the daemon on \"{0}\" refused \"{1}\": {2:?}: {3}")]
    Refused(SocketAddress, &'static str, Code, String),
}

impl AskDaemon {
    /// Whether it could not because its volume is full.
    pub fn lacks_room(&self) -> bool {
        matches!(self, Self::Refused(_, _, Code::ResourceExhausted, _))
    }
}

/// Builds of a daemon.
#[derive(Clone, Debug, Default)]
pub struct Builds {
    /// Those that run.
    pub active: Vec<Build>,
    /// Those that ended, newest first; empty unless asked for.
    pub finished: Vec<Build>,
}

/// What the cache holds, by BuildKit's own books.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Cache {
    /// Number of records.
    pub records: u64,
    /// Their size.
    pub bytes: u64,
    /// Size of those that are in use, and so cannot be pruned.
    pub bytes_in_use: u64,
}

/// What a prune removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Pruned {
    /// Number of records.
    pub records: u64,
    /// Their size.
    pub bytes: u64,
}

/// A daemon. Connects when first asked, and again after the daemon restarted.
#[derive(Clone, Debug)]
pub struct Daemon {
    address: SocketAddress,
    client: ControlClient<Channel>,
    connections: Arc<AtomicU64>,
    pid: Arc<AtomicI32>,
}

impl Daemon {
    /// A client of the daemon at an address. Needs a runtime to run in.
    pub fn new(address: SocketAddress) -> Self {
        let connections = Arc::new(AtomicU64::new(0));
        let pid = Arc::new(AtomicI32::new(0));
        let (path, count, peer) = (address.0.clone(), Arc::clone(&connections), Arc::clone(&pid));
        let connect = tower::service_fn(move |_: Uri| {
            let (path, count, peer) = (path.clone(), Arc::clone(&count), Arc::clone(&peer));
            async move {
                let stream = UnixStream::connect(path).await?;
                peer.store(stream.peer_cred()?.pid().unwrap_or(0), Ordering::Relaxed);
                count.fetch_add(1, Ordering::Relaxed);
                Ok::<_, std::io::Error>(TokioIo::new(stream))
            }
        });
        // The authority is never looked up: the connector ignores it.
        let channel = Endpoint::from_static("http://buildkitd").connect_with_connector_lazy(connect);
        let client = ControlClient::new(channel).max_decoding_message_size(MESSAGE_MAX);
        Self { address, client, connections, pid }
    }

    /// Counts the processes that have served on the socket: a connection to it
    /// lasts as long as its process.
    pub fn process(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// The daemon's process id, where this process can see it: not from
    /// another container of its pod.
    pub fn pid(&self) -> Option<i32> {
        Some(self.pid.load(Ordering::Relaxed)).filter(|pid| *pid > 0)
    }

    /// The builds of the daemon; finished ones only with `history`.
    ///
    /// # Errors
    /// When the daemon does not answer in time, or refuses.
    pub async fn builds(&self, history: bool, within: Duration) -> Result<Builds, AskDaemon> {
        let request =
            BuildHistoryRequest { active_only: !history, early_exit: true, limit: LIMIT, ..Default::default() };
        let mut client = self.client.clone();
        self.call("ListenBuildHistory", within, async move {
            let mut events = client.listen_build_history(request).await?.into_inner();
            let mut builds = Builds::default();
            while let Some(event) = events.message().await? {
                let kind = event.r#type();
                match (kind, event.record) {
                    (BuildHistoryEventType::Started, Some(record)) => builds.active.push(build(record)),
                    (BuildHistoryEventType::Complete, Some(record)) => builds.finish(build(record)),
                    (BuildHistoryEventType::Deleted, _) | (_, None) => {}
                }
            }
            builds.keep_newest();
            Ok(builds)
        })
        .await
    }

    /// Tells what becomes of the vertices of a running build, until it ends.
    ///
    /// # Errors
    /// When the daemon goes away, or refuses.
    pub async fn follow(&self, reference: &str, mut told: impl FnMut(Vertex)) -> Result<(), AskDaemon> {
        let mut client = self.client.clone();
        let request = StatusRequest { r#ref: reference.to_owned() };
        let followed = async {
            let mut updates = client.status(request).await?.into_inner();
            while let Some(update) = updates.message().await? {
                update.vertexes.into_iter().map(vertex).for_each(&mut told);
            }
            Ok(())
        };
        followed.await.map_err(|status| self.refused("Status", &status))
    }

    /// What serves on the socket.
    ///
    /// # Errors
    /// When the daemon does not answer in time, or refuses.
    pub async fn identity(&self, within: Duration) -> Result<Identity, AskDaemon> {
        let mut client = self.client.clone();
        self.call("ListWorkers", within, async move {
            let workers = client.list_workers(ListWorkersRequest::default()).await?.into_inner().record;
            let snapshotter = workers.into_iter().next().and_then(|mut worker| worker.labels.remove(SNAPSHOTTER));
            let info = client.info(InfoRequest {}).await?.into_inner();
            let version = info.buildkit_version.map(|version| version.version);
            Ok(Identity { version: version.unwrap_or_default(), snapshotter: snapshotter.unwrap_or_default() })
        })
        .await
    }

    /// What the cache holds; `None` when the answer is larger than a message
    /// may be, as that of a large cache is.
    ///
    /// # Errors
    /// When the daemon does not answer in time, or refuses.
    pub async fn cache(&self, within: Duration) -> Result<Option<Cache>, AskDaemon> {
        let mut client = self.client.clone();
        let usage = self.call("DiskUsage", within, async move {
            let records = client.disk_usage(DiskUsageRequest::default()).await?.into_inner().record;
            Ok(records.iter().fold(Cache::default(), |cache, record| {
                let bytes = u64::try_from(record.size).unwrap_or(0);
                Cache {
                    records: cache.records + 1,
                    bytes: cache.bytes + bytes,
                    bytes_in_use: cache.bytes_in_use + if record.in_use { bytes } else { 0 },
                }
            }))
        });
        match usage.await {
            Err(error) if error.is_too_large() => Ok(None),
            usage => usage.map(Some),
        }
    }

    /// Removes what is not in use: all of it, or the least recently used until
    /// `min_free` bytes of the volume are free.
    ///
    /// # Errors
    /// When the daemon does not finish in time, or refuses.
    pub async fn prune(&self, min_free: Option<u64>, within: Duration) -> Result<Pruned, AskDaemon> {
        let min_free_space = signed(min_free.unwrap_or(0));
        self.removed(PruneRequest { all: true, min_free_space, ..Default::default() }, within).await
    }

    /// Removes what is not in use, the least recently used first, until the
    /// cache holds no more than so many bytes.
    ///
    /// # Errors
    /// When the daemon does not finish in time, or refuses.
    pub async fn prune_to(&self, bytes: u64, within: Duration) -> Result<Pruned, AskDaemon> {
        // Nothing said is nothing kept, and so is 0.
        self.removed(PruneRequest { all: true, max_used_space: signed(bytes), ..Default::default() }, within).await
    }

    async fn removed(&self, request: PruneRequest, within: Duration) -> Result<Pruned, AskDaemon> {
        let mut client = self.client.clone();
        self.call("Prune", within, async move {
            let mut removed = client.prune(request).await?.into_inner();
            let mut pruned = Pruned::default();
            while let Some(record) = removed.message().await? {
                pruned.records += 1;
                pruned.bytes += u64::try_from(record.size).unwrap_or(0);
            }
            Ok(pruned)
        })
        .await
    }

    async fn call<T>(
        &self,
        name: &'static str,
        within: Duration,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, AskDaemon> {
        let answer = timeout(within, call).await.map_err(|_| AskDaemon::Silent(self.address.clone(), name, within))?;
        answer.map_err(|status| self.refused(name, &status))
    }

    fn refused(&self, name: &'static str, status: &Status) -> AskDaemon {
        if nobody_listens(status) {
            AskDaemon::Gone(self.address.clone())
        } else {
            AskDaemon::Refused(self.address.clone(), name, status.code(), status.message().to_owned())
        }
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl AskDaemon {
    /// Whether the answer was larger than a message may be: by the daemon's
    /// limit, or by ours.
    pub fn is_too_large(&self) -> bool {
        matches!(self, Self::Refused(_, _, Code::ResourceExhausted | Code::OutOfRange, _))
    }
}

impl Builds {
    /// Older daemons know no limit, and tell all that they have.
    fn finish(&mut self, build: Build) {
        self.finished.push(build);
        if self.finished.len() > 4 * HISTORY {
            self.keep_newest();
        }
    }

    fn keep_newest(&mut self) {
        self.finished.sort_by_key(|build| std::cmp::Reverse(build.completed));
        self.finished.truncate(HISTORY);
    }
}

fn vertex(vertex: ProtoVertex) -> Vertex {
    Vertex {
        digest: vertex.digest,
        name: vertex.name,
        cached: vertex.cached,
        started: vertex.started.and_then(timestamp),
        completed: vertex.completed.is_some(),
    }
}

/// Whether a call failed because no process has the socket open.
fn nobody_listens(status: &Status) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    let mut next: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(status);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return matches!(io.kind(), ConnectionRefused | NotFound);
        }
        next = error.source();
    }
    false
}

fn build(record: BuildHistoryRecord) -> Build {
    let count = |steps: i32| u32::try_from(steps).unwrap_or(0);
    Build {
        reference: record.r#ref,
        started: record.created_at.and_then(timestamp),
        completed: record.completed_at.and_then(timestamp),
        steps_total: count(record.num_total_steps),
        steps_cached: count(record.num_cached_steps),
        steps_completed: count(record.num_completed_steps),
        error: record.error.map(|status| outward(status.code, &status.message)),
        step: None,
    }
}

fn timestamp(proto: ProtoTimestamp) -> Option<Timestamp> {
    Timestamp::new(proto.seconds, proto.nanos).ok()
}

/// An error without the command that failed, which may hold secrets.
fn outward(code: i32, message: &str) -> String {
    let exit = message.rsplit_once("did not complete successfully: ").map(|(_, exit)| exit);
    let exit = exit.and_then(|exit| exit.strip_prefix("exit code: ")).map(|rest| {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        format!("exit code: {digits}")
    });
    exit.unwrap_or_else(|| format!("{:?}", Code::from_i32(code)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_sockets_are_told_from_others() {
        let address = "unix:///run/buildkit/buildkitd.sock".parse::<SocketAddress>().unwrap();
        assert_eq!(address.to_string(), "unix:///run/buildkit/buildkitd.sock");
        for text in ["", "unix://", "unix:///", "unix://run/x", "tcp://127.0.0.1:1234", "/run/x"] {
            assert!(text.parse::<SocketAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_is_told_without_its_command() {
        let message = "process \"/bin/sh -c login --token s3cret\" did not complete successfully: exit code: 137";
        assert_eq!(outward(2, message), "exit code: 137");
        assert_eq!(outward(2, &format!("{message}: out of memory at s3cret")), "exit code: 137");
        assert_eq!(outward(1, "context canceled s3cret"), "Cancelled");
    }
}
