//! The CPU's peak rates, with which kernels and models are compared.

use std::time::{Duration, Instant};

use baton_cpu_kernels::{
    CHAINS, Cpu, Isa, LANES, PanelFormat, TILE_OPERATIONS, fma_loop, has_pairs, integers_loop,
    level_tiles_multiply, nibbles_differ, pairs_loop, read_loop, tiles_loop,
};
use baton_cpu_threads::anonymous;
use baton_model_spec::{FloatDtype, IntegerWidth, StoredWeights};
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
    /// The same with weights of four bits, if the CPU has other instructions for them.
    Int4,
    /// Products of tiles of bf16, if the CPU has them.
    Bf16Tiles,
    /// The same of eight-bit integers.
    Int8Tiles,
}

/// What a processor reaches with so many threads.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuPeaks {
    /// The best instruction set.
    pub isa: Isa,
    /// Multiplications and additions per second, of each kind that the processor has.
    pub operations: Vec<(Peak, f64)>,
    /// Bytes per second, read from memory.
    pub read: f64,
}

/// Iterations of a loop. Loops are short, so that an idle thread takes the next one.
const ROUNDS: usize = 2000;
const LOOPS: usize = 40;
/// The same of products of tiles.
const TILE_ROUNDS: usize = 500;
/// Distances, in bytes, of which reading takes the best: processors differ.
const AHEAD: [usize; 4] = [512, 1024, 2048, 4096];
/// Memory that [`CpuPeaks`] reads, more than caches hold, and how long it repeats each loop.
const READ_BYTES: usize = 256 << 20;
const PATIENCE: Duration = Duration::from_millis(200);

impl Peak {
    /// The name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Peak::F32 => "f32",
            Peak::Bf16Pairs => "bf16",
            Peak::Int8 => "int8",
            Peak::Int4 => "int4",
            Peak::Bf16Tiles => "bf16 tiles",
            Peak::Int8Tiles => "int8 tiles",
        }
    }

    /// What an instruction set has loops for. The software model of tiles has none of its own.
    fn of(isa: Isa) -> Vec<Peak> {
        let mut peaks = vec![Peak::F32, Peak::Int8];
        if isa == Isa::TileModel {
            return peaks;
        }
        if has_pairs(isa) {
            peaks.push(Peak::Bf16Pairs);
        }
        if isa.has_tiles() {
            peaks.extend([Peak::Bf16Tiles, Peak::Int8Tiles]);
        }
        if nibbles_differ(isa) {
            peaks.push(Peak::Int4);
        }
        peaks
    }

    /// Operations of one call of [`Peaks::run`]: a multiplication and an addition each.
    pub fn operations(self, threads: usize) -> usize {
        let per_lane = match self {
            Peak::F32 => 2,
            Peak::Bf16Pairs => 4,
            Peak::Int8 | Peak::Int4 => 8,
            Peak::Bf16Tiles => return threads * LOOPS * TILE_ROUNDS * TILE_OPERATIONS,
            Peak::Int8Tiles => return threads * LOOPS * TILE_ROUNDS * 2 * TILE_OPERATIONS,
        };
        threads * LOOPS * ROUNDS * CHAINS * LANES * per_lane
    }

    /// What bounds products with weights of this format: the operations of their kernel from 8 rows on. Where there are
    /// tiles, fewer rows of integers may be multiplied by vectors.
    pub fn of_products(isa: Isa, format: PanelFormat) -> Peak {
        match format {
            PanelFormat::Floats(_) => Peak::F32,
            PanelFormat::Bf16Pairs if isa.has_tiles() => Peak::Bf16Tiles,
            PanelFormat::Bf16Pairs => Peak::Bf16Pairs,
            PanelFormat::Integers(format) if isa.has_tiles() => {
                if level_tiles_multiply(format) {
                    Peak::Int8Tiles
                } else {
                    Peak::Bf16Tiles
                }
            }
            PanelFormat::Integers(format) if format.width == IntegerWidth::Four && nibbles_differ(isa) => {
                Peak::Int4
            }
            PanelFormat::Integers(_) => Peak::Int8,
        }
    }
}

impl CpuPeaks {
    /// Measures this machine for a second or two: the best of many short runs, as other load can only lower a rate.
    pub fn measure(threads: usize) -> CpuPeaks {
        let isa = Isa::detect();
        let mut peaks = Peaks::new(isa, threads, READ_BYTES);
        let operations = Peak::of(isa).into_iter().map(|peak| {
            let seconds = best(|| peaks.run(peak));
            (peak, peak.operations(threads) as f64 / seconds)
        });
        let operations = operations.collect();
        CpuPeaks { isa, operations, read: READ_BYTES as f64 / best(|| peaks.read()) }
    }

