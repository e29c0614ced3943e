//! Integers in registers of NEON, with `sdot` and, for several rows, `smmla`.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::aarch64::*;

use super::super::blocks::{self, BlockSimd, Blocks, add_products};
use super::super::panels::LINE_BYTES;
use super::operations::{IntegerSimd, PREFETCH, Place, add_lines};
use baton_cpu_simd::{Neon, Simd, quarters};
use baton_model_spec::IntegerWidth;

/// NEON with the instruction for dot products; with `MATRICES` also the one for matrices.
pub(super) struct NeonIntegers<const MATRICES: bool>;

impl<const MATRICES: bool> IntegerSimd for NeonIntegers<MATRICES> {
    type Floats = Neon;
    type I = [int32x4_t; 4];
    type Levels = [uint8x16_t; 4];
    type Activations = int32x4_t;
    const ROWS: usize = blocks::ROWS;
    const HALVES: usize = 1;
    const IS_SIGNED: bool = true;
    const IS_FUSED: bool = true;

    #[inline(always)]
    unsafe fn splat(x: i32) -> Self::I {
        unsafe { [vdupq_n_s32(x); 4] }
    }
    #[inline(always)]
    unsafe fn levels(p: *const u8) -> Self::Levels {
        unsafe {
            let middle = vdupq_n_u8(IntegerWidth::Eight.middle());
            quarters!(Q => veorq_u8(vld1q_u8(p.add(16 * Q)), middle))
        }
    }
    #[inline(always)]
    unsafe fn nibbles(p: *const u8) -> [Self::Levels; 2] {
        unsafe {
            let (both, low) = (quarters!(Q => vld1q_u8(p.add(16 * Q))), vdupq_n_u8(15));
            [quarters!(Q => vandq_u8(both[Q], low)), quarters!(Q => vshrq_n_u8::<4>(both[Q]))]
        }
    }
    #[inline(always)]
    unsafe fn activations(p: *const u8) -> int32x4_t {
        unsafe { vdupq_n_s32(p.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn dot(sums: Self::I, levels: Self::Levels, activations: int32x4_t) -> Self::I {
        unsafe { quarters!(Q => sdot(sums[Q], levels[Q], activations)) }
    }
    #[inline(always)]
    unsafe fn to_floats(sums: Self::I) -> [float32x4_t; 4] {
        unsafe { quarters!(Q => vcvtq_f32_s32(sums[Q])) }
    }
    #[inline(always)]
    unsafe fn add_group<const NIBBLES: bool, const AHEAD: usize, const R: usize, const H: usize>(
        mut at: Place,
        len: usize,
        sums: &mut [[Self::I; H]; R],
    ) -> Place {
        unsafe {
            if !MATRICES || R == 1 {
                return add_lines::<Self, NIBBLES, AHEAD, R, H>(at, len, sums);
            }
            let mut rows = [[vdupq_n_s32(0); 4]; R];
            for r in 0..R {
                rows[r] = sums[r][0];
            }
            let mut blocks = Blocks::of_rows(&rows);
            let mut left = len;
            while left > 0 {
                Neon::prefetch(at.w.wrapping_add(PREFETCH));
                at.prefetch::<Neon, AHEAD>();
                let [low, high] = if NIBBLES {
                    let both = Self::nibbles(at.w);
                    at.w = at.w.add(LINE_BYTES);
                    both
                } else {
                    let low = Self::levels(at.w);
                    at.w = at.w.add(LINE_BYTES);
                    // If a line is the last one, the second words of the rows are zero, whatever they multiply.
                    let mut high = low;
                    if left > 4 {
                        at.prefetch::<Neon, AHEAD>();
                        high = Self::levels(at.w);
                        at.w = at.w.add(LINE_BYTES);
                    }
                    [low, high]
                };
                let words = at.a.cast::<i32>();
                let lines = [
                    quarters!(Q => vreinterpretq_s32_u8(low[Q])),
                    quarters!(Q => vreinterpretq_s32_u8(high[Q])),
                ];
                blocks.add::<Smmla>(lines, [words, words.add(R)]);
                at.a = at.a.add(8 * R);
                left = left.saturating_sub(8);
            }
            let rows = blocks.to_rows();
            for r in 0..R {
                sums[r][0] = rows[r];
            }
            at
        }
    }
}

/// The loop of products of several rows: as many as with four numbers in each lane.
///
/// # Safety
/// The CPU has `smmla`.
#[inline(always)]
pub(super) unsafe fn products_of_matrices(rounds: usize) -> f32 {
    unsafe {
        let sums = blocks::products::<Smmla>(rounds);
        sums.iter().fold(0.0, |all, sum| all + vaddvq_s32(*sum) as f32)
    }
}

/// Adds the sums of four products of signed bytes.
#[inline(always)]
unsafe fn sdot(mut sums: int32x4_t, levels: uint8x16_t, activations: int32x4_t) -> int32x4_t {
    unsafe { add_products!("sdot", "16b", sums, levels, activations) };
    sums
}

/// Products of eight signed bytes of two rows with eight of two outputs.
struct Smmla;

impl BlockSimd for Smmla {
    #[inline(always)]
    unsafe fn multiply(mut sums: int32x4_t, rows: int32x4_t, outputs: int32x4_t) -> int32x4_t {
        unsafe { add_products!("smmla", "16b", sums, rows, outputs) };
        sums
    }
}
