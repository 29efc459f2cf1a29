//! One host: `bko-install up` with real `buildkitd` processes, as root and as
//! an ordinary user, in namespaces of their own.

#![expect(clippy::disallowed_methods, reason = "tests read clocks, files and the environment")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]

#[path = "../cluster"]
mod shared {
    pub(crate) mod harness;
}

mod builds;
mod cgroups;
mod clock;
mod faults;
mod fetch;
mod host;
mod identities;
#[path = "../vectors/issuer.rs"]
mod issuer;
mod killed;
mod lifecycle;
mod mounts;
mod storage;
mod terminal;
mod unit;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use shared::harness;

use harness::Test;
use harness::tools::Tools;

/// A machine with BuildKit and nothing else.
pub(crate) struct Machine {
    pub(crate) tools: Arc<Tools>,
}

impl harness::Tier for Machine {
    const NAME: &'static str = "local";
    const PROGRAMS: &'static [&'static str] = &[
        "docker-registry",
        "buildkitd",
        "buildctl",
        "buildx",
        "rootlesskit",
        "runc",
        "newuidmap",
        "busybox",
        "setpriv",
        "cc",
    ];

    async fn start(tools: Arc<Tools>) -> anyhow::Result<Self> {
        host::furnish(&tools)?;
        Ok(Self { tools })
    }
}

fn tests() -> Vec<Test<Machine>> {
    vec![
        test!(builds::a_stock_client_builds_without_dns_and_the_second_time_from_the_cache),
        test!(builds::an_ordinary_user_runs_a_farm),
        test!(builds::names_below_a_domain_lead_there_too),
        test!(builds::untrusted_builds_are_refused_unless_they_are_allowed),
        test!(lifecycle::two_first_routes_start_one_daemon),
        test!(lifecycle::an_idle_daemon_goes_to_zero_and_a_dial_wakes_it),
        test!(lifecycle::a_build_that_nobody_registered_keeps_its_daemon),
        test!(lifecycle::ctrl_c_lets_builds_end_first),
        test!(lifecycle::the_least_recently_used_cache_makes_room),
        test!(lifecycle::cut_builds_end_at_once_and_stay_away),
        test!(lifecycle::an_entry_that_nobody_uses_does_not_hold_the_end),
        test!(lifecycle::what_is_removed_is_removed_whoever_routes_meanwhile),
        test!(lifecycle::stop_logs_rm_and_prune_do_what_they_say),
        test!(killed::whoever_is_killed_nothing_is_lost).serial().limit(Duration::from_secs(900)),
        test!(killed::a_daemon_that_no_project_knows_of_is_ended),
        test!(killed::a_daemon_that_dies_is_started_again),
        test!(faults::the_second_on_a_folder_is_told_who_has_it),
        test!(faults::flags_that_cannot_work_are_refused_at_once),
        test!(faults::a_given_token_is_handed_to_clients_on_the_host),
        test!(faults::a_taken_port_is_named_with_its_flag),
        test!(faults::a_daemon_that_cannot_start_is_told_with_its_last_word),
        test!(faults::a_state_folder_is_its_owners_alone),
        test!(faults::the_routing_api_without_tls_is_for_this_host),
        test!(faults::a_damaged_state_is_told_and_caches_are_found_again),
        test!(faults::a_full_disk_refuses_routes_and_loses_nothing),
        test!(faults::a_clock_that_was_put_back_is_told_and_keeps_no_daemon),
        test!(clock::a_clock_that_jumps_under_a_running_farm_cuts_nothing_and_loses_nothing),
        test!(identities::a_job_builds_with_its_identity_and_nothing_else),
        test!(cgroups::each_daemon_has_its_own_and_ends_with_all_that_is_in_it),
        test!(cgroups::v2_alone_will_do),
        test!(cgroups::an_ordinary_user_has_some_where_it_may_make_them),
        test!(mounts::what_a_killed_daemon_left_is_in_nobodys_way).limit(Duration::from_secs(240)),
        test!(mounts::a_cache_that_cannot_be_removed_keeps_nothing_down),
        test!(terminal::up_draws_on_a_terminal_and_tells_elsewhere),
        test!(unit::systemd_finds_nothing_wrong_with_the_units),
        test!(unit::nothing_in_the_units_reaches_the_steps_of_builds),
        test!(fetch::buildkit_comes_out_of_its_image_however_often_the_registry_cuts).limit(Duration::from_secs(240)),
        test!(storage::every_file_system_keeps_and_copies_caches).serial(),
    ]
}

fn main() -> ExitCode {
    harness::run(tests())
}
