//! A real node: pods run, volumes bind, names resolve, images are built.

#![expect(clippy::disallowed_methods, reason = "tests read clocks, files and the environment")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]

#[path = "../cluster"]
mod shared {
    pub(crate) mod harness;
}

mod builds;
mod credentials;
mod farm;
mod gate;
mod harness_checks;
mod installation;
mod lifetime;
mod refusals;
#[path = "../cluster/farm.rs"]
mod server;

use std::process::ExitCode;
use std::time::Duration;

use shared::harness;

use harness::{Node, Test};

fn tests() -> Vec<Test<Node>> {
    vec![
        test!(harness_checks::pod_runs_resolves_names_and_keeps_its_volume),
        test!(harness_checks::pushed_image_is_pulled),
        test!(harness_checks::own_image_runs),
        test!(harness_checks::rootless_buildkit_builds_the_example),
        test!(refusals::a_missing_image_is_told_with_a_way_to_have_it).serial(),
        test!(refusals::a_container_that_cannot_start_is_told).serial(),
        test!(builds::nothing_takes_a_daemon_from_a_running_build)
            .serial()
            .limit(Duration::from_secs(u64::from(builds::lasting(4200, 600)))),
        test!(builds::the_installer_takes_no_daemon_from_a_running_build).serial().limit(Duration::from_secs(420)),
        test!(credentials::a_ci_needs_nothing_but_the_credentials).serial().limit(Duration::from_secs(300)),
        test!(gate::what_is_dialled_wakes).serial().limit(Duration::from_secs(420)),
        test!(gate::the_gateway_serves_the_api_and_is_not_missed).serial().limit(Duration::from_secs(240)),
        test!(lifetime::from_an_export_to_a_removal).serial().limit(Duration::from_secs(300)),
        test!(farm::the_main_job).limit(Duration::from_secs(420)),
    ]
}

fn main() -> ExitCode {
    harness::run(tests())
}
