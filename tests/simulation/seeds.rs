//! Many seeds, on all cores.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::story;

/// How often something happened.
pub(crate) type Counts = BTreeMap<&'static str, u64>;

/// A seed that breaks an invariant, and which.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) seed: u64,
    pub(crate) violation: String,
}

/// What came of many seeds.
#[derive(Debug, Default)]
pub(crate) struct Played {
    pub(crate) failure: Option<Failure>,
    pub(crate) reached: Counts,
}

/// Plays seeds from 0 on until one fails.
pub(crate) fn play(count: u64) -> Played {
    let (next, found, played) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(Played::default()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while !found.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= count {
                        return;
                    }
                    let outcome = story::play(seed, false);
                    let mut played = played.lock().unwrap();
                    for (what, times) in outcome.reached {
                        *played.reached.entry(what).or_default() += times;
                    }
                    if let Some(violation) = outcome.violation {
                        found.store(true, Ordering::Relaxed);
                        played.failure.get_or_insert(Failure { seed, violation });
                    }
                }
            });
        }
    });
    played.into_inner().unwrap()
}

/// Plays one seed, and prints what happens.
pub(crate) fn replay(seed: u64) -> ExitCode {
    tracing_subscriber::fmt().without_time().with_ansi(false).with_max_level(tracing::Level::INFO).init();
    let outcome = story::play(seed, true);
    for (what, times) in outcome.reached {
        println!("{times:>9}  {what}");
    }
    match outcome.violation {
        None => ExitCode::SUCCESS,
        Some(violation) => {
            println!("seed {seed}: {violation}");
            ExitCode::FAILURE
        }
    }
}

/// A variable of the environment, unless it is empty.
pub(crate) fn named(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|value| !value.is_empty())
}

/// How often a long test repeats: in full when `BKO_REPEAT` is `full`, else a
/// tenth.
pub(crate) fn repetitions(full: u64) -> u64 {
    if named("BKO_REPEAT").as_deref() == Some("full") { full } else { full.div_ceil(10) }
}
