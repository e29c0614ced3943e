//! Pairs of bf16 in registers of NEON: `bfdot` for one row, `bfmmla`, which is two of them, for several.

use std::arch::aarch64::*;

use super::super::blocks::{self, BlockSimd, Blocks, ROWS, add_products, load};
use super::super::panels::PANEL;
use super::super::tile::TileArgs;
use super::PREFETCH;
use baton_cpu_simd::{LANES, Neon, Simd, bfdot, quarters};

/// Rows of the largest tile. Smaller tiles have an even number of rows, or one.
pub(in super::super) const TILE_ROWS: usize = ROWS;

const LINE_BYTES: usize = 4 * PANEL;
/// The second words of rows whose number of pairs is odd.
static ZEROS: [i32; ROWS] = [0; ROWS];

/// # Safety
/// As for [`TileArgs`]; the CPU has the instructions.
#[target_feature(enable = "bf16")]
pub(in super::super) unsafe fn tile_kernel(args: &TileArgs) {
    for panel in 0..args.panels {
        // SAFETY: guaranteed by the caller; indices of panels are in range.
        unsafe {
            if args.rows == 1 {
                one_row(args, panel);
                continue;
            }
            for half in 0..2 {
                match args.rows {
                    2 => rows::<2>(args, panel, half),
                    _ => rows::<ROWS>(args, panel, half),
                }
            }
        }
    }
}

/// A loop of products of several rows alone, for measuring the peak rate: as many as with two numbers in each lane.
///
/// # Safety
/// The CPU has the instruction.
#[target_feature(enable = "bf16")]
pub unsafe fn pairs_loop(rounds: usize) -> f32 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let sums = blocks::products::<Bfmmla>(rounds);
        sums.iter().fold(0.0, |all, sum| all + vaddvq_f32(vreinterpretq_f32_s32(*sum)))
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn one_row(args: &TileArgs, panel: usize) {
    // SAFETY: indices of pairs are in range. Panels have whole steps of pairs, so there is a line after an odd number of
    // them. A prefetched address need not be valid.
    unsafe {
        let mut w = args.w.add(panel * args.panel_bytes);
        let a = args.a.cast::<f32>();
        let mut sums = [Neon::splat(0.0); 2];
        let num_pairs = args.k.div_ceil(2);
        // An even number, as several rows take them: adding zeros turns -0 to 0.
        for pair in 0..num_pairs.next_multiple_of(2) {
            let x = if pair < num_pairs { a.add(pair).read_unaligned() } else { 0.0 };
            let x = Neon::splat(x);
            for half in 0..2 {
                let from = w.add(half * LANES * 4);
                Neon::prefetch(from.wrapping_add(PREFETCH));
                let line = Neon::load(from.cast());
                sums[half] = quarters!(Q => bfdot(sums[half][Q], line[Q], x[Q]));
            }
            w = w.add(LINE_BYTES);
        }
        for half in 0..2 {
            args.finish::<Neon>(0, panel, half, sums[half]);
        }
    }
}

#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
unsafe fn rows<const R: usize>(args: &TileArgs, panel: usize, half: usize) {
    // SAFETY: as above.
    unsafe {
        let mut w = args.w.add(panel * args.panel_bytes + half * LANES * 4);
        let mut a = args.a.cast::<i32>();
        let mut blocks = Blocks::of_rows(&[[vdupq_n_s32(0); 4]; R]);
        let num_pairs = args.k.div_ceil(2);
        let mut pair = 0;
        while pair < num_pairs {
            Neon::prefetch(w.wrapping_add(PREFETCH));
            Neon::prefetch(w.wrapping_add(PREFETCH + LINE_BYTES));
            let second = if pair + 1 < num_pairs { a.add(R) } else { ZEROS.as_ptr() };
            blocks.add::<Bfmmla>([load(w), load(w.add(LINE_BYTES))], [a, second]);
            w = w.add(2 * LINE_BYTES);
            a = a.wrapping_add(2 * R);
            pair += 2;
        }
        let rows = blocks.to_rows();
        for r in 0..R {
            if r >= args.real_rows {
                break;
            }
            let sums = quarters!(Q => vreinterpretq_f32_s32(rows[r][Q]));
            args.finish::<Neon>(r, panel, half, sums);
        }
    }
}

/// Products of two pairs of bf16 of two rows with two of two outputs: for each block's element what `bfdot` adds for the
/// first pair, then for the second.
struct Bfmmla;

impl BlockSimd for Bfmmla {
    #[inline(always)]
    unsafe fn multiply(mut sums: int32x4_t, rows: int32x4_t, outputs: int32x4_t) -> int32x4_t {
        // SAFETY: the caller guarantees the instruction.
        unsafe { add_products!("bfmmla", "8h", sums, rows, outputs) };
        sums
    }
}
