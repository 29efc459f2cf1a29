//! Asks those who know: the companion in the daemon's pod, and every gateway.
//! Decides nothing.
#![expect(clippy::disallowed_methods, reason = "shell: looks are dated on the monotonic clock")]

use std::collections::HashMap;
use std::mem::Discriminant;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::gateways::{Gateways, Listed};
use super::{Answers, Builds, Busy, Daemon, Gateway, Observations, Verdict, quiet};
use crate::families::build_farm::build::pod::{COMPANION, COMPANION_PORT};
use crate::families::build_farm::view::View;
use crate::gateway::streams::{PATH, Streams, Summary};
use crate::key::ProjectKey;
use crate::runtime::internal::{InternalToken, ask};

/// How long one answer may take.
const DEADLINE: Duration = Duration::from_secs(3);

/// Where gateways are, and how they are asked.
pub struct Witnesses {
    /// The operator's namespace.
    pub namespace: String,
    /// Port of the gateways' admin listeners.
    pub port: u16,
    /// What they know us by.
    pub token: Option<InternalToken>,
    /// Streams of this very process, when it is a gateway too.
    pub own: Option<Arc<Streams>>,
}

/// Asks, and remembers what it was told from one look to the next.
pub struct Truth {
    view: Arc<View>,
    gateways: Arc<Gateways>,
    token: Option<InternalToken>,
    own: Option<Arc<Streams>>,
    began: Instant,
    seen: Mutex<HashMap<String, Seen>>,
}

/// What was seen of one daemon, and what was last told about it.
struct Seen {
    observations: Observations,
    told: Option<Discriminant<Busy>>,
}

impl Truth {
    /// Starts to watch which gateways there are.
    pub fn start(client: Client, view: Arc<View>, witnesses: Witnesses, shutdown: CancellationToken) -> Arc<Self> {
        let Witnesses { namespace, port, token, own } = witnesses;
        let began = Instant::now();
        let gateways = Gateways::start(client, &namespace, port, began, shutdown);
        Arc::new(Self { view, gateways, token, own, began, seen: Mutex::default() })
    }

    /// Looks once, and judges it together with the looks before.
    pub async fn look(&self, key: &ProjectKey, max_build: Duration) -> Verdict {
        let answers = self.ask(key).await;
        let now = self.now();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.retain(|_, seen| seen.observations.counts(now));
        let previous = seen.remove(key.as_str());
        let observations = Observations::after(previous.as_ref().map(|seen| &seen.observations), answers, now);
        let verdict = quiet(&observations, max_build, now);
        let told = previous.and_then(|seen| seen.told);
        seen.insert(key.to_string(), Seen { observations, told });
        verdict
    }

    /// Whether it is worth telling again that a daemon is busy: for another
    /// reason than it was.
    pub fn is_news(&self, key: &str, why: &Busy) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let why = Some(std::mem::discriminant(why));
        seen.get_mut(key).is_none_or(|seen| std::mem::replace(&mut seen.told, why) != why)
    }

    /// Forgets what was seen of a daemon that has gone.
    pub fn forget(&self, key: &str) {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// The clock of all looks.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// What all who can know say now.
    pub async fn ask(&self, key: &ProjectKey) -> Answers {
        let pod = self.view.pod(key);
        let name = key.daemon();
        let (daemon, gateways) = tokio::join!(ask_companion(pod.as_deref()), self.ask_gateways(&name));
        Answers { daemon, gateways }
    }

    async fn ask_gateways(&self, daemon: &str) -> Option<Vec<Gateway>> {
        let listed = self.gateways.list()?;
        let asked = listed.into_iter().map(|listed| self.ask_gateway(listed, daemon));
        let own = self.own.iter().map(|own| Gateway { name: "here".to_owned(), gone: None, said: Ok(own.of(daemon)) });
        Some(own.chain(join_all(asked).await).collect())
    }

    async fn ask_gateway(&self, listed: Listed, daemon: &str) -> Gateway {
        let Listed { name, address, gone } = listed;
        let path = format!("{PATH}?daemon={daemon}");
        let said = ask::<HashMap<String, Summary>>(address, &path, self.token.as_ref(), DEADLINE).await;
        let said = said
            .map_err(|error| error.to_string())
            .and_then(|mut all| all.remove(daemon).ok_or_else(|| format!("{address} does not know of {daemon}")));
        Gateway { name, gone, said }
    }
}

/// Where the companion of a daemon that runs can be asked; `None` without one.
pub(in crate::families::build_farm) fn companion_of(pod: &Pod) -> Option<IpAddr> {
    let mut sidecars = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    if sidecars.any(|container| container.name == COMPANION) { running(pod) } else { None }
}

async fn ask_companion(pod: Option<&Pod>) -> Daemon {
    let Some(pod) = pod.filter(|pod| running(pod).is_some()) else { return Daemon::Absent };
    let Some(ip) = companion_of(pod) else { return Daemon::Unwatched };
    match ask::<Builds>(SocketAddr::new(ip, COMPANION_PORT), "/builds", None, DEADLINE).await {
        Ok(builds) => builds.into(),
        Err(error) => Daemon::Silent(error.to_string()),
    }
}

/// The address of a pod whose daemon runs, ready or not.
fn running(pod: &Pod) -> Option<IpAddr> {
    let status = pod.status.as_ref()?;
    let daemon = status.container_statuses.iter().flatten().find(|container| container.name == "buildkitd")?;
    daemon.state.as_ref()?.running.as_ref()?;
    status.pod_ip.as_deref()?.parse().ok()
}
