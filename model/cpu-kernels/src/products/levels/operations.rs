//! Integer operations of products, and their portable implementation.

use super::super::panels::LINE_BYTES;
use baton_cpu_simd::{LANES, Portable, Simd};

/// Prefetch distance in bytes.
pub(super) const PREFETCH: usize = 4096;

/// Where a tile is.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The next line of weights, from the first half that the tile multiplies on.
    pub(super) w: *const u8,
    /// The next activations.
    pub(super) a: *const u8,
    /// The next line to prefetch for later. It need not be valid.
    pub(super) ahead: *const u8,
}

impl Place {
    /// Prefetches `LINES` lines for later.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    pub(super) unsafe fn prefetch<S: Simd, const LINES: usize>(&mut self) {
        for _ in 0..LINES {
            // SAFETY: guaranteed by the caller.
            unsafe { S::prefetch_for_later(self.ahead) };
            self.ahead = self.ahead.wrapping_add(64);
        }
    }
}

/// Integer operations on sixteen lanes of i32, beside the f32 lanes of [`Simd`].
///
/// # Safety (of all methods)
/// As for [`Simd`]; `p` is valid for sixty-four bytes, or four for `activations`.
pub(super) trait IntegerSimd {
    type Floats: Simd;
    /// A vector of sums.
    type I: Copy;
    /// Four levels for each of sixteen outputs.
    type Levels: Copy;
    /// Four activations, the same for all lanes.
    type Activations: Copy;
    /// Rows of the largest tile whose sums of one group fit into registers.
    const ROWS: usize;
    /// Halves of a panel computed at a time: 2 or 1.
    const HALVES: usize;
    /// Whether `levels` subtracts the middle level, because only signed bytes are multiplied. `nibbles` does not.
    const IS_SIGNED: bool = false;
    /// Whether one instruction multiplies and adds to the sums.
    const IS_FUSED: bool = false;

    /// Whether one row's weights are prefetched far ahead, if both halves are computed at a time. Asks the CPU once.
    fn reads_far() -> bool {
        false
    }

    unsafe fn splat(x: i32) -> Self::I;
    unsafe fn levels(p: *const u8) -> Self::Levels;
    /// The levels in the low nibbles and in the high ones.
    unsafe fn nibbles(p: *const u8) -> [Self::Levels; 2];
    unsafe fn activations(p: *const u8) -> Self::Activations;
    /// Adds the sum of four products to each lane.
    unsafe fn dot(sums: Self::I, levels: Self::Levels, activations: Self::Activations) -> Self::I;
    unsafe fn to_floats(sums: Self::I) -> <Self::Floats as Simd>::V;
    /// Adds the products of a group's `len` numbers to the sums of `R` rows and of `H` halves from the place on, and
    /// prefetches `AHEAD` lines with each line of weights. Returns the place after the group.
    #[inline(always)]
    unsafe fn add_group<const NIBBLES: bool, const AHEAD: usize, const R: usize, const H: usize>(
        at: Place,
        len: usize,
        sums: &mut [[Self::I; H]; R],
    ) -> Place
    where
        Self: Sized,
    {
        // SAFETY: guaranteed by the caller.
        unsafe { add_lines::<Self, NIBBLES, AHEAD, R, H>(at, len, sums) }
    }
}

/// As [`IntegerSimd::add_group`], one line of a panel at a time.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // no closures here, see `Simd`
pub(super) unsafe fn add_lines<
    S: IntegerSimd,
    const NIBBLES: bool,
    const AHEAD: usize,
    const R: usize,
    const H: usize,
>(
    mut at: Place,
    len: usize,
    sums: &mut [[S::I; H]; R],
) -> Place {
    // SAFETY: the group has these lines; a prefetched address need not be valid.
    unsafe {
        for _ in 0..len.div_ceil(if NIBBLES { 8 } else { 4 }) {
            let Place { w, a, .. } = at;
            at.prefetch::<S::Floats, AHEAD>();
            // Four levels of each output, or four in the low nibbles and four in the high ones.
            let mut halves = [[S::levels(w); 2]; H];
            for h in 0..H {
                let w = w.add(h * 64);
                S::Floats::prefetch(w.wrapping_add(PREFETCH));
                halves[h] = if NIBBLES { S::nibbles(w) } else { [S::levels(w); 2] };
            }
            let num_parts = if NIBBLES { 2 } else { 1 };
            for part in 0..num_parts {
                for r in 0..R {
                    let x = S::activations(a.add((part * R + r) * 4));
                    for h in 0..H {
                        sums[r][h] = S::dot(sums[r][h], halves[h][part], x);
                    }
                }
            }
            at.a = a.add(4 * num_parts * R);
            at.w = w.add(LINE_BYTES);
        }
    }
    at
}

// SAFETY of the blocks below: the trait's contract, for each instruction.
#[allow(clippy::undocumented_unsafe_blocks)]
impl IntegerSimd for Portable {
    type Floats = Portable;
    type I = [i32; LANES];
    type Levels = [[u8; 4]; LANES];
    type Activations = [i8; 4];
    const ROWS: usize = 2;
    const HALVES: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn levels(p: *const u8) -> Self::Levels {
        unsafe { p.cast::<Self::Levels>().read() }
    }
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [Self::Levels; 2] {
        let both = unsafe { p.cast::<Self::Levels>().read() };
        [both.map(|four| four.map(|byte| byte & 15)), both.map(|four| four.map(|byte| byte >> 4))]
    }
    #[inline(always)]
    unsafe fn activations(p: *const u8) -> Self::Activations {
        unsafe { p.cast::<[i8; 4]>().read() }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::I, levels: Self::Levels, activations: Self::Activations) -> Self::I {
        std::array::from_fn(|lane| {
            let products = levels[lane].iter().zip(activations).map(|(w, x)| i32::from(*w) * i32::from(x));
            sums[lane] + products.sum::<i32>()
        })
    }
    #[inline(always)]
    unsafe fn to_floats(sums: Self::I) -> [f32; LANES] {
        sums.map(|sum| sum as f32)
    }
}
