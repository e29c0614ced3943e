//! Loops of a single operation, for measuring the CPU's peak rates.

use baton_cpu_simd::{CHAINS, LANES, Simd, kernel};

kernel! {
    /// A loop of f32 multiply-adds.
    ///
    /// # Safety
    /// The instruction set must be present.
    pub fn fma_loop / fmas (rounds: usize) -> f32
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn fmas<S: Simd>(rounds: usize) -> f32 {
    // SAFETY: no pointers.
    unsafe {
        let mut sums = [S::splat(0.0); CHAINS];
        let x = S::splat(std::hint::black_box(0.5));
        // Sums that fit into registers: else the loop would measure stores and loads of them.
        let num_sums = S::PANEL_ROWS.min(CHAINS);
        for _ in 0..rounds {
            for i in 0..CHAINS {
                sums[i % num_sums] = S::fma(x, x, sums[i % num_sums]);
            }
        }
        let mut all = sums[0];
        for i in 1..CHAINS {
            all = S::add(all, sums[i]);
        }
        S::sum(all)
    }
}

kernel! {
    /// A loop of reads of four streams, which a core reads faster than one, that prefetches `ahead` bytes before it reads them.
    ///
    /// # Safety
    /// `from` is valid for `len` numbers, and the instruction set is present.
    pub fn read_loop / reads (from: *const f32, len: usize, ahead: usize) -> f32
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn reads<S: Simd>(from: *const f32, len: usize, ahead: usize) -> f32 {
    // SAFETY: vectors stay below `len`.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        let stream = len / 4 / LANES * LANES;
        let mut i = 0;
        while i < stream {
            for j in 0..4 {
                let at = from.add(j * stream + i);
                S::prefetch(at.cast::<u8>().wrapping_add(ahead));
                sums[j] = S::add(sums[j], S::load(at));
            }
            i += LANES;
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}
