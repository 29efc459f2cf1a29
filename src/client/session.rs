//! One build from its route to its release.
#![expect(clippy::disallowed_methods, reason = "reads what the builder wrote of the image")]

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use futures::future::try_join_all;
use tokio::time::{sleep, timeout};

use super::api::{Api, RouteRequest, Routed};
use super::builder::{Builder, Commands, Node, Spec};
use super::certificates::{Certificates, Private};
use super::dial::{self, DialError, Endpoint};
use super::execute::{self, Ended, ExecuteError};
use super::fault::BuildError;
use super::gateway::Gateway;
use super::narrate::Narrator;
use super::now;
use super::output::{self, Progress};
use super::patience::{Next, Patience, reason};
use super::platform::{Stop, Stops};
use super::tls;
use crate::key::Project;

/// How long a release may take; with somebody waiting for us to end, less.
const RELEASE: Duration = Duration::from_secs(30);
const HASTY_RELEASE: Duration = Duration::from_secs(8);

/// What to build, where, and with whom.
#[derive(Debug)]
pub struct Build {
    /// The routing API.
    pub api: Api,
    /// One for each architecture.
    pub requests: Vec<RouteRequest>,
    /// What the builder is told.
    pub spec: Spec,
    /// The client's certificate.
    pub certificates: Certificates,
    /// What must be a file for the time of the build.
    pub private: Private,
    /// Which builder.
    pub builder: Builder,
    /// Where daemons are, if not where the answer says.
    pub gateway: Gateway,
    /// How long a daemon may take to wake.
    pub route_wait: Duration,
    /// How often a build whose daemon goes away is repeated.
    pub retries: u32,
    /// Where to write the image's digest.
    pub digest_file: Option<PathBuf>,
    /// Variables that builders need not see.
    pub hidden: &'static [&'static str],
}

enum Attempt {
    Ended { code: u8, stopped: Option<Stop> },
    Again(String),
}

/// Routes, builds and releases; returns the exit code.
///
/// # Errors
/// When nothing was built, and no signal is the reason.
pub async fn run(mut build: Build, narrator: &Narrator) -> Result<u8, BuildError> {
    let mut stops = Stops::listen().map_err(BuildError::Signals)?;
    let metadata = build.keep_metadata();
    let mut repeated = 0;
    loop {
        let routes = Mutex::new(Vec::new());
        let result = build.attempt(&routes, repeated, &mut stops, narrator).await;
        let routes = routes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        let stopped = matches!(result, Ok(Attempt::Ended { stopped: Some(_), .. }));
        let again = build.release(&routes, stopped, &mut stops, narrator).await;
        match (result?, again) {
            (Attempt::Ended { code, stopped: None }, None) => {
                if code == 0 {
                    build.write_metadata(metadata)?;
                    build.write_digest()?;
                }
                return Ok(code);
            }
            (Attempt::Ended { stopped: Some(stop), .. }, _) | (_, Some(stop)) => {
                narrator.say(stop.word());
                return Ok(stop.code());
            }
            (Attempt::Again(why), None) => {
                narrator.say(&format!("{why}; asking for a daemon once more"));
                repeated += 1;
            }
        }
    }
}

impl Build {
    async fn attempt(
        &self,
        routes: &Mutex<Vec<Routed>>,
        repeated: u32,
        stops: &mut Stops,
        narrator: &Narrator,
    ) -> Result<Attempt, BuildError> {
        let prepared = tokio::select! {
            biased;
            stop = stops.next() => return Ok(Attempt::Ended { code: stop.code(), stopped: Some(stop) }),
            prepared = self.prepare(routes, narrator) => prepared,
        };
        let nodes = match prepared {
            Ok(nodes) => nodes,
            Err(BuildError::Dial { source: source @ DialError::Away { .. }, .. })
                if repeated == 0 || repeated < self.retries =>
            {
                return Ok(Attempt::Again(source.to_string()));
            }
            Err(error) => return Err(error),
        };
        let commands =
            self.builder.commands(&self.spec, &nodes, &self.certificates.paths, self.certificates.lasting)?;
        let ended = self.work(&commands, stops, !narrator.terminal()).await;
        if let Some(remove) = &commands.remove
            && let Err(error) = execute::quietly(remove, self.hidden).await
        {
            narrator.warn(&error.to_string());
        }
        let ended = ended.map_err(BuildError::Execute)?;
        if ended.code != 0 && ended.stopped.is_none() {
            let progress = self.judge(ended.progress, &nodes).await?;
            if output::repeats(&progress, repeated, self.retries) {
                return Ok(Attempt::Again("the daemon has gone away".to_owned()));
            }
        }
        Ok(Attempt::Ended { code: ended.code, stopped: ended.stopped })
    }