    /// What bounds products, from 8 rows on, with weights that are stored so. As in loading a model, FP8 is widened to bf16,
    /// and bf16 has the faster of its two formats.
    pub fn of_weights(&self, weights: StoredWeights) -> Peak {
        let peak = |format| Peak::of_products(self.isa, format);
        match weights {
            StoredWeights::Integers(format) => peak(PanelFormat::Integers(format)),
            StoredWeights::Floats(FloatDtype::Bf16) | StoredWeights::Fp8 => {
                let floats = peak(PanelFormat::Floats(FloatDtype::Bf16));
                let pairs = peak(PanelFormat::Bf16Pairs);
                if self.rate(pairs) > self.rate(floats) { pairs } else { floats }
            }
            StoredWeights::Floats(dtype) => peak(PanelFormat::Floats(dtype)),
        }
    }

    /// Operations per second; `None` if the processor has none of that kind.
    fn rate(&self, peak: Peak) -> Option<f64> {
        self.operations.iter().find(|(kind, _)| *kind == peak).map(|(_, rate)| *rate)
    }
}

/// Seconds of the fastest run. The first one, which wakes threads, does not count.
fn best(mut run: impl FnMut()) -> f64 {
    run();
    let (started, mut best) = (Instant::now(), Duration::MAX);
    while best == Duration::MAX || started.elapsed() < PATIENCE {
        let begun = Instant::now();
        run();
        best = best.min(begun.elapsed());
    }
    best.as_secs_f64()
}

/// Runs the loops.
pub struct Peaks {
    cpu: Cpu,
    memory: MmapMut,
    /// How often it has read.
    num_reads: usize,
}

impl Peaks {
    /// Uses `threads` threads and `num_bytes` of memory to read.
    ///
    /// # Panics
    /// When this CPU does not have `isa`.
    pub fn new(isa: Isa, threads: usize, num_bytes: usize) -> Peaks {
        Peaks { cpu: Cpu::new(isa, threads).expect("threads start"), memory: memory(num_bytes), num_reads: 0 }
    }

    /// Runs the same number of loops on every thread.
    ///
    /// # Panics
    /// When the instruction set has no such loop.
    pub fn run(&mut self, peak: Peak) {
        let isa = self.cpu.isa();
        assert!(Peak::of(isa).contains(&peak), "{} has no loop of {}", isa.name(), peak.name());
        let num_threads = self.cpu.pool().num_threads();
        self.cpu.pool().for_each(num_threads * LOOPS, |_, _| {
            // SAFETY: no pointers; `Cpu::on` has checked the instruction set, which has the loop.
            let sum = unsafe {
                match peak {
                    Peak::F32 => fma_loop(isa, ROUNDS),
                    Peak::Bf16Pairs => pairs_loop(ROUNDS),
                    Peak::Int8 => integers_loop(isa, IntegerWidth::Eight, ROUNDS),
                    Peak::Int4 => integers_loop(isa, IntegerWidth::Four, ROUNDS),
                    Peak::Bf16Tiles => tiles_loop(true, TILE_ROUNDS),
                    Peak::Int8Tiles => tiles_loop(false, TILE_ROUNDS),
                }
            };
            std::hint::black_box(sum);
        });
    }

