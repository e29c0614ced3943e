//! Sixteen lanes in four registers of NEON, which every aarch64 CPU has.
#![allow(clippy::undocumented_unsafe_blocks)] // the trait's contract, instruction by instruction

use std::arch::{aarch64::*, asm};

use super::lanes::Simd;
use super::stored::{E4M3_BITS, E4M3_SCALE};

/// An array of one expression for each of the four registers of a vector, in which `Q` is the register's index.
#[macro_export]
macro_rules! quarters {
    ($q:ident => $each:expr) => {
        [
            {
                const $q: usize = 0;
                $each
            },
            {
                const $q: usize = 1;
                $each
            },
            {
                const $q: usize = 2;
                $each
            },
            {
                const $q: usize = 3;
                $each
            },
        ]
    };
}

/// Four 128-bit registers.
#[derive(Clone, Copy)]
pub struct Neon;

impl Simd for Neon {
    type V = [float32x4_t; 4];
    const NUM_REGISTERS: usize = 16;
    const PANEL_ROWS: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { quarters!(Q => vld1q_f32(p.add(4 * Q))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        unsafe { quarters!(Q => vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(p.add(4 * Q)))))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        unsafe { quarters!(Q => vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.add(4 * Q))))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        unsafe {
            let words = widen_i8(p.cast());
            let (mask, scale) = (vdupq_n_s32(E4M3_BITS), vdupq_n_f32(E4M3_SCALE));
            quarters!(Q => {
                let bits = vandq_s32(vshlq_n_s32::<20>(words[Q]), mask);
                vmulq_f32(vreinterpretq_f32_s32(bits), scale)
            })
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::V {
        unsafe {
            let words = widen_i8(p);
            quarters!(Q => vcvtq_f32_s32(words[Q]))
        }
    }
    #[inline(always)]
    unsafe fn load_i32(p: *const i32) -> Self::V {
        unsafe { quarters!(Q => vcvtq_f32_s32(vld1q_s32(p.add(4 * Q)))) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> [Self::V; 2] {
        unsafe {
            let both = quarters!(Q => vld1q_u32(p.cast::<u32>().add(4 * Q)));
            let mask = vdupq_n_u32(0xffff_0000);
            [
                quarters!(Q => vreinterpretq_f32_u32(vshlq_n_u32::<16>(both[Q]))),
                quarters!(Q => vreinterpretq_f32_u32(vandq_u32(both[Q], mask))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { asm!("prfm pldl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    }
    #[inline(always)]
    unsafe fn prefetch_for_later(p: *const u8) {
        unsafe { asm!("prfm pldl2keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    }
    #[inline(always)]
    unsafe fn prefetch_to_write(p: *mut f32) {
        unsafe { asm!("prfm pstl1keep, [{}]", in(reg) p, options(nostack, preserves_flags, readonly)) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe {
            vst1q_f32(p, v[0]);
            vst1q_f32(p.add(4), v[1]);
            vst1q_f32(p.add(8), v[2]);
            vst1q_f32(p.add(12), v[3]);
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { quarters!(Q => vfmaq_f32(c[Q], a[Q], b[Q])) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(Q => vaddq_f32(a[Q], b[Q])) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(Q => vmulq_f32(a[Q], b[Q])) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(Q => vdivq_f32(a[Q], b[Q])) }
    }
    // The instructions for the maximum and the minimum return NaN for NaN in either operand.
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(Q => vbslq_f32(vcgtq_f32(a[Q], b[Q]), a[Q], b[Q])) }
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        unsafe { quarters!(Q => vbslq_f32(vcltq_f32(a[Q], b[Q]), a[Q], b[Q])) }
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        unsafe { quarters!(Q => vrndnq_f32(a[Q])) }
    }
    #[inline(always)]
    unsafe fn pow2(a: Self::V) -> Self::V {
        unsafe {
            let bias = vdupq_n_s32(127);
            quarters!(Q => {
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtnq_s32_f32(a[Q]), bias)))
            })
        }
    }
    #[inline(always)]
    unsafe fn sum(a: Self::V) -> f32 {
        unsafe {
            let four = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)))
        }
    }
    #[inline(always)]
    unsafe fn max_lane(a: Self::V) -> f32 {
        unsafe { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a[0], a[1]), vmaxnmq_f32(a[2], a[3]))) }
    }
}

/// Sixteen integers of eight bits.
#[inline(always)]
unsafe fn widen_i8(p: *const i8) -> [int32x4_t; 4] {
    unsafe {
        let bytes = vld1q_s8(p);
        let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
        [
            vmovl_s16(vget_low_s16(low)),
            vmovl_high_s16(low),
            vmovl_s16(vget_low_s16(high)),
            vmovl_high_s16(high),
        ]
    }
}

/// Adds the sum of two products of bf16 to each of four sums. The standard library's function for it is not stable yet.
///
/// # Safety
/// The CPU has the instruction.
#[inline(always)]
pub unsafe fn bfdot(mut sums: float32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
    unsafe {
        asm!(
            "bfdot {sums:v}.4s, {a:v}.8h, {b:v}.8h",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
