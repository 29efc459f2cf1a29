//! A real API server, without a node: what can be shown when pods are played.

#![expect(clippy::disallowed_methods, reason = "tests read clocks, files and the environment")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr, reason = "tests")]

mod conformance;
mod farm;
mod harness;
mod harness_checks;
mod honesty;
mod identities;
mod installer;
mod lifecycle;
mod projects;
mod routes;
mod truth;
mod view;
mod wake;
mod wire;

#[path = "../simulation/model.rs"]
#[allow(dead_code, reason = "watches are the simulation's")]
mod model;

/// Where the benchmark, which shares some of these files, has the harness.
mod shared {
    pub(crate) use crate::harness;
}

#[path = "../vectors/differences.rs"]
mod differences;

#[path = "../vectors/issuer.rs"]
mod issuer;

#[path = "../vectors/replay.rs"]
mod replay;

use std::process::ExitCode;
use std::time::Duration;

use harness::{Cluster, Test};

fn tests() -> Vec<Test<Cluster>> {
    vec![
        test!(harness_checks::api_answers),
        test!(harness_checks::played_pod_becomes_an_endpoint),
        test!(harness_checks::play_waits_for_its_switch_and_delay),
        test!(harness_checks::audit_counts_writes_by_user_agent),
        test!(harness_checks::claim_binds_to_a_volume),
        test!(harness_checks::api_server_comes_back_after_a_crash).serial(),
        test!(installer::init_installs_on_an_empty_cluster_and_then_writes_nothing),
        test!(installer::what_was_asked_for_once_is_carried_over_and_status_tells_it).serial(),
        test!(installer::an_upgrade_writes_what_changes_and_events_are_lines_of_json),
        test!(installer::an_installer_that_left_its_lease_behind_is_waited_for),
        test!(installer::what_changed_before_the_lock_ends_the_run_before_its_intent),
        test!(installer::credentials_are_what_is_installed_and_a_rotation_keeps_the_old_token),
        test!(installer::who_may_only_read_the_secrets_names_the_rest),
        test!(installer::an_export_applied_in_order_gives_what_init_gives),
        test!(installer::kustomize_applies_what_init_would),
        test!(installer::flux_and_argo_cd_take_what_is_exported).serial(),
        test!(installer::a_certificate_is_renewed_when_asked_for_and_only_that),
        test!(installer::an_authority_is_replaced_stage_by_stage),
        test!(installer::daemons_that_do_not_know_the_new_authority_stop_a_rotation),
        test!(installer::a_rotation_is_completed_after_a_kill),
        test!(installer::the_server_renews_what_is_about_to_end),
        test!(installer::secrets_that_others_make_are_asked_for_with_the_command),
        test!(installer::cert_manager_is_waited_for).serial(),
        test!(installer::runs_draw_on_a_terminal_and_leave_their_last_state).serial(),
        test!(installer::a_load_balancer_that_never_comes_is_a_warning),
        test!(installer::another_manager_is_named_and_overruled_only_by_force),
        test!(installer::a_lacking_permission_is_named_before_the_first_write),
        test!(installer::an_installer_at_work_is_named_to_the_other),
        test!(installer::an_image_that_is_missing_ends_the_run_at_once),
        test!(installer::what_is_not_ready_in_time_is_exit_code_4),
        test!(installer::a_quota_that_is_used_up_is_the_reason_told),
        test!(installer::what_somebody_changed_is_planned_back),
        test!(installer::a_cluster_is_checked_and_then_what_is_installed_too),
        test!(installer::the_printed_roles_suffice_and_each_of_their_rules_is_needed).limit(Duration::from_secs(240)),
        test!(installer::the_printed_roles_suffice_to_prune_to_go_back_and_to_uninstall)
            .limit(Duration::from_secs(240)),
        test!(installer::a_release_is_taken_over_with_the_roles_printed_for_that).serial(),
        test!(installer::an_authority_is_replaced_with_the_roles_printed_for_that),
        test!(installer::without_a_default_class_nothing_is_written).serial(),
        test!(installer::every_profile_is_taken_by_the_api_server),
        test!(installer::the_gitops_profile_is_taken_by_the_api_server).serial(),
        test!(installer::a_namespace_that_takes_no_daemon_is_named),
        test!(installer::a_policy_that_breaks_daemons_is_named_with_its_field),
        test!(installer::killed_after_the_intent),
        test!(installer::killed_in_the_middle_of_a_level),
        test!(installer::killed_between_two_levels),
        test!(installer::killed_before_the_outcome),
        test!(installer::interrupted_it_stops_cleanly_and_goes_on_later),
        test!(installer::a_restart_of_the_api_server_is_survived).serial(),
        test!(installer::killed_at_random_requests_it_converges).serial().limit(Duration::from_secs(3600)),
        test!(installer::a_throttling_api_server_is_waited_for),
        test!(installer::a_webhook_that_does_not_serve_yet_is_waited_for),
        test!(installer::a_lease_of_another_clock_is_judged_by_ours),
        test!(installer::any_text_reaches_its_object_unchanged),
        test!(installer::a_claim_that_waits_for_its_pod_is_deferred),
        test!(installer::an_autoscaler_keeps_its_replicas),
        test!(installer::what_is_called_settled_the_api_server_would_not_change).limit(Duration::from_secs(240)),
        test!(installer::an_edited_field_is_told_with_both_values),
        test!(installer::what_kubectl_had_applied_goes_when_it_is_not_wanted),
        test!(installer::a_port_that_is_renumbered_keeps_its_name),
        test!(installer::a_gitops_tools_object_is_refused_and_its_owner_named),
        test!(installer::a_placeholder_ca_bundle_is_never_sent),
        test!(installer::a_job_that_its_time_to_live_has_removed_is_not_run_again),
        test!(installer::what_is_immutable_is_made_anew_only_where_that_is_allowed),
        test!(installer::a_stateful_set_with_caches_is_never_made_anew),
        test!(installer::a_broken_stateful_set_is_mended_and_its_stuck_pod_named),
        test!(installer::a_definition_may_come_with_the_second_version),
        test!(installer::a_stored_version_is_left_only_when_nothing_is_lost),
        test!(installer::what_is_no_longer_wanted_is_deleted_when_all_is_ready),
        test!(installer::a_namespace_with_foreign_objects_is_not_pruned),
        test!(installer::a_delete_that_admission_denies_stays_recorded),
        test!(installer::an_api_service_that_is_down_is_named_and_does_not_stop_a_run).serial(),
        test!(installer::a_record_beyond_one_mebibyte_is_kept_in_parts_and_rolled_back),
        test!(installer::a_farm_is_rolled_back_with_its_keys_and_history_tells_it),
        test!(installer::uninstalled_caches_stay_until_they_are_asked_for).serial(),
        test!(installer::running_builds_and_finalizers_are_told_before_anything_is_removed).serial(),
        test!(installer::a_helm_installation_is_adopted_with_its_daemons_and_caches).serial(),
        test!(installer::the_controller_of_another_release_ends_when_ours_is_ready).serial(),
        test!(routes::a_cold_route_is_answered_within_250_ms_of_ready),
        test!(routes::concurrent_routes_share_their_writes),
        test!(routes::no_answered_route_is_lost_with_its_server),
        test!(routes::a_release_right_after_its_route_finds_its_entry),
        test!(routes::a_new_project_begins_with_what_the_first_rule_says),
        test!(routes::an_idle_daemon_goes_to_zero_and_comes_back),
        test!(routes::a_route_during_a_scale_down_gets_the_next_daemon),
        test!(routes::forks_are_apart_and_reaped_with_their_cache).limit(Duration::from_secs(150)),
        test!(routes::a_steady_farm_causes_no_writes),
        test!(routes::a_follower_takes_over),
        test!(routes::the_controller_owns_what_it_makes),
        test!(routes::an_outage_of_the_api_server_is_waited_out_or_said).serial(),
        test!(honesty::the_model_answers_as_the_api_server_does).limit(Duration::from_secs(600)),
        test!(projects::an_architecture_without_a_companion_is_refused),
        test!(projects::a_cache_stays_where_its_daemon_was_made),
        test!(projects::what_cannot_take_effect_is_refused_with_its_reason),
        test!(projects::daemons_of_every_profile_are_accepted),
        test!(lifecycle::an_eviction_is_refused_during_a_build_and_granted_after),
        test!(lifecycle::builds_in_a_row_share_one_budget),
        test!(lifecycle::a_quota_fails_the_route_with_its_reason).limit(Duration::from_secs(150)),
        test!(lifecycle::a_claim_that_cannot_be_bound_fails_the_route),
        test!(lifecycle::a_pod_that_no_node_takes_fails_the_route_unless_a_node_is_coming),
        test!(lifecycle::a_volume_that_another_node_holds_fails_the_route_until_it_is_free),
        test!(lifecycle::an_image_that_is_missing_fails_the_route_and_a_slow_registry_does_not),
        test!(lifecycle::a_changed_template_waits_for_the_builds_in_flight),
        test!(lifecycle::a_broken_daemon_on_an_old_template_is_rolled_at_once),
        test!(lifecycle::the_steps_of_a_daemons_life_are_told_once),
        test!(lifecycle::an_oom_kill_is_told_and_no_wedge),
        test!(truth::a_build_that_nobody_registered_keeps_its_daemon).limit(Duration::from_secs(90)),
        test!(truth::who_does_not_answer_keeps_the_daemon).limit(Duration::from_secs(120)),
        test!(truth::a_route_ends_the_asking_at_once),
        test!(truth::nobody_is_let_in_while_the_gate_is_closed),
        test!(truth::an_entry_that_nobody_uses_expires_early),
        test!(wake::a_dial_wakes_what_was_routed_lately),
        test!(wake::a_dial_ends_a_scale_down_at_once),
        test!(identities::two_pull_requests_of_one_repository_get_two_daemons).limit(Duration::from_secs(150)),
        test!(identities::keys_are_fetched_through_the_proxy_but_for_what_is_excepted),
        test!(identities::a_job_ends_its_own_builds_on_every_replica),
        test!(identities::a_rotated_token_is_accepted_without_a_restart),
        test!(view::a_project_tells_what_its_daemon_does_until_it_is_at_zero),
        test!(view::what_builds_told_is_written_once_each),
        test!(view::a_companion_that_does_not_answer_is_no_reason_to_wait),
        test!(conformance::an_open_api_is_as_documented).limit(Duration::from_secs(900)),
        test!(conformance::an_api_with_a_token_is_as_documented).limit(Duration::from_secs(900)),
        test!(wire::every_recorded_exchange_comes_out_the_same).limit(Duration::from_secs(180)),
    ]
}

fn main() -> ExitCode {
    harness::run(tests())
}
