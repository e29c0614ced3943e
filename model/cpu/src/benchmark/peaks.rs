//! The CPU's peak rates, with which kernels are compared.

use baton_cpu_kernels::{
    CHAINS, Cpu, Isa, LANES, TILE_OPERATIONS, fma_loop, integers_loop, pairs_loop, read_loop, tiles_loop,
};
use baton_cpu_threads::anonymous;
use memmap2::MmapMut;

/// A loop of independent multiply-adds of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peak {
    /// f32 multiply-adds.
    F32,
    /// Multiply-adds of pairs of bf16, if the CPU has them.
    Bf16Pairs,
    /// Multiply-adds of eight-bit integers.
    Int8,
    /// Products of tiles of bf16, if the CPU has them.
    Bf16Tiles,
    /// The same of eight-bit integers.
    Int8Tiles,
}

/// Iterations of a loop. Loops are short, so that an idle thread takes the next one.
const ROUNDS: usize = 2000;
const LOOPS: usize = 40;
/// The same of products of tiles.
const TILE_ROUNDS: usize = 500;

impl Peak {
    /// Operations of one call of [`Peaks::run`]: a multiplication and an addition each.
    pub fn operations(self, threads: usize) -> usize {
        let per_lane = match self {
            Peak::F32 => 2,
            Peak::Bf16Pairs => 4,
            Peak::Int8 => 8,
            Peak::Bf16Tiles => return threads * LOOPS * TILE_ROUNDS * TILE_OPERATIONS,
            Peak::Int8Tiles => return threads * LOOPS * TILE_ROUNDS * 2 * TILE_OPERATIONS,
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
    /// Uses `threads` threads and `num_bytes` of memory to read.
    pub fn new(isa: Isa, threads: usize, num_bytes: usize) -> Peaks {
        Peaks { cpu: Cpu::new(isa, threads).expect("threads start"), memory: memory(num_bytes) }
    }

    /// Runs the same number of loops on every thread.
    pub fn run(&mut self, peak: Peak) {
        let isa = self.cpu.isa();
        let num_threads = self.cpu.pool().num_threads();
        self.cpu.pool().for_each(num_threads * LOOPS, |_, _| {
            // SAFETY: no pointers; pairs are only requested if the CPU has them.
            let sum = unsafe {
                match peak {
                    Peak::F32 => fma_loop(isa, ROUNDS),
                    Peak::Bf16Pairs => pairs_loop(ROUNDS),
                    Peak::Int8 => integers_loop(isa, ROUNDS),
                    Peak::Bf16Tiles => tiles_loop(true, TILE_ROUNDS),
                    Peak::Int8Tiles => tiles_loop(false, TILE_ROUNDS),
                }
            };
            std::hint::black_box(sum);
        });
    }

    /// Reads all bytes once, divided among the threads.
    pub fn read(&mut self) {
        const PIECE: usize = 1 << 20;
        let Peaks { cpu, memory } = self;
        let isa = cpu.isa();
        let pieces: &[u8] = memory;
        cpu.pool().for_each(pieces.len().div_ceil(PIECE), |_, idx| {
            let piece = &pieces[idx * PIECE..pieces.len().min((idx + 1) * PIECE)];
            // SAFETY: any bytes are valid numbers.
            std::hint::black_box(unsafe { read_loop(isa, piece.as_ptr().cast(), piece.len() / 4) });
        });
    }
}

/// Memory in large pages, as packed weights have. It is not zero, because the system may map all zero pages to one, and
/// holds no numbers whose products are subnormal, which are slow.
pub(super) fn memory(num_bytes: usize) -> MmapMut {
    let mut map = anonymous(num_bytes);
    map.fill(0x3c);
    map
}
