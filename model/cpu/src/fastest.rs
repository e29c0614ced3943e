//! Measures which kernel is faster where that depends on the CPU.

use std::hint::black_box;
use std::time::{Duration, Instant};

use baton_cpu_kernels::{Isa, fma_loop, has_pairs, pairs_loop};

/// Iterations of a loop: about ten microseconds.
const ROUNDS: usize = 2000;

/// Whether there is an instruction for pairs of bf16 that is worth using. It does twice the work of an f32 multiply-add;
/// on some CPUs it takes as long, on others four times as long.
///
/// The measurement compares loops of the instructions alone. A product that is small enough to measure at every start
/// spends most time on other things, and measuring one gave a random answer.
pub(crate) fn bf16_is_faster(isa: Isa) -> bool {
    if !has_pairs(isa) {
        return false;
    }
    if isa.has_tiles() {
        return true;
    }
    let [mut f32, mut bf16] = [Duration::MAX; 2];
    // Measured alternately, taking the best of several, so that other load on this CPU does not decide.
    for _ in 0..8 {
        // SAFETY: the instruction set was detected, or `load_on` has checked it; `has_pairs` has checked pairs.
        f32 = f32.min(time(|| unsafe { fma_loop(isa, ROUNDS) }));
        // SAFETY: as above.
        bf16 = bf16.min(time(|| unsafe { pairs_loop(ROUNDS) }));
    }
    tracing::debug!(?f32, ?bf16, "measured the time of products in f32 and of twice as many in bf16");
    bf16 < 2 * f32
}

fn time(work: impl Fn() -> f32) -> Duration {
    let start = Instant::now();
    black_box(work());
    start.elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_start_measures_the_same_winner() {
        let measured = || bf16_is_faster(Isa::detect());
        let first = measured();
        assert!((0..20).all(|_| measured() == first), "measured as {first} and as {}", !first);
    }
}
