//! A private Kubernetes for tests: one cluster per test binary, ready in a few
//! seconds, and gone without a trace however the run ends.
//!
//! [`run`] re-executes the test binary inside namespaces of its own (see
//! [`sandbox`]), starts a [`Tier`] there and hands it to the tests. They run
//! inside too, so they reach the API server, pods and services directly.

#![allow(dead_code, unused_imports, reason = "several test binaries share the harness, and each uses a part of it")]

pub(crate) mod audit;
pub(crate) mod cluster;
pub(crate) mod companion;
pub(crate) mod container_runtime;
pub(crate) mod control_plane;
pub(crate) mod executable;
pub(crate) mod fault_proxy;
pub(crate) mod image;
pub(crate) mod kubelet;
pub(crate) mod namespaces;
pub(crate) mod network;
pub(crate) mod node;
pub(crate) mod pki;
pub(crate) mod play;
pub(crate) mod process;
pub(crate) mod registration;
pub(crate) mod registry;
pub(crate) mod sandbox;
pub(crate) mod tools;
pub(crate) mod volumes;

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Context;
use libtest_mimic::{Arguments, Trial};

pub(crate) use cluster::Cluster;
pub(crate) use node::Node;
pub(crate) use registration::{Stage, Test, test};
use tools::Tools;

/// The only address of the sandbox: API server, node, registry.
pub(crate) const ADDRESS: &str = "192.168.64.2";

/// Everything that a cluster writes is below, on a file system in memory that
/// ends with the sandbox.
pub(crate) const ROOT: &str = "/run/bko";

/// How much of a cluster runs.
pub(crate) trait Tier: Send + Sync + Sized + 'static {
    /// The name that `tests/cluster/harness/sandbox.sh` knows it by.
    const NAME: &'static str;

    /// The programs that it needs.
    const PROGRAMS: &'static [&'static str];

    /// Starts it, inside the sandbox, and returns when it is ready.
    fn start(tools: Arc<Tools>) -> impl Future<Output = anyhow::Result<Self>>;
}

/// The main function of a test binary.
pub(crate) fn run<T: Tier>(tests: Vec<Test<T>>) -> ExitCode {
    let arguments = Arguments::from_args();
    let stage = Arc::new(OnceLock::new());
    let trials: Vec<Trial> = tests.into_iter().map(|test| test.into_trial(&stage)).collect();
    let selected = |trial: &Trial| !arguments.is_filtered_out(trial) && !arguments.is_ignored(trial);
    if arguments.list || !trials.iter().any(selected) {
        return libtest_mimic::run(&arguments, trials).exit_code();
    }
    enter::<T>(|tier, runtime| {
        let _ = stage.set(Stage::new(tier, runtime.handle().clone()));
        libtest_mimic::run(&arguments, trials).exit_code()
    })
}

/// Runs `body` with a tier, inside the sandbox, and returns its exit code
/// outside, when nothing is left of it.
pub(crate) fn enter<T: Tier>(body: impl FnOnce(Arc<T>, &tokio::runtime::Runtime) -> ExitCode) -> ExitCode {
    let tools = match Tools::locate(T::PROGRAMS) {
        Ok(tools) => tools,
        Err(error) => return fail(&error),
    };
    let outcome = sandbox::run(T::NAME, &tools.environment(), || {
        let runtime = tokio::runtime::Runtime::new()?;
        let begin = Instant::now();
        let tier = runtime.block_on(T::start(Arc::new(tools))).context("starting the cluster")?;
        eprintln!("{} ready in {} ms", T::NAME, begin.elapsed().as_millis());
        Ok(body(Arc::new(tier), &runtime))
    });
    outcome.unwrap_or_else(|error| fail(&error))
}

/// How often a long test repeats: in full when `BKO_REPEAT` is `full`, else a
/// tenth, at least once.
pub(crate) fn repetitions(full: usize) -> usize {
    match std::env::var("BKO_REPEAT").as_deref() {
        Ok("full") => full,
        _ => full.div_ceil(10),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {error:#}");
    ExitCode::FAILURE
}
