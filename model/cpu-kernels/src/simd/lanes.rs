//! Sixteen lanes of f32, and the plain implementation that all others agree with.
//!
//! It knows no tensors.

use baton_kv_cache::e4m3;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Sums that are enough to hide the latency of an instruction.
pub const CHAINS: usize = 16;

/// Operations on sixteen f32 lanes.
///
/// Kernels over it use plain loops and functions that are `#[inline(always)]`: a closure, also one that
/// `map` or `from_fn` calls, is compiled without the instruction set of the kernel around it, and costs
/// a call per vector.
///
/// # Safety (of all methods)
/// The processor has the instructions of the implementation, and pointers are valid for the sixteen
/// (or `n`) elements that the name promises. No alignment is asked for.
pub(crate) trait Simd: Copy {
    type V: Copy;
    /// Registers: with sixteen lanes each, or half as wide where there are 16.
    const NUM_REGISTERS: usize;
    /// Rows of the largest tile over packed weights whose sums stay in registers: 14 with 32 columns, or 6 with 16.
    const PANEL_ROWS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn load_f16(p: *const u16) -> Self::V;
    /// Sixteen E4M3 that are numbers: what NaN becomes is not said.
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    unsafe fn load_i8(p: *const i8) -> Self::V;
    /// Thirty-two bf16 that alternate: lane i of the first vector, lane i of the second.
    unsafe fn load_bf16_pair(p: *const u16) -> [Self::V; 2];
    /// Asks for the cache line at `p`, which need not be valid.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
    /// As [`prefetch`](Self::prefetch), but only as far as the second cache: it will be needed later, among much else.
    #[inline(always)]
    unsafe fn prefetch_for_later(_p: *const u8) {}
    unsafe fn store(p: *mut f32, v: Self::V);
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest whole number.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `2^a` of whole numbers in -126..=127.
    unsafe fn pow2(a: Self::V) -> Self::V;
    /// Lanes added as a tree: i with i+8, then +4, +2, +1.
    unsafe fn sum(a: Self::V) -> f32;

    /// `n < 16` elements, the other lanes zero.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self::V {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the caller vouches for `n` elements, and `n < LANES`.
        unsafe {
            std::ptr::copy_nonoverlapping(p.cast::<u8>(), lanes.as_mut_ptr().cast(), n * 4);
            Self::load(lanes.as_ptr())
        }
    }

    /// The first `n < 16` lanes.
    #[inline(always)]
    unsafe fn store_part(p: *mut f32, v: Self::V, n: usize) {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: as above.
        unsafe {
            Self::store(lanes.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
        }
    }

    /// The largest lane.
    #[inline(always)]
    unsafe fn max_lane(a: Self::V) -> f32 {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: `lanes` holds sixteen.
        unsafe { Self::store(lanes.as_mut_ptr(), a) };
        lanes.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x))
    }

    /// e^x within two units in the last place; zero below -87.7, where results would be denormal.
    ///
    /// Cephes' expf: x = n ln 2 + r, and a polynomial of degree five for e^r.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        // SAFETY: no pointers.
        unsafe {
            // Of min and max the second operand survives when one is NaN.
            let x = Self::min(Self::splat(88.02), Self::max(Self::splat(-88.02), x));
            let n = Self::round(Self::mul(x, Self::splat(std::f32::consts::LOG2_E)));
            let r = Self::fma(n, Self::splat(-0.693_359_4), x);
            let r = Self::fma(n, Self::splat(2.121_944_4e-4), r);
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = Self::fma(p, r, Self::splat(c));
            }
            let p = Self::add(Self::fma(Self::mul(r, r), p, r), Self::splat(1.0));
            Self::mul(p, Self::pow2(n))
        }
    }
}

/// Plain arrays: the reference of the others, and what other processors get.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl Simd for Portable {
    type V = [f32; LANES];
    const NUM_REGISTERS: usize = 16;
    const PANEL_ROWS: usize = 6;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        // SAFETY: the caller vouches for sixteen elements, of any alignment.
        unsafe { p.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        // SAFETY: as above.
        let bits = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        bits.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        // SAFETY: as above; bytes are aligned anywhere.
        unsafe { *p.cast::<[u8; LANES]>() }.map(e4m3::to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self::V {
        // SAFETY: as above.
        unsafe { *p.cast::<[i8; LANES]>() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u16) -> [Self::V; 2] {
        // SAFETY: the caller vouches for thirty-two elements, of any alignment.
        let bits = unsafe { p.cast::<[[u16; 2]; LANES]>().read_unaligned() };
        [0, 1].map(|half| bits.map(|pair| f32::from_bits(u32::from(pair[half]) << 16)))
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        // SAFETY: as above.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Without an instruction for it `mul_add` is a slow library call.
        std::array::from_fn(|lane| {
            if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                a[lane].mul_add(b[lane], c[lane])
            } else {
                a[lane] * b[lane] + c[lane]
            }
        })
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn round(a: Self::V) -> Self::V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn pow2(a: Self::V) -> Self::V {
        a.map(|a| f32::from_bits(((a as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn sum(a: Self::V) -> f32 {
        let a: [f32; 8] = std::array::from_fn(|i| a[i] + a[i + 8]);
        let a: [f32; 4] = std::array::from_fn(|i| a[i] + a[i + 4]);
        (a[0] + a[2]) + (a[1] + a[3])
    }
}
