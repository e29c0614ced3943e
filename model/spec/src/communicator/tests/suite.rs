//! The conformance suite of communicators.

use std::sync::atomic::{AtomicUsize, Ordering};

use baton_model_testing::noise;

use crate::communicator::{Communicator, CommunicatorError};

/// Runs all tests. `group(num_ranks)` makes the ends.
pub(super) fn run<C: Communicator>(group: impl Fn(usize) -> Vec<C>) {
    for num_ranks in 1..=5 {
        sums_are_in_the_order_of_ranks(group(num_ranks));
        parts_are_gathered_in_the_order_of_ranks(group(num_ranks));
        writes_before_a_barrier_are_seen_after_it(group(num_ranks));
    }
    for _ in 0..500 {
        a_rank_that_leaves_after_an_operation_fails_no_other(group(3));
    }
    for num_ranks in 2..=4 {
        for lost in 0..num_ranks {
            a_lost_rank_fails_the_others(group(num_ranks), lost, false);
            a_lost_rank_fails_the_others(group(num_ranks), lost, true);
            a_different_operation_fails_all_ranks(group(num_ranks), lost);
        }
    }
}

/// Runs `rank` for each end on its own thread and returns the results.
fn on_threads<C: Communicator, T: Send>(ends: Vec<C>, rank: impl Fn(C) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(|| rank(end))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank that does not panic")).collect()
    })
}

fn numbers(rank_idx: usize, round: usize, len: usize) -> Vec<f32> {
    noise((rank_idx * 1000 + round) as u64, len).iter().map(|x| x * 10f32.powi(rank_idx as i32)).collect()
}

fn sums_are_in_the_order_of_ranks<C: Communicator>(ends: Vec<C>) {
    const LENS: [usize; 8] = [0, 1, 15, 16, 17, 255, 1000, 5000];
    let num_ranks = ends.len();
    on_threads(ends, |mut end| {
        let idx = end.rank().idx;
        for round in 0..200 {
            let len = LENS[round % LENS.len()];
            let mut buffer = numbers(idx, round, len);
            end.all_reduce_sum(&mut buffer).unwrap();
            let mut expected = numbers(0, round, len);
            for other in 1..num_ranks {
                expected.iter_mut().zip(numbers(other, round, len)).for_each(|(sum, x)| *sum += x);
            }
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&buffer), bits(&expected), "rank {idx} of {num_ranks}, {len} numbers");
        }
    });
}

fn parts_are_gathered_in_the_order_of_ranks<C: Communicator>(ends: Vec<C>) {
    on_threads(ends, |mut end| {
        let rank = end.rank();
        for (round, len) in [0, 1, 17, 300].into_iter().enumerate() {
            let mut all = vec![f32::NAN; rank.num_ranks * len];
            let room = rank.is_first().then_some(&mut *all);
            end.gather(&numbers(rank.idx, round, len), room).unwrap();
            if rank.is_first() {
                let parts = (0..rank.num_ranks).flat_map(|idx| numbers(idx, round, len));
                assert_eq!(all, parts.collect::<Vec<_>>());
            }
        }
    });
}

fn writes_before_a_barrier_are_seen_after_it<C: Communicator>(ends: Vec<C>) {
    let num_ranks = ends.len();
    let num_written = AtomicUsize::new(0);
    on_threads(ends, |mut end| {
        for round in 1..=200 {
            num_written.fetch_add(1, Ordering::Relaxed);
            end.barrier().unwrap();
            assert_eq!(num_written.load(Ordering::Relaxed), round * num_ranks);
            end.barrier().unwrap();
        }
    });
}

/// A rank may leave as soon as its last call returns: the others complete that operation, too.
fn a_rank_that_leaves_after_an_operation_fails_no_other<C: Communicator>(ends: Vec<C>) {
    on_threads(ends, |mut end| end.barrier().unwrap());
}

/// After some rounds one rank is dropped. The waiting ranks get an error, and so does each later call.
fn a_lost_rank_fails_the_others<C: Communicator>(ends: Vec<C>, lost: usize, panics: bool) {
    let num_waiting = AtomicUsize::new(0);
    let num_others = ends.len() - 1;
    let outcomes = on_threads(ends, |mut end| {
        let idx = end.rank().idx;
        for _ in 0..3 {
            end.all_reduce_sum(&mut [1.0; 40]).unwrap();
        }
        if idx == lost {
            // The others usually sleep by now.
            while num_waiting.load(Ordering::Relaxed) < num_others {
                std::thread::yield_now();
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
            if panics {
                let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                    let _dropped = end;
                    panic!("on purpose");
                }));
                assert!(panicked.is_err());
            }
            return vec![];
        }
        num_waiting.fetch_add(1, Ordering::Relaxed);
        let mut buffer = [1.0; 40];
        vec![end.all_reduce_sum(&mut buffer), end.barrier(), end.all_reduce_sum(&mut buffer), end.barrier()]
    });
    for (idx, outcomes) in outcomes.into_iter().enumerate() {
        assert_eq!(outcomes.is_empty(), idx == lost);
        // A rank that ended for that reason may be the one that another reports as lost.
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Err(CommunicatorError::Lost { .. }))));
        if let Some(first) = outcomes.first() {
            assert_eq!(*first, Err(CommunicatorError::Lost { rank: lost }));
        }
    }
}

fn a_different_operation_fails_all_ranks<C: Communicator>(ends: Vec<C>, other: usize) {
    let outcomes = on_threads(ends, |mut end| {
        let outcome = match end.rank().idx == other {
            true if other.is_multiple_of(2) => end.all_reduce_sum(&mut [1.0; 41]),
            true => end.barrier(),
            false => end.all_reduce_sum(&mut [1.0; 40]),
        };
        // Every rank keeps its end until all have their error.
        (outcome, end)
    });
    for (outcome, _) in outcomes {
        assert!(matches!(outcome, Err(CommunicatorError::Differs { .. })), "{outcome:?}");
    }
}
