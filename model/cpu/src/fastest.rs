//! Which kernel is faster, where that depends on the processor.

use std::hint::black_box;
use std::time::{Duration, Instant};

use baton_cpu_kernels::{Isa, fma_loop, has_pairs, pairs_loop};

/// Rounds of a loop: some ten microseconds.
const ROUNDS: usize = 2000;

/// Whether this processor has an instruction for pairs of bf16.
pub(crate) fn multiplies_bf16() -> bool {
    has_pairs(Isa::detect())
}

/// Whether that instruction is worth using. It does twice the work of one for f32, and takes as long on some processors
/// and four times as long on others.
///
/// Loops of nothing but the instructions are compared: a product that is small enough to be measured at every start spends
/// its time on other things, which decided as often as not.
pub(crate) fn bf16_is_faster() -> bool {
    if !multiplies_bf16() {
        return false;
    }
    let isa = Isa::detect();
    let [mut f32, mut bf16] = [Duration::MAX; 2];
    // In turns, and the best of several, so that somebody else's moment on this processor decides nothing.
    for _ in 0..8 {
        // SAFETY: the processor has the instructions.
        f32 = f32.min(time(|| unsafe { fma_loop(isa, ROUNDS) }));
        // SAFETY: as above.
        bf16 = bf16.min(time(|| unsafe { pairs_loop(ROUNDS) }));
    }
    tracing::debug!(?f32, ?bf16, "as many instructions measured for f32 and for pairs of bf16");
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
    fn every_start_chooses_alike() {
        let first = bf16_is_faster();
        assert!((0..20).all(|_| bf16_is_faster() == first), "measured as {first} and as {}", !first);
    }
}
