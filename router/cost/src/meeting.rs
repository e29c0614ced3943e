//! Bringing in KV beside computing it.

/// What takes more than this part of the time to compute it is not waited for: it is brought in from its end while it is computed from
/// its beginning. For what is faster that would save less than a quarter of the time, and cost computing.
pub const WORTH_WAITING: f64 = 0.3;

/// Fewer tokens are not brought in beside computing: behind them a prompt needs a step of its own.
pub const MIN_BROUGHT: usize = 128;

/// Of the time until blocks are computed, bringing in the others may take this part: what is late is in vain.
const MARGIN: f64 = 0.9;

/// Blocks at the end of `num_blocks` that are brought in, in the time in which those before them are computed. `bring` says how many
/// seconds so many blocks at the end take, `compute` how many the first so many take. So both meet in the middle (Jin et al., "Compute
/// Or Load KV Cache? Why Not Both?", ICML 2025), and both together take less time than either.
pub fn meeting(num_blocks: usize, bring: impl Fn(usize) -> f64, compute: impl Fn(usize) -> f64) -> usize {
    let is_in_time = |num: usize| bring(num) <= MARGIN * compute(num_blocks - num);
    // More blocks take longer, and less time is left for them.
    let (mut some, mut too_many) = (0, num_blocks + 1);
    while some + 1 < too_many {
        let middle = some.midpoint(too_many);
        if is_in_time(middle) { some = middle } else { too_many = middle }
    }
    some
}

/// [Blocks](meeting) of `block_size` tokens that are brought in while those before them are computed. `None`: bringing in all of them is so
/// fast that they are waited for. 0: it is not worth it.
pub fn worth_bringing(
    num_blocks: usize,
    block_size: usize,
    bring: impl Fn(usize) -> f64,
    compute: impl Fn(usize) -> f64,
) -> Option<usize> {
    if num_blocks == 0 || bring(num_blocks) <= WORTH_WAITING * compute(num_blocks) {
        return None;
    }
    let num_brought = meeting(num_blocks, bring, compute);
    Some(if num_brought * block_size < MIN_BROUGHT { 0 } else { num_brought })
}

/// The share of KV that [meets](meeting) computing, if all of it takes `bring` or `compute` seconds, each in proportion. 1: it is waited
/// for.
pub fn share_brought(bring: f64, compute: f64) -> f64 {
    if bring <= WORTH_WAITING * compute { 1.0 } else { MARGIN * compute / (bring + MARGIN * compute) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_meet_where_they_take_as_long() {
        let of = |latency: f64, bring: f64| {
            meeting(100, |num| latency + num as f64 * bring, |num| num as f64 * 0.1)
        };
        // As fast as computing: nearly half. A third as fast, twice as fast.
        assert_eq!((of(0.0, 0.1), of(0.0, 0.3), of(0.0, 0.05)), (47, 23, 64));
        // What takes no time is all brought in; what never comes is not.
        assert_eq!((of(0.0, 0.0), of(0.0, f64::INFINITY)), (100, 0));
        // The latency may be too long.
        assert_eq!((of(2.0, 0.1), of(20.0, 0.1)), (36, 0));
        assert_eq!(meeting(0, |_| 0.0, |_| 0.0), 0);
    }

    #[test]
    fn what_is_fast_is_waited_for_and_what_is_too_slow_left() {
        let of = |bring: f64| worth_bringing(100, 16, |num| num as f64 * bring, |num| num as f64 * 0.1);
        assert_eq!([0.03, 0.031, 0.1, 2.0].map(of), [None, Some(74), Some(47), Some(0)]);
        assert_eq!(worth_bringing(0, 16, |_| 1.0, |_| 0.0), None);
    }

    #[test]
    fn the_share_is_that_of_the_blocks_and_no_bound_is_passed() {
        for bring in [0.4, 1.0, 3.0, 100.0] {
            let num = meeting(1000, |num| num as f64 * bring, |num| num as f64);
            assert!((share_brought(bring, 1.0) - num as f64 / 1000.0).abs() < 2e-3, "{bring}");
        }
        assert_eq!((share_brought(0.3, 1.0), share_brought(0.0, 0.0)), (1.0, 1.0));
        assert_eq!(share_brought(f64::INFINITY, 1.0), 0.0);
    }
}