    async fn work(&self, commands: &Commands, stops: &mut Stops, watched: bool) -> Result<Ended, ExecuteError> {
        let create = async {
            for create in &commands.create {
                execute::quietly(create, self.hidden).await?;
            }
            Ok(())
        };
        tokio::select! {
            biased;
            stop = stops.next() => return Ok(Ended { code: stop.code(), stopped: Some(stop), progress: None }),
            created = create => created?,
        }
        execute::attached(&commands.build, self.hidden, watched, stops).await
    }

    /// What became of a build that failed. What was drawn on a terminal is not
    /// known here: its steps count as begun, and the daemon is asked itself.
    async fn judge(&self, progress: Option<Progress>, nodes: &[Node]) -> Result<Progress, BuildError> {
        let mute = matches!(self.spec.progress.as_deref(), Some("quiet" | "none" | "rawjson"));
        match progress {
            Some(progress) if !mute => Ok(progress),
            _ if self.retries == 0 => Ok(Progress { began: true, ..Progress::default() }),
            _ => {
                let tls = tls::daemon_trust(&self.certificates).map_err(BuildError::Tls)?;
                let mut progress = Progress { began: true, ..Progress::default() };
                for node in nodes {
                    progress.lost |= matches!(dial::probe(&node.endpoint, &tls).await, Err(DialError::Away { .. }));
                }
                Ok(progress)
            }
        }
    }

    /// Routes every architecture, and looks whether the daemons take us.
    async fn prepare(&self, routes: &Mutex<Vec<Routed>>, narrator: &Narrator) -> Result<Vec<Node>, BuildError> {
        let tls = tls::daemon_trust(&self.certificates).map_err(BuildError::Tls)?;
        let all = self.requests.iter().map(|request| async {
            let routed = self.route(request, narrator).await?;
            // Kept where it is released even if another architecture fails.
            routes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(routed.clone());
            let endpoint = Endpoint::parse(&routed.endpoint).ok_or(BuildError::Endpoint(routed.endpoint))?;
            let endpoint = self.gateway.place(endpoint);
            let what = format!("connecting to {}", endpoint.host);
            narrator
                .wait(&what, dial::probe(&endpoint, &tls))
                .await
                .map_err(|source| BuildError::Dial { key: routed.key.clone(), source })?;
            Ok(Node { arch: request.arch.clone(), endpoint, cache: routed.cache })
        });
        try_join_all(all).await
    }

    async fn route(&self, request: &RouteRequest, narrator: &Narrator) -> Result<Routed, BuildError> {
        let what = describe(request);
        let begun = now();
        let mut patience = Patience::new(self.route_wait);
        let mut waiting_for = format!("waiting for a daemon for {what}");
        let mut last = None;
        loop {
            let left = self.route_wait.saturating_sub(begun.elapsed());
            let answer = narrator.wait(&waiting_for, timeout(left, self.api.route(request))).await;
            let Ok(answer) = answer else {
                return Err(BuildError::NotInTime { what, waited: begun.elapsed(), source: last });
            };
            let error = match answer {
                Ok(routed) => {
                    check_key(request, &routed, self.api.token.vouches(), narrator);
                    return Ok(routed);
                }
                Err(error) => error,
            };
            match patience.after(&error, begun.elapsed()) {
                Next::Again(pause) => {
                    waiting_for = format!("waiting for a daemon for {what}: {}", reason(&error));
                    last = Some(error);
                    narrator.wait(&waiting_for, sleep(pause)).await;
                }
                Next::GiveUp => return Err(BuildError::Refused { what, source: error }),
                Next::TimeIsUp => {
                    return Err(BuildError::NotInTime { what, waited: begun.elapsed(), source: Some(error) });
                }
            }
        }
    }

