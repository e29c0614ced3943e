//! Products of bf16 with bf16 in tiles.
//!
//! A panel of pairs is stored as tiles want it: sixteen lines of a panel are two tiles of weights, one for each half.
//! Two tiles of rows and those two give four tiles of sums. All rows of a matrix are multiplied so, few or many:
//! a step of 32 numbers of K adds its even products and its odd ones to one sum each, and both to the output
//! ([`Tiles::dot_bf16`]), which no other instruction does.
#![cfg_attr(not(any(test, target_arch = "x86_64")), allow(dead_code))] // only x86-64 has tiles

use super::panels::{PAIR_STEP as STEP, PANEL};
use super::slabs::Slab;
use super::tile::TileArgs;
use crate::tiles::{ROW_BYTES, ROWS, TileUse, Tiles, tile_kernel};
use baton_cpu_simd::{LANES, Simd};

const _: () = assert!(STEP == ROW_BYTES / 2);
/// Numbers of K that are multiplied at a time.
pub(super) const SLAB: usize = 2048;
/// Bytes of a panel in a step.
const STEP_BYTES: usize = STEP * PANEL * 2;
/// Bytes of a row of sums.
const SUM_BYTES: usize = PANEL * 4;
/// Prefetch distance in bytes, if weights are read once.
const PREFETCH: usize = 8 * STEP_BYTES;

tile_kernel! {
    /// Multiplies tiles of rows with a slab of one panel.
    ///
    /// # Safety
    /// As for [`TileArgs`].
    pub(super) fn kernel / product (shapes: &mut TileUse, rows: &[TileArgs], slab: &Slab)
}

#[inline(always)]
unsafe fn product<S: Simd, T: Tiles>(tiles: &mut T, shapes: &mut TileUse, rows: &[TileArgs], slab: &Slab) {
    for (idx, args) in rows.iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            shapes.set(tiles, args.rows, ROW_BYTES);
            let sums = slab.sums.add(idx * slab.sums_stride);
            if args.rows <= ROWS {
                steps::<S, T, false>(tiles, args, slab, sums, rows.len() == 1);
            } else {
                steps::<S, T, true>(tiles, args, slab, sums, false);
            }
        }
    }
}

#[inline(always)]
unsafe fn steps<S: Simd, T: Tiles, const TWO: bool>(
    tiles: &mut T,
    args: &TileArgs,
    slab: &Slab,
    sums: *mut f32,
    reads_once: bool,
) {
    let (first, end) = (slab.first / STEP, slab.end.div_ceil(STEP));
    let step_bytes = args.rows * ROW_BYTES;
    // Lines to prefetch in a step.
    let ahead_lines = args.ahead.len().div_ceil(64 * (end - first));
    let mut ahead = args.ahead.as_ptr();
    // SAFETY: indices of steps and rows are in range; a prefetched address need not be valid.
    unsafe {
        // The sums of rows 0 to 15 and of rows 16 to 31.
        let (high, low) = (sums.cast::<u8>(), sums.add(ROWS * PANEL).cast::<u8>());
        if first == 0 {
            tiles.zero::<0>();
            tiles.zero::<1>();
            if TWO {
                tiles.zero::<2>();
                tiles.zero::<3>();
            }
        } else {
            tiles.load::<0>(high, SUM_BYTES);
            tiles.load::<1>(high.add(LANES * 4), SUM_BYTES);
            if TWO {
                tiles.load::<2>(low, SUM_BYTES);
                tiles.load::<3>(low.add(LANES * 4), SUM_BYTES);
            }
        }
        if slab.end == args.k {
            args.prefetch_output::<S>();
        }
        let mut w = args.w.add(first * STEP_BYTES);
        let mut a = args.a.add(first * step_bytes);
        for _ in first..end {
            if reads_once {
                for line in 0..STEP_BYTES / 64 {
                    S::prefetch(w.wrapping_add(PREFETCH + line * 64));
                }
            }
            for _ in 0..ahead_lines {
                S::prefetch_for_later(ahead);
                ahead = ahead.wrapping_add(64);
            }
            tiles.load::<4>(a, ROW_BYTES);
            tiles.load::<6>(w, 2 * ROW_BYTES);
            tiles.dot_bf16::<0, 4, 6>();
            tiles.load::<7>(w.add(ROW_BYTES), 2 * ROW_BYTES);
            tiles.dot_bf16::<1, 4, 7>();
            if TWO {
                tiles.load::<5>(a.add(ROWS * ROW_BYTES), ROW_BYTES);
                tiles.dot_bf16::<2, 5, 6>();
                tiles.dot_bf16::<3, 5, 7>();
            }
            w = w.add(STEP_BYTES);
            a = a.add(step_bytes);
        }
        tiles.store::<0>(high, SUM_BYTES);
        tiles.store::<1>(high.add(LANES * 4), SUM_BYTES);
        if TWO {
            tiles.store::<2>(low, SUM_BYTES);
            tiles.store::<3>(low.add(LANES * 4), SUM_BYTES);
        }
        if slab.end == args.k {
            for row in 0..args.real_rows {
                for half in 0..2 {
                    args.finish::<S>(row, 0, half, S::load(sums.add(row * PANEL + half * LANES)));
                }
            }
        }
    }
}
