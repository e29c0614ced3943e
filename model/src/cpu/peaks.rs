//! What the processor could do at best: the ceilings that kernels are measured against.

use super::simd::{Isa, LANES, Simd, kernel};
use memmap2::MmapMut;

use super::Cpu;
use super::benchmark::memory;

/// A loop of independent multiplications, or of reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peak {
    /// f32 multiply-adds.
    F32,
    /// Pairs of bf16, where the processor has them.
    Bf16Pairs,
    /// Eight-bit integers.
    Int8,
}

/// Sums that are enough to hide the latency of an instruction.
pub(super) const CHAINS: usize = 16;
/// Rounds of a loop, and loops of each thread: short ones, so that whichever thread is free takes the next.
const ROUNDS: usize = 2000;
const LOOPS: usize = 40;

impl Peak {
    /// Operations of one call of [`Peaks::run`], a multiplication and an addition each.
    pub fn operations(self, threads: usize) -> usize {
        let per_lane = match self {
            Peak::F32 => 2,
            Peak::Bf16Pairs => 4,
            Peak::Int8 => 8,
        };
        threads * LOOPS * ROUNDS * CHAINS * LANES * per_lane
    }
}

/// Runs the loops.
pub struct Peaks {
    cpu: Cpu,
    memory: MmapMut,
}

impl Peaks {
    /// On `threads` threads, with `num_bytes` to read.
    pub fn new(threads: usize, num_bytes: usize) -> Peaks {
        Peaks { cpu: Cpu::new(Isa::detect(), threads).expect("threads start"), memory: memory(num_bytes) }
    }

    /// Runs as many loops on every thread.
    pub fn run(&mut self, peak: Peak) {
        let isa = self.cpu.isa;
        let num_threads = self.cpu.pool.num_threads();
        self.cpu.pool.for_each(num_threads * LOOPS, |_, _| {
            // SAFETY: no pointers; pairs are only asked for where there are some.
            let sum = unsafe {
                match peak {
                    Peak::F32 => fma_loop(isa, ROUNDS),
                    Peak::Bf16Pairs => super::products::pairs_loop(ROUNDS),
                    Peak::Int8 => super::products::integers_loop(isa, ROUNDS),
                }
            };
            std::hint::black_box(sum);
        });
    }

    /// Reads its bytes once, divided among the threads.
    pub fn read(&mut self) {
        const PIECE: usize = 1 << 20;
        let Peaks { cpu, memory } = self;
        let isa = cpu.isa;
        let pieces: &[u8] = memory;
        cpu.pool.for_each(pieces.len().div_ceil(PIECE), |_, idx| {
            let piece = &pieces[idx * PIECE..pieces.len().min((idx + 1) * PIECE)];
            // SAFETY: any bytes are numbers of some kind.
            std::hint::black_box(unsafe { read_loop(isa, piece.as_ptr().cast(), piece.len() / 4) });
        });
    }
}

kernel! {
    /// # Safety
    /// None beyond the instruction set.
    pub(super) fn fma_loop / fmas (rounds: usize) -> f32
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn fmas<S: Simd>(rounds: usize) -> f32 {
    // SAFETY: no pointers.
    unsafe {
        let mut sums = [S::splat(0.0); CHAINS];
        let x = S::splat(std::hint::black_box(0.5));
        for _ in 0..rounds {
            for i in 0..CHAINS {
                sums[i] = S::fma(x, x, sums[i]);
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
    /// # Safety
    /// `from` is valid for `len` numbers.
    fn read_loop / reads (from: *const f32, len: usize) -> f32
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn reads<S: Simd>(from: *const f32, len: usize) -> f32 {
    // SAFETY: vectors stay below `len`.
    unsafe {
        let mut sums = [S::splat(0.0); 4];
        let mut i = 0;
        while i + 4 * LANES <= len {
            for j in 0..4 {
                S::prefetch(from.wrapping_add(i + j * LANES + 1024).cast());
                sums[j] = S::add(sums[j], S::load(from.add(i + j * LANES)));
            }
            i += 4 * LANES;
        }
        S::sum(S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])))
    }
}
