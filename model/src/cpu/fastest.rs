//! Which kernel is faster, where that depends on the processor.

use std::time::{Duration, Instant};

use super::products::{Output, PanelFormat, PanelsRef, has_pairs, multiply};
use super::simd::{Dtype, Isa};
use super::{Aligned, Cpu};

/// Whether this processor has an instruction for pairs of bf16.
pub(crate) fn multiplies_bf16() -> bool {
    has_pairs(Isa::detect())
}

/// Whether that instruction is worth using. It does twice the work of one for f32, and takes as long on some processors
/// and four times as long on others.
pub(crate) fn bf16_is_faster() -> bool {
    if !multiplies_bf16() {
        return false;
    }
    let mut times = [Duration::MAX; 2];
    // In turns, and the best of several, so that somebody else's moment on this processor decides nothing.
    for _ in 0..8 {
        for (best, format) in times.iter_mut().zip([PanelFormat::Floats(Dtype::Bf16), PanelFormat::Bf16Pairs])
        {
            *best = (*best).min(time(format));
        }
    }
    let [f32, bf16] = times;
    tracing::debug!(?f32, ?bf16, "a product measured with activations in f32 and in bf16");
    bf16 < f32
}

/// Time of a product that stays in the nearest cache.
fn time(format: PanelFormat) -> Duration {
    const ROWS: usize = 14;
    const COLS: usize = 256;
    let mut cpu = Cpu::new(Isa::detect(), 1).expect("one thread is this one");
    let a = vec![1.0; ROWS * COLS];
    let mut w = Aligned::default();
    let num_bytes = format.matrix_bytes(32, COLS);
    w.grown(num_bytes / 4).fill(1.0);
    // SAFETY: any bytes of f32 are bytes.
    let bytes = unsafe { std::slice::from_raw_parts(w.as_ptr().cast::<u8>(), num_bytes) };
    let weights = PanelsRef::new(bytes, format, 32, COLS);
    let mut out = vec![0.0; ROWS * 32];
    let mut run = || multiply(&mut cpu, ROWS, &a, weights, None, &mut out, Output::Store);
    run();
    let start = Instant::now();
    for _ in 0..16 {
        run();
    }
    start.elapsed()
}