    /// Releases what was routed; a signal meanwhile ends the wait.
    async fn release(&self, routes: &[Routed], hasty: bool, stops: &mut Stops, narrator: &Narrator) -> Option<Stop> {
        let budget = if hasty { HASTY_RELEASE } else { RELEASE };
        let all = futures::future::join_all(routes.iter().map(|routed| self.release_one(routed, budget)));
        let results = tokio::select! {
            results = all => results,
            stop = stops.next() => {
                narrator.warn("the build is not released; the server forgets it by itself");
                return Some(stop);
            }
        };
        for error in results.into_iter().flatten() {
            narrator.warn(&format!("the build is not released ({error}); the server forgets it by itself"));
        }
        None
    }

    async fn release_one(&self, routed: &Routed, budget: Duration) -> Option<String> {
        let begun = now();
        let mut patience = Patience::new(budget);
        loop {
            let left = budget.saturating_sub(begun.elapsed()).min(Duration::from_secs(10));
            let error = match timeout(left, self.api.complete(routed)).await {
                Ok(Ok(())) => return None,
                Ok(Err(error)) => error,
                Err(_) => return Some("no answer in time".into()),
            };
            match patience.after(&error, begun.elapsed()) {
                Next::Again(pause) => sleep(pause).await,
                Next::GiveUp | Next::TimeIsUp => return Some(reason(&error)),
            }
        }
    }

    /// Who wants the digest needs what was built; and buildctl makes a file
    /// that everybody can write, whatever the umask is: it gets a private one.
    /// Returns where to that one has to go.
    fn keep_metadata(&mut self) -> Option<PathBuf> {
        let buildctl = matches!(self.builder, Builder::Buildctl(_));
        let wanted = self.spec.metadata_file.take_if(|_| buildctl);
        if wanted.is_some() || (self.digest_file.is_some() && self.spec.metadata_file.is_none()) {
            self.spec.metadata_file = Some(self.private.path("metadata.json"));
        }
        wanted
    }

    fn write_metadata(&self, wanted: Option<PathBuf>) -> Result<(), BuildError> {
        let (Some(path), Some(kept)) = (wanted, &self.spec.metadata_file) else { return Ok(()) };
        let written = std::fs::read(kept).and_then(|text| std::fs::write(&path, text));
        written.map_err(|source| BuildError::Metadata { path, source })
    }

    fn write_digest(&self) -> Result<(), BuildError> {
        let (Some(path), Some(metadata)) = (&self.digest_file, &self.spec.metadata_file) else { return Ok(()) };
        let failed = |why: String| BuildError::Digest { path: path.clone(), why };
        let digest = digest(metadata).map_err(failed)?;
        std::fs::write(path, format!("{digest}\n")).map_err(|error| failed(error.to_string()))
    }
}

fn digest(metadata: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(metadata).map_err(|error| error.to_string())?;
    let json: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let digest = json["containerimage.digest"].as_str().map(str::to_owned);
    digest.ok_or_else(|| "the builder names none: nothing was exported as an image".into())
}

fn describe(request: &RouteRequest) -> String {
    let RouteRequest { repo, name, target, arch, .. } = request;
    let parts = [repo, name, target, arch];
    parts.into_iter().filter(|part| !part.is_empty()).cloned().collect::<Vec<_>>().join(" ")
}

/// Client and server must agree where a build goes, or its cache is not where
/// `bko-install key` says.
fn check_key(request: &RouteRequest, routed: &Routed, vouched: bool, narrator: &Narrator) {
    let RouteRequest { repo, name, target, arch, untrusted } = request;
    let Ok(project) = Project::new(repo, name, target, arch, *untrusted) else { return };
    let key = project.key().to_string();
    // With an identity the server decides about repository and trust; clones
    // and forks end in the project's key.
    if !vouched && !routed.key.ends_with(project.canonical_key().as_str()) {
        narrator.warn(&format!("the server routes to {}, but this version computes {key}", routed.key));
    }
}