    /// Reads all bytes once, divided among the threads, with the next of several distances of prefetching.
    pub fn read(&mut self) {
        const PIECE: usize = 1 << 20;
        let Peaks { cpu, memory, num_reads } = self;
        let ahead = AHEAD[*num_reads % AHEAD.len()];
        *num_reads += 1;
        let isa = cpu.isa();
        let pieces: &[u8] = memory;
        cpu.pool().for_each(pieces.len().div_ceil(PIECE), |_, idx| {
            let piece = &pieces[idx * PIECE..pieces.len().min((idx + 1) * PIECE)];
            // SAFETY: `Cpu::on` has checked the instruction set; any bytes are valid numbers.
            std::hint::black_box(unsafe { read_loop(isa, piece.as_ptr().cast(), piece.len() / 4, ahead) });
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

#[cfg(test)]
mod tests {
    use baton_model_spec::{IntegerFormat, Quantisation};

    use super::*;

    fn integers(text: &str) -> IntegerFormat {
        text.parse::<Quantisation>().unwrap().format()
    }

    #[test]
    fn products_are_compared_with_the_operations_of_their_kernel() {
        let of = |text: &str| PanelFormat::Integers(integers(text));
        for (format, in_tiles, in_vectors) in [
            (PanelFormat::Floats(FloatDtype::F32), Peak::F32, Peak::F32),
            (PanelFormat::Floats(FloatDtype::Bf16), Peak::F32, Peak::F32),
            (PanelFormat::Bf16Pairs, Peak::Bf16Tiles, Peak::Bf16Pairs),
            (of("int8"), Peak::Int8Tiles, Peak::Int8),
            (of("int8:96"), Peak::Int8Tiles, Peak::Int8),
            (of("int8:512"), Peak::Int8Tiles, Peak::Int8),
            // Widened to bf16 where there are tiles.
            (of("int8:64"), Peak::Bf16Tiles, Peak::Int8),
            (of("int8:544"), Peak::Bf16Tiles, Peak::Int8),
            (of("int4"), Peak::Bf16Tiles, Peak::Int8),
            (of("int4:128"), Peak::Bf16Tiles, Peak::Int8),
        ] {
            assert_eq!(Peak::of_products(Isa::TileModel, format), in_tiles, "{format:?}");
            assert_eq!(Peak::of_products(Isa::Portable, format), in_vectors, "{format:?}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn nibbles_have_a_peak_of_their_own_where_their_instructions_do() {
        let of = |isa, text| Peak::of_products(isa, PanelFormat::Integers(integers(text)));
        for (isa, int8, int4) in [
            (Isa::Amx, Peak::Int8Tiles, Peak::Bf16Tiles),
            (Isa::Avx2, Peak::Int8, Peak::Int4),
            (Isa::Portable, Peak::Int8, Peak::Int8),
        ] {
            assert_eq!((of(isa, "int8"), of(isa, "int4")), (int8, int4), "{isa:?}");
            assert_eq!(Peak::of(isa).contains(&Peak::Int4), int4 == Peak::Int4, "{isa:?}");
        }
    }

    #[test]
    fn every_peak_of_this_processor_has_a_loop() {
        for isa in Isa::available() {
            let mut peaks = Peaks::new(isa, 1, 1 << 20);
            Peak::of(isa).into_iter().for_each(|peak| peaks.run(peak));
        }
    }

    #[test]
    fn stored_weights_are_compared_with_what_they_are_multiplied_in() {
        let vectors = vec![(Peak::F32, 4.0), (Peak::Int8, 8.0), (Peak::Bf16Pairs, 2.0)];
        let tiles = [&vectors[..], &[(Peak::Bf16Tiles, 16.0), (Peak::Int8Tiles, 32.0)]].concat();
        let with_tiles = CpuPeaks { isa: Isa::TileModel, operations: tiles, read: 1.0 };
        let with_vectors = CpuPeaks { isa: Isa::Portable, operations: vectors, read: 1.0 };
        for (weights, in_tiles, in_vectors) in [
            (StoredWeights::Floats(FloatDtype::F32), Peak::F32, Peak::F32),
            (StoredWeights::Floats(FloatDtype::F16), Peak::F32, Peak::F32),
            (StoredWeights::Floats(FloatDtype::Bf16), Peak::Bf16Tiles, Peak::F32),
            (StoredWeights::Fp8, Peak::Bf16Tiles, Peak::F32),
            (StoredWeights::Integers(integers("int8")), Peak::Int8Tiles, Peak::Int8),
            (StoredWeights::Integers(integers("int8:32")), Peak::Bf16Tiles, Peak::Int8),
            (StoredWeights::Integers(integers("int4")), Peak::Bf16Tiles, Peak::Int8),
        ] {
            assert_eq!(with_tiles.of_weights(weights), in_tiles, "{weights:?}");
            assert_eq!(with_vectors.of_weights(weights), in_vectors, "{weights:?}");
        }
        let faster = CpuPeaks { operations: vec![(Peak::F32, 4.0), (Peak::Bf16Pairs, 8.0)], ..with_vectors };
        assert_eq!(faster.of_weights(StoredWeights::Fp8), Peak::Bf16Pairs);
        let without = CpuPeaks { operations: vec![(Peak::F32, 4.0)], ..faster };
        assert_eq!(without.of_weights(StoredWeights::Fp8), Peak::F32);
    }
}
