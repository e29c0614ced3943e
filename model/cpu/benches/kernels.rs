//! Measures kernels beside the CPU's peak rates, in the same run.
//!
//!     cargo bench -p baton-model-cpu                     # everything, some minutes
//!     cargo bench -p baton-model-cpu -- int8             # rows that contain a word
//!     cargo bench -p baton-model-cpu -- --isa avx512     # another instruction set than the best: amx, avx512, avx2
//!     cargo bench -p baton-model-cpu -- --rows 512 --threads 1
//!
//! A rate is the best of many runs, because other load on the machine can only lower one. The share is the median of the
//! runs before and after which the peak was the same. Products of two rows and more are compared with a loop of
//! multiply-adds alone: those of their kernel from 8 rows on. Where there are tiles, fewer rows of integers may have another
//! kernel. Products of one row, and attention of one query, are compared with a loop that only reads memory.

use std::hint::black_box;
use std::time::{Duration, Instant};

use baton_cpu_kernels::{Isa, has_pairs};
use baton_kv_cache::KvDtype;
use baton_model_cpu::benchmark::{AttentionRun, Gemm, Peak, Peaks, Weights};

/// Weights of a product: more than the caches hold, so that they are read from memory.
const MATRIX_BYTES: usize = 256 << 20;
const SHAPES: [(usize, usize); 2] = [(16384, 2048), (2048, 8192)];
/// Time for one row of the table.
const BUDGET: Duration = Duration::from_millis(2000);
/// Runs of a loop of operations beside each run of a kernel.
const PEAK_RUNS: u32 = 6;
/// Peaks are equal if they differ by less than this part.
const STEADY: u32 = 30;

fn main() {
    let mut words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let isa = option(&mut words, "--isa").map_or_else(Isa::detect, |name| {
        let found = Isa::available().into_iter().find(|isa| isa.name() == name);
        found.unwrap_or_else(|| panic!("this CPU has no {name}"))
    });
    let mut number = |name| option(&mut words, name).map(|number| number.parse().expect("a number"));
    let (rows, threads) = (number("--rows"), number("--threads"));
    println!("{}", isa.name());
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{:<28} {:>7} {:>8} {:>10} {:>10} {:>6}", "kernel", "threads", "rows", "rate", "peak", "share");
    let all = threads.map_or_else(|| if all == 1 { vec![1] } else { vec![1, all] }, |threads| vec![threads]);
    for threads in all {
        let peaks = Peaks::new(isa, threads, MATRIX_BYTES);
        let mut table = Table { words: &words, isa, rows, threads, peaks };
        products(&mut table);
        attention(&mut table);
    }
}

/// Takes an option and its value out of the words.
fn option(words: &mut Vec<String>, name: &str) -> Option<String> {
    let at = words.iter().position(|word| word == name)?;
    Some(words.drain(at..words.len().min(at + 2)).nth(1).unwrap_or_else(|| panic!("{name} needs a value")))
}

struct Table<'a> {
    words: &'a [String],
    isa: Isa,
    /// The only number of rows to measure.
    rows: Option<usize>,
    threads: usize,
    peaks: Peaks,
}

/// The peak with which a row is compared.
#[derive(Clone, Copy)]
enum Ceiling {
    /// A peak rate, and the number of operations of one run.
    Operations(Peak, usize),
    /// The number of bytes read by one run.
    Bytes(usize),
}

