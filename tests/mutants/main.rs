//! The simulation can fail: broken variants of the decision code, each caught
//! by some seed. The code under test is a copy of the sources, made by
//! `build.rs` when the package is built, with all variants in it behind a switch.
//!
//! `make simulation MUTANT=<test> SEED=<seed>` plays one seed and prints what happened.

#![expect(clippy::disallowed_methods, reason = "tests read clocks and the environment")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]
#![allow(dead_code, reason = "some of the simulation is for its other user")]

#[path = "../simulation/builds.rs"]
mod builds;
#[path = "../simulation/check.rs"]
mod check;
#[path = "../simulation/client.rs"]
mod client;
#[path = "../simulation/cluster.rs"]
mod cluster;
#[path = "../simulation/model.rs"]
mod model;
#[path = "../simulation/network.rs"]
mod network;
#[path = "../simulation/replica.rs"]
mod replica;
#[path = "../simulation/seeds.rs"]
mod seeds;
#[path = "../simulation/story.rs"]
mod story;
#[path = "../simulation/world.rs"]
mod world;

/// The copy.
#[allow(warnings, clippy::all, clippy::pedantic, reason = "generated; its original is checked")]
mod product {
    include!(concat!(env!("OUT_DIR"), "/product.rs"));
}

/// Which variant is in force.
mod mutant {
    use std::sync::atomic::{AtomicUsize, Ordering};

    static IN_FORCE: AtomicUsize = AtomicUsize::new(usize::MAX);

    pub(crate) fn is(number: usize) -> bool {
        IN_FORCE.load(Ordering::Relaxed) == number
    }

    pub(crate) fn set(number: usize) {
        IN_FORCE.store(number, Ordering::Relaxed);
    }
}

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use product::VARIANTS;

fn main() -> ExitCode {
    if let (Some(name), Some(seed)) = (seeds::named("BKO_MUTANT"), seeds::named("BKO_SEED")) {
        let number = VARIANTS.iter().position(|variant| test_name(variant) == name);
        mutant::set(number.expect("BKO_MUTANT is the name of a test"));
        return seeds::replay(seed.parse().expect("BKO_SEED is a number"));
    }
    let caught =
        VARIANTS.iter().enumerate().map(|(number, variant)| Trial::test(test_name(variant), move || is_caught(number)));
    let woven = Trial::test("all_variants_fit_the_sources", || match product::UNWOVEN {
        [] => Ok(()),
        unwoven => Err(format!("their passages in the sources have changed: {unwoven:?}").into()),
    });
    let trials = std::iter::once(woven).chain(caught).collect();
    // One switch for all: one at a time, each on all cores.
    libtest_mimic::run(&Arguments { test_threads: Some(1), ..Arguments::from_args() }, trials).exit_code()
}

fn test_name(variant: &str) -> String {
    variant.replace(' ', "_")
}

fn is_caught(number: usize) -> Result<(), Failed> {
    mutant::set(number);
    const LIMIT: u64 = 10_000;
    match seeds::play(LIMIT).failure {
        Some(failure) => {
            println!("caught by seed {}: {}", failure.seed, failure.violation);
            Ok(())
        }
        None => Err(format!("not caught by {LIMIT} seeds").into()),
    }
}
