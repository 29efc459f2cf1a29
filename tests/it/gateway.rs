//! The gateway: its parser over recorded and made-up ClientHellos, and the
//! whole of it over loopback sockets, with real TLS and with raw bytes.
//!
//! What happened to others, and the tests that keep it from happening here:
//!
//! | Row | |
//! |---|---|
//! | G1, G2 | `routing::a_post_quantum_hello_in_two_segments_routes_a_thousand_times`, `hellos::captured` |
//! | G3 | `routing::a_hello_in_segments_of_one_byte_routes`, `sni::every_prefix_of_every_hello_is_incomplete_and_the_whole_has_its_name` |
//! | G4 | `sni::a_decision_never_changes_with_more_bytes`, `wake::a_name_without_a_project_wakes_nobody` |
//! | G5 | `sni::bytes_that_were_not_received_are_not_read` |
//! | G6, G7, G14, G18 | `sni::hellos_route_up_to_the_limit_and_not_one_byte_above`, `sni::so_many_bytes_always_suffice` |
//! | G10, G13 | `sni::records_of_any_size_carry_the_same_name`, `sni::records_of_one_byte_count_up_to_their_limit` |
//! | G11, G28, G29 | `sni::Domains`, beside the code |
//! | G12 | `limits::a_dripping_client_gains_no_time`, `limits::a_silent_client_is_cut_at_the_first_deadline` |
//! | G16, G17 | `relay::hello_and_body_and_end_in_one_write_are_answered_in_full` |
//! | G19, G20 | `relay::a_slow_reader_gets_every_byte_before_the_end` |
//! | G21 | `relay::bulk_never_stalls` |
//! | G22 | `relay::a_silent_surviving_half_is_freed` |
//! | G23, G24 | `limits::a_storm_of_aborted_connections_leaves_nothing_behind` |
//! | G26 | `limits::clients_that_the_kernel_accepted_before_the_shutdown_are_served`, and `gate` on a node |
//! | G27 | `limits::shutdown_lets_a_stream_finish_and_takes_no_new_one`, `limits::the_end_of_the_drain_cuts_what_is_left` |
//! | G30 | `proxy::a_proxy_header_of_anybody_else_is_refused` |
//! | G32 | `sni::any_bytes_are_survived`, `sni::rustls_agrees_on_changed_hellos` |

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a failed step fails the test, and these tests measure time"
)]

mod farm;
mod hellos;
mod limits;
mod proxy;
mod relay;
mod routing;
mod sni;
mod wake;