impl Table<'_> {
    fn wants_rows(&self, rows: usize) -> bool {
        self.rows.is_none_or(|wanted| wanted == rows)
    }

    fn wants(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| name.contains(word.as_str()))
    }

    /// Measures `run` and its ceiling alternately.
    fn row(&mut self, name: &str, rows: usize, ceiling: Ceiling, mut run: impl FnMut()) {
        let most = |peaks: &mut Peaks| {
            let runs = if matches!(ceiling, Ceiling::Bytes(_)) { 1 } else { PEAK_RUNS };
            let mut once = || match ceiling {
                Ceiling::Operations(peak, _) => peaks.run(peak),
                Ceiling::Bytes(_) => peaks.read(),
            };
            // The first run wakes its threads.
            once();
            time(|| (0..runs).for_each(|_| once())) / runs
        };
        run();
        let (mut best, mut best_peak) = (Duration::MAX, Duration::MAX);
        // Of runs between equal peaks: the peak's time by the run's.
        let mut shares = Vec::new();
        let mut before = most(&mut self.peaks);
        let start = Instant::now();
        while start.elapsed() < BUDGET {
            let took = time(&mut run);
            let after = most(&mut self.peaks);
            if before.abs_diff(after) * STEADY < after {
                shares.push((before + after).div_f64(2.0).div_duration_f64(took));
            }
            (best, best_peak) = (best.min(took), best_peak.min(after));
            before = after;
        }
        shares.sort_by(f64::total_cmp);
        let share = shares.get(shares.len() / 2).copied();
        let (unit, amount, most) = match ceiling {
            Ceiling::Operations(peak, operations) => ("GOP/s", operations, peak.operations(self.threads)),
            Ceiling::Bytes(bytes) => ("GB/s", bytes, MATRIX_BYTES),
        };
        let share = share.unwrap_or(best_peak.div_duration_f64(best)) * amount as f64 / most as f64 * 100.0;
        let per_second = |amount: usize, time: Duration| amount as f64 / time.as_secs_f64() / 1e9;
        let (rate, peak, threads) = (per_second(amount, best), per_second(most, best_peak), self.threads);
        println!("{name:<28} {threads:>7} {rows:>8} {rate:>10.1} {peak:>10.1} {share:>4.0} %  {unit}");
    }
}

fn time(run: impl FnOnce()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

fn products(table: &mut Table<'_>) {
    for (weights_name, weights) in Weights::available(table.isa) {
        for (n, k) in SHAPES {
            let name = format!("{weights_name} {n}x{k}");
            if !table.wants(&name) {
                continue;
            }
            for m in [1, 2, 4, 8, 16, 32, 64, 512] {
                if !table.wants_rows(m) {
                    continue;
                }
                let bytes = weights.matrix_bytes(n, k);
                // Several matrices in turn, so that none is still in a cache.
                let num = if m < 64 { MATRIX_BYTES.div_ceil(bytes) } else { 1 };
                let mut gemm = Gemm::new(table.isa, (m, n, k), weights, num, table.threads);
                let ceiling = match m {
                    1 => Ceiling::Bytes(num * bytes),
                    _ => Ceiling::Operations(weights.peak(table.isa), 2 * num * m * n * k),
                };
                table.row(&name, m, ceiling, || _ = black_box(gemm.run()));
            }
        }
    }
}

fn attention(table: &mut Table<'_>) {
    // A token's key and value in 8 KV heads of 64.
    let bytes = |dtype: KvDtype| 2 * 8 * dtype.vector_bytes(64);
    let pairs = if table.isa.has_tiles() { Peak::Bf16Tiles } else { Peak::Bf16Pairs };
    let mut kinds = Vec::new();
    for dtype in [KvDtype::Bf16, KvDtype::Fp8, KvDtype::Int8] {
        kinds.push((dtype.name().to_owned(), dtype, Peak::F32));
        if has_pairs(table.isa) {
            kinds.push((format!("{}_pairs", dtype.name()), dtype, pairs));
        }
    }
    for (kind, dtype, peak) in kinds {
        for context in [2048, 16384] {
            let name = format!("attention {kind} of {context}");
            if !table.wants(&name) {
                continue;
            }
            for rows in [1, 512] {
                if !table.wants_rows(rows) {
                    continue;
                }
                let ceiling = match rows {
                    1 => Ceiling::Bytes(context * bytes(dtype)),
                    rows => Ceiling::Operations(peak, 4 * 32 * 64 * rows * (context - rows / 2)),
                };
                let pairs = peak != Peak::F32;
                let mut attention = AttentionRun::new(table.isa, rows, context, dtype, pairs, table.threads);
                table.row(&name, rows, ceiling, || _ = black_box(attention.run()));
            }
        }
    }
}
