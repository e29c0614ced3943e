//! What the processor could do at best: the ceilings that kernels are measured against.

use baton_cpu_kernels::{CHAINS, Cpu, Isa, LANES, anonymous, fma_loop, integers_loop, pairs_loop, read_loop};
use memmap2::MmapMut;

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
        let isa = self.cpu.isa();
        let num_threads = self.cpu.pool().num_threads();
        self.cpu.pool().for_each(num_threads * LOOPS, |_, _| {
            // SAFETY: no pointers; pairs are only asked for where there are some.
            let sum = unsafe {
                match peak {
                    Peak::F32 => fma_loop(isa, ROUNDS),
                    Peak::Bf16Pairs => pairs_loop(ROUNDS),
                    Peak::Int8 => integers_loop(isa, ROUNDS),
                }
            };
            std::hint::black_box(sum);
        });
    }

    /// Reads its bytes once, divided among the threads.
    pub fn read(&mut self) {
        const PIECE: usize = 1 << 20;
        let Peaks { cpu, memory } = self;
        let isa = cpu.isa();
        let pieces: &[u8] = memory;
        cpu.pool().for_each(pieces.len().div_ceil(PIECE), |_, idx| {
            let piece = &pieces[idx * PIECE..pieces.len().min((idx + 1) * PIECE)];
            // SAFETY: any bytes are numbers of some kind.
            std::hint::black_box(unsafe { read_loop(isa, piece.as_ptr().cast(), piece.len() / 4) });
        });
    }
}

/// Bytes in large pages, as packed weights have them. Not zeroes, which the system might keep in one page that stands for
/// all.
pub(super) fn memory(num_bytes: usize) -> MmapMut {
    let mut map = anonymous(num_bytes);
    map.fill(1);
    map
}
