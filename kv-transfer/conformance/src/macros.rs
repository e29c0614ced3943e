//! The suite as one test for each function.

/// A module of tests: one for each function of the suite. `$transport` is an `Option<TestTransport>`, `None` where it
/// cannot be tested; `$setup` says where the pools are. Both are given by paths from the crate's root.
#[macro_export]
macro_rules! conformance {
    ($module:ident, $setup:ident, $transport:expr) => {
        mod $module {
            $crate::conformance!(@tests $setup, $transport, transfer: [
                pushed_pieces_arrive_verify_and_are_counted,
                a_flipped_bit_is_found,
                a_late_write_lands_nowhere,
                an_unknown_generation_writes_nothing,
                a_restarted_pool_is_told_from_the_old_one,
                a_pool_of_another_layout_is_refused,
                pieces_outside_of_the_pools_are_refused,
                a_closed_route_gives_its_guard_back,
                a_dropped_grant_is_revoked,
                a_lost_peer_gives_everything_back,
                a_thousand_grants_with_random_cancels_return_every_block,
            ]);
            $crate::conformance!(@tests $setup, $transport, sides: [
                kv_arrives_as_the_receiver_would_have_written_it,
                converted_pieces_are_verified_and_fenced_as_others_are,
                sources_that_do_not_fit_are_refused,
                kv_that_cannot_go_there_finds_no_route,
            ]);
            $crate::conformance!(@tests $setup, $transport, measure: [
                a_way_is_measured_and_everything_comes_back,
                sides_that_differ_are_measured_with_the_conversion,
            ]);
        }
    };
    (@tests $setup:ident, $transport:expr, $suite:ident: [$($name:ident,)*]) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            let _setup = $crate::Setup::$setup.enter();
            if let Some(transport) = $transport {
                $crate::$suite::$name(transport).await;
            }
        })*
    };
}
