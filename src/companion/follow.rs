//! Follows running builds: one stream of the daemon's socket for each, dropped
//! when the build ends. Who follows holds nothing up; what it misses is merely
//! not known.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::JoinHandle;

use super::daemon::Daemon;
use super::observation::Build;
use super::progress::Progress;

/// Builds that are followed at once.
const FOLLOWED: usize = 32;

/// Those that are followed.
#[derive(Debug)]
pub struct Followers {
    daemon: Daemon,
    followed: HashMap<String, Follower>,
}

#[derive(Debug)]
struct Follower {
    progress: Arc<Mutex<Progress>>,
    task: JoinHandle<()>,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Followers {
    /// Follows nothing yet.
    pub fn new(daemon: Daemon) -> Self {
        Self { daemon, followed: HashMap::new() }
    }

    /// Follows these builds and no others, and adds to them how far they are.
    pub fn complete(&mut self, active: &mut [Build]) {
        self.followed.retain(|reference, _| active.iter().any(|build| build.reference == *reference));
        for build in active {
            if !self.followed.contains_key(&build.reference) && self.followed.len() < FOLLOWED {
                self.followed.insert(build.reference.clone(), follow(self.daemon.clone(), build.reference.clone()));
            }
            let Some(follower) = self.followed.get(&build.reference) else { continue };
            let progress = follower.progress.lock().unwrap_or_else(PoisonError::into_inner);
            build.steps_total = progress.total();
            build.steps_cached = progress.cached();
            build.steps_completed = progress.completed();
            build.step = progress.step().map(str::to_owned);
        }
    }
}

fn follow(daemon: Daemon, reference: String) -> Follower {
    let progress = Arc::<Mutex<Progress>>::default();
    let told = progress.clone();
    let task = tokio::spawn(async move {
        let update = |vertex| told.lock().unwrap_or_else(PoisonError::into_inner).update(vertex);
        if let Err(error) = daemon.follow(&reference, update).await {
            tracing::debug!(build.reference = reference, %error, "a build is not followed any more");
        }
    });
    Follower { progress, task }
}
