//! A real API server, without a node: what can be shown when pods are played.

#![expect(clippy::disallowed_methods, reason = "tests read clocks, files and the environment")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]

mod harness;
mod harness_checks;

use std::process::ExitCode;

use harness::{Cluster, Test};

fn tests() -> Vec<Test<Cluster>> {
    vec![
        test!(harness_checks::api_answers),
        test!(harness_checks::played_pod_becomes_an_endpoint),
        test!(harness_checks::play_waits_for_its_switch_and_delay),
        test!(harness_checks::audit_counts_writes_by_user_agent),
        test!(harness_checks::claim_binds_to_a_volume),
        test!(harness_checks::api_server_comes_back_after_a_crash).serial(),
    ]
}

fn main() -> ExitCode {
    harness::run(tests())
}
