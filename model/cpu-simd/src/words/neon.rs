//! Words in registers of NEON.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::aarch64::*;

use super::{LANES, Words};
use crate::neon::{Neon, bfdot};
use crate::quarters;
use crate::stored::{E4M3_BITS, E4M3_SCALE};

impl Words for Neon {
    #[inline(always)]
    unsafe fn transpose(rows: [Self::V; LANES]) -> [Self::V; LANES] {
        unsafe {
            let mut columns = rows;
            let mut first_row = 0;
            while first_row < LANES {
                let mut q = 0;
                while q < 4 {
                    let turned = transpose4(quarters!(R => rows[first_row + R][q]));
                    let mut c = 0;
                    while c < 4 {
                        columns[4 * q + c][first_row / 4] = turned[c];
                        c += 1;
                    }
                    q += 1;
                }
                first_row += 4;
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn unpack_bf16(words: Self::V, idx: usize) -> Self::V {
        unsafe {
            let upper = vdupq_n_u32(0xffff_0000);
            quarters!(Q => {
                let words = vreinterpretq_u32_f32(words[Q]);
                vreinterpretq_f32_u32(match idx {
                    0 => vshlq_n_u32::<16>(words),
                    _ => vandq_u32(words, upper),
                })
            })
        }
    }
    #[inline(always)]
    unsafe fn unpack_f16(words: Self::V, idx: usize) -> Self::V {
        unsafe {
            quarters!(Q => {
                let words = vreinterpretq_u32_f32(words[Q]);
                let halves = if idx == 0 { vmovn_u32(words) } else { vshrn_n_u32::<16>(words) };
                vcvt_f32_f16(vreinterpret_f16_u16(halves))
            })
        }
    }
    #[inline(always)]
    unsafe fn unpack_e4m3(words: Self::V, idx: usize) -> Self::V {
        unsafe {
            let (mask, scale) = (vdupq_n_s32(E4M3_BITS), vdupq_n_f32(E4M3_SCALE));
            quarters!(Q => {
                let bits = vandq_s32(vshrq_n_s32::<4>(top_byte(words[Q], idx)), mask);
                vmulq_f32(vreinterpretq_f32_s32(bits), scale)
            })
        }
    }
    #[inline(always)]
    unsafe fn unpack_i8(words: Self::V, idx: usize) -> Self::V {
        unsafe { quarters!(Q => vcvtq_f32_s32(vshrq_n_s32::<24>(top_byte(words[Q], idx)))) }
    }
    #[inline(always)]
    unsafe fn dot_bf16(a: Self::V, b: Self::V, sums: Self::V) -> Self::V {
        unsafe { quarters!(Q => bfdot(sums[Q], a[Q], b[Q])) }
    }
    #[inline(always)]
    unsafe fn pack_bf16(lower: Self::V, upper: Self::V) -> Self::V {
        unsafe {
            quarters!(Q => {
                let lower = vshrq_n_u32::<16>(vreinterpretq_u32_f32(lower[Q]));
                vreinterpretq_f32_u32(vorrq_u32(lower, vreinterpretq_u32_f32(upper[Q])))
            })
        }
    }
    #[inline(always)]
    unsafe fn join_bf16(lower: *const u16, upper: *const u16) -> Self::V {
        unsafe {
            let (low, up) = (vld1q_u16(lower), vld1q_u16(upper));
            let (next_low, next_up) = (vld1q_u16(lower.add(8)), vld1q_u16(upper.add(8)));
            [
                vreinterpretq_f32_u16(vzip1q_u16(low, up)),
                vreinterpretq_f32_u16(vzip2q_u16(low, up)),
                vreinterpretq_f32_u16(vzip1q_u16(next_low, next_up)),
                vreinterpretq_f32_u16(vzip2q_u16(next_low, next_up)),
            ]
        }
    }
}

/// Moves byte `idx` of each word to its highest byte.
#[inline(always)]
unsafe fn top_byte(words: float32x4_t, idx: usize) -> int32x4_t {
    unsafe { vshlq_s32(vreinterpretq_s32_f32(words), vdupq_n_s32(24 - 8 * idx as i32)) }
}

#[inline(always)]
unsafe fn transpose4(r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    unsafe {
        // Numbers 0 and 2, and 1 and 3, of two rows each.
        let (a, b) = (vtrn1q_f32(r[0], r[1]), vtrn2q_f32(r[0], r[1]));
        let (c, d) = (vtrn1q_f32(r[2], r[3]), vtrn2q_f32(r[2], r[3]));
        [low_pairs(a, c), low_pairs(b, d), high_pairs(a, c), high_pairs(b, d)]
    }
}

#[inline(always)]
unsafe fn low_pairs(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    unsafe { vreinterpretq_f32_f64(vtrn1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b))) }
}

#[inline(always)]
unsafe fn high_pairs(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    unsafe { vreinterpretq_f32_f64(vtrn2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b))) }
}
