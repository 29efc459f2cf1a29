//! How a test is registered: a name, an asynchronous function, and whether it
//! needs the cluster for itself.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use libtest_mimic::{Failed, Trial};
use tokio::runtime::Handle;
use tokio::sync::RwLock;

/// How long a test may take, unless it says otherwise.
const LIMIT: Duration = Duration::from_secs(120);

type Run<T> = Box<dyn FnOnce(Arc<T>) -> Pin<Box<dyn Future<Output = anyhow::Result<()>>>> + Send>;

/// What the tests of a binary run on.
pub(crate) struct Stage<T> {
    tier: Arc<T>,
    runtime: Handle,
    /// Shared by ordinary tests, held alone by serial ones.
    turn: RwLock<()>,
}

impl<T> Stage<T> {
    /// A stage on a tier that is up.
    pub(crate) fn new(tier: Arc<T>, runtime: Handle) -> Self {
        Self { tier, runtime, turn: RwLock::new(()) }
    }
}

/// A test on a tier.
pub(crate) struct Test<T> {
    name: String,
    serial: bool,
    limit: Duration,
    run: Run<T>,
}

/// Registers a function; [`test!`](crate::test) fills in the name.
pub(crate) fn test<T, F, R>(name: &str, run: F) -> Test<T>
where
    F: FnOnce(Arc<T>) -> R + Send + 'static,
    R: Future<Output = anyhow::Result<()>> + 'static,
{
    let name = name.replace(' ', "");
    Test { name, serial: false, limit: LIMIT, run: Box::new(move |tier| Box::pin(run(tier))) }
}

/// Registers a function under its own path.
#[macro_export]
macro_rules! test {
    ($function:path) => {
        $crate::harness::test(stringify!($function), $function)
    };
}

impl<T: Send + Sync + 'static> Test<T> {
    /// No other test runs at the same time: for what belongs to the whole cluster.
    pub(crate) fn serial(self) -> Self {
        Self { serial: true, ..self }
    }

    /// Fails when it takes longer.
    pub(crate) fn limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// As the test runner wants it; the stage is set before it runs.
    pub(crate) fn into_trial(self, stage: &Arc<OnceLock<Stage<T>>>) -> Trial {
        let stage = Arc::clone(stage);
        let Self { name, serial, limit, run } = self;
        Trial::test(name, move || {
            let Stage { tier, runtime, turn } = stage.get().ok_or("the cluster is not up")?;
            runtime.block_on(async {
                let (_shared, _alone);
                if serial {
                    _alone = turn.write().await;
                } else {
                    _shared = turn.read().await;
                }
                match tokio::time::timeout(limit, run(Arc::clone(tier))).await {
                    Ok(outcome) => outcome.map_err(|error| failed(&error)),
                    Err(_) => Err(Failed::from(format!("not done within {limit:?}"))),
                }
            })
        })
    }
}

/// What went wrong and why; a backtrace of an error would hide both.
pub(crate) fn failed(error: &anyhow::Error) -> Failed {
    Failed::from(error.chain().map(ToString::to_string).collect::<Vec<_>>().join("\n  caused by: "))
}
