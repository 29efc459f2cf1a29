//! The control plane in a simulated cluster: the real routing API, writer,
//! controller and lease, over a modelled API server with faults, on simulated
//! time. Each seed is one history; the same seed is always the same history.
//!
//! `make simulation SEED=<seed>` plays one seed and prints what happened.

#![expect(clippy::disallowed_methods, reason = "tests read clocks and the environment")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod builds;
mod check;
mod client;
mod cluster;
mod model;
mod network;
mod replica;
mod seeds;
mod story;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use bko_install as product;
use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    if let Some(seed) = seeds::named("BKO_SEED") {
        return seeds::replay(seed.parse().expect("BKO_SEED is a number"));
    }
    let trials = vec![
        Trial::test("invariants_hold_over_many_seeds", invariants_hold),
        Trial::test("a_seed_is_always_the_same_history", histories_repeat),
    ];
    libtest_mimic::run(&Arguments { test_threads: Some(1), ..Arguments::from_args() }, trials).exit_code()
}

/// And what is to be tried is tried: no invariant is checked in vain.
fn invariants_hold() -> Result<(), Failed> {
    let (begin, count) = (Instant::now(), seeds::repetitions(100_000));
    let played = seeds::play(count);
    if let Some(failure) = played.failure {
        let seeds::Failure { seed, violation } = failure;
        return Err(format!("seed {seed}: {violation}\n\nto read it: make simulation SEED={seed}").into());
    }
    println!("\n{count} seeds in {:.0} s, with", begin.elapsed().as_secs_f64());
    for what in world::STATES {
        println!("{:>9}  {what}", played.reached.get(what).copied().unwrap_or(0));
    }
    match world::STATES.iter().find(|what| !played.reached.contains_key(*what)) {
        None => Ok(()),
        Some(never) => Err(format!("never reached: {never}").into()),
    }
}

fn histories_repeat() -> Result<(), Failed> {
    for seed in 0..100 {
        let [first, second] = [(); 2].map(|()| story::play(seed, false).digest);
        if first != second {
            return Err(format!("seed {seed} tells two histories").into());
        }
    }
    Ok(())
}
