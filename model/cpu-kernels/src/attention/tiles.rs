//! Products of rows with a tile of KV, as [`product`](super::product), in tile registers.
//!
//! K by columns of pairs and V by rows of pairs are stored as tiles want them. Every number of rows is multiplied so:
//! no other instruction adds in the order of tiles.
#![cfg_attr(not(any(test, target_arch = "x86_64")), allow(dead_code))] // only x86-64 has tiles

use super::product::{Rows, Start};
use baton_cpu_simd::tile_kernel;
use baton_cpu_simd::tiles::{ROW_BYTES, ROWS, TileUse, Tiles};
use baton_cpu_simd::{LANES, Simd};

/// Lines of a tile register: words of two bf16 along K.
pub(super) const LINES: usize = 16;

tile_kernel! {
    /// As [`multiply_pairs`](super::product::multiply_pairs). Lines are zero up to a multiple of [`LINES`], and rows of
    /// `a` have as many words.
    ///
    /// # Safety
    /// All pointers are valid for these sizes.
    pub(super) fn multiply / product (
        shapes: &mut TileUse,
        num_rows: usize,
        num_lines: usize,
        num_vectors: usize,
        a: Rows<*const f32>,
        b: Rows<*const f32>,
        c: Rows<*mut f32>,
        start: Start,
    )
}

#[inline(always)]
#[allow(clippy::too_many_arguments, clippy::extra_unused_type_parameters)] // `tile_kernel` gives them
unsafe fn product<S: Simd, T: Tiles>(
    tiles: &mut T,
    shapes: &mut TileUse,
    num_rows: usize,
    num_lines: usize,
    num_vectors: usize,
    a: Rows<*const f32>,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    start: Start,
) {
    let mut row = 0;
    while row < num_rows {
        let rows = if num_rows - row < 2 * ROWS { num_rows - row } else { 2 * ROWS };
        // SAFETY: row and vector indices are in range.
        unsafe {
            shapes.set(tiles, rows, ROW_BYTES);
            let a = Rows { first: a.first.add(row * a.stride), ..a };
            let mut vector = 0;
            while vector < num_vectors {
                let b = Rows { first: b.first.add(vector * LANES), ..b };
                let c = Rows { first: c.first.add(row * c.stride + vector * LANES), ..c };
                let two_vectors = vector + 1 < num_vectors;
                match (rows > ROWS, two_vectors) {
                    (false, false) => block::<T, false, false>(tiles, num_lines, a, b, c, start),
                    (false, true) => block::<T, false, true>(tiles, num_lines, a, b, c, start),
                    (true, false) => block::<T, true, false>(tiles, num_lines, a, b, c, start),
                    (true, true) => block::<T, true, true>(tiles, num_lines, a, b, c, start),
                }
                vector += 2;
            }
        }
        row += rows;
    }
}

/// One or two tiles of rows with one or two tiles of vectors.
#[inline(always)]
unsafe fn block<T: Tiles, const ROWS_TWO: bool, const VECTORS_TWO: bool>(
    tiles: &mut T,
    num_lines: usize,
    a: Rows<*const f32>,
    b: Rows<*const f32>,
    c: Rows<*mut f32>,
    start: Start,
) {
    let (a_stride, b_stride, c_stride) = (a.stride * 4, b.stride * 4, c.stride * 4);
    // SAFETY: guaranteed by the caller.
    unsafe {
        let (high, low) = (c.first.cast::<u8>(), c.first.wrapping_add(ROWS * c.stride).cast::<u8>());
        if start == Start::Zero {
            tiles.zero::<0>();
            tiles.zero::<1>();
            if ROWS_TWO {
                tiles.zero::<2>();
                tiles.zero::<3>();
            }
        } else {
            tiles.load::<0>(high, c_stride);
            if VECTORS_TWO {
                tiles.load::<1>(high.add(ROW_BYTES), c_stride);
            }
            if ROWS_TWO {
                tiles.load::<2>(low, c_stride);
                if VECTORS_TWO {
                    tiles.load::<3>(low.add(ROW_BYTES), c_stride);
                }
            }
        }
        let (mut x, mut y) = (a.first.cast::<u8>(), b.first.cast::<u8>());
        for _ in 0..num_lines.div_ceil(LINES) {
            tiles.load::<4>(x, a_stride);
            tiles.load::<6>(y, b_stride);
            tiles.dot_bf16::<0, 4, 6>();
            if VECTORS_TWO {
                tiles.load::<7>(y.add(ROW_BYTES), b_stride);
                tiles.dot_bf16::<1, 4, 7>();
            }
            if ROWS_TWO {
                tiles.load::<5>(x.add(ROWS * a_stride), a_stride);
                tiles.dot_bf16::<2, 5, 6>();
                if VECTORS_TWO {
                    tiles.dot_bf16::<3, 5, 7>();
                }
            }
            x = x.add(ROW_BYTES);
            y = y.add(LINES * b_stride);
        }
        tiles.store::<0>(high, c_stride);
        if VECTORS_TWO {
            tiles.store::<1>(high.add(ROW_BYTES), c_stride);
        }
        if ROWS_TWO {
            tiles.store::<2>(low, c_stride);
            if VECTORS_TWO {
                tiles.store::<3>(low.add(ROW_BYTES), c_stride);
            }
        }
    }
}
